"""Simulated devices, which detect moves, host syncs and wrong devices on a machine without an accelerator."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.accelerators.torch_device import parse_indices
from drivetrain.base.introspect import temporarily
from drivetrain.base.torch_private import where
from drivetrain.errors import ConfigurationError, is_count, shown
from drivetrain.testing._machine import Machine
from drivetrain.testing._modes import CallMode, OperationMode
from drivetrain.testing._places import Place, device_at
from drivetrain.testing.record import Record

_COUNT = "DRIVETRAIN_FAKE_DEVICES"

_machine: Machine | None = None  # the simulation of the running recording, if there is one


class FakeAccelerator(Accelerator):
    """Simulated devices that compute on the CPU, with exactly the results of ``accelerator="cpu"``.

    ::

        with FakeAccelerator.recording() as record:
            Trainer(accelerator="fake", devices=1).fit(model, loader)
        assert not [sync for sync in record.syncs if sync.step > 0]
        print(record)

    The devices are ``torch.device("cpu", 0)``, ``torch.device("cpu", 1)`` and so on. By default there is one device.
    :func:`fake_devices` or the environment variable ``DRIVETRAIN_FAKE_DEVICES`` sets another number. Outside of a
    recording, these devices behave as the plain CPU. In a recording, ``tensor.device`` is a tensor's simulated device,
    and moving a tensor copies it. Operations that would fail with GPUs also fail in a recording. Such operations mix
    tensors of two devices, mix tensors of a device and of the host, or use a device that does not exist. ``numpy()`` of
    a tensor on a device also fails. A recording belongs to one thread, so each process of a job must enter a recording.

    ``accelerator="fake"`` is for tests, and is therefore not in the list of accelerators.
    """

    device_count_is_limit = True

    @property
    def supports_pinned_memory(self) -> bool:  # type: ignore[override]  # there an attribute
        """Whether a recording, which simulates pinned memory, is running."""
        return _machine is not None

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Return the numbers of the selected devices. ``n`` or ``"n"`` selects the first n devices, -1 selects all, and
        ``[i, j]`` or ``"i,j"`` selects the devices i and j.

        Raises:
            ConfigurationError: ``devices`` selects no device, the same device twice, or a device that is not simulated.
        """
        try:
            return parse_indices(devices, _count())
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} Or simulate more: with fake_devices(4): Trainer(...).") from None

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return _count()

    @staticmethod
    def is_available() -> bool:
        """Return True if there is at least one simulated device."""
        return _count() > 0

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the current and the peak bytes of the tensors on a device, under the names of CUDA's allocator."""
        if _machine is None:
            return {}
        record = _machine.record
        return {
            "allocated_bytes.all.current": float(record.bytes_alive(device)),
            "allocated_bytes.all.peak": float(record.peak_bytes(device)),
        }

    @classmethod
    def why_unavailable(cls) -> str:
        return f"{_COUNT} is 0"

    def setup_device(self, device: torch.device) -> None:
        _let_torch_load()

    def synchronize(self, device: torch.device) -> None:
        if _machine is not None:
            _machine.note_sync(_machine.places.check(device), "synchronize")

    def memory_allocated(self, device: torch.device) -> int | None:
        return None if _machine is None else _machine.record.bytes_alive(device)

    def max_memory_allocated(self, device: torch.device) -> int | None:
        return None if _machine is None else _machine.record.peak_bytes(device)

    def reset_peak_memory(self, device: torch.device) -> None:
        if _machine is not None:
            _machine.record.reset_peak(device)

    @staticmethod
    @contextmanager
    def recording(devices: int | None = None) -> Iterator[Record]:
        """Context that simulates devices in this thread, and records moves, host syncs and optimizer steps.

        All existing tensors are on the host at the beginning of the context, and all tensors are on the host after its
        end.

        Args:
            devices: the number of devices, by default the number outside of the recording.

        Returns:
            A context that yields the record. The record can still be read after the end of the context.

        Raises:
            ConfigurationError: another recording is running.
        """
        global _machine
        if _machine is not None:
            raise ConfigurationError("A recording of simulated devices is running. Leave it before another one begins.")
        with ExitStack() as stack:
            if devices is not None:
                stack.enter_context(fake_devices(devices))
            _let_torch_load()
            machine = _machine = Machine(_count())
            stack.callback(_stop)
            calls = CallMode(machine)
            stack.enter_context(_steps_noted(machine))
            stack.enter_context(_replaced(*where("group_tensors"), _grouped))
            stack.enter_context(_replaced(*where("run_engine"), functools.partial(_seen_by, calls)))
            stack.enter_context(_replaced(*where("push_hooks"), functools.partial(_hooks_seen_by, calls)))
            stack.enter_context(OperationMode(machine))
            stack.enter_context(calls)
            yield machine.record


@contextmanager
def fake_devices(count: int) -> Iterator[None]:
    """Context with ``count`` simulated devices, in this process and in processes that this process starts.

    Raises:
        ConfigurationError: ``count`` is negative or no int.
    """
    if not is_count(count):
        raise ConfigurationError(f"fake_devices({shown(count)}): that is no number of devices. Write fake_devices(2).")
    with temporarily(os.environ, **{_COUNT: str(count)}):
        yield


def _count() -> int:
    text = os.environ.get(_COUNT, "1")
    if not text.isdigit():
        raise ConfigurationError(f"{_COUNT} is a number of simulated devices, not {text!r}. Unset it or write 2.")
    return int(text)


# ---- a recording -----------------------------------------------------------------------------------------------------


def _stop() -> None:
    global _machine
    _machine = None


@contextmanager
def _steps_noted(machine: Machine) -> Iterator[None]:
    """Context that records optimizer steps. A step that calls ``super().step()`` is recorded once."""
    running: dict[int, int] = {}

    def begins(optimizer: Optimizer, *_: Any) -> None:
        running[id(optimizer)] = running.get(id(optimizer), 0) + 1

    def ends(optimizer: Optimizer, *_: Any) -> None:
        running[id(optimizer)] -= 1
        if not running[id(optimizer)]:
            machine.note_step(optimizer)

    hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``wrapper`` replaces the function ``name`` of ``owner``. The wrapper's first argument is the
    replaced function.
    """
    original = getattr(owner, name, None)
    if original is None:  # not every version of torch has the function
        yield
        return
    setattr(owner, name, functools.partial(wrapper, original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _seen_by(calls: CallMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` in the mode ``calls``, which then sees each call of torch in ``function``. In the backward pass,
    this helper runs gradient hooks and recomputations.
    """
    with calls:
        return function(*args, **kwargs)


def _hooks_seen_by(calls: CallMode, push: Callable[..., None], *hooks: Callable[[Any], Any]) -> None:
    """Install hooks on saved tensors. The mode ``calls`` will see the hooks' calls of torch. Activation checkpointing
    and offloading use such hooks.
    """
    push(*(functools.partial(_seen_by, calls, hook) for hook in hooks))


def _grouped(group: Callable[..., Any], lists: Any, with_indices: bool = False) -> Any:
    """Group tensors by simulated device. Optimizers and clipping call this function instead of torch's function, which
    does not know simulated devices.
    """
    first: Sequence[Any] = next((column for column in lists if column), [])
    members: dict[Place, list[int]] = {}
    for position, tensor in enumerate(first):
        members.setdefault(None if _machine is None else _machine.place(tensor), []).append(position)
    if set(members) <= {None}:
        return group(lists, with_indices)
    groups = {}
    for place, positions in members.items():
        part = [[column[position] for position in positions] if column else [] for column in lists]
        for (_, dtype), (columns, indices) in group(part, with_indices).items():
            groups[device_at(place), dtype] = columns, [positions[index] for index in indices]
    return groups


# ---- files -----------------------------------------------------------------------------------------------------------


@functools.cache
def _let_torch_load() -> None:
    """Support ``torch.load(map_location=torch.device("cpu", 0))``, and record from which devices ``torch.save``
    reads.
    """
    # priority 5, because torch's functions for the CPU have the priority 10, and the lowest priority comes first
    torch.serialization.register_package(5, _saved, _loaded)


def _saved(storage: Any) -> None:
    place = None if _machine is None else _machine.places.where(storage)
    if _machine is not None and place is not None:
        _machine.note_bytes(place, None, storage.nbytes(), blocking=True, what="save")


def _loaded(storage: Any, location: str) -> Any:
    if re.fullmatch(r"cpu:\d+", location) is None:
        return None
    if _machine is not None:
        place = _machine.places.check(torch.device(location))
        _machine.places.put(storage, place)
        _machine.note_bytes(None, place, storage.nbytes(), blocking=True, what="load")
    return storage
