"""torch_xla's profiler: a server from which a tool collects what the host and the devices did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

_PORT = 9012


class XLAProfiler(Callback):
    """Marks the batches of a run, and actions of your own, in the traces of torch_xla's profiler.

    Pass it as ``Trainer(profiler=XLAProfiler())`` or in ``callbacks``. When a run begins, it starts torch_xla's server
    in this process; ``torch_xla.debug.profiler.trace("localhost:9012", folder)`` or TensorBoard collects a trace from
    there. Nothing is measured here: :meth:`summary` is empty.

    Args:
        port: where the server listens.
    """

    is_profiler = True

    def __init__(self, port: int = _PORT) -> None:
        self.port = port
        self._server: Any = None
        self._open: dict[str, Any] = {}  # by action

    def __getstate__(self) -> dict[str, Any]:
        return {"port": self.port, "_server": None, "_open": {}}

    # ---- actions -------------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Begin an action, which the trace shows under its name.

        Raises:
            ConfigurationError: it has begun, and not ended.
        """
        from torch_xla.debug import profiler

        if action_name in self._open:
            raise ConfigurationError(
                f"XLAProfiler.start({action_name!r}): this action has begun and not ended. Call stop({action_name!r}) "
                "before, or give it another name."
            )
        self._open[action_name] = trace = profiler.Trace(action_name)
        trace.__enter__()

    def stop(self, action_name: str) -> None:
        """End an action; one that has not begun is ignored."""
        if (trace := self._open.pop(action_name, None)) is not None:
            trace.__exit__(None, None, None)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Return a context that is one action."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """Return the empty report: the traces are collected elsewhere."""
        return ""

    def describe(self) -> None:
        """Do nothing, for the same reason."""

    # ---- a run ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the server, once in this process."""
        if self._server is None:
            from torch_xla.debug import profiler

            self._server = profiler.start_server(self.port, only_on_master=False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The trace shows each batch as one action."""
        self.start("training batch")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stop("training batch")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.start("validation batch")

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.stop("validation batch")

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.start("test batch")

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.stop("test batch")

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.start("predict batch")

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.stop("predict batch")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End what an exception has left open."""
        for action in list(self._open):
            self.stop(action)
