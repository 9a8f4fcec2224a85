"""The private names of torch that drivetrain uses: all of them are in one file, and the installed torch has them.

Any release of torch may rename or remove a private name. ``test_this_torch_has_every_private_name`` lists those that
have vanished; base/torch_private.py says what each is for, and what happens without it. No other file spells one, but
for the two attributes in IN_A_STEP.

The test reads the source, so it misses a name that is put together at run time, and an attribute of ``self`` that a
class of ours has from torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import drivetrain
from drivetrain.base import packages, torch_private
from drivetrain.errors import MissingAttributeError

PACKAGE = Path(drivetrain.__file__).parent
ONE_FILE = PACKAGE / "base" / "torch_private.py"
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - {ONE_FILE})
TORCH_PATH = re.compile(r"torch(\.\w+)+")
IS_PRIVATE = re.compile(r"_(?!_)\w*")
LOOKUPS = {"getattr", "hasattr", "setattr", "delattr", "_replaced"}

IN_A_STEP = {"loops/direct.py": {"_backward_hooks", "_version"}}
"""What a step reads of the loss and of its gradient: a function around each would be a call more in every step."""

ATTRIBUTES = {
    "torch.Tensor": ("_backward_hooks _indices _post_accumulate_grad_hooks _values _version"),
    "torch.TypedStorage": "_pickle_storage_type _untyped_storage",
    "torch.UntypedStorage": "_cdata",
    "torch._C": "_nn",
    "torch._C._distributed_c10d": "_dump_fr_trace_json _dump_nccl_trace_json",
    "torch._C._dynamo.eval_frame": "_FrameAction _FrameExecStrategy set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameAction": "SKIP",
    "torch._dynamo.compiled_autograd": "compiled_autograd_enabled",
    "torch._dynamo.decorators": "_torchdynamo_disable",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch._dynamo.external_utils": "wrap_inline",
    "torch._dynamo.trace_rules": "SKIP_DIRS _recompile_re check",
    "torch._ops.OpOverload": "_opname _overloadpacket",
    "torch._weights_only_unpickler": "_get_allowed_globals _get_user_allowed_globals",
    "torch.amp.GradScaler": "_growth_tracker _per_optimizer_states _scale _unscale_grads_",
    "torch.amp.grad_scaler": "_step_supports_amp_scaling",
    "torch.autograd": "_engine_run_backward",
    "torch._C._functions.AccumulateGrad": "_sequence_nr",
    "torch.distributed.Reducer": "_delay_all_reduce _rebuild_buckets",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "_module_info _orig_size _unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
        "_all_gather_result _all_reduce_state _partial_reduce_output _post_forward_indices _post_reduce_event "
        "_reshard_after_forward_event _to_sharded _to_sharded_post_forward _training_state"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": (
        "_comm_ctx _device_handle _fsdp_param_group _fsdp_param_groups _is_root _lazy_init _modules_to_run_forward "
        "_root_post_backward_final_callback _state_ctx"
    ),
    "torch.distributed.fsdp.wrap.CustomPolicy": "_lambda_fn",
    "torch.distributed.fsdp.wrap.ModuleWrapPolicy": "_module_classes",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "_optim_constructor",
    "torch.distributed.device_mesh.DeviceMesh": "_concatenate",
    "torch.distributed.pipelining.PipelineStage": "_get_init_p2p_neighbors_ops",
    "torch.distributed.pipelining.schedules.ScheduleGPipe": "_n_microbatches",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": "_propagate_tensor_meta_non_cached",
    "torch.distributed.tensor.experimental._attention": "_cp_options",
    "torch.distributed.tensor.experimental._attention._cp_options": "enable_load_balance",
    "torch.nn.Module": (
        "_apply _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks _forward_pre_hooks "
        "_is_full_backward_hook _load_state_dict_pre_hooks _modules _non_persistent_buffers_set _parameters "
        "_replicate_for_data_parallel"
    ),
    "torch.nn.RNNBase": "_flat_weights _flat_weights_names",
    "torch.nn.SyncBatchNorm": "_check_input_dim",
    "torch.nn.parallel.DistributedDataParallel": (
        "_comm_hooks _ddp_init_helper _pre_forward _set_static_graph _static_graph_delay_allreduce_enqueued "
        "_sync_buffers"
    ),
    "torch.nn.parallel.distributed": (
        "_ddp_params_and_buffers_to_ignore _sync_module_states _verify_param_shape_across_processes"
    ),
    "torch.ops.aten.add.Tensor": "_schema",
    "torch.optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    "torch.optim.lr_scheduler": "_last_lr _opt_called _wrapped_by_lr_sched",
    "torch.optim.lr_scheduler.SequentialLR": "_schedulers",
    "torch.distributed.pipelining.stage.PipelineStage": "_warmup_backward_result _warmup_forward_vote",
    "torch.optim.optimizer": "_get_value _warned_capturable_if_run_uncaptured",
    "torch.utils.data.DataLoader": "_get_iterator _iterator",
    "torch.utils.data.RandomSampler": "_num_samples",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "_shutdown_workers _workers",
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter": "_next_data _next_index",
}
"""Names outside of ``torch_private._PATHS``, by the class or the module of torch that sets or has them."""

NOT_IN_ALL = {
    "torch._C._distributed_c10d._dump_nccl_trace_json",  # only in builds with NCCL
    "torch.distributed.device_mesh.DeviceMesh._concatenate",  # not in torch 2.9
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",  # from torch 2.12 on
    "torch.distributed.pipelining.stage.PipelineStage._warmup_backward_result",  # not in torch 2.9, whose stages
    "torch.distributed.pipelining.stage.PipelineStage._warmup_forward_vote",  # do not vote
}
"""Names that drivetrain uses only where they are there."""

OF_OTHERS = {
    "DeepSpeed": "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state _release_process_group_references",
    "Lightning's programs": "_forward_module _gpus_arg_default",
    "argparse": "_SubParsersAction _choices_actions _expand_help _get_formatter",
    "dataclasses": "_HAS_DEFAULT_FACTORY",
    "enum": "_name_",
    "fsspec": "_put_file",
    "models of Hugging Face": "_no_split_modules _tp_plan",
    "multiprocessing": "_get_base_temp_dir",
    "named tuples": "_asdict _fields",
    "numpy": "_bit_generator _rand",
    "omegaconf": "_get_flag _get_parent",
    "os, sys, random, runpy": "_current_frames _exit _getframe _inst _is_gil_enabled _run_module_as_main",
    "our own objects, set by other means": "_convert_output _converts _is_heard",
    "torch_xla": "_XLAC _get_xla_sharding_spec _parallel_loader_kwargs _xla_runtime_is_initialized",
    "torchmetrics": "_forward_cache _reductions _update_count",
}
"""Names of the same form that are not torch's."""


def is_private(dotted: str) -> bool:
    """Whether a part of a path begins with one underscore."""
    return any(IS_PRIVATE.fullmatch(part) for part in dotted.split("."))


class Names(ast.NodeVisitor):
    """The private names in one file.

    Attributes:
        paths: those from ``torch`` on.
        attributes: those of objects whose class is not known.
        of_others: the attributes of objects that are neither ``self`` nor ``super()``.
        texts: the strings that have the form of a private name.
    """

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.nodes = [*ast.walk(tree)]
        self.paths: set[str] = set()
        self.attributes: set[str] = set()
        self.of_others: set[str] = set()
        self.texts: set[str] = set()
        self._bound: dict[str, str] = {}
        self._bind()
        self._inner: set[int] = set()  # parts of a longer chain, which is looked at as a whole
        self.visit(tree)

    def _bind(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bound[name] = alias.name if alias.asname else name
                    if alias.name.startswith("torch.") and is_private(alias.name):
                        self.paths.add(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    later = packages._MODULES.get(alias.name) if node.module == packages.__name__ else None
                    self._bound[alias.asname or alias.name] = path = later or f"{node.module}.{alias.name}"
                    if path.startswith("torch.") and is_private(path):
                        self.paths.add(path)
        for node in self.nodes:  # "autograd = torch.autograd", and the like of several
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                targets, values = node.targets, [node.value]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    targets, values = node.targets[0].elts, node.value.elts
                for target, value in zip(targets, values, strict=False):
                    path = self.path_of(value)
                    if isinstance(target, ast.Name) and path is not None and target.id not in self._bound:
                        self._bound[target.id] = path

    def path_of(self, node: ast.AST) -> str | None:
        """The dotted path of a chain of attributes that begins in torch."""
        if isinstance(node, ast.Name):
            path = self._bound.get(node.id)
            return path if path is not None and path.split(".")[0] == "torch" else None
        if isinstance(node, ast.Attribute) and (owner := self.path_of(node.value)) is not None:
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # sys.modules["torch..."]
            text = node.slice.value
            return text if isinstance(text, str) and TORCH_PATH.fullmatch(text) else None
        return None

    def _note(self, owner: ast.AST, attribute: str) -> None:
        path = self.path_of(owner)
        if path is not None and is_private(f"{path}.{attribute}"):
            self.paths.add(f"{path}.{attribute}")
        elif path is None and IS_PRIVATE.fullmatch(attribute):
            self.attributes.add(attribute)
            called = owner.func if isinstance(owner, ast.Call) else owner
            if not (isinstance(called, ast.Name) and called.id in ("self", "cls", "super")):
                self.of_others.add(attribute)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if id(node) not in self._inner:
            self._note(node.value, node.attr)
        if self.path_of(node.value) is not None:
            self._inner.add(id(node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in LOOKUPS and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._note(node.args[0], name.value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and TORCH_PATH.fullmatch(node.value) and is_private(node.value):
            self.paths.add(node.value)
        if isinstance(node.value, str) and IS_PRIVATE.fullmatch(node.value):
            self.texts.add(node.value)


@functools.cache
def names_of(path: Path) -> Names:
    return Names(path.read_text(encoding="utf-8"))


def own_names() -> set[str]:
    """Every name that the package itself gives to a function, a class, a variable or an attribute of ``self``."""
    own: set[str] = set()
    for path in SOURCES:
        for node in names_of(path).nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
            elif isinstance(node, ast.Assign) and any(ast.unparse(each) == "__slots__" for each in node.targets):
                own |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return own


def names_in(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    for owner, names in table.items():
        yield from ((owner, name) for name in names.split())


def attributes_of_torch() -> set[str]:
    """The private attributes that objects of the installed torch have, and those in base/torch_private.py."""
    weight = nn.Parameter(torch.ones(1))
    loader, optimizer = DataLoader([1]), torch.optim.SGD([weight], lr=0.1)
    things: list[Any] = [
        weight, nn.Linear(1, 1), nn.parallel.DistributedDataParallel, optimizer, torch.amp.GradScaler("cpu"), loader,
        torch.optim.lr_scheduler.StepLR(optimizer, 1), iter(loader), RandomSampler([1]), torch.UntypedStorage,
    ]  # fmt: skip
    there = {name for thing in things for name in dir(thing) if IS_PRIVATE.fullmatch(name)}
    return there | {name for _, name in names_in(ATTRIBUTES) if IS_PRIVATE.fullmatch(name)}


def spelled(names: Names, own: set[str], torchs: set[str]) -> set[str]:
    """The private names of torch in a file.

    Args:
        names: those in the file.
        own: names that the package gives to things of its own.
        torchs: private attributes that objects of torch have.
    """
    others = {name for _, name in names_in(OF_OTHERS)}
    found = names.paths | (names.attributes - own - others) | (names.of_others & torchs)
    return found | (names.texts & {name for _, name in names_in(ATTRIBUTES)})


def test_no_other_file_spells_a_private_name() -> None:
    own, torchs = own_names(), attributes_of_torch()
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in SOURCES
        if (names := spelled(names_of(path), own, torchs))
    }
    assert found == IN_A_STEP


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("optimizer._opt_called = True", {"_opt_called"}),
        ("vars(optimizer)['_opt_called'] = True", {"_opt_called"}),
        ("module._parameters", {"_parameters"}),
        ("something._never_heard_of", {"_never_heard_of"}),
        ("self._parameters = {}\nself._of_ours\nsuper()._apply(1)\nother._of_ours\nnode._fields", set()),
        ("def _apply(self): ...", set()),
    ],
)
def test_a_private_name_is_found_and_a_definition_is_none(source: str, found: set[str]) -> None:
    assert spelled(Names(source), {"_apply", "_of_ours", "_parameters"}, {"_apply", "_parameters"}) == found


def test_the_table_of_attributes_names_what_the_one_file_uses() -> None:
    names, text = names_of(ONE_FILE), ONE_FILE.read_text(encoding="utf-8")
    own = {node.name for node in names.nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.id for node in names.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    there = names.attributes | names.texts | {part for path in names.paths for part in path.split(".")}
    listed = {name for _, name in names_in(ATTRIBUTES)}
    in_paths = {part for path in (*ATTRIBUTES, *dict(torch_private._PATHS.values())) for part in re.split("[.:]", path)}
    unlisted = {name for name in there - own - listed - in_paths if IS_PRIVATE.fullmatch(name)}
    assert unlisted == {"_forward_", "_backward_"}  # how the names of hooks begin
    assert {name for name in listed if not re.search(rf"\b{name}\b", text)} == set()


def test_the_names_of_others_are_used() -> None:
    attributes = set().union(*(names_of(path).attributes for path in SOURCES))
    assert {name for _, name in names_in(OF_OTHERS)} - attributes == set()


def test_each_name_of_the_one_file_is_used_and_each_used_one_is_there() -> None:
    tree = ast.parse(ONE_FILE.read_text(encoding="utf-8"))
    there = {name for node in tree.body if isinstance(node, ast.FunctionDef) for name in [node.name]}
    there |= {each.id for node in tree.body for each in ast.walk(node) if is_constant(node, each)}
    there = {name for name in there if not name.startswith("_")} | set(torch_private._PATHS)
    used: set[str] = set()
    for path in SOURCES:
        for node in names_of(path).nodes:
            if isinstance(node, ast.ImportFrom) and node.module == torch_private.__name__:
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch_private":
                used.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("where", "torch_private.where"):
                used |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    inside = {node.attr for node in names_of(ONE_FILE).nodes if isinstance(node, ast.Attribute)}
    inside |= {
        node.id for node in names_of(ONE_FILE).nodes if isinstance(node, ast.Name) and type(node.ctx) is ast.Load
    }
    assert used - there == set()
    assert there - used - inside == set()


def is_constant(statement: ast.AST, node: Any) -> bool:
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and type(node) is ast.Name and type(node.ctx) is ast.Store


# ---- whether torch has them ------------------------------------------------------------------------------------------


def thing(path: str) -> Any:
    """What a dotted path names; AttributeError if there is nothing."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


def exists(owner: str, name: str) -> bool:
    """Whether torch has the name: as an attribute, or in the source of the module that sets it on its objects."""
    try:
        there = thing(owner)
    except AttributeError:
        return False
    if hasattr(there, name) or any(
        name in getattr(base, "__annotations__", {}) for base in getattr(there, "__mro__", ())
    ):
        return True
    module = there if inspect.ismodule(there) else sys.modules[there.__module__]
    is_python = str(getattr(module, "__file__", "")).endswith(".py")
    return is_python and re.search(rf"\b{name}\b", inspect.getsource(module)) is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, which are all imported here
def test_this_torch_has_every_private_name() -> None:
    vanished = [path for name, (path, _) in torch_private._PATHS.items() if not hasattr(*torch_private.where(name))]
    vanished += [f"{owner}.{name}" for owner, name in names_in(ATTRIBUTES) if not exists(owner, name)]
    assert sorted(set(vanished) - NOT_IN_ALL) == []


@pytest.mark.parametrize("owner", ["torch.Tensor", "torch.nn.Module", "torch.nn", "torch._gone.inner"])
def test_a_name_that_has_vanished_is_found(owner: str) -> None:
    """The control."""
    assert not exists(owner, "_never_was_there")


@pytest.mark.parametrize(
    ("source", "paths", "attributes"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}, set()),
        (
            "from torch import nn\nx = nn.modules\nx.batchnorm._BatchNorm",
            {"torch.nn.modules.batchnorm._BatchNorm"},
            set(),
        ),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}, set()),
        ("import torch._dynamo.eval_frame as frame", {"torch._dynamo.eval_frame"}, set()),
        ("import sys\nc = sys.modules['torch._C.x']\ngetattr(c, '_f')", {"torch._C.x", "torch._C.x._f"}, set()),
        ("loader._iterator\nhasattr(loader, '_kept')\nloader.__len__", set(), {"_iterator", "_kept"}),
        ("import torch, os\ntorch.__version__\ntorch.nn.Linear\nos.sep", set(), set()),
    ],
)
def test_names_are_found_in_a_source(source: str, paths: set[str], attributes: set[str]) -> None:
    names = Names(source)
    assert names.paths == paths
    assert names.attributes == attributes


# ---- what happens without one ----------------------------------------------------------------------------------------


@pytest.fixture
def vanished(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch lack two names: one without which drivetrain goes another way, and one that it needs."""
    for name, path in (("is_view", "torch:Tensor._gone"), ("read_scalar", "torch._gone:inner")):
        monkeypatch.setitem(torch_private._PATHS, name, (path, torch_private._PATHS[name][1]))
        monkeypatch.delitem(vars(torch_private), name, raising=False)
    yield
    for name in ("is_view", "read_scalar"):
        vars(torch_private).pop(name, None)


def test_without_a_name_the_ordinary_way_is_taken_or_an_error_names_the_feature(vanished: None) -> None:
    view = torch.ones(2)[:1]
    assert torch_private.is_view(view) is True
    with pytest.raises(MissingAttributeError, match=r"drivetrain plan needs torch\._gone\.inner, and torch .* has no"):
        _ = torch_private.read_scalar


def test_a_name_is_looked_up_once() -> None:
    vars(torch_private).pop("is_view", None)
    assert torch_private.is_view(torch.ones(2)[:1])
    assert not torch_private.is_view(torch.ones(2))
    assert vars(torch_private)["is_view"] is torch.Tensor._is_view


def test_what_stands_for_a_missing_name_stands_for_one_of_the_table() -> None:
    assert torch_private._ORDINARY.keys() <= torch_private._PATHS.keys()
    with pytest.raises(AttributeError, match="has no attribute 'never_was_there'"):
        _ = torch_private.never_was_there


WITHOUT_ANY = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.base import torch_private

torch_private._PATHS.update({name: ("torch._gone:inner", use) for name, (_, use) in torch_private._PATHS.items()})

from drivetrain import LightningModule, Trainer


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(epochs, **options):
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8, 4)), 2, num_workers=1), **options)
    return trainer


first = fitted(1)
print(fitted(2, ckpt_path=first.checkpoint_callback.best_model_path).global_step)
print(next(each for each in first.plan.decisions if each.what == "step").why)
"""


def test_without_any_name_of_torchs_modules_a_fit_is_saved_and_resumed(programs: Any, tmp_path: Path) -> None:
    done = programs.run("-c", WITHOUT_ANY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps, why = done.stdout.splitlines()[-2:]
    assert steps == "8"
    assert why == f"torch {torch.__version__} has not the private name that they need: torch._gone.inner"
