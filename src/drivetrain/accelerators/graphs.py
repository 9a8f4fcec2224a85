"""Graphs of a device: its work, recorded once and then replayed without Python.

They are torch's ``torch.accelerator.Graph``, or, in versions of torch before 2.13, the backend's own, such as
``torch.cuda.CUDAGraph``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class GraphRecorder:
    """Records the work that a function queues on ``device``.

    A function that will be recorded first runs a few times inside :meth:`beside`. Memory that is allocated and kernels
    that are chosen on first use then belong to the stream on which the graph is recorded.

    Raises:
        RuntimeError: torch has no graphs of this device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._new_graph()
        self._stream = torch.Stream(device)

    def _new_graph(self) -> Any:
        # Other threads, such as the one that pins batches, may go on allocating while this one records.
        if hasattr(torch.accelerator, "Graph"):
            return torch.accelerator.Graph(capture_error_mode="thread_local")
        kind = getattr(torch.get_device_module(self._device), f"{self._device.type.upper()}Graph", None)
        if kind is None:
            raise RuntimeError(f"torch {torch.__version__} has no graphs of {self._device.type!r} devices")
        return _Recording(self._device, kind())

    @contextmanager
    def beside(self, waits: list[str] | None = None) -> Iterator[None]:
        """Context whose work runs on the stream on which graphs are recorded.

        ``waits`` gets the place of each synchronization with the device, which cannot be recorded. Only backends that
        warn of synchronizations report them.
        """
        outer = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(outer)
        with self._stream:
            if waits is None:
                yield
            else:
                with _waits_seen(torch.get_device_module(self._device), waits):
                    yield
        outer.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record the work of ``work``, which is called once; the device runs nothing.

        Returns: The result of ``work``, whose tensors each replay fills, and the function that replays the graph.
        """
        graph = self._new_graph()
        with self._stream, graph:
            result = work()
        return result, graph.replay


class _Recording:
    """A backend's own graph, with the context and the replay of ``torch.accelerator.Graph``."""

    def __init__(self, device: torch.device, graph: Any) -> None:
        self._module, self._graph = torch.get_device_module(device), graph
        self.replay = graph.replay

    def __enter__(self) -> None:
        self._module.synchronize()
        self._module.empty_cache()
        self._graph.capture_begin(capture_error_mode="thread_local")

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()


@contextmanager
def _waits_seen(module: Any, waits: list[str]) -> Iterator[None]:
    switch = getattr(module, "set_sync_debug_mode", None)
    if switch is None:
        yield
        return
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_others(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
            if "synchronizing" in str(message):
                waits.append(f"{filename}:{lineno}")
            else:
                show(message, category, filename, lineno, *more)

        warnings.showwarning = show_others  # type: ignore[assignment]
        warnings.filterwarnings("always", message=".*synchronizing")
        switch("warn")
        try:
            yield
        finally:
            switch(before)
