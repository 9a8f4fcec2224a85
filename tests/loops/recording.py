"""A graph recorder for the CPU: it records the operations of torch that a step makes, and replays these alone.

As with a device's graph, Python does not run in a replay, numbers that it has computed stay as they were, results go
to the memory of the recording, and a wait for the device cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.accelerators import CPUAccelerator
from drivetrain.base.seed import rng_state, set_rng_state


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors of others that were changed, and their values
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted while a graph is recorded")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if (
            func._schema.is_mutable or "batch_norm" in func.name()
        ):  # its schema does not say that it writes the averages
            for each in given:
                if each.untyped_storage().data_ptr() not in self._own:
                    self.before.append((each, each.clone()))
        result = func(*args, **kwargs)
        places = {each.untyped_storage().data_ptr() for each in given}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in places:
                self._own.add(each.untyped_storage().data_ptr())
        self.done.append((func, *(tree_map(_bare, each) for each in (args, kwargs, result))))
        return result


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class FakeRecorder:
    """Records and replays on the CPU."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    @contextmanager
    def beside(self, waits: list[str] | None = None) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        operations, random = _Operations(), rng_state()
        try:
            with operations:
                result = work()
        finally:
            with torch.no_grad():
                for tensor, value in reversed(operations.before):
                    tensor.copy_(value)
            set_rng_state(random)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for func, args, kwargs, made in operations.done:
                    again = func(*args, **kwargs)
                    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return result, replay


class RecordingAccelerator(CPUAccelerator):
    """The CPU, with graphs; keeps its recorders."""

    def __init__(self) -> None:
        self.recorders: list[Any] = []

    def graph_recorder(self, device: torch.device) -> Any:
        self.recorders.append(FakeRecorder())
        return self.recorders[-1]

    @property
    def recorder(self) -> Any:
        return self.recorders[-1]
