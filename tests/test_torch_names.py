"""The private names of torch that drivetrain uses, and whether the installed torch has them.

Any release of torch may rename or remove a private name. ``test_this_torch_has_every_private_name`` lists those that
have vanished. A private name that is new in the source, or no longer used there, fails
``test_the_tables_name_what_the_source_uses`` until the tables below are right again.

A name that several files need stands in base/torch_private.py, with what it is for; SHARED lists the exceptions.

The test reads the source, so it misses two kinds of names: an attribute of torch that has the name of one of our own,
and a name that is put together at run time.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.base import packages

PACKAGE = Path(drivetrain.__file__).parent
TORCH_PATH = re.compile(r"torch(\.\w+)+")
IS_PRIVATE = re.compile(r"_(?!_)\w*")
LOOKUPS = {"getattr", "hasattr", "setattr", "delattr", "_replaced"}


PATHS = {  # where in torch, and the names there
    "torch": (
        "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _foreach_add_ _foreach_copy_ "
        "_foreach_div_ _foreach_mul_ _foreach_sub _has_compatible_shallow_copy_type"
    ),
    "torch.Tensor": "_make_wrapper_subclass",
    "torch._C": (
        "DisableTorchFunction PyTorchFileReader PyTorchFileWriter _are_functorch_transforms_active "
        "_current_autograd_node _get_privateuse1_backend_name _group_tensors_by_device_and_dtype "
        "_len_torch_dispatch_stack _len_torch_function_stack _nn _set_grad_enabled"
    ),
    "torch._C._autograd": "_get_sequence_nr _top_saved_tensors_default_hooks",
    "torch._C._distributed_c10d": "PrefixStore TCPStore _dump_fr_trace_json _dump_nccl_trace_json",
    "torch._C._dynamo.eval_frame": "_FrameExecStrategy set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameAction": "SKIP",
    "torch._dynamo": "eval_frame list_backends",
    "torch._dynamo.compiled_autograd": "compiled_autograd_enabled",
    "torch._dynamo.external_utils": "wrap_inline",
    "torch._dynamo.trace_rules": "_recompile_re check",
    "torch._dynamo.trace_rules.SKIP_DIRS": "extend",
    "torch._inductor": "list_mode_options",
    "torch._inductor.cpp_builder": "get_cpp_compiler",
    "torch._inductor.exc": "InvalidCxxCompiler",
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
    "torch._weights_only_unpickler": "_get_allowed_globals _get_user_allowed_globals",
    "torch.autograd": "_engine_run_backward _profiler_enabled",
    "torch.autograd.Variable._execution_engine": "queue_callback",
    "torch.cuda.memory": "_dump_snapshot _record_memory_history",
    "torch.distributed._tools.fake_collectives": "collective_ops",
    "torch.distributed._tools.fake_collectives.CollectiveOp": "get_process_group",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.distributed.distributed_c10d._world": "pg_map pg_names",
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState": "FORWARD IDLE",
    "torch.distributed.rendezvous": "_torchelastic_use_agent_store",
    "torch.distributed.tensor.experimental._attention._cp_options": "enable_load_balance",
    "torch.multiprocessing": "_prctl_pr_set_pdeathsig",
    "torch.nn.Module": "_load_from_state_dict",
    "torch.nn.SyncBatchNorm": "_check_input_dim",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch.nn.modules.module": "_has_any_global_hook",
    "torch.ops.aten._local_scalar_dense": "default",
    "torch.ops.aten._to_copy": "default",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "tree_map",
    "torch.utils.data.DataLoader": "_get_iterator",
    "torch.utils.data._utils.collate.default_collate_fn_map": "values",
    "torch.utils.data._utils.fetch._MapDatasetFetcher": "fetch",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter _MultiProcessingDataLoaderIter _SingleProcessDataLoaderIter",
}
"""Names that the source spells from ``torch`` on."""

ATTRIBUTES = {
    "torch.Tensor": "_backward_hooks _is_view _post_accumulate_grad_hooks",
    "torch.TypedStorage": "_pickle_storage_type _untyped_storage",
    "torch.UntypedStorage": "_cdata",
    "torch._dynamo.decorators": "_torchdynamo_disable",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch._ops.OpOverload": "_opname _overloadpacket",
    "torch.amp.GradScaler": "_growth_tracker _per_optimizer_states",
    "torch.amp.grad_scaler": "_step_supports_amp_scaling",
    "torch.autograd": "_engine_run_backward _profiler_enabled",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.graph.Node": "_sequence_nr",
    "torch.distributed": "_compute_bucket_assignment_by_size _DEFAULT_FIRST_BUCKET_BYTES",
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
    "torch.distributed.pipelining.PipelineStage": "_get_init_p2p_neighbors_ops",
    "torch.distributed.pipelining.schedules.ScheduleGPipe": "_n_microbatches",
    "torch.nn.Module": (
        "_backward_pre_hooks _call_impl _compiled_call_impl _forward_hooks _forward_pre_hooks "
        "_is_full_backward_hook _load_state_dict_pre_hooks _non_persistent_buffers_set "
        "_replicate_for_data_parallel"
    ),
    "torch.nn.SyncBatchNorm": "_check_input_dim",
    "torch.nn.parallel.DistributedDataParallel": (
        "_set_static_graph _static_graph_delay_allreduce_enqueued _sync_buffers"
    ),
    "torch.nn.parallel.distributed": (
        "_ddp_params_and_buffers_to_ignore _sync_module_states _verify_param_shape_across_processes"
    ),
    "torch.ops.aten.add.Tensor": "_schema",
    "torch.optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    "torch.optim.lr_scheduler": "_opt_called _wrapped_by_lr_sched",
    "torch.optim.lr_scheduler.SequentialLR": "_schedulers",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks _use_grad_for_differentiable",
    "torch.utils.data.DataLoader": "_iterator",
    "torch.utils.data.RandomSampler": "_num_samples",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "_shutdown_workers",
}
"""Attributes of objects, by the class or the module of torch that sets or has them."""

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
    "os, sys, random, runpy": "_exit _getframe _inst _run_module_as_main",
    "our own objects, set by other means": "_convert_output _converts _is_heard",
    "torch_xla": "_XLAC _get_xla_sharding_spec _parallel_loader_kwargs _xla_runtime_is_initialized",
    "torchmetrics": "_forward_cache _reductions _update_count",
}
"""Names of the same form that are not torch's."""

FILES = """
accelerators/cuda.py accelerators/graphs.py accelerators/torch_device.py base/compile_options.py
base/compiled.py base/packages.py base/torch_private.py callbacks/model_summary.py checkpoints/container.py
checkpoints/foreign.py checkpoints/references.py checkpoints/unread.py cli/checkpoint_dcp.py
compat/collectives.py data/batched.py data/combined.py data/sampled_passes.py doctor/optimizers.py
engine/snapshots.py engine/wrappers.py forecast/ledger.py forecast/standins.py forecast/torch_tools.py
launchers/flight.py legacy/v1_3/training_type_plugins.py logbook/entry.py
loops/direct.py loops/graph_parts.py loops/replay.py loops/step_checks.py precision/_layers.py
precision/bitsandbytes.py proof/recorder.py strategies/_deepspeed_optimizers.py strategies/batchnorm.py
strategies/context_parallel.py strategies/ddp.py strategies/fsdp_blocks.py strategies/fsdp_kept.py
strategies/fully_sharded.py strategies/gradient_exchange.py strategies/group.py strategies/local_passes.py
strategies/meeting.py strategies/model_parallel.py strategies/optimizer_states.py strategies/pipeline_stages.py
strategies/replicas.py testing/_machine.py testing/_ranks.py testing/fake.py trainer/compiling.py
"""
"""The files that use any of torch's private names."""

SHARED = {
    "the optimizer's and the tensors' hooks, in files that may not have a call more": (
        "_backward_hooks _len_torch_dispatch_stack _len_torch_function_stack _post_accumulate_grad_hooks "
        "_wrapped_by_lr_sched"
    ),
    "modules, whose names base/packages.py holds so that they are imported late": (
        "_attention _distributed_c10d _dynamo _fsdp_common _inductor _python_dispatch cpp_builder exc fake_collectives "
        "fake_pg fake_tensor"
    ),
    "torch._C itself, with names that are put together": "_C",
    "the parts of FSDP, in strategies/fsdp_*.py and what is built on them": (
        "_get_fsdp_state _to_sharded _training_state _unsharded_param"
    ),
    "a file that may not import torch": "pg_names",
    "what plans on fake tensors read of each operation, or replace": (
        "_autograd _cdata _current_autograd_node _opname _rebuild_buckets"
    ),
    "a class that is patched, and asked for in a loader's pass": "_BaseDataLoaderIter",
    "an attribute of a module, in two files of one feature": "_compiled_call_impl",
}
"""Names in several files, by the reason why."""

NOT_IN_ALL = {
    "torch.autograd.graph.Node._sequence_nr",  # torch 2.9 has it on nodes, and not on their class
    "torch._C._distributed_c10d._dump_nccl_trace_json",  # only in builds with NCCL
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",  # from torch 2.12 on
}
"""Names that the source uses only where they are there."""


def is_private(dotted: str) -> bool:
    """Whether a part of a path begins with one underscore."""
    return any(IS_PRIVATE.fullmatch(part) for part in dotted.split("."))


class Names(ast.NodeVisitor):
    """The private names in one file: paths from ``torch`` on, and attributes of objects whose class is not known."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.paths: set[str] = set()
        self.attributes: set[str] = set()
        self._bound: dict[str, str] = {}
        self._bind(tree)
        self._inner: set[int] = set()  # parts of a longer chain, which is looked at as a whole
        self.visit(tree)

    def _bind(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
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
        for node in ast.walk(tree):  # "dynamo = torch._dynamo", and the like of several
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

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if id(node) not in self._inner:
            self._note(node.value, node.attr)
        if self.path_of(node.value) is not None:
            self._inner.add(id(node.value))
        self.generic_visit(node)

    def _pair(self, first: ast.AST, second: ast.AST) -> None:
        if isinstance(second, ast.Constant) and isinstance(second.value, str):
            self._note(first, second.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in LOOKUPS and len(node.args) > 1:
            self._pair(node.args[0], node.args[1])
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        if len(node.elts) == 2 and self.path_of(node.elts[0]) is not None:  # (torch._C, "_name"), looked up later
            self._pair(*node.elts)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and TORCH_PATH.fullmatch(node.value) and is_private(node.value):
            self.paths.add(node.value)


def own_names() -> set[str]:
    """Every name that the package itself gives to a function, a class, a variable or an attribute of ``self``."""
    own: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def used() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The paths and the attributes in the source, each with the files that use it."""
    paths: dict[str, set[str]] = defaultdict(set)
    attributes: dict[str, set[str]] = defaultdict(set)
    own = own_names()
    for path in PACKAGE.rglob("*.py"):
        names = Names(path.read_text(encoding="utf-8"))
        for found, there in ((paths, names.paths), (attributes, names.attributes - own)):
            for name in there:
                found[name].add(path.relative_to(PACKAGE).as_posix())
    return paths, attributes


def names_in(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    for owner, names in table.items():
        yield from ((owner, name) for name in names.split())


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


def exists(owner: str, name: str, may_be_set_later: bool) -> bool:
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
    return may_be_set_later and re.search(rf"\b{name}\b", inspect.getsource(module)) is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, which are all imported here
def test_this_torch_has_every_private_name() -> None:
    vanished = [f"{owner}.{name}" for owner, name in names_in(PATHS) if not exists(owner, name, False)]
    vanished += [f"{owner}.{name}" for owner, name in names_in(ATTRIBUTES) if not exists(owner, name, True)]
    assert sorted(set(vanished) - NOT_IN_ALL) == []


@pytest.mark.parametrize("owner", ["torch.Tensor", "torch.nn.Module", "torch.nn", "torch._gone.inner"])
@pytest.mark.parametrize("may_be_set_later", [True, False])
def test_a_name_that_has_vanished_is_found(owner: str, may_be_set_later: bool) -> None:
    """The control."""
    assert not exists(owner, "_never_was_there", may_be_set_later)


def test_a_name_that_several_files_need_is_in_one_of_them() -> None:
    paths, attributes = used()
    torchs = {name for _, name in names_in(ATTRIBUTES)}
    found = {**paths, **{name: files for name, files in attributes.items() if name in torchs}}
    several = {path.rpartition(".")[2] for path, files in found.items() if len(files) > 1}
    assert several == {name for names in SHARED.values() for name in names.split()}


def test_the_tables_name_what_the_source_uses() -> None:
    paths, attributes = used()
    listed = {f"{owner}.{name}" for owner, name in names_in(PATHS)}
    unlisted = {
        path: files for path, files in paths.items() if not any(f"{each}.".startswith(f"{path}.") for each in listed)
    }
    assert unlisted == {}
    assert {path for path in listed if path not in paths} == set()
    torchs, others = ({name for _, name in names_in(table)} for table in (ATTRIBUTES, OF_OTHERS))
    assert {name: files for name, files in attributes.items() if name not in torchs | others} == {}
    assert (torchs | others) - attributes.keys() == set()
    assert torchs & others == set()
    assert set().union(*paths.values(), *(attributes[name] for name in torchs)) == set(FILES.split())


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
        (
            "from drivetrain.base.packages import dynamo\ndynamo.reset()",
            {"torch._dynamo", "torch._dynamo.reset"},
            set(),
        ),
        ("import sys\nc = sys.modules['torch._C.x']\ngetattr(c, '_f')", {"torch._C.x", "torch._C.x._f"}, set()),
        ("import torch\npairs = (torch.autograd, '_f')", {"torch.autograd._f"}, set()),
        ("loader._iterator\nhasattr(loader, '_kept')\nloader.__len__", set(), {"_iterator", "_kept"}),
        ("import torch, os\ntorch.__version__\ntorch.nn.Linear\nos.sep", set(), set()),
    ],
)
def test_names_are_found_in_a_source(source: str, paths: set[str], attributes: set[str]) -> None:
    names = Names(source)
    assert names.paths == paths
    assert names.attributes == attributes
