"""Hold the private names of torch that drivetrain uses, each with its purpose. No other file contains such names.

Any release of torch may rename or remove a private name. If a name is missing, only the feature that needs the name
stops working:

- ``torch_private.txt`` has the names in torch's modules. A name is looked up at the first use. If torch lacks the name,
  drivetrain uses the replacement in ``_ORDINARY``. Without a replacement, an error names the feature.
- The functions below read the attributes of objects. If an attribute is missing, the function returns a default, or
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

__all__ = ["BatchNorm", "DispatchMode", "tree_map"]  # type checkers know only these names


def _rows() -> dict[str, tuple[str, str]]:
    """Read ``torch_private.txt``: return, for each name, the path in torch, and the feature that needs the name."""
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
    "AnyPass": (),  # without the class, the workers end only when the iterator is freed
    "PassOfWorkers": (),
    "BatchNorm": nn.BatchNorm1d.__base__,  # torch's class _BatchNorm, even if torch renames the class
    "Fetcher": object,  # torch then iterates over the loader
    "PassOfThisProcess": object,
    "can_move_in_place": lambda *_: False,  # without the check, the model is moved before sharding
    "collate_functions": {None: ""},  # without the functions, samples are fetched one by one
    "cpp_compiler": lambda: None,  # without the check, torch raises its own error
    "foreign_device_type": lambda: "privateuseone",  # torch's default name for a custom backend
    "is_view": lambda _: True,  # each value then counts as a view, and is copied
    "list_backends": lambda _: ["inductor", "eager", "aot_eager"],
    "list_modes": lambda: ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    "newest_node": None,  # backward operations are then shown without a line of the program
    "running_node": None,
}
"""The replacements of names that torch may lack."""

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
    """Return the owner of a private attribute and the attribute's name in torch, so that a caller can replace the
    attribute. ``name`` is the attribute's name in this module.
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
    """Return torch's function ``name``, such as "releasePool", for the device type ``kind``; ``None`` if torch lacks
    it.
    """
    return getattr(torch._C, f"_{kind}_{name}", None)


# ---- tensors ---------------------------------------------------------------------------------------------------------

version_of = attrgetter("_version")  # the counter of a tensor's in-place changes
hooks_of = attrgetter("_backward_hooks")  # the hooks on a tensor's gradient, or None
storage_key = attrgetter("_cdata")  # the same number for all Python objects of one storage
storage_inside = attrgetter("_untyped_storage")  # the untyped storage of a TypedStorage
schema_of = attrgetter("_schema")  # the arguments of an operation, and which of them it changes in place
operation_name = attrgetter("_opname")  # an operation's name without the namespace
overloads_of = attrgetter("_overloadpacket")  # all overloads of an operation
PARTS_OF_SPARSE = "_indices", "_values"  # methods of COO tensors that also work for uncoalesced tensors
name_of_storage = methodcaller("_pickle_storage_type")  # a TypedStorage's name in pickles
number_of_node = methodcaller("_sequence_nr")  # the number of a node in the autograd graph, in forward order
hooks_on_accumulation = _read("_post_accumulate_grad_hooks", None)  # hooks that run after a gradient is accumulated
READS_A_COUNT = "_get_value"  # torch's function that reads an optimizer's step count
VOTES_OF_A_STAGE = "_warmup_forward_vote", "_warmup_backward_result"  # methods to vote whether shapes are static


def gradient_facts(tensors: Iterable[Any]) -> list[Any]:
    """Return for each tensor the address, ``requires_grad``, and the hooks on the gradient."""
    return [
        (each.data_ptr(), each.requires_grad, each._backward_hooks, each._post_accumulate_grad_hooks)
        for each in tensors
    ]


# ---- what watches a step ---------------------------------------------------------------------------------------------

RUN_ENGINE = "_engine_run_backward"
"""The function in ``torch.autograd`` with which every backward pass starts the autograd engine."""


def watching() -> Callable[[], Any]:
    """Return a function that returns a true value while a profiler, a mode or a hook observes operations or saved
    tensors.

    Raises:
        ImportError, AttributeError: torch lacks a name.
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

own_parameters = attrgetter("_parameters")  # a module's parameters by name; a value may be None
own_buffers = attrgetter("_buffers")
own_modules = attrgetter("_modules")
non_persistent_buffers = attrgetter("_non_persistent_buffers_set")  # names of buffers that are not in the state dict
hooks_before_loading = attrgetter("_load_state_dict_pre_hooks")  # a module's hooks that may rename loaded entries
compiled_call = attrgetter("_compiled_call_impl")  # a module's compiled call; None if there is none
uncompiled_call = attrgetter("_call_impl")  # a module's uncompiled call, with hooks
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
STORES = (PARAMETERS, BUFFERS, "_non_persistent_buffers_set", MODULES)
"""The attributes for parameters, buffers and submodules, which ``nn.Module.__init__`` sets."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute with the compiled call of a module that was compiled in place."""
WRAPPED = "_orig_mod"
"""The attribute of a result of ``torch.compile`` that contains the original module. The attribute's name is a prefix of
the names of the result's parameters.
"""
APPLY = "_apply"
"""The method of a module that replaces its tensors, as ``to`` and ``half`` do."""


def apply(module: nn.Module, change: Callable[..., Any], recurse: bool = True) -> None:
    """Replace each tensor of a module by ``change(tensor)``, as ``nn.Module.half`` does."""
    getattr(module, APPLY)(change, recurse)


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has a hook on the forward or backward pass."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def copy_hooks(old: nn.Module, new: nn.Module) -> None:
    """Copy the forward and backward hooks of ``old`` to ``new``."""
    for name, value in vars(old).items():
        if name.startswith(("_forward_", "_backward_")) and "hooks" in name and value:
            getattr(new, name).update(value)
    new._is_full_backward_hook = old._is_full_backward_hook


def replica_of(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module, as ``nn.DataParallel`` makes it. The copy has no parameters of its own."""
    copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # torch has no types for it
    vars(copy).pop(COMPILED_CALL, None)  # a compiled call would run the original module
    return copy


def list_weights_of_rnn(module: nn.Module) -> None:
    """Update the internal parameter list of an RNN after its parameters were replaced."""
    own = vars(module)
    if "_flat_weights_names" in own:
        own["_flat_weights"] = [getattr(module, name, None) for name in own["_flat_weights_names"]]


def check_input(layer: Any, given: Tensor) -> None:
    """Raise the batch norm's error if ``given`` has a wrong number of dimensions."""
    layer._check_input_dim(given)


def input_check_of_sync_batch_norm() -> dict[str, Any]:
    """Return the name and the method with which ``nn.SyncBatchNorm`` checks inputs, for the body of another class."""
    return {"_check_input_dim": nn.SyncBatchNorm._check_input_dim}


# ---- torch.compile ---------------------------------------------------------------------------------------------------

DYNAMO = "torch._dynamo"
"""The name of torch's compiler package. The package is slow to import, so checks only look into ``sys.modules``."""

_rules: Any = Later("torch._dynamo.trace_rules")
_inlining: Any = Later("torch._dynamo.external_utils")
_frames: Any = Later("torch._C._dynamo.eval_frame")


def module_inside(module: Any) -> Any:
    """If ``module`` is a result of ``torch.compile``, return the original module. Otherwise, return ``None``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return module._orig_mod if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def compiled_by(context: Any, module: nn.Module, function: Any) -> Any:
    """Compile ``function``, a method of ``module``, as ``module.compile()`` does. ``context`` has the arguments of
    torch.compile.
    """
    if _rules.check(module.forward):  # torch.compile would skip the functions of torch's own modules
        function = _inlining.wrap_inline(function)
    return context(function)


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Make each call of ``module`` run ``call``. With ``None``, calls run uncompiled."""
    module._compiled_call_impl = call


def leave_folders_uncompiled(folders: Iterable[Any]) -> None:
    """Keep torch.compile from compiling the functions in these folders."""
    _rules.SKIP_DIRS.extend(f"{folder}/" for folder in folders)
    _rules._recompile_re()


def leave_uncompiled(function: Any) -> None:
    """Keep torch.compile from compiling ``function`` and the functions that it calls."""
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # torch's own decorators set this attribute, too


# ---- optimizers, schedulers, scalers ---------------------------------------------------------------------------------

BEFORE_STEP, AFTER_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
"""The attributes of an optimizer with the hooks that run before and after its step."""
STEPPED = "_opt_called"
"""The attribute of an optimizer that is true after a step. A scheduler warns if the attribute is false."""
LAST_RATES, SCHEDULERS = "_last_lr", "_schedulers"
"""Attributes in the state dict of a scheduler: the present learning rates, and the inner schedulers."""
WATCHED = "_wrapped_by_lr_sched"
"""The attribute that a scheduler sets on the ``step`` method of its optimizer. If it is missing, the scheduler warns.
"""
SCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute of an optimizer that unscales gradients in its kernel and skips steps with overflows."""
UNSCALE = "_unscale_grads_"
"""The method with which a GradScaler unscales the gradients of an optimizer."""
GROWTH_TRACKER = "_growth_tracker"
"""The entry in the state of a GradScaler that counts the steps since the last change of the scale."""
schedulers_in = _read(SCHEDULERS, ())  # the schedulers inside a SequentialLR or a ChainedScheduler
class_in_shards = _read("_optim_constructor", None)  # the optimizer class that a ZeroRedundancyOptimizer uses
states_of_scaler = _read("_per_optimizer_states", {})  # a GradScaler's states by optimizer; {} if disabled
scale_of = _read("_scale", None)  # a GradScaler's scale; None before the first loss


def mark_as_stepped(optimizer: Any) -> None:
    """Keep schedulers from warning after a step that was made without ``optimizer.step``."""
    vars(optimizer)[STEPPED] = True


def expect_no_graph(optimizer: Any) -> None:
    """Keep an optimizer with ``capturable=True`` from warning about a step without a CUDA graph."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True


def update_scale(scaler: Any, overflow: bool) -> None:
    """Change the scale of a GradScaler after a step, as ``GradScaler.update`` does."""
    if (scale := scale_of(scaler)) is not None and scaler.is_enabled():
        found = torch.full((), float(overflow), device=scale.device)
        options = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        _own.update_scale_(scale, scaler._growth_tracker, found, *options)


# ---- loaders ---------------------------------------------------------------------------------------------------------

ITERATOR, GET_ITERATOR = "_iterator", "_get_iterator"
"""Members of a DataLoader: the iterator with the persistent workers, and the method that creates an iterator."""
kept_iterator = _read(ITERATOR, None)  # a DataLoader's iterator; None without persistent workers
NUMBER_OF_DRAWS = "_num_samples"  # an attribute of RandomSampler; None means one draw per sample


def keep_iterator(loader: Any, iterator: Any) -> None:
    """Set the iterator that a DataLoader uses in its next pass. The workers of the earlier iterator end."""
    loader._iterator = iterator


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, even if they hang."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        worker.kill()  # a hanging worker does not receive the request to end


def methods_of_a_pass() -> tuple[tuple[type, str], ...]:
    """Return the class and the name of each method that torch calls to iterate over a DataLoader without workers."""
    loader = torch.utils.data.DataLoader
    names = ("__init__", "__next__", "_next_data", "_next_index")
    first = ((loader, "__iter__"), (loader, GET_ITERATOR), (_own.Fetcher, "fetch"))
    return (*first, *((_own.PassOfThisProcess, name) for name in names))


# ---- processes -------------------------------------------------------------------------------------------------------

_c10d: Any = Later("torch._C._distributed_c10d")
_ddp: Any = Later("torch.nn.parallel.distributed")
_dist: Any = Later("torch.distributed")
names_ignored_by_ddp = _read("_ddp_params_and_buffers_to_ignore", ())  # names of parameters and buffers that DDP skips
comm_hooks_of = attrgetter("_comm_hooks")  # the communication hooks of a DistributedDataParallel
sync_buffers = methodcaller("_sync_buffers")  # broadcasts the buffers of rank 0 to all ranks of DDP
make_static = methodcaller("_set_static_graph")  # tells DDP that each pass uses the same parameters
FUNCTIONS_OF_DDP = "_ddp_init_helper", "_pre_forward"  # methods of DDP that allocate its buckets


def flight_records() -> list[bytes]:
    """Return the traces of torch's Flight Recorder as JSON. A build of torch with NCCL adds a second trace, of NCCL's
    collectives.
    """
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [dump() for name in names if (dump := getattr(_c10d, name, None)) is not None]


def rebuild_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP check the last backward pass and order the buckets of gradients, as DDP does before a forward pass."""
    model.reducer._rebuild_buckets()


def exchange_after_first_pass(model: Any) -> None:
    """Let DDP with a static graph exchange all gradients at the end of the first backward pass. DDP's ``forward`` does
    the same.
    """
    if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
        model._static_graph_delay_allreduce_enqueued = True
        model.reducer._delay_all_reduce()


def start_ddp_alone() -> None:
    """Patch DDP in this process, so that wrapping a model compares and broadcasts nothing."""
    _ddp._verify_param_shape_across_processes = lambda *args, **options: True
    _ddp._sync_module_states = lambda *args, **options: None
    _dist.Reducer._rebuild_buckets = lambda reducer: False


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------

TRAINING_STATE = "_training_state"  # whether an FSDP parameter group is idle, or in a forward or backward pass
place_of = attrgetter("_module_info")  # the module of a sharded parameter, and the parameter's name there
shape_of = attrgetter("_orig_size")  # the complete shape of a sharded parameter
gathered_of = _read("_unsharded_param", None)  # a sharded parameter in gathered form; None before the first gather
FSDP_STATE = "_get_fsdp_state"  # a method that ``fully_shard`` adds to a module
CLASSES_OF_POLICY, FUNCTION_OF_POLICY = "_module_classes", "_lambda_fn"  # of ModuleWrapPolicy and CustomPolicy
RESHARDING = "_to_sharded", "_to_sharded_post_forward"  # methods that free the gathered parameters of a group
JOIN_MESHES = "_concatenate"  # a static method of DeviceMesh


def fsdp_groups(module: Any) -> list[Any]:
    """Return the parameter groups of an ``FSDPModule``. FSDP gathers the parameters of a group together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has a single group
    return [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]


def prepare_passes(root: Any) -> None:
    """Initialize FSDP now, instead of in its first forward pass."""
    root._get_fsdp_state()._lazy_init()


def reset_passes(root: Any, gathered: Iterable[Any]) -> None:
    """Reset FSDP after an unfinished pass. torch after 2.9 has the method ``reset_iter_state`` for this."""
    state = root._get_fsdp_state()
    if state._is_root is None:  # no pass has begun
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
    """Let FSDP reduce the gradients and shard the parameters of each group, as FSDP does after a backward pass."""
    root._get_fsdp_state()._root_post_backward_final_callback()


_ring: Any = Later("torch.distributed.tensor.experimental._attention")


COMPUTES_SHAPES = "_propagate_tensor_meta_non_cached"  # the method that computes the shapes of an operator's results


def connect_by_equal_messages(stage: Any) -> None:
    """Give the first messages between pipeline stages equal sizes. In torch 2.9 the sizes differ, and Gloo aborts."""
    ask = stage._get_init_p2p_neighbors_ops

    def messages() -> list[Any]:
        found: list[Any] = ask()
        for each in found:
            each.tensor = torch.zeros(1, dtype=torch.float32, device=each.tensor.device)
        return found

    stage._get_init_p2p_neighbors_ops = messages


def set_micro_batches(schedule: Any, count: int) -> None:
    """Change the number of micro-batches of a schedule to ``count``."""
    schedule._n_microbatches = count


def keep_order_in_ring() -> None:
    """Let torch's ring attention split a sequence in the order of the ranks."""
    _ring._cp_options.enable_load_balance = False


# ---- pickles ---------------------------------------------------------------------------------------------------------

FUNCTIONS_IN_C = "torch._C._nn"
"""The name of the module in which pickles find the C functions of ``torch.nn.functional``."""

_unpickler: Any = Later("torch._weights_only_unpickler")


def allowed_in_pickles() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dictionaries from names to objects. The first has all objects that ``torch.load(weights_only=True)``
    accepts. The second has only the objects that the program has added.
    """
    users: dict[str, Any] = _unpickler._get_user_allowed_globals()
    return {**_unpickler._get_allowed_globals(), **users}, users
