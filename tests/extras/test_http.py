"""Checkpoints that a web server offers: read with all checks, never written."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.addresses import Net, equal, loader, net, trainer, weights

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError

pytest.importorskip("aiohttp")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of the test's folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_module_is_loaded_and_a_fit_resumes(served: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="a")
    trained = net()
    trainer(str(tmp_path / "logs"), 1, callbacks=[saver]).fit(trained, loader())
    assert equal(weights(Net.load_from_checkpoint(f"{served}/a.ckpt")), weights(trained))
    again = trainer(str(tmp_path / "logs"), 2, callbacks=[ModelCheckpoint(tmp_path, filename="a")])
    again.fit(net(), loader(), ckpt_path=f"{served}/a.ckpt")
    assert again.global_step == 8


def test_what_is_not_there_or_damaged_is_told(served: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"There is no checkpoint at {served}/none.ckpt"):
        Net.load_from_checkpoint(f"{served}/none.ckpt")
    with pytest.raises(CheckpointError, match=f"There is no checkpoint at {served}/none.ckpt"):
        trainer(str(tmp_path / "logs")).fit(net(), loader(), ckpt_path=f"{served}/none.ckpt")
    (tmp_path / "bad.ckpt").write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match=f"{served}/bad.ckpt"):
        Net.load_from_checkpoint(f"{served}/bad.ckpt")


def test_nothing_is_written_there(served: str) -> None:
    with pytest.raises(ConfigurationError, match="can only be read"):
        TorchCheckpointIO().save_checkpoint({}, f"{served}/a.ckpt")
    with pytest.raises(ConfigurationError, match="can only be read"):
        ModelCheckpoint(served)
