"""Gradients of several ranks, averaged while the backward pass still computes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from drivetrain.errors import NotSupportedError

_BUCKET_BYTES = 25 * 2**20

Start = Callable[[Tensor, str], Any]
"""Begins to sum up a tensor over the ranks, in place; the name is the same on all ranks. Returns a handle."""


class Bucket:
    """Parameters whose gradients travel together.

    Args:
        parameters: of one type, in the same order on all ranks.
        name: of the exchange, the same on all ranks.

    Attributes:
        waiting: those that this backward pass has no gradient of yet, by identity.
        flat: the gradients behind each other, followed by a 1 for each parameter that has one, while they travel.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), name: str = "") -> None:
        self.name = name
        self.parameters = list(parameters)
        self.waiting: set[int] = set()
        self.missing: list[int] = []
        self.flat: Tensor | None = None
        self.handle: Any = None

    def expect(self) -> None:
        """Wait for the gradients of the next backward pass."""
        self.waiting = {id(parameter) for parameter in self.parameters}
        self.flat = self.handle = None

    @torch.no_grad()
    def pack(self) -> Tensor:
        """Return what this rank sends. :meth:`unpack` expects the mean over the ranks in ``flat``."""
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
        """Write the means into the gradients. One that no rank has stays ``None``."""
        assert self.flat is not None  # it was packed
        sizes = [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]
        *parts, there = self.flat.split(sizes)  # type: ignore[no-untyped-call]
        somewhere = [number > 0 for number in there.tolist()] if self.missing else []  # else nothing is read
        for index, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif somewhere[index]:
                parameter.grad = part.view_as(parameter).clone()


class GradientExchange:
    """Averages the gradients of these parameters over the ranks in each backward pass.

    A bucket travels as soon as all its gradients are there, and those of the buckets before it are on their way: so all
    ranks send the same buckets in the same order. When the backward pass ends, the means are in the gradients. A rank
    whose loss does not depend on a parameter contributes zeros for it.

    Args:
        parameters: those that require gradients, in the same order on all ranks.
        ranks: how many there are.
        start, wait: begin and end an exchange; ``wait`` gets the handle that ``start`` has returned.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], ranks: int, start: Start, wait: Callable[[Any], Any]
    ) -> None:
        self.enabled = True
        self._ranks, self._start, self._wait = ranks, start, wait
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._sent = 0  # buckets, in this backward pass
        self._queued = False
        self._hooks: list[Any] = []
        self.include_thawed(parameters)

    def include_thawed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Exchange the gradients of those of these, too, that are trained now; the others stay in ``frozen``."""
        parameters = list(parameters)
        thawed = [each for each in parameters if each.requires_grad and id(each) not in self._bucket_of]
        self._fill(thawed)
        self._hooks += [each.register_post_accumulate_grad_hook(self._ready) for each in thawed]  # type: ignore[no-untyped-call]
        self.frozen = [each for each in parameters if id(each) not in self._bucket_of]

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Put parameters of one type and device together; the last ones get their gradients first."""
        open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
        for parameter in reversed(parameters):
            kind = parameter.dtype, parameter.device
            bucket = open_buckets.get(kind)
            if bucket is None:
                bucket = open_buckets[kind] = Bucket(name=f"drivetrain.gradients.{len(self._buckets)}")
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            self._bucket_of[id(parameter)] = bucket
            if sum(each.numel() * each.element_size() for each in bucket.parameters) >= _BUCKET_BYTES:
                del open_buckets[kind]
        for bucket in self._buckets:
            bucket.expect()

    def _ready(self, parameter: Tensor) -> None:
        """A gradient of this backward pass is complete."""
        if not self.enabled:
            return
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        bucket.handle = self._start(bucket.pack().div_(self._ranks), bucket.name)
        self._sent += 1

    def _finish(self) -> None:
        """The backward pass ends: send what was not sent, and wait for everything."""
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
        """Leave gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()


class GradientExchanges:
    """The exchanges of a strategy: one for each module that it has set up for training."""

    def __init__(self) -> None:
        self._of: dict[int, GradientExchange] = {}  # by the identity of the module

    def begin(self, module: nn.Module, ranks: int, start: Start, wait: Callable[[Any], Any]) -> None:
        """Exchange the gradients of ``module`` from now on; an earlier exchange of them ends."""
        if (earlier := self._of.pop(id(module), None)) is not None:
            earlier.close()
        self._of[id(module)] = GradientExchange(module.parameters(), ranks, start, wait)

    def frozen(self, module: nn.Module | None) -> Sequence[nn.Parameter]:
        """Return the parameters of ``module`` whose gradients are not exchanged, because they are not trained."""
        exchange = self._of.get(id(module))
        return () if exchange is None else exchange.frozen

    def include_thawed(self, module: nn.Module | None) -> None:
        """Exchange the gradients of all parameters of ``module`` that are trained now."""
        if module is not None and (exchange := self._of.get(id(module))) is not None:
            exchange.include_thawed(module.parameters())

    @contextmanager
    def paused(self, module: nn.Module) -> Iterator[None]:
        """Context whose backward passes leave the gradients of ``module`` to this process."""
        if any(each.requires_grad for each in self.frozen(module)):
            self.include_thawed(module)
        exchange = self._of.get(id(module))
        if exchange is None:
            yield
            return
        before, exchange.enabled = exchange.enabled, False
        try:
            yield
        finally:
            exchange.enabled = before

    def close(self) -> None:
        """Leave all gradients alone from now on."""
        for exchange in self._of.values():
            exchange.close()
        self._of.clear()
