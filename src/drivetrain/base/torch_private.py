"""Hold the private names of torch that drivetrain uses, each with its purpose. No other file contains such names.

Any release of torch may rename or remove private names. If one is missing, only the feature that needs it stops
working:

- ``torch_private.txt`` has the names in torch's modules. Each is looked up when it is first used. If torch lacks a
  name, drivetrain uses the replacement in ``_ORDINARY``; if there is none, the error names the feature.
- The functions below read the attributes of objects. If an attribute is missing, the function returns its default, or
  raises an error that names the attribute.

``tests/test_torch_names.py`` reports the names that the installed torch lacks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.base.lazy import Later
from drivetrain.errors import MissingAttributeError

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
    from torch.utils._pytree import tree_map

__all__ = ["BatchNorm", "DispatchMode", "tree_map"]  # the names with types; all other names are Any


def _rows() -> dict[str, tuple[str, str]]:
    """Return, for each name in ``torch_private.txt``: the module and the name in torch, and the feature that
    needs it.
    """
    found, use = {}, ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            use = line[1:-1]
        elif line[:1].isalpha():
            name, _, path = line.partition(" = ")
            found[name] = path, use
    return found


_PATHS = _rows()
_ORDINARY: dict[str, Any] = {
    "AnyPass": (),  # no class: torch's iterators are then treated as any iterator, whose workers end when it is freed
    "PassOfWorkers": (),
    "BatchNorm": nn.BatchNorm1d.__base__,  # torch's class, under whatever name
    "Fetcher": object,  # torch iterates the loader itself
    "PassOfThisProcess": object,
    "can_move_in_place": lambda *_: False,  # False: the model is moved before it is sharded
    "collate_functions": {None: ""},  # no functions: samples are fetched one by one
    "cpp_compiler": lambda: None,  # no check: torch then raises its own error
    "foreign_device_type": lambda: "privateuseone",  # torch's name for a backend that has chosen none
    "is_view": lambda _: True,  # True: each value counts as a view, and is copied
    "list_backends": lambda _: ["inductor", "eager", "aot_eager"],
    "list_modes": lambda: ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    "newest_node": None,  # unknown: operations of a backward pass are shown without a line
    "running_node": None,
}
"""By name: what is used if torch lacks the name."""

_own: Any = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, attribute = where(name)
    if hasattr(home, attribute):
        found = getattr(home, attribute)
    elif name in _ORDINARY:
        found = _ORDINARY[name]
    else:
        path, use = _PATHS[name][0].replace(":", "."), _PATHS[name][1]
        error = MissingAttributeError(
            f"{use} needs {path}, and torch {torch.__version__} has no such name. Install a torch with which "
            "drivetrain was tested: docs/release.md lists them."
        )
        error.name = path
        raise error
    globals()[name] = found
    return found


def where(name: str) -> tuple[Any, str]:
    """Return the object and the attribute in torch for which ``name`` stands, so that the caller can replace the
    attribute.
    """
    module, _, path = _PATHS[name][0].partition(":")
    *owners, attribute = path.split(".")
    try:
        home: Any = importlib.import_module(module)
        for owner in owners:
            home = getattr(home, owner)
    except (ImportError, AttributeError):
        home = None
    return home, attribute


def _read(name: str, default: Any) -> Callable[[Any], Any]:
    return lambda owner: getattr(owner, name, default)


# ---- devices ---------------------------------------------------------------------------------------------------------


def function_of_device(kind: str, name: str) -> Any:
    """Return torch's function ``name``, such as "releasePool", for the device type ``kind``; ``None`` if torch has
    none.
    """
    return getattr(torch._C, f"_{kind}_{name}", None)


# ---- tensors ---------------------------------------------------------------------------------------------------------

version_of = attrgetter("_version")  # of a tensor: grows with each change in place; RuntimeError in inference mode
hooks_of = attrgetter("_backward_hooks")  # of a tensor: the hooks on its gradient, or None
storage_key = attrgetter("_cdata")  # of a storage: a number that all Python objects of the storage share
storage_inside = attrgetter("_untyped_storage")  # of a TypedStorage
schema_of = attrgetter("_schema")  # of an operation: the arguments' names, and which arguments the operation writes to
operation_name = attrgetter("_opname")  # of an operation, without its namespace
overloads_of = attrgetter("_overloadpacket")  # of an operation: the packet of all overloads with its name
PARTS_OF_SPARSE = "_indices", "_values"  # methods of tensors in COO layout, even of uncoalesced ones
name_of_storage = methodcaller("_pickle_storage_type")  # of a TypedStorage: its name in pickles, such as "FloatStorage"
number_of_node = methodcaller("_sequence_nr")  # of a node of the autograd graph: increases in forward order
hooks_on_accumulation = _read("_post_accumulate_grad_hooks", None)  # of a parameter
READS_A_COUNT = "_get_value"  # the function in which optimizers read their count of steps
VOTES_OF_A_STAGE = "_warmup_forward_vote", "_warmup_backward_result"  # of a pipeline stage: whether ranks know shapes


def gradient_facts(tensors: Iterable[Any]) -> list[Any]:
    """Return for each tensor its address, whether it requires a gradient, and the hooks on its gradient."""
    return [
        (each.data_ptr(), each.requires_grad, each._backward_hooks, each._post_accumulate_grad_hooks)
        for each in tensors
    ]


# ---- what watches a step ---------------------------------------------------------------------------------------------

RUN_ENGINE = "_engine_run_backward"
"""The function in ``torch.autograd`` with which every backward pass starts the autograd engine."""


def watching() -> Callable[[], Any]:
    """Return a function whose result is true while something observes operations or saved tensors.

    Raises:
        ImportError, AttributeError: torch lacks one of the names; the caller then uses public functions of torch.
    """
    dispatch_modes, function_modes = _own.count_dispatch_modes, _own.count_function_modes
    is_profiling, is_transforming = _own.is_profiling, _own.is_transforming
    saved, is_anomaly_enabled = _own.top_saved_hooks, torch.is_anomaly_enabled
    compiled: Any = importlib.import_module("torch._dynamo.compiled_autograd")
    compiled.compiled_autograd_enabled  # noqa: B018  # raises an AttributeError if torch lacks the name

    def is_watched() -> Any:
        return (
            dispatch_modes()
            or function_modes()
            or is_transforming()
            or is_profiling()
            or is_anomaly_enabled()
            or saved(True) is not None
            or compiled.compiled_autograd_enabled
        )

    return is_watched


# ---- modules ---------------------------------------------------------------------------------------------------------

own_parameters = attrgetter("_parameters")  # of a module, by name; a parameter that was registered as None is None
own_buffers = attrgetter("_buffers")
own_modules = attrgetter("_modules")
non_persistent_buffers = attrgetter("_non_persistent_buffers_set")  # of a module: names that its state dict lacks
hooks_before_loading = attrgetter("_load_state_dict_pre_hooks")  # of a module: hooks that may rename loaded entries
compiled_call = attrgetter("_compiled_call_impl")  # of a module; None: the module was not compiled in place
uncompiled_call = attrgetter("_call_impl")  # of a module: the call with its hooks, never compiled
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
STORES = (PARAMETERS, BUFFERS, "_non_persistent_buffers_set", MODULES)
"""The attributes for parameters, buffers and submodules, which ``nn.Module.__init__`` sets."""
COMPILED_CALL = "_compiled_call_impl"
"""In a module that was compiled in place: the attribute with the function that calls of the module run."""
WRAPPED = "_orig_mod"
"""In a result of ``torch.compile``: the attribute with the original module. The names of the result's parameters begin
with this word.
"""
APPLY = "_apply"
"""The method through which a module replaces its tensors, as in ``to`` and ``half``."""


def apply(module: nn.Module, change: Callable[..., Any], recurse: bool = True) -> None:
    """Replace each tensor of a module by the result of ``change`` for this tensor, as ``nn.Module.half`` does."""
    getattr(module, APPLY)(change, recurse)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs around the module's forward or backward pass."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def copy_hooks(old: nn.Module, new: nn.Module) -> None:
    """Register the forward and backward hooks of ``old`` with ``new``."""
    for name, value in vars(old).items():
        if name.startswith(("_forward_", "_backward_")) and "hooks" in name and value:
            getattr(new, name).update(value)
    new._is_full_backward_hook = old._is_full_backward_hook


def replica_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module without its submodules, as DataParallel makes it for another device."""
    copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # torch has no types for it
    vars(copy).pop(COMPILED_CALL, None)  # a compiled call would run the original module
    return copy


def list_weights_of_rnn(module: nn.Module) -> None:
    """Update an RNN's second list of its parameters, after these were replaced."""
    own = vars(module)
    if "_flat_weights_names" in own:
        own["_flat_weights"] = [getattr(module, name, None) for name in own["_flat_weights_names"]]


def check_input(layer: Any, given: Tensor) -> None:
    """Raise the error of a batch norm if the number of dimensions of ``given`` does not fit."""
    layer._check_input_dim(given)


def input_check_of_sync_batch_norm() -> dict[str, Any]:
    """Return ``nn.SyncBatchNorm``'s check of its input, as a member for another class of batch norms."""
    return {"_check_input_dim": nn.SyncBatchNorm._check_input_dim}


# ---- torch.compile ---------------------------------------------------------------------------------------------------

DYNAMO = "torch._dynamo"
"""The package of torch that compiles; it is slow to import, so checks only look for it in ``sys.modules``."""

_rules: Any = Later("torch._dynamo.trace_rules")
_inlining: Any = Later("torch._dynamo.external_utils")
_frames: Any = Later("torch._C._dynamo.eval_frame")


def module_inside(module: Any) -> Any:
    """Return the original module if ``module`` is a result of ``torch.compile``; ``None`` for any other object."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return module._orig_mod if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def compiled_by(context: Any, module: nn.Module, function: Any) -> Any:
    """Return ``function``, which runs ``module``, compiled by ``context`` as ``module.compile()`` does."""
    if _rules.check(module.forward):  # true for torch's own modules, whose functions torch.compile would otherwise skip
        function = _inlining.wrap_inline(function)
    return context(function)


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Set the function that calls of ``module`` run; ``None``: the uncompiled one."""
    module._compiled_call_impl = call


def leave_folders_uncompiled(folders: Iterable[Any]) -> None:
    """Let torch.compile compile no function that is defined in these folders."""
    _rules.SKIP_DIRS.extend(f"{folder}/" for folder in folders)
    _rules._recompile_re()


def leave_uncompiled(function: Any) -> None:
    """Let torch.compile compile neither ``function`` nor what it calls."""
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # torch's own decorators mark a function in this way


# ---- optimizers, schedulers, scalers ---------------------------------------------------------------------------------

BEFORE_STEP, AFTER_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
"""The attributes of an optimizer with the hooks that run before and after its step."""
STEPPED = "_opt_called"
"""The attribute of an optimizer that is true after a step; while it is false, a scheduler warns."""
LAST_RATES, SCHEDULERS = "_last_lr", "_schedulers"
"""Attributes of schedulers that are in their state dicts: the present learning rates, and the inner schedulers."""
WATCHED = "_wrapped_by_lr_sched"
"""The attribute that marks a step function which counts steps for a scheduler; without the mark, the scheduler
warns.
"""
SCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute of optimizers whose kernel itself unscales the gradients, and skips steps with overflows."""
UNSCALE = "_unscale_grads_"
"""The method with which a GradScaler unscales the gradients of an optimizer."""
GROWTH_TRACKER = "_growth_tracker"
"""The entry in the state of a GradScaler that counts the steps since the scale has changed."""
schedulers_in = _read(SCHEDULERS, ())  # of a SequentialLR or a ChainedScheduler; () for others
class_in_shards = _read("_optim_constructor", None)  # of a ZeroRedundancyOptimizer: the class of optimizers
states_of_scaler = _read("_per_optimizer_states", {})  # of a GradScaler: by optimizer; {} if the scaler is disabled
scale_of = _read("_scale", None)  # of a GradScaler; None before its first loss


def mark_as_stepped(optimizer: Any) -> None:
    """Tell torch's schedulers, which would warn otherwise, that a step was made without ``optimizer.step``."""
    vars(optimizer)[STEPPED] = True


def expect_no_graph(optimizer: Any) -> None:
    """Keep an optimizer with ``capturable=True`` from warning that no CUDA graph records its step."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True


def update_scale(scaler: Any, overflow: bool) -> None:
    """Change the scale of a GradScaler after a step, as ``GradScaler.update`` does."""
    if (scale := scale_of(scaler)) is not None and scaler.is_enabled():
        found = torch.full((), float(overflow), device=scale.device)
        options = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        _own.update_scale_(scale, scaler._growth_tracker, found, *options)


# ---- loaders ---------------------------------------------------------------------------------------------------------

ITERATOR, GET_ITERATOR = "_iterator", "_get_iterator"
"""Members of a DataLoader: the iterator that it keeps with persistent workers, and the method that creates an
iterator.
"""
kept_iterator = _read(ITERATOR, None)  # of a DataLoader; None without persistent workers, and for other loaders
NUMBER_OF_DRAWS = "_num_samples"  # of a RandomSampler; None: as many as its data source has samples


def keep_iterator(loader: Any, iterator: Any) -> None:
    """Set the iterator of a DataLoader's next pass. If the loader kept another one, that iterator's workers end."""
    loader._iterator = iterator


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, even if they hang."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        worker.kill()  # a hanging worker has not received the request to end


def methods_of_a_pass() -> tuple[tuple[type, str], ...]:
    """Return torch's methods that run while a DataLoader without workers is iterated, each as class and name."""
    loader = torch.utils.data.DataLoader
    names = ("__init__", "__next__", "_next_data", "_next_index")
    first = ((loader, "__iter__"), (loader, GET_ITERATOR), (_own.Fetcher, "fetch"))
    return (*first, *((_own.PassOfThisProcess, name) for name in names))


# ---- processes -------------------------------------------------------------------------------------------------------

_c10d: Any = Later("torch._C._distributed_c10d")
_ddp: Any = Later("torch.nn.parallel.distributed")
_dist: Any = Later("torch.distributed")
names_ignored_by_ddp = _read("_ddp_params_and_buffers_to_ignore", ())  # of a module: names that DDP skips
comm_hooks_of = attrgetter("_comm_hooks")  # of a DistributedDataParallel: the list of its communication hooks
sync_buffers = methodcaller("_sync_buffers")  # of a DistributedDataParallel: broadcast rank 0's buffers
make_static = methodcaller("_set_static_graph")  # of a DistributedDataParallel: each pass uses equal parameters
FUNCTIONS_OF_DDP = "_ddp_init_helper", "_pre_forward"  # methods of DDP that allocate its buckets


def flight_records() -> list[bytes]:
    """Return torch's Flight Recorder traces as JSON: one trace of all collectives, and in a build with NCCL one more,
    of NCCL's collectives.
    """
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [dump() for name in names if (dump := getattr(_c10d, name, None)) is not None]


def rebuild_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP do what it does before a forward pass: check the last backward pass, and order the buckets of
    gradients.
    """
    model.reducer._rebuild_buckets()


def exchange_after_first_pass(model: Any) -> None:
    """Let DDP with a static graph exchange all gradients at the end of its first backward pass. DDP's own forward pass
    would arrange this.
    """
    if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
        model._static_graph_delay_allreduce_enqueued = True
        model.reducer._delay_all_reduce()


def start_ddp_alone() -> None:
    """Change DDP in this process so that DDP compares and broadcasts nothing when it wraps a model."""
    _ddp._verify_param_shape_across_processes = lambda *args, **options: True
    _ddp._sync_module_states = lambda *args, **options: None
    _dist.Reducer._rebuild_buckets = lambda reducer: False


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------

TRAINING_STATE = "_training_state"  # of an FSDP group of parameters: forward pass, backward pass or neither
place_of = attrgetter("_module_info")  # of a sharded parameter: its module, and its name in this module
shape_of = attrgetter("_orig_size")  # of a sharded parameter: its shape when it is gathered
gathered_of = _read("_unsharded_param", None)  # of a sharded parameter: the gathered one; None if it was never gathered
FSDP_STATE = "_get_fsdp_state"  # a method that ``fully_shard`` adds to a module
CLASSES_OF_POLICY, FUNCTION_OF_POLICY = "_module_classes", "_lambda_fn"  # of ModuleWrapPolicy, and of CustomPolicy
RESHARDING = "_to_sharded", "_to_sharded_post_forward"  # the methods with which a group frees gathered parameters
JOIN_MESHES = "_concatenate"  # a static method of DeviceMesh


def fsdp_groups(module: Any) -> list[Any]:
    """Return torch's groups of parameters that ``module``, an ``FSDPModule``, gathers together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has a single group
    return [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]


def prepare_passes(root: Any) -> None:
    """Let FSDP do now the preparations that it makes before its first forward pass."""
    root._get_fsdp_state()._lazy_init()


def reset_passes(root: Any, gathered: Iterable[Any]) -> None:
    """Reset FSDP after an unfinished pass, as ``reset_iter_state`` in newer versions of torch than 2.9 does."""
    state = root._get_fsdp_state()
    if state._is_root is None:  # None: no pass has begun
        return
    state._device_handle.synchronize()  # wait for exchanges of the unfinished pass
    exchanges, passes, idle = state._comm_ctx, state._state_ctx, type(state._training_state).IDLE
    exchanges.all_gather_state = exchanges.reduce_scatter_state = None
    exchanges.post_forward_order.clear()
    passes.iter_forward_root, passes.post_backward_final_callback_queued = None, False
    for each in passes.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
    for part in gathered:
        work = getattr(part._all_gather_result, "all_gather_work", None)
        if work is not None:
            work.wait()
        part._all_gather_result = part._post_reduce_event = part._all_reduce_state = None
        part._reshard_after_forward_event = part._partial_reduce_output = None
        part._post_forward_indices.clear()
        part._training_state = idle
        part._to_sharded()


def end_backward(root: Any) -> None:
    """Let FSDP do what it does after a backward pass: reduce each group's gradients, and shard its parameters again."""
    root._get_fsdp_state()._root_post_backward_final_callback()


_ring: Any = Later("torch.distributed.tensor.experimental._attention")


COMPUTES_SHAPES = "_propagate_tensor_meta_non_cached"  # the method that runs an operator for the shapes of its results


def connect_by_equal_messages(stage: Any) -> None:
    """Give the first messages between stages of a pipeline the same size. In torch 2.9 their sizes differ, and Gloo
    aborts.
    """
    ask = stage._get_init_p2p_neighbors_ops

    def messages() -> list[Any]:
        found: list[Any] = ask()
        for each in found:
            each.tensor = torch.zeros(1, dtype=torch.float32, device=each.tensor.device)
        return found

    stage._get_init_p2p_neighbors_ops = messages


def set_micro_batches(schedule: Any, count: int) -> None:
    """Let a schedule run ``count`` micro-batches instead of the number that it was created with."""
    schedule._n_microbatches = count


def keep_order_in_ring() -> None:
    """Let torch's ring attention keep the parts of a sequence in the order of the ranks."""
    _ring._cp_options.enable_load_balance = False


# ---- pickles ---------------------------------------------------------------------------------------------------------

FUNCTIONS_IN_C = "torch._C._nn"
"""The module that a pickle names for functions of ``torch.nn.functional`` that are written in C."""

_unpickler: Any = Later("torch._weights_only_unpickler")


def allowed_in_pickles() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return, by name, what ``torch.load(weights_only=True)`` accepts, in two dictionaries: all accepted objects, and
    those that the program has added.
    """
    users: dict[str, Any] = _unpickler._get_user_allowed_globals()
    return {**_unpickler._get_allowed_globals(), **users}, users
