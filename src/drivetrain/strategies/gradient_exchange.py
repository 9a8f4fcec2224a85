"""Average gradients over ranks while the backward pass still computes other gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.base import torch_private
from drivetrain.errors import NotSupportedError

_BUCKET_BYTES = 25 * 2**20
T = TypeVar("T", bound=Tensor)

Start = Callable[[Tensor, str], Any]
"""A function ``(tensor, name)`` that starts an in-place sum of the tensor over the ranks, and returns a handle. All
ranks pass the same name.
"""


def alike(tensors: Iterable[T], most_bytes: int = _BUCKET_BYTES) -> list[list[T]]:
    """Divide ``tensors`` into lists that can each be exchanged at once. The tensors of a list have the same dtype and
    device.

    A list ends with the tensor that makes its size reach ``most_bytes``. The lists are in the order of their first
    tensors.
    """
    lists: list[list[T]] = []
    open_lists: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()  # the size of each open list, in bytes
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind not in open_lists:
            open_lists[kind] = []
            lists.append(open_lists[kind])
        open_lists[kind].append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= most_bytes:
            del open_lists[kind], sizes[kind]
    return lists


class Bucket:
    """Parameters whose gradients are exchanged together.

    Args:
        parameters: parameters of one dtype, in the same order on all ranks.
        name: the name of the exchange, the same on all ranks.

    Attributes:
        waiting: the ``id`` of each parameter that has no gradient in this backward pass yet.
        flat: during the exchange, the concatenated gradients, followed by one number for each parameter: 1 if this rank
            has a gradient of the parameter, else 0.
    """

    def __init__(self, parameters: Sequence[Tensor], name: str = "") -> None:
        self.parameters, self.name = parameters, name
        self.waiting: set[int] = set()
        self.missing: list[int] = []
        self.flat: Tensor | None = None
        self.handle: Any = None

    def expect(self) -> None:
        """Reset for the gradients of the next backward pass."""
        self.waiting = {id(parameter) for parameter in self.parameters}
        self.flat = self.handle = None

    @torch.no_grad()
    def pack(self) -> Tensor:
        """Set ``flat`` to this rank's gradients, and return ``flat``. Before :meth:`unpack`, the caller replaces the
        values in ``flat`` by the means over the ranks.
        """
        self.missing = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        parts = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                raise NotSupportedError(
                    f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, and this strategy exchanges "
                    'dense ones only. Write sparse=False for its layer, or strategy="ddp".'
                )
            part = torch.zeros_like(parameter) if gradient is None else gradient
            parts.append(part.detach().reshape(-1))
        there = parts[0].new_ones(len(parts))
        for index in self.missing:
            there[index] = 0
        self.flat = torch.cat([*parts, there])
        return self.flat

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the means from ``flat`` to the gradients. If no rank has a gradient of a parameter, the gradient stays
        ``None``.
        """
        assert self.flat is not None  # pack() has run
        sizes = [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]
        *parts, there = self.flat.split(sizes)  # type: ignore[no-untyped-call]
        # Reading the numbers waits for the device. If this rank has all gradients, the numbers are not needed.
        somewhere = [number > 0 for number in there.tolist()] if self.missing else []
        for index, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif somewhere[index]:
                parameter.grad = part.view_as(parameter).clone()


class GradientExchange:
    """Averages the gradients of ``parameters`` over the ranks in each backward pass.

    A bucket (a group of gradients) is sent when its gradients are computed and all earlier buckets were sent. All ranks
    therefore send the same buckets in the same order. After the backward pass, each gradient is the mean over the
    ranks. If the loss of a rank does not depend on a parameter, the rank sends zeros as the gradient of the parameter.

    Args:
        parameters: the parameters, in the same order on all ranks; gradients of frozen parameters are not exchanged.
        ranks: the number of ranks.
        start, wait: functions that begin and end an exchange; ``wait`` gets the handle that ``start`` has returned.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], ranks: int, start: Start, wait: Callable[[Any], Any]
    ) -> None:
        self.enabled = True
        self._ranks, self._start, self._wait = ranks, start, wait
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._sent = 0  # number of buckets sent in this backward pass
        self._queued = False
        self._hooks: list[Any] = []
        self.include_thawed(parameters)

    def include_thawed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Also exchange the gradients of those ``parameters`` that now require gradients. Store all other parameters in
        ``frozen``.
        """
        parameters = list(parameters)
        thawed = [each for each in parameters if each.requires_grad and id(each) not in self._bucket_of]
        # in reverse order, because a backward pass reaches the last parameters first
        for together in alike(reversed(thawed), _BUCKET_BYTES):
            bucket = Bucket(together, f"drivetrain.gradients.{len(self._buckets)}")
            bucket.expect()
            self._buckets.append(bucket)
            self._bucket_of.update({id(each): bucket for each in together})
        self._hooks += [each.register_post_accumulate_grad_hook(self._ready) for each in thawed]  # type: ignore[no-untyped-call]
        self.frozen = [each for each in parameters if id(each) not in self._bucket_of]

    def _ready(self, parameter: Tensor) -> None:
        """Called when a gradient of this backward pass is complete."""
        if not self.enabled:
            return
        if not self._queued:
            self._queued = True
            torch_private.engine.queue_callback(self._finish)
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        bucket.handle = self._start(bucket.pack().div_(self._ranks), bucket.name)
        self._sent += 1

    def _finish(self) -> None:
        """Send the remaining buckets, and wait for all buckets. Called at the end of the backward pass."""
        try:
            while self._sent < len(self._buckets):
                self._send_next()
            for bucket in self._buckets:
                self._wait(bucket.handle)
                bucket.unpack()
        finally:
            self._sent, self._queued = 0, False
            for bucket in self._buckets:
                bucket.expect()

    def close(self) -> None:
        """Stop exchanging gradients."""
        for hook in self._hooks:
            hook.remove()


class GradientExchanges:
    """The exchanges of a strategy, one for each module that the strategy has set up for training."""

    def __init__(self) -> None:
        self._of: dict[int, GradientExchange] = {}  # the keys are the id() of modules

    def begin(self, module: nn.Module, ranks: int, start: Start, wait: Callable[[Any], Any]) -> None:
        """Begin to exchange the gradients of ``module``. An earlier exchange for this module is replaced."""
        if (earlier := self._of.pop(id(module), None)) is not None:
            earlier.close()
        self._of[id(module)] = GradientExchange(module.parameters(), ranks, start, wait)

    def include_thawed(self, module: nn.Module | None) -> Sequence[nn.Parameter]:
        """Exchange the gradients of all parameters of ``module`` that are now trained. Return the frozen parameters."""
        exchange = self._of.get(id(module))
        if module is None or exchange is None:
            return ()
        exchange.include_thawed(module.parameters())
        return exchange.frozen

    @contextmanager
    def paused(self, module: nn.Module) -> Iterator[None]:
        """Context in which backward passes do not exchange the gradients of ``module``."""
        exchange = self._of.get(id(module))
        if exchange is None:
            yield
            return
        if any(each.requires_grad for each in exchange.frozen):
            exchange.include_thawed(module.parameters())
        before, exchange.enabled = exchange.enabled, False
        try:
            yield
        finally:
            exchange.enabled = before

    def close(self) -> None:
        """Stop all exchanges."""
        for exchange in self._of.values():
            exchange.close()
        self._of.clear()
