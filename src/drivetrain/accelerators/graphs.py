"""Graphs of a device, such as CUDA graphs: operations that are recorded once, and then replayed without Python.

The graphs are ``torch.accelerator.Graph``. Before torch 2.13, the graphs are the backend's own, such as
``torch.cuda.CUDAGraph``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from drivetrain.base.torch_private import function_of_device

T = TypeVar("T")


class GraphRecorder:
    """Records the operations that a function queues on ``device`` as a graph.

    Before a function is recorded, the caller must run the function a few times inside :meth:`beside`. In the first
    calls, torch allocates memory and chooses kernels. Inside :meth:`beside`, the calls run on the stream on which the
    graph is recorded.

    Raises:
        RuntimeError: torch has no graphs of this device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module, self._pool = device, torch.get_device_module(device), None
        self._new_pool = getattr(self._module, "graph_pool_handle", None)
        self._new_graph()
        self._stream = torch.Stream(device)

    def _new_graph(self) -> Any:
        # With "thread_local", other threads can allocate memory while this thread records, for example to pin batches.
        settings: dict[str, Any] = {"capture_error_mode": "thread_local"}
        if self._new_pool is not None:
            settings["pool"] = self._pool = self._new_pool()
        if hasattr(torch.accelerator, "Graph"):
            return torch.accelerator.Graph(**settings)
        kind = getattr(self._module, f"{self._device.type.upper()}Graph", None)
        if kind is None:
            raise RuntimeError(f"torch {torch.__version__} has no graphs of {self._device.type!r} devices")
        return _Recording(self._module, kind(), settings)

    @contextmanager
    def beside(self, waits: list[str] | None = None) -> Iterator[None]:
        """Context that runs operations on the stream for recording graphs.

        A synchronization with the device cannot be recorded. On backends that warn of synchronizations, the file and
        line of each synchronization are added to ``waits``.
        """
        outer = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(outer)
        with self._stream, nullcontext() if waits is None else _waits_seen(self._module, waits):
            yield
        outer.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Call ``work`` once, and record the operations that ``work`` queues. The device does not run these operations
        during the recording.

        Returns: The result of ``work``, and the function that replays the graph. Each replay fills the tensors of the
        result.

        Raises:
            Exception: the exception of ``work``, even if the end of the recording raises a further exception.
        """
        graph, failed = self._new_graph(), None
        try:
            with self._stream, graph:
                try:
                    result = work()
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:
            self._drop(self._pool)
            raise failed or error from None
        return result, graph.replay

    def _drop(self, pool: Any) -> None:
        """End a failed recording, which torch leaves open. An open recording would keep torch from freeing memory that
        two streams have used. torch's random generators would raise an error at their next use.
        """
        if pool is not None:
            for name in ("endAllocateToPool", "releasePool"):
                if (end := function_of_device(self._device.type, name)) is not None:
                    end(self._device.index, pool)
        with self._stream, self._new_graph():  # a completed recording makes the random generators usable again
            torch.zeros(1, device=self._device)


class _Recording:
    """Wraps a backend's own graph. Like ``torch.accelerator.Graph``, this class is a context manager with a method
    ``replay``.
    """

    def __init__(self, module: Any, graph: Any, settings: dict[str, Any]) -> None:
        self._module, self._graph, self._settings = module, graph, settings
        self.replay = graph.replay

    def __enter__(self) -> None:
        self._module.synchronize()
        self._module.empty_cache()
        self._graph.capture_begin(**self._settings)

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
