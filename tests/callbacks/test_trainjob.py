"""Reports to Kubeflow Trainer: against an HTTPS server on the loopback interface, with a certificate made here."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import trainjob
from drivetrain.callbacks.trainjob import TrainJobStatus

TIMEOUT_S = 60
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"


class Model(LightningModule):
    def __init__(self, logs: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.logs = logs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.weight * batch).sum()
        if self.logs:
            self.log("accuracy", 0.5, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Server:
    """Kubeflow's endpoint: keeps what it gets, and answers what a test says."""

    def __init__(self, certificate: Path) -> None:
        self.posts: list[tuple[str, str | None, dict[str, Any]]] = []
        self.came = threading.Condition()
        self.silent = threading.Event()  # while it is not set, no request is answered
        self.silent.set()
        self.answer: Callable[[str | None], int] = lambda token: 200
        self.raw: Callable[[Callable[[bytes], Any]], None] | None = None  # writes the whole answer
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                token = self.headers["Authorization"]
                with outer.came:
                    outer.posts.append((self.path, token, body))
                    outer.came.notify_all()
                outer.silent.wait(TIMEOUT_S)
                if outer.raw is not None:
                    outer.raw(self.wfile.write)
                    return
                self.send_response(outer.answer(token))
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def wait_for(self, posts: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.posts) >= posts, TIMEOUT_S)

    def close(self) -> None:
        self.silent.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def join_reporters() -> None:
    for thread in threading.enumerate():
        if thread.name == "drivetrain-trainjob":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes the certificate")
    path = tmp_path_factory.mktemp("certificate") / "ca.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", path.with_suffix(".key"), "-out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.fixture
def server(certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(certificate)
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{made.http.server_port}{PATH}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setattr(TrainJobStatus, "each_s", 3600.0)  # the first and the last post, unless a test wants more
    monkeypatch.setattr(TrainJobStatus, "last_s", float(TIMEOUT_S))
    try:
        yield made
    finally:
        made.close()
        join_reporters()


class AfterEach(Callback):
    """Calls a function after each batch."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.function(trainer.global_step)


def fit(after: Callable[[int], None] = lambda step: None, logs: bool = True, **arguments: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[AfterEach(after)], log_every_n_steps=1,
        **{"max_epochs": 2, **arguments},
    )  # fmt: skip
    trainer.fit(Model(logs), DataLoader(torch.arange(4.0)))
    return trainer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about the reports, once their thread has ended."""
    join_reporters()
    return [record.message for record in caplog.records if "Kubeflow" in record.message]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")


def test_a_fit_reports_its_begin_and_its_end_however_many_steps_it_has(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    fit(max_epochs=25)
    (path, token, first), (_, _, last) = server.posts
    assert (path, token) == (PATH, "Bearer first")
    assert [*first] == [*last] == ["trainerStatus"]
    assert last["trainerStatus"].pop("lastUpdatedTime").endswith("+00:00")
    assert last["trainerStatus"] == {
        "progressPercentage": 100, "estimatedRemainingSeconds": 0,
        "metrics": [{"name": "accuracy", "value": "0.5"}],
    }  # fmt: skip
    assert lines(caplog) == []


def test_percent_and_remaining_time_of_the_whole_fit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainJobStatus, "each_s", 0.001)
    until = [0]

    def look(step: int) -> None:
        until[0] = len(server.posts)
        server.wait_for(until[0] + 2)  # one of them was made after this step

    fit(look, logs=False, max_epochs=2)
    seen = [post["trainerStatus"] for _, _, post in server.posts]
    percents = [status["progressPercentage"] for status in seen]
    assert percents == sorted(percents)
    assert {12, 25, 37, 50, 62, 75, 87} <= {*percents}
    assert percents[-1] == 100
    assert all("estimatedRemainingSeconds" in status for status in seen if 30 < status["progressPercentage"] < 90)
    assert [metric["name"] for metric in seen[-1]["metrics"]] == ["loss"]  # nothing was logged for a bar


def test_without_an_end_there_is_no_percentage(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(step: int) -> None:
        trainer.should_stop = step >= 3

    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[AfterEach(stop)], max_epochs=-1,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(torch.arange(4.0)))
    first, last = (post["trainerStatus"] for _, _, post in server.posts)
    assert "progressPercentage" not in first
    assert "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 100


def test_an_expired_token_is_one_line_and_its_successor_is_read(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainJobStatus, "each_s", 0.001)
    server.answer = lambda token: 200 if token == "Bearer second" else 401

    def rotate(step: int) -> None:
        if step == 2:
            server.wait_for(3)
            (tmp_path / "next").write_text("second")
            (tmp_path / "next").replace(tmp_path / "token")  # at once, as Kubernetes does
            before = len(server.posts)
            server.wait_for(before + 2)

    fit(rotate)
    assert {token for _, token, _ in server.posts} == {"Bearer first", "Bearer second"}
    assert len(lines(caplog)) == 1
    assert "Kubeflow Trainer has failed: the server answered 401 Unauthorized. Train" in lines(caplog)[0]


def test_errors_of_the_server_are_one_line(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainJobStatus, "each_s", 0.001)
    server.answer = lambda token: 500
    trainer = fit(lambda step: server.wait_for(2 * step))
    assert trainer.global_step == 8
    assert len(lines(caplog)) == 1
    assert "500 Internal Server Error" in lines(caplog)[0]


def test_a_silent_server_does_not_hold_the_fit(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainJobStatus, "timeout_s", float(TIMEOUT_S))
    monkeypatch.setattr(TrainJobStatus, "last_s", 0.0)
    server.silent.clear()
    trainer = fit(lambda step: server.wait_for(1))
    assert trainer.global_step == 8  # while the first request is still open
    assert len(server.posts) == 1


def test_a_silent_server_is_one_line_after_the_timeout(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainJobStatus, "timeout_s", 0.05)
    monkeypatch.setattr(TrainJobStatus, "each_s", 0.001)
    server.silent.clear()
    fit(lambda step: server.wait_for(2 if step < 3 else 3))
    assert len(lines(caplog)) == 1
    assert "timed out" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/status", "refused"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "http://localhost/status", "is not an https:// address"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "", "is not an https:// address"),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", "/nowhere/token", "No such file"),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", None, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "/nowhere/ca.crt", "No such file"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", None, "certificate verify failed"),
    ],
)
def test_what_is_missing_is_one_line(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, said: str
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert fit(max_epochs=1).global_step == 4
    assert server.posts == []
    assert len(lines(caplog)) == 1
    assert said in lines(caplog)[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://localhost/elsewhere\r\n\r\n", "the server answered 302 Found"),
        (b"HTTP/1.1 500 \x1b[31m" + 5000 * b"x" + b"\r\n\r\n", "the server answered 500 Internal Server Error. Train"),
        (b"x" * 5000, "which is not HTTP"),
        (b"\n", "which is not HTTP"),
        (b"", "which is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + 1000 * b"X-Long: 1\r\n", None),
    ],
    ids=["redirect", "long reason", "long line", "empty line", "nothing", "many headers"],
)
def test_an_odd_answer_is_at_most_one_line(
    server: Server, caplog: pytest.LogCaptureFixture, answer: bytes, said: str | None
) -> None:
    server.raw = lambda write: write(answer)
    assert fit(max_epochs=1).global_step == 4
    found = lines(caplog)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert all(len(line) < 300 and line.isprintable() for line in found)


def test_an_answer_that_comes_byte_by_byte_is_one_line_after_the_timeout(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainJobStatus, "timeout_s", 0.1)
    over = threading.Event()

    def drip(write: Callable[[bytes], Any]) -> None:
        with suppress(OSError):  # of a client that has left
            while not over.wait(0.01):
                write(b"x")

    server.raw = drip
    fit(max_epochs=1)
    found = lines(caplog)  # the thread has ended, though the server would go on
    over.set()
    assert len(found) == 1
    assert "timed out" in found[0]


@pytest.mark.parametrize("token", ["secret\nsecret", "secret\u20ac"])
def test_a_file_without_a_token_is_not_shown(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    (tmp_path / "token").write_text(token, encoding="utf-8")
    fit(max_epochs=1)
    [line] = lines(caplog)
    assert "holds no token" in line
    assert "secret" not in line


def test_an_ipv6_address_needs_no_port(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def connect(address: Any, *_: Any, **__: Any) -> Any:
        seen.append(address)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://[fd00::1]/status")
    fit(max_epochs=1)
    join_reporters()
    assert set(seen) == {("fd00::1", 443)}


def test_an_exception_ends_the_reports_without_100_percent(server: Server) -> None:
    def fail(step: int) -> None:
        server.wait_for(1)
        raise ArithmeticError("in the middle")

    with pytest.raises(ArithmeticError):
        fit(fail)
    join_reporters()
    assert [post["trainerStatus"].get("progressPercentage") for _, _, post in server.posts] == [0]


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"barebones": True}])
def test_a_trial_run_reports_nothing(server: Server, arguments: dict[str, Any]) -> None:
    options = {} if "barebones" in arguments else {"enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, **options, **arguments)
    assert not any(isinstance(each, TrainJobStatus) for each in trainer.callbacks)


def test_elsewhere_there_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trainjob.SERVER, raising=False)
    assert not any(isinstance(each, TrainJobStatus) for each in Trainer(accelerator="cpu").callbacks)
    assert TrainJobStatus.each_s >= 5.0  # what Kubeflow asks for
    assert isinstance(pickle.loads(pickle.dumps(TrainJobStatus())), TrainJobStatus)
