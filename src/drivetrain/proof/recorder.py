"""Record the state of a training program at each optimizer step, through torch's global hooks."""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from drivetrain.base import torch_private
from drivetrain.base.digest import digest, leaves, numbers_of
from drivetrain.base.torch_private import MODULES, non_persistent_buffers, own_buffers
from drivetrain.proof.judge import position
from drivetrain.proof.logged import listen
from drivetrain.proof.operations import Operations
from drivetrain.proof.records import OPERATIONS, Step, Writer, packed, path_of, start_of

Tensors = dict[str, Tensor]
Names = dict[str, list[str]]


class Recorder:
    """Records each optimizer step of this process, and kills the job at a given step.

    Args:
        folder: the folder for the records.
        start: the number of earlier starts of the program in this run.
        parent: the process that has started the program.
        undisturbed: the folder with the records of the undisturbed run. The recorder compares the state with these
            records to find the current step.
        latest: the latest step at which the program can have continued. The last kill was in the step before.
        kill: the step of the kill, counted from 0 in the undisturbed run, and the seconds to wait in this step before
            the kill. The kill happens before the next step.
        operations: a rank, and a step of this rank, counted from 0 in this process. All operations of this step are
            recorded, then the job is killed.
    """

    def __init__(
        self, folder: str, start: int, parent: int, undisturbed: str = "", latest: int = 0,
        kill: tuple[int, float] | None = None, operations: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._start, self._parent = folder, start, parent
        self._undisturbed, self._latest, self._kill = undisturbed, latest, kill
        self._operations, self._mode = list(operations or ()), Operations()
        self._writer: Writer | None = None
        self._pid, self._main = 0, os.getpid()
        self._count = 0
        self._is_dying = False
        self._first: int | None = None  # the index, in the undisturbed run, of this process's first step
        self._depth = 0
        self._since: dict[str, list[Any]] = {"inputs": [], "batches": [], "losses": []}  # values since the last step
        self._parameters = weakref.WeakKeyDictionary[Optimizer, int]()  # number of parameters of each optimizer
        self._modules: list[weakref.ref[nn.Module]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._before: tuple[Step, Names] | None = None  # during a step with a closure, the state before the step
        self._last: Optimizer | None = None  # keeps the parameters alive for the last record

    def install(self) -> None:
        """Add the hooks to torch, for the whole process."""
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        nn.modules.module.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        backward = torch.autograd.backward

        def recorded_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._since["losses"] += map(_loss, leaves(tensors))
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded_backward
        _wrap_loaders(lambda batch: self._since["batches"].append(digest(leaves(batch))))
        atexit.register(self._at_exit)
        self._watch_operations()

    # ---- what happens between steps ----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth += 1

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and torch.is_grad_enabled():
            self._since["inputs"].append(digest(leaves((args, kwargs))))

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._pid != os.getpid():  # this process makes its first step, perhaps after a fork
            self._pid, self._count, self._first = os.getpid(), 0, None
            forked = self._pid if self._pid != self._main else ""
            counts = not (forked and self._undisturbed and path_of(self._undisturbed, 0, rank()).exists())
            self._writer = Writer(path_of(self._folder, self._start, rank(), forked)) if counts else None
            # in a process of multiprocessing, atexit's functions do not run
            if multiprocessing.parent_process() is not None:
                multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)
        if self._writer is None:
            return
        # kill before the next step; the timer's thread has not killed the process yet
        if self._is_dying:
            kill_job(self._parent)
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        # Going through all objects is slow. So look for modules only at steps 0, 1, 2, 4, 8 ... and when the optimizer
        # has new parameters.
        if self._count & (self._count - 1) == 0 or self._parameters.get(optimizer) != parameters:
            self._parameters[optimizer] = parameters
            self._look_around()
            listen(self._hear)
        self._last = optimizer
        if callable(kwargs.get("closure", args[1] if len(args) > 1 else None)):
            # this record is written after the step, because the closure computes loss and gradients during the step
            self._before = self._state_of(optimizer)
        else:
            self._finish(*self._state_of(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._before is not None and optimizer is self._last:
            (step, names), (after, names_after) = self._before, self._state_of(optimizer)
            step["tensors"]["gradients"], step["random"] = after["tensors"]["gradients"], after["random"]
            self._before = None
            self._finish(step, {**names, "gradients": names_after["gradients"]})

    def _finish(self, step: Step, names: Names) -> None:
        if self._operations == [rank(), self._count]:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode.write(Path(self._folder, OPERATIONS))
            kill_job(self._parent)
        self._write("step", step, names)
        if self._kill is not None and rank() == 0:
            self._die_if_due(step, *self._kill)
        self._count += 1
        self._watch_operations()  # the recorded operations of a step begin with the previous optimizer step

    def _write(self, kind: str, step: Step, names: Names) -> None:
        assert self._writer is not None
        step["since"] = {part: list(each) for part, each in self._since.items()}
        for each in self._since.values():
            each.clear()
        self._writer.write(kind, step, names)

    def _watch_operations(self) -> None:
        """Start to record operations if the step in ``operations`` is the next step."""
        if self._operations == [rank(), self._count]:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _hear(self, name: str, value: Any, logged_step: Any) -> None:
        """Write a logged value immediately, because the process may be killed at any time."""
        if self._writer is not None and self._pid == os.getpid():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(value, (int, float)):
                self._writer.write("row", {"row": [name, value, logged_step]}, {})

    def _at_exit(self) -> None:
        if self._last is not None and self._writer is not None and self._pid == os.getpid():
            if self._is_dying:
                kill_job(self._parent)
            self._write("end", *self._state_of(self._last))

    def _die_if_due(self, step: Step, at: int, seconds: float) -> None:
        if self._first is None:
            self._first = position([step], start_of(self._undisturbed, 0, rank()).steps, self._latest)
        if self._first + self._count == at:
            # A thread kills the job. The kill can therefore happen in the optimizer's step, in the next batch or while
            # a checkpoint is written.
            self._is_dying = True
            timer = threading.Timer(seconds, kill_job, [self._parent])
            timer.daemon = True
            timer.start()

    def _look_around(self) -> None:
        alive = [each for each in gc.get_objects() if issubclass(type(each), (nn.Module, torch.amp.GradScaler))]
        modules = [each for each in alive if isinstance(each, nn.Module)]
        inner = {id(child) for each in modules for child in vars(each).get(MODULES, {}).values()}
        self._modules = [weakref.ref(each) for each in modules if id(each) not in inner]
        self._scalers = [weakref.ref(each) for each in alive if isinstance(each, torch.amp.GradScaler)]

    def _state_of(self, optimizer: Optimizer) -> tuple[Step, Names]:
        """Return the current state as a record, and the names of the tensors in this record."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places = {id(each): place for place, each in enumerate(own)}
        found = [(type(each).__name__, tensors_of(each)) for ref in self._modules if (each := ref()) is not None]
        others = [each for each in found if each[1] and places.keys().isdisjoint(map(id, each[1].values()))]
        trained = [each for _, each in found if not places.keys().isdisjoint(map(id, each.values()))]
        trained.sort(key=lambda module: min(places.get(id(each), len(own)) for each in module.values()))
        # Name parameters in the order of their modules. The order in the optimizer may differ between processes, if the
        # program has passed a set to the optimizer.
        named: dict[int, tuple[str, Tensor]] = {}
        for number, module in enumerate([*trained, {f"parameter {place}": each for place, each in enumerate(own)}], 1):
            taken = {name for name, _ in named.values()}
            for name, tensor in module.items():
                named.setdefault(id(tensor), (f"{name} of module {number}" if name in taken else name, tensor))
        tensors: dict[str, Tensors] = {"model": {}, "parameters": {}}
        for key, (name, tensor) in named.items():
            tensors["parameters" if key in places else "model"][name] = tensor
        gradients = {name: tensor.grad for name, tensor in tensors["parameters"].items()}
        tensors["gradients"] = {name: each for name, each in gradients.items() if each is not None}
        tensors["optimizer"], values = state_of_optimizer(optimizer, {key: name for key, (name, _) in named.items()})
        if self._operations == [rank(), self._count]:
            self._mode.name(tensors)
        everything = [*tensors.values(), *(found for _, found in others)]
        numbers = iter(numbers_of([each for part in everything for each in part.values()]))
        text = [packed([next(numbers) for _ in part]) for part in everything]
        names = {part: list(found) for part, found in tensors.items()}
        names.update({f"module {kind} {len(each)}": list(each) for kind, each in others})
        step = {
            "time": time.monotonic(),
            "tensors": dict(zip(tensors, text, strict=False)),
            "others": [[kind, each] for (kind, _), each in zip(others, text[len(tensors) :], strict=True)],
            "values": {
                "hyperparameters": values,
                "scaler": [state for ref in self._scalers if (scaler := ref()) and (state := scaler.state_dict())],
            },
            "random": random_states(),
            "is_sharded": any(_is_shard(name, each) for name, each in tensors["parameters"].items()),
        }
        return step, names


def rank() -> int:
    """Return this process's rank in its job, or 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def kill_job(parent: int) -> None:
    """Find the child of ``parent`` that is an ancestor of this process, such as torchrun. Kill this child and its
    descendants, and the calling process last.

    Other children of ``parent`` are not killed, because ``parent`` can be a test suite.
    """
    above = [psutil.Process(), *psutil.Process().parents()]
    place = next((number for number, each in enumerate(above) if each.pid == parent), 1)
    top = above[max(place - 1, 0)]
    for each in [top, *top.children(recursive=True)]:
        if each.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                each.kill()
    os.kill(os.getpid(), signal.SIGKILL)


# ---- what is read ----------------------------------------------------------------------------------------------------


def tensors_of(module: nn.Module) -> Tensors:
    """Return a module's parameters and persistent buffers by name."""
    found: Tensors = dict(module.named_parameters())
    for prefix, each in module.named_modules():
        for name, buffer in own_buffers(each).items():
            if buffer is not None and name not in non_persistent_buffers(each):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def state_of_optimizer(optimizer: Optimizer, names: dict[int, str]) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of an optimizer's state by name. Also return the hyperparameters and other numbers of the
    optimizer.
    """
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    places = {key: place for place, key in enumerate(names)}
    for parameter, state in sorted(optimizer.state.items(), key=lambda each: places.get(id(each[0]), len(places))):
        owner = names.get(id(parameter), "another parameter" if isinstance(parameter, Tensor) else repr(parameter))
        for key, content in state.items() if isinstance(state, Mapping) else [("state", state)]:
            is_nested = isinstance(content, (Mapping, list, tuple))
            for place, value in enumerate(leaves(content)):
                name = f"{key} {place} of {owner}" if is_nested else f"{key} of {owner}"
                if isinstance(value, Tensor):
                    tensors[name] = value
                elif isinstance(value, (int, float)):
                    values[name] = value
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if key != "initial_lr" and isinstance(value, (int, float, tuple)):
                values[f"{key} of group {number}"] = _plain(value)
    return tensors, values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value


def _is_shard(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is this rank's shard of a larger parameter, as in FSDP or a tensor-parallel layer."""
    return "_flat_param" in name or any(each.is_shard() for each in getattr(parameter, "placements", ()))


def random_states() -> dict[str, str]:
    """Return a digest of each global random generator of this process."""
    states: dict[str, Any] = {"Python": repr(random.getstate()).encode(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["NumPy"] = repr((kind, keys.tobytes(), *rest)).encode()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and (module := torch.get_device_module(device)).is_initialized():
        states[f"torch on {device.type}"] = module.get_rng_state()
    return {name: digest([each]) for name, each in states.items()}


def _loss(loss: Any) -> list[Any]:
    return [loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None, digest([loss])]


def _wrap_loaders(see: Callable[[Any], None]) -> None:
    """Call ``see`` with each batch that an iterator of torch's DataLoader returns."""
    kind: Any = torch_private.AnyPass
    following = kind.__next__

    def recorded_next(self: Any) -> Any:
        batch = following(self)
        see(batch)
        return batch

    # The new function looks like torch's own method. Otherwise drivetrain's Trainer would notice a replaced iterator,
    # and would fetch batches differently.
    kind.__next__ = types.FunctionType(
        recorded_next.__code__, vars(dataloader), "__next__", None, recorded_next.__closure__
    )
