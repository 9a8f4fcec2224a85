"""A profiler that starts torch_xla's server, for tools that collect traces of the host and the devices."""

from __future__ import annotations

from typing import Any

from drivetrain.base.packages import xla_profiler
from drivetrain.profilers.profiler import Profiler, already_running

_PORT = 9012


class XLAProfiler(Profiler):
    """Marks the actions of a run and of user code in the traces of torch_xla's profiler.

    Pass the profiler as ``Trainer(profiler=XLAProfiler())``. When a run begins, the profiler starts torch_xla's server
    in this process. Then ``torch_xla.debug.profiler.trace("localhost:9012", folder)`` or TensorBoard collects a trace.
    The profiler itself measures nothing, so :meth:`summary` is empty.

    Args:
        port: the server's port.
    """

    def __init__(self, port: int = _PORT) -> None:
        super().__init__()
        self.port = port
        self._server: Any = None
        self._open: dict[str, Any] = {}  # by action

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_server": None, "_open": {}}

    # ---- actions -------------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Begin an action. The trace shows the action under this name.

        Raises:
            ConfigurationError: the action is already running.
        """
        if action_name in self._open:
            raise already_running(self, action_name)
        self._open[action_name] = trace = xla_profiler.Trace(action_name)
        trace.__enter__()

    def stop(self, action_name: str) -> None:
        """End an action. Do nothing if the action is not running."""
        if (trace := self._open.pop(action_name, None)) is not None:
            trace.__exit__(None, None, None)

    # ---- a run ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start the server, if this process has not started it yet."""
        super().setup(stage, local_rank, log_dir)
        if self._server is None:
            self._server = xla_profiler.start_server(self.port, only_on_master=False)

    def teardown(self, stage: str | None) -> None:
        """End actions that are still running after an exception."""
        for action in list(self._open):
            self.stop(action)
