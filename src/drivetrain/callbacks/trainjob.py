"""Report the progress of a fit to Kubeflow Trainer, if a TrainJob runs the fit."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import ssl
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivetrain.base.rank_zero import any_rank_info
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.callbacks._progress_estimate import Rest
from drivetrain.callbacks._progress_thread import DRAWING

SERVER = "KUBEFLOW_TRAINER_SERVER_URL"
"""The environment variable with the address to which reports are sent. Two more environment variables contain the paths
of the certificate authority of the server and of a token. Kubernetes replaces the token about once per hour.
"""

_CA_CERT, _TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
_LINE = 1000  # the maximum number of bytes to read of an answer


class TrainJobStatus(Callback):
    """Reports the percentage, the remaining time and the metrics of a fit in the status of the TrainJob.

    The Trainer adds the callback if ``KUBEFLOW_TRAINER_SERVER_URL`` is set. Kubeflow Trainer sets the variable since
    version 2.2, if the feature gate ``TrainJobStatus`` is on. On rank 0, a separate thread posts when training begins,
    every ``each_s`` seconds, and when training ends. The metrics are the values that were logged with
    ``prog_bar=True``; without logged values, the loss. If a post fails, the fit and later posts continue. The first
    failure is logged.
    """

    changes_in_validation = False

    each_s: float = 5.0
    """The number of seconds between two posts; Kubeflow requires at least 5."""

    timeout_s: float = 5.0
    """The maximum number of seconds to wait for an answer of the server."""

    last_s: float = 1.0
    """The maximum number of seconds for which the end of a fit waits for the last post. If an earlier post has failed,
    there is no wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reporter: _Reporter | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reporter": None}  # a thread cannot be pickled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the thread."""
        if trainer.is_global_zero:
            self._reporter = _Reporter(trainer, self.each_s, self.timeout_s)
            self._reporter.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report 100 %."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.finish(self.last_s)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the thread without another post: the TrainJob's status keeps the last report."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.stopped.set()


class _Reporter(threading.Thread):
    """The thread that posts until the fit ends."""

    def __init__(self, trainer: Trainer, each_s: float, timeout_s: float) -> None:
        # a daemon, so that the program can end while a server does not answer
        super().__init__(name="drivetrain-trainjob", daemon=True)
        self.stopped = threading.Event()
        self._trainer, self._rest = trainer, Rest(trainer)
        self._each_s, self._timeout_s = each_s, timeout_s
        self._completed = self._failed = False

    def run(self) -> None:
        self._report()
        while not self.stopped.wait(self._each_s):
            self._report()
        if self._completed:
            self._report()

    def finish(self, wait_s: float) -> None:
        """Let the thread send a last post and end. Wait for the thread, at most ``wait_s`` seconds."""
        self._completed = True
        self.stopped.set()
        self.join(0 if self._failed else wait_s)

    def _report(self) -> None:
        try:
            self._post(json.dumps({"trainerStatus": self._status()}).encode())
        except Exception as error:  # no exception in this thread may end the fit
            if not self._failed:
                self._failed = True
                with DRAWING:  # the line must not damage a progress bar
                    any_rank_info(
                        f"A progress report to Kubeflow Trainer has failed: {error or type(error).__name__}. "
                        "Training continues, and so do the reports; further failures are not logged."
                    )

    def _status(self) -> dict[str, Any]:
        """Return the status in the form of TrainJob's ``status.trainerStatus``. An entry with an unknown value is left
        out.
        """
        progress, metrics = self._trainer.progress, {**self._trainer.logbook.bar_metrics}
        if not metrics:
            progress.want_loss()
            metrics = {} if progress.loss is None else {"loss": progress.loss}
        status: dict[str, Any] = {
            "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
        }
        done, left = progress.total_batches, self._rest.batches()
        left_s = self._rest.seconds(left, 0.0)
        if self._completed:
            return {"progressPercentage": 100, "estimatedRemainingSeconds": 0, **status}
        if left < math.inf and done + left > 0:
            # 100 would mean that the fit is finished
            status["progressPercentage"] = min(int(100 * done / (done + left)), 99)
        if left_s is not None and math.isfinite(left_s):
            status["estimatedRemainingSeconds"] = round(left_s)
        return status

    def _post(self, body: bytes) -> None:
        """Send ``body``.

        Raises:
            Exception: the post was not sent, or the server has not accepted it.
        """
        url = urlsplit(os.environ[SERVER])
        if url.scheme != "https" or not url.hostname:  # the token must not be sent without encryption
            raise ValueError(f"{SERVER}={os.environ[SERVER]!r} is not an https:// address")
        if _TOKEN not in os.environ:
            raise ValueError(f"{_TOKEN} is not set")
        token = Path(os.environ[_TOKEN]).read_text().strip()
        if not token.isascii() or not token.isprintable():  # http.client would raise an error that shows the token
            raise ValueError(f"the file {os.environ[_TOKEN]}, which {_TOKEN} names, holds no token")
        context = ssl.create_default_context(cafile=os.environ.get(_CA_CERT))
        # without a port, http.client would take the last part of an IPv6 address as the port
        port = url.port or http.client.HTTPS_PORT
        connection = http.client.HTTPSConnection(url.hostname, port, timeout=self._timeout_s, context=context)
        try:  # http.client follows no redirections, which could send the token to another server
            head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", url.path, body, head)
            status = _status_of(connection.sock, self._timeout_s)
            if status >= http.HTTPStatus.MULTIPLE_CHOICES:
                raise OSError(f"the server answered {status} {http.client.responses.get(status, '')}")
        finally:
            connection.close()


def _status_of(connection: socket.socket, timeout_s: float) -> int:
    """Return the HTTP status from the first line of an answer. The rest may have any length and is not read.

    Raises:
        OSError: the line has not arrived in time, or is not a status line of HTTP.
    """
    deadline, line = time.monotonic() + timeout_s, b""
    while b"\n" not in line and len(line) < _LINE:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))  # the deadline is for the whole line
        if not (more := connection.recv(_LINE)):
            break
        line += more
    if (found := re.match(rb"HTTP/1\.[01] (\d{3})\b", line)) is None:
        raise OSError(f"the server answered {line[:40]!r}, which is not HTTP")
    return int(found[1])
