"""Gather states with DTensors into complete tensors for a file, and shard loaded tensors again. Raise an error where
DTensors are not supported.

A strategy for sharded models overrides four methods of :class:`Strategy` with the functions of this module. The
checkpoints then have the same content as without sharding, so any strategy can resume from them::

    class FSDP2Strategy(ParallelStrategy):
        facts = ParallelStrategy.facts.but(restores_after_setup=True)

        def module_state(self, module):
            return whole_model_state(module)

        def load_module_state(self, module, state, strict=True):
            load_whole_model_state(module, state, strict)

        def optimizer_state(self, optimizer):
            return whole_optimizer_state(optimizer)

        def load_optimizer_states(self, optimizers, states, module_state):
            load_whole_optimizer_states(optimizers, states)

[Note: torch's own functions] ``torch.distributed.checkpoint.state_dict`` also has functions for these conversions, but
torch's functions do not restore all states exactly. ``get_optimizer_state_dict`` steps an optimizer that has no state
yet, so Adam counts a step that never happened. ``get_optimizer_state_dict`` also drops the state of currently frozen
parameters (pytorch#192202), and does not support LBFGS. ``set_model_state_dict`` accepts a state with missing names
even with ``strict=True``. ``strategies/optimizer_states.py`` uses the same names as torch's functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from drivetrain.base.packages import dtensor
from drivetrain.base.restoring import check_optimizer_state, load_states
from drivetrain.base.tree import first_dtensor, map_leaves, move_to_host, parameters_of
from drivetrain.base.tree import is_dtensor as is_dtensor
from drivetrain.checkpoints.sharded import StoredTensor
from drivetrain.errors import CheckpointError
from drivetrain.strategies.optimizer_states import plain_name

State = dict[str, Any]
Box = tuple[tuple[int, ...], tuple[slice, ...]]
"""A part of a shard: the offsets of the part in the complete tensor, and the slices of the part in the shard."""


def refuse_dtensors(
    state: Mapping[str, Any], method: str, module: nn.Module | None, optimizer: Optimizer | None = None
) -> None:
    """Raise an error if ``state`` contains a DTensor. Rank 0 would otherwise write its own shard instead of the
    complete tensor.

    Args:
        state: the state dict of ``module``, or of ``optimizer``.
        method: the method that returned ``state``, such as "DDPStrategy.optimizer_state". The error message asks for an
            override of this method.
        module: the strategy's module. The message uses the module's parameter names.
        optimizer: the optimizer of the state; ``None``: ``state`` is the state of the module.

    Raises:
        CheckpointError: ``state`` contains a DTensor. The message names the parameter.
    """
    path = first_dtensor(state)
    if path is None:
        return
    name = path if optimizer is None else f"{path} of {type(optimizer).__name__}"
    kind, _, rest = path.partition("/")
    number = rest.partition("/")[0]
    if optimizer is not None and kind == "state" and number.isdecimal():
        name = f"{type(optimizer).__name__}'s state of {_name(module, optimizer, int(number))}"
    raise CheckpointError(
        f"{name} is a DTensor, of which each process holds a shard, but {method} returns complete "
        f"tensors for a file. Use a strategy that handles sharded models, or override {method} with "
        "the functions of drivetrain.strategies.sharded_state."
    )


def _name(module: nn.Module | None, optimizer: Optimizer, number: int) -> str:
    parameters = parameters_of(optimizer)
    named = () if module is None else module.named_parameters()
    names = {id(parameter): name for name, parameter in named}
    return names.get(id(parameters[number]), f"parameter {number}") if number < len(parameters) else str(number)


# ---- complete tensors for a file, and shards again -------------------------------------------------------------------


def whole_model_state(module: nn.Module) -> State:
    """On rank 0, return ``module.state_dict()`` with complete tensors in host memory. On all other ranks, return
    ``{}``.

    Every rank must call this function. Besides the result, the function needs memory for one complete parameter at a
    time. The names do not contain prefixes of wrappers such as torch.compile.
    """
    return _whole(sharded_model_state(module))


def sharded_model_state(module: nn.Module) -> State:
    """Return ``module.state_dict()`` with the shards of this rank. The names do not contain prefixes of wrappers such
    as torch.compile.
    """
    return {plain_name(name): value for name, value in module.state_dict().items()}


def load_whole_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load complete tensors into a module whose parameters may be DTensors. Each rank copies its own shards.

    Every rank must pass the same complete ``state``. The ranks do not communicate. Parameters on the meta device are
    replaced.

    Raises:
        RuntimeError: names or shapes do not match. torch raises this error.
    """
    own = module.state_dict(keep_vars=True)
    wrapped = {plain_name(name): name for name in own}
    named = {wrapped.get(plain_name(name), name): value for name, value in state.items()}
    sharded = {name: shard_like(value, own.get(name)) for name, value in named.items()}
    assign = any(isinstance(value, Tensor) and value.is_meta for value in own.values())
    module.load_state_dict(sharded, strict=strict, assign=assign)


def whole_optimizer_state(optimizer: Optimizer) -> State:
    """On rank 0, return ``optimizer.state_dict()`` with complete tensors in host memory. On all other ranks, return
    ``{}``.

    Parameters are numbered as in torch's state dicts. Every rank must call this function.
    """
    return _whole(optimizer.state_dict())


def load_whole_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Load one complete state into each optimizer. Each rank keeps its own shards, and the ranks do not communicate.

    A tensor that has the shape of its parameter is sharded like the parameter. Any other tensor with dimensions, such
    as a flat tensor of LBFGS, becomes a replicated DTensor. A scalar tensor stays plain.

    Raises:
        CheckpointError: the number of states differs, or a state does not fit its optimizer.
    """
    load_states("optimizer", optimizers, states, check_optimizer_state, _load_whole)


def whole_parameters(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> tuple[dict[str, nn.Parameter], list[Optimizer]]:
    """Return the parameters as complete tensors in host memory. Also return the optimizers, with these tensors as their
    parameters.

    Call this function only after a run, because the function changes the optimizers. Every rank must call this
    function, but only rank 0 can use the result. Without DTensors, the arguments are returned unchanged.
    """
    if not any(map(is_dtensor, parameters.values())):
        return dict(parameters), list(optimizers)
    whole = {name: nn.Parameter(_gathered(each), each.requires_grad) for name, each in parameters.items()}
    replaced = {id(each): whole[name] for name, each in parameters.items()}
    for optimizer in optimizers:
        state = whole_optimizer_state(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(each), each) for each in group["params"]]
        optimizer.state.clear()
        if state:
            optimizer.load_state_dict(state)
    return whole, list(optimizers)


def whole_state(state: Any) -> Any:
    """Return ``state`` on every rank, with complete tensors in host memory in place of DTensors.

    Every rank must call this function. A state without DTensors is returned unchanged.
    """
    if first_dtensor(state) is None:
        return state
    return map_leaves(lambda leaf: move_to_host(_gathered(leaf)) if is_dtensor(leaf) else leaf, state)


def _whole(state: Mapping[Any, Any]) -> State:
    keeps = not distributed.is_initialized() or distributed.get_rank() == 0

    def gathered(leaf: Any) -> Any:
        leaf = _gathered(leaf)
        if not keeps:
            return None
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    whole = {key: map_leaves(gathered, value) for key, value in state.items()}
    return whole if keeps else {}


_class_name = attrgetter("__class__.__name__")


def _gathered(leaf: Any) -> Any:
    """Return a DTensor as a complete tensor, and any other value unchanged. Every rank must call this function."""
    if not is_dtensor(leaf):
        return leaf
    device = leaf.device_mesh.device_type  # on some meshes, ranks cannot exchange host memory
    leaf = leaf.detach().to(device)
    placements = list(leaf.placements)
    if "_StridedShard" in map(_class_name, placements):  # tensor parallelism together with FSDP
        placements[0] = dtensor.Replicate()  # full_tensor() also gathers in this order, but warns
        leaf = leaf.redistribute(placements=placements)
    return leaf.full_tensor()


def _load_whole(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, parameters_of(optimizer), strict=True))
    sharded = {
        number: {key: map_leaves(partial(_state_like, parameters[number], key), value) for key, value in each.items()}
        for number, each in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def _state_like(parameter: Any, key: Any, value: Any) -> Any:
    """Return an entry of an optimizer's state in the form that the optimizer uses for ``parameter``. ``key`` and
    ``value`` are the entry in a checkpoint.
    """
    if not isinstance(value, Tensor) or not is_dtensor(parameter) or key == "step":
        return shard_like(value, None)
    if value.shape == parameter.shape:
        return shard_like(value, parameter)

    value = shard_like(value, None)
    return _distributed(value, parameter, [dtensor.Replicate()] * parameter.device_mesh.ndim) if value.ndim else value


def shard_like(value: Any, own: Any) -> Any:
    """If ``own`` is a DTensor, shard ``value`` like ``own``. Otherwise return ``value``. ``value`` is complete on every
    rank.

    The ranks do not communicate. If ``value`` is still in the files of a checkpoint, each rank reads only its own
    shard. A ``value`` that is no tensor is returned unchanged.
    """
    if not isinstance(value, Tensor) or is_dtensor(value):
        return value
    if isinstance(value, StoredTensor):
        if is_dtensor(own) and value.shape == own.shape:
            return _read_shard(value, own)
        value = value.whole()
    if not isinstance(own, Tensor):
        return value
    if own.is_meta and value.is_floating_point():
        value = value.to(own.dtype)  # the result replaces ``own``; no later code converts the dtype
    return _distributed(value, own, own.placements) if is_dtensor(own) else value  # type: ignore[attr-defined]


def _read_shard(value: Any, own: Any) -> Tensor:
    shard = local_shard(own)
    read = torch.empty(shard.shape, dtype=value.dtype)
    for offsets, inside in boxes_of(own):
        read[inside] = value.part(offsets, read[inside].shape)
    dtype = own.dtype if own.is_meta and value.is_floating_point() else value.dtype
    device = own.device_mesh.device_type if shard.is_meta else shard.device
    return _from_local(read.to(device, dtype), own)


def _distributed(value: Tensor, own: Any, placements: Sequence[Any]) -> Tensor:
    # src_data_rank=None: no rank sends data, because each rank has the complete tensor
    return dtensor.distribute_tensor(value, own.device_mesh, placements, src_data_rank=None)


# ---- one rank's own shard --------------------------------------------------------------------------------------------


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, detached. Return any other tensor unchanged."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def from_local_shard(shard: Tensor, like: Any) -> Tensor:
    """Undo :func:`local_shard`: return a tensor with the dtype, device and placements of ``like``."""
    shard = shard.to(local_shard(like))
    return _from_local(shard, like) if is_dtensor(like) else shard


def _from_local(shard: Tensor, like: Any) -> Tensor:
    # Without shape and stride, torch would assume shards of equal size.
    return dtensor.DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def boxes_of(tensor: Any) -> list[Box]:
    """Return the place of this rank's shard in the complete tensor, as boxes. Each box has offsets in the complete
    tensor, and slices of the shard.

    If rows of other ranks lie between the rows of a shard, the shard has several boxes. The boxes are computed from the
    mesh and the placements. The ranks do not communicate.
    """
    return boxes_in(tensor.device_mesh, tensor.placements, tensor.shape)


def boxes_in(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> list[Box]:
    """Return the boxes (see :func:`boxes_of`) of this rank's shard of a tensor of ``shape`` that is spread over
    ``mesh``.
    """
    axes = []
    for dimension, extent in enumerate(shape):
        along = [
            placement if getattr(placement, "dim", None) == dimension else dtensor.Replicate()
            for placement in placements
        ]
        numbers = torch.arange(extent, device=mesh.device_type)
        lines = [extent if each == dimension else 1 for each in range(len(shape))]
        spread = dtensor.distribute_tensor(numbers.reshape(lines), mesh, along, src_data_rank=None)
        axes.append(_runs(spread.to_local().flatten().tolist()))
    boxes: list[Box] = [((), ())]
    for runs in axes:
        boxes = [((*at, start), (*inside, part)) for at, inside in boxes for start, part in runs]
    return boxes


def _runs(numbers: list[int]) -> list[tuple[int, slice]]:
    """Split ascending indices into sequences of consecutive indices. For each sequence, return the first index, and the
    slice of ``numbers``.
    """
    found, begin = [], 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            found.append((numbers[begin], slice(begin, index)))
            begin = index
    return found
