"""Runs on an S3 server: moto's, which speaks the protocol on this machine, through s3fs as users have it."""

from __future__ import annotations

import csv
import io
import os
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests import addresses
from tests.addresses import Net, loader, names, net, trainer

from drivetrain.base import files, remote
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.loggers import CSVLogger
from drivetrain.plugins import AsyncCheckpointIO

s3fs = pytest.importorskip("s3fs")

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server that lives as long as these tests."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def run(pool: Any, function: Any, *args: Any, world_size: int) -> Any:
    """Run ``function`` in processes that may have been started before there was a server."""
    variables = {name: os.environ[name] for name in (*CREDENTIALS, "AWS_ENDPOINT_URL")}
    return pool.run(addresses.with_variables, variables, function, *args, world_size=world_size, group=False)


@pytest.fixture
def folder(bucket: str) -> str:
    return f"{bucket}/{uuid.uuid4().hex}"


def test_a_fit_saves_and_resumes_exactly(folder: str) -> None:
    addresses.check_fit_saves_and_resumes_exactly(folder)


def test_the_best_and_the_last_are_kept(folder: str) -> None:
    addresses.check_top_k_and_last(folder)


def test_a_fit_that_raises_leaves_its_checkpoint(folder: str) -> None:
    addresses.check_failures_save(folder)


def test_an_upload_that_fails_leaves_the_earlier_checkpoint(folder: str) -> None:
    call = s3fs.S3FileSystem._call_s3

    async def breaking(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "put_object":
            raise ConnectionResetError(104, "Connection reset by peer")
        return await call(self, method, *args, **kwargs)

    addresses.check_upload_that_fails(folder, mock.patch.object(s3fs.S3FileSystem, "_call_s3", breaking))


def test_everything_of_a_run_lies_below_default_root_dir(folder: str, tmp_path: Path) -> None:
    addresses.check_root(folder, tmp_path)


def test_an_upload_in_parts_that_breaks_in_the_middle(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three parts does not arrive: the earlier object stays, and no part is kept on the server."""
    path, store = f"{folder}/a.ckpt", TorchCheckpointIO()
    store.save_checkpoint({"state_dict": {"w": torch.ones(8)}}, path)
    system, call, parts = s3fs.S3FileSystem(), s3fs.S3FileSystem._call_s3, []
    put = s3fs.S3FileSystem._put_file

    async def in_parts(self: Any, lpath: str, rpath: str, **kwargs: Any) -> None:
        await put(self, lpath, rpath, **{**kwargs, "chunksize": 5 * 2**20})

    async def breaking(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "upload_part":
            parts.append(kwargs["PartNumber"])
            if kwargs["PartNumber"] == 2 and broken:
                raise ConnectionResetError(104, "Connection reset by peer")
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", in_parts)
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", breaking)
    s3fs.S3FileSystem.clear_instance_cache()  # whose methods are bound
    large, broken = {"state_dict": {"w": torch.zeros(3 * 2**20)}}, True  # 12 MiB
    with pytest.raises(CheckpointError, match=f"{path} could not be written: .*Connection reset by peer.*untouched"):
        store.save_checkpoint(large, path)
    assert 2 in parts
    assert len(store.load_checkpoint(path)["state_dict"]["w"]) == 8
    assert names(folder) == ["a.ckpt"]
    assert system.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []) == []
    broken = False
    store.save_checkpoint(large, path)
    assert len(store.load_checkpoint(path)["state_dict"]["w"]) == 3 * 2**20
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()


class Faulty:
    """The server, with a fault at one of the requests that it gets.

    Attributes:
        at: at which request, from 1 on. kind: "500": that is its answer; "cut": it closes the connection after the
            first bytes of the request's body; "late": it does what is asked, and answers 500.
        for_ever: whether all later requests have the fault too. asked: the methods of the requests until now.
        faults: how many of them had it. url: of the server.
    """

    url = ""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._application = DomainDispatcherApplication(create_backend_app)
        self.set("", 0)

    def set(self, kind: str, at: int, for_ever: bool = False) -> None:
        self.kind, self.at, self.for_ever, self.asked = kind, at, for_ever, list[str]()
        self.faults = 0

    def __call__(self, environ: Any, start_response: Any) -> Any:
        self.asked.append(environ["REQUEST_METHOD"])
        now = len(self.asked)
        if not self.kind or now < self.at or (now > self.at and not self.for_ever):
            return self._application(environ, start_response)
        self.faults += 1
        if self.kind == "late":
            b"".join(self._application(environ, lambda *args: None))
        elif self.kind == "cut":
            environ["wsgi.input"].read(min(100, int(environ.get("CONTENT_LENGTH") or 0)))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]


@pytest.fixture
def faulty(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Another server for the same buckets; one attempt is made for each request."""
    from werkzeug.serving import make_server

    made = Faulty()
    server = make_server("127.0.0.1", 0, made, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


def step_of(path: str) -> int:
    store = TorchCheckpointIO()
    assert store.is_complete(path)
    step: int = store.load_checkpoint(path)["global_step"]
    return step


def check_every_request(folder: str, faulty: Faulty, store: CheckpointIO, kind: str) -> None:
    """Save with the fault at each request of a save, alone and with all that follow."""
    path = f"{folder}/a.ckpt"

    def save(step: int) -> None:
        store.save_checkpoint({"global_step": step, "state_dict": {"w": torch.full((5000,), step)}}, path)
        store.wait(path)

    save(1)
    faulty.set("", 0)
    save(durable := 2)
    requests = faulty.asked
    assert "PUT" in requests
    for for_ever in (False, True):
        for at in range(1, len(requests) + 1):
            faulty.set(kind, at, for_ever)
            error = ""
            try:
                save(durable + 1)
            except CheckpointError as caught:
                error = str(caught)
            assert error or not for_ever  # it may have asked again
            assert not error or re.search(f"{path} could not be .*(500|nternal|onnect)", error), error
            least = durable if error else durable + 1
            assert faulty.faults
            faulty.set("", 0)
            assert step_of(path) in (least, durable + 1)
            save(durable := durable + 2)
            assert step_of(path) == durable
            assert names(folder) == ["a.ckpt"]
    store.teardown()


@pytest.mark.parametrize("kind", ["500", "cut", "late"])
@pytest.mark.parametrize("store", [TorchCheckpointIO, AsyncCheckpointIO])
def test_a_fault_at_any_request_leaves_the_checkpoint_before_or_the_new_one(
    folder: str, faulty: Faulty, store: Any, kind: str
) -> None:
    check_every_request(folder, faulty, store(), kind)


def test_this_check_finds_an_upload_that_removes_the_object_first(
    folder: str, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    upload = remote.upload

    def wrong(local: Any, address: Any, new: bool = False) -> None:
        remote.remove(address)
        upload(local, address, new)

    monkeypatch.setattr(remote, "upload", wrong)
    with pytest.raises(AssertionError):
        check_every_request(folder, faulty, TorchCheckpointIO(), "500")


def test_one_answer_500_is_asked_again(folder: str, faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = f"{folder}/a.ckpt", TorchCheckpointIO()
    store.save_checkpoint({"global_step": 1}, path)
    monkeypatch.undo()  # as many attempts as by default
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
    s3fs.S3FileSystem.clear_instance_cache()
    faulty.set("500", 1)
    store.save_checkpoint({"global_step": 2}, path)
    assert faulty.faults == 1
    assert step_of(path) == 2


def test_what_another_process_writes_is_seen(folder: str) -> None:
    assert names(folder) == []
    s3fs.S3FileSystem(anon=False, skip_instance_cache=True).pipe_file(f"{folder}/a.ckpt", b".")
    assert names(folder) == ["a.ckpt"]


def test_a_new_object_replaces_none(folder: str) -> None:
    files.write(f"{folder}/a", b"first")
    with pytest.raises(FileExistsError), files.replacing(f"{folder}/a", new=True) as stream:
        stream.write(b"second")
    assert remote.read(f"{folder}/a") == b"first"

    asked: list[str] = []

    def unseen(self: Any, path: str, **kwargs: Any) -> bool:  # as if it came between the question and the upload
        asked.append(path)
        return len(asked) > 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "exists", unseen)
        with pytest.raises(FileExistsError), files.replacing(f"{folder}/a", new=True) as stream:
            stream.write(b"second")
    assert len(asked) == 2
    assert remote.read(f"{folder}/a") == b"first"


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    with pytest.raises(CheckpointError, match="s3://nowhere/a.ckpt could not be written: .*bucket"):
        TorchCheckpointIO().save_checkpoint({}, "s3://nowhere/a.ckpt")
    assert not s3fs.S3FileSystem().exists("nowhere")  # none is made in silence


def test_a_server_that_does_not_answer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match="could not be (looked up|listed).*Check the address, the credentials"):
        trainer(folder, callbacks=[ModelCheckpoint(folder)]).fit(net(), loader(), ckpt_path="last")
    s3fs.S3FileSystem.clear_instance_cache()


def test_the_table_of_a_csv_logger(folder: str) -> None:
    logger = CSVLogger(folder, "a", flush_logs_every_n_steps=2)
    for step in range(4):
        logger.log_metrics({"loss": float(step)}, step)
    logger.finalize("success")
    rows = csv.DictReader(io.StringIO(remote.read(f"{folder}/a/version_0/metrics.csv").decode()))
    assert [row["loss"] for row in rows] == ["0.0", "1.0", "2.0", "3.0"]
    assert CSVLogger(folder, "a").version == 1


def test_a_configuration(folder: str) -> None:
    pytest.importorskip("jsonargparse")
    from drivetrain.cli import LightningCLI

    files.write(f"{folder}/config.yaml", b"trainer: {max_epochs: 3, accelerator: cpu}\nmodel: {width: 5}")
    cli = LightningCLI(Net, args=["--config", f"{folder}/config.yaml"], run=False)
    assert (cli.trainer.max_epochs, cli.model.hparams["width"]) == (3, 5)


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_processes_that_this_one_starts(folder: str, strategy: str) -> None:
    """This process has used the store before it is copied, and writes to the logger's table after them."""
    logger = CSVLogger(folder)
    assert logger.version == 0
    saver = ModelCheckpoint(save_last=True)
    ours = trainer(folder, strategy=strategy, devices=2, logger=logger, callbacks=[saver])
    ours.fit(net(), loader())
    assert TorchCheckpointIO().load_checkpoint(saver.last_model_path)["global_step"] == ours.global_step == 4
    logger.log_metrics({"after": 1.0}, 9)
    logger.save()
    rows = csv.DictReader(io.StringIO(remote.read(logger.metrics_file_path).decode()))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "9"]


def test_two_processes_resume_inside_an_epoch(folder: str, pool: Any) -> None:
    """Rank 1 uploads its part beside the checkpoint of rank 0; as many processes resume exactly, others do not."""
    straight = run(pool, addresses.fit_on_ranks, folder, world_size=2)
    run(pool, addresses.fit_on_ranks, folder, 3, world_size=2)
    assert len(remote.find(f"{folder}/saved", "last.ckpt.*.rank1")) == 1
    resumed = run(pool, addresses.fit_on_ranks, folder, None, "last", world_size=2)
    assert addresses.equal(resumed[0], straight[0])


def test_shards_of_two_processes_are_resumed_by_one_and_by_two(folder: str, pool: Any) -> None:
    """Each rank uploads its shards; the manifest comes last, and any number of processes reads its own parts."""
    straight = run(pool, addresses.fit_sharded, folder, 2, "straight", world_size=2)[0]
    run(pool, addresses.fit_sharded, folder, 1, "saved", world_size=2)
    assert "manifest.json" in names(f"{folder}/saved.ckpt")
    assert any(name.endswith("rank1.bin") for name in names(f"{folder}/saved.ckpt"))
    for processes in (1, 2):
        given = folder, 2, f"again-{processes}", f"{folder}/saved.ckpt"
        resumed = run(pool, addresses.fit_sharded, *given, world_size=processes)[0]
        for one, other in zip(resumed, straight, strict=True):
            torch.testing.assert_close(one, other)
    untrained = run(pool, addresses.fit_sharded, folder, 1, "other", world_size=2)[0]
    assert not addresses.equal(untrained, straight)
