"""Copies of one module on several devices. Each copy runs on its part of a batch, and the outputs are joined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base import torch_private
from drivetrain.base.introspect import defined_by_user
from drivetrain.errors import NotSupportedError
from drivetrain.logbook.parts import PartBook, logging_into, merge
from drivetrain.strategies.batch_parts import Joiner, split_batch

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_WITH_END = _STEPS[:3]

Split = Callable[[Any, Sequence[torch.device]], "tuple[list[Any], list[int]]"]


class Replicas(nn.Module):
    """A module that runs on several devices at once. A call of this module runs ``forward`` on all devices.

    The first replica is the module itself, so the attributes and buffers that a step sets there stay. The other
    replicas are shallow copies that exist only during one call. The parameters of a copy are on the copy's device, and
    pass gradients to the module's parameters. The buffers of a copy are independent of the module's buffers.

    Args:
        module: the module, on the first device.
        devices: one device for each replica. A device may occur several times.
        accelerator: makes each replica's device current in the replica's thread.
        split: a function that returns the parts of a batch, each on its device, and the number of samples in each part.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        accelerator: Accelerator | None = None,
        split: Split = split_batch,
    ) -> None:
        super().__init__()
        self.module = module
        self._devices = tuple(devices)
        self._accelerator = accelerator
        self._split = split
        self._several = len(set(devices)) > 1
        self._threads: ThreadPoolExecutor | None = None
        self.next_run: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``next_run`` if a wrapper has set it for this call. Otherwise run the module's ``forward`` on all
        devices.
        """
        run, self.next_run = self.next_run, None
        return (run or self.runs(self.module.forward))(*args, **kwargs)

    def runs(self, method: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """Return a callable that runs a method of the module on all devices. The callable joins the outputs into the
        value that one device would return.

        If the module has a hook for the end of the step, such as ``training_step_end``, the callable returns the hook's
        result.

        Args:
            method: the module's method, or a compiled form of the method.
            name: the method's name; ``None``: ``method.__name__``.
        """
        name = method.__name__ if name is None else name
        end = _end_of(self.module, name)
        if name == "forward":
            method = self.module  # the module's __call__, with forward hooks

        def run(*args: Any, **kwargs: Any) -> Any:
            outputs, sizes = self._run(name, method, args, kwargs)
            joiner = Joiner(sizes, self._devices[0])
            return joiner.joined(outputs) if end is None else end(joiner.gathered(outputs))

        return run

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": None}

    # ---- one call ------------------------------------------------------------------------------------------------

    def _run(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[int]]:
        """Return the output of each replica, and the number of samples of each replica."""
        calls, sizes = self._calls(name, args, kwargs)
        if len(calls) == 1:
            ((own_args, own_kwargs),) = calls
            return [method(*own_args, **own_kwargs)], sizes
        devices = self._devices[: len(calls)]
        copies = [replica(self.module, device, self._several) for device in devices[1:]]
        methods = [method, *(copy if name == "forward" else getattr(copy, name) for copy in copies)]
        with _part_books([self.module, *copies], sizes, devices[0]):
            return self._call(methods, calls, devices), sizes

    def _calls(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[tuple[tuple[Any, ...], dict[str, Any]]], list[int]]:
        """Return the arguments of each replica's call, and the number of samples in each call."""
        devices = self._devices
        if len(devices) == 1 or not (args or kwargs):
            return [(args, kwargs)], [1]
        if name not in _STEPS:
            return self._split((args, kwargs), devices)
        if not args:  # the batch was passed by keyword
            parts, sizes = self._split(kwargs["batch"], devices)
            return [((), {**kwargs, "batch": part}) for part in parts], sizes
        parts, sizes = self._split(args[0], devices)
        return [((part, *args[1:]), kwargs) for part in parts], sizes

    def _call(
        self, methods: Sequence[Callable[..., Any]], calls: Sequence[Any], devices: Sequence[torch.device]
    ) -> list[Any]:
        if not self._several:  # one after the other, so that replicas draw random numbers in a fixed order
            return [method(*args, **kwargs) for method, (args, kwargs) in zip(methods, calls, strict=True)]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._devices) - 1, "drivetrain-replica")
        enter = _contexts(devices[0])

        def on_device(method: Callable[..., Any], call: Any, device: torch.device) -> Any:
            if self._accelerator is not None:
                self._accelerator.setup_device(device)
            with enter():
                return method(*call[0], **call[1])

        futures = [
            self._threads.submit(on_device, method, call, device)
            for method, call, device in zip(methods[1:], calls[1:], devices[1:], strict=True)
        ]
        try:
            first = methods[0](*calls[0][0], **calls[0][1])
        finally:
            wait(futures)  # the module must not change while a replica runs
        return [first, *(future.result() for future in futures)]


def _end_of(module: nn.Module, name: str) -> Callable[[Any], Any] | None:
    """Return the user's hook for the end of the step ``name``, such as ``training_step_end``, or ``None`` if there is
    none.
    """
    end: Any = getattr(module, f"{name}_end", None) if name in _WITH_END else None
    # modules written for earlier versions of Lightning inherit a default hook, which no user has written
    if not (callable(end) and defined_by_user(module, f"{name}_end")):
        return None
    try:
        inspect.signature(end).bind(None)
    except TypeError:  # a method of the user with a different purpose
        return None
    return end


def replica(module: nn.Module, device: torch.device, moves: bool = True) -> nn.Module:
    """Return a shallow copy of ``module`` whose parameters and buffers are on ``device``.

    Gradients of the copy's parameters flow to the parameters of ``module``. Writing to the copy's buffers does not
    change the buffers of ``module``.

    Args:
        module: the module.
        device: the device of the copy.
        moves: whether replicas are on different devices. If not, the copy shares parameters and metric objects with
            ``module``.
    """
    copies: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def tensor_on_device(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:  # one copy for each tensor, so that tied weights stay tied
            tensors[id(tensor)] = tensor.to(device, non_blocking=True)
        return tensors[id(tensor)]

    def copied(original: nn.Module) -> nn.Module:
        if id(original) not in copies:
            copies[id(original)] = new_copy(original)
        return copies[id(original)]

    def new_copy(original: nn.Module) -> nn.Module:
        # torch.compile's wrapper runs the original module, so copy the original
        if (inside := torch_private.own_modules(original).get(torch_private.WRAPPED)) is not None:
            return copied(inside)
        if _is_metric(original):
            return _NoMetric(type(original).__name__) if moves else original
        copy = torch_private.replica_of(original)
        own = copy.__dict__
        own[torch_private.PARAMETERS] = {
            name: None if parameter is None else tensor_on_device(parameter) if moves else parameter
            for name, parameter in torch_private.own_parameters(original).items()
        }
        own[torch_private.BUFFERS] = {
            name: None if buffer is None else buffer.to(device, non_blocking=True, copy=True)
            for name, buffer in torch_private.own_buffers(original).items()
        }
        children = torch_private.own_modules(original)
        own[torch_private.MODULES] = {name: None if each is None else copied(each) for name, each in children.items()}
        torch_private.list_weights_of_rnn(copy)
        return copy

    return copied(module)


def _is_metric(module: nn.Module) -> bool:
    return all(callable(getattr(module, name, None)) for name in ("update", "compute", "reset"))


class _NoMetric(nn.Module):
    """Replaces a metric object on a replica, because the state of the replica's metric would be lost."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(
            f"A step on several devices used the metric object {self._name}, which is on the first device only. Return "
            "its inputs from the step, and update it in training_step_end, validation_step_end or test_step_end."
        )

    update = compute = reset = forward


@contextmanager
def _part_books(replicas: Sequence[nn.Module], sizes: Sequence[int], device: torch.device) -> Iterator[None]:
    """Context in which each replica collects its logged values separately. At the end, these values are merged."""
    book = replicas[0].__dict__.get("_book")
    if book is None:
        yield
        return
    books = [PartBook(book, size) for size in sizes]
    with ExitStack() as stack:
        for copy, part in zip(replicas, books, strict=True):
            stack.enter_context(logging_into(copy, part))
        yield
    merge(books, device)


def _contexts(device: torch.device) -> Callable[[], ExitStack]:
    """Return a function that enters the gradient, inference and autocast modes of this thread in another thread."""
    kind, gradients, inference = device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocasts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocasts else None
    caches = torch.is_autocast_cache_enabled()

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(gradients))
        if autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
        return stack

    return enter
