"""``drivetrain checkpoint convert`` and ``consolidate``: what comes back, what is lost, the memory it takes."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import DATA, CheckedNet, Harmful, answer, loaded, quiet, run, shards_of, trained
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.container import write
from drivetrain.cli import checkpoint_dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The checkpoint holds the state of callbacks that this Trainer does not have"),
]

WHOLE = ["drivetrain", "dcp"]
"""Formats that hold everything."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def needs_safetensors(to: str) -> str:
    if to in ("safetensors", "huggingface"):
        pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    return ".safetensors" if to == "safetensors" else ""


@pytest.mark.parametrize("source", ["file", "shards"])
@pytest.mark.parametrize("to", WHOLE)
def test_what_holds_everything_brings_everything_back(
    model: Path, tmp_path: Path, capsys: Any, to: str, source: str
) -> None:
    path = model if source == "file" else shards_of(loaded(model), tmp_path / "shards")
    assert answer(capsys, "convert", path, tmp_path / "other", "--to", to)["lost"] == []
    assert answer(capsys, "convert", tmp_path / "other", tmp_path / "back.ckpt", "--to", "drivetrain")["lost"] == []
    assert run(capsys, "diff", model, tmp_path / "back.ckpt")[0] == 0
    assert loaded(model).keys() == loaded(tmp_path / "back.ckpt").keys()


@pytest.mark.parametrize("to", ["lightning", "safetensors", "huggingface"])
def test_weights_come_back_to_the_last_bit_and_the_rest_is_named(
    model: Path, tmp_path: Path, capsys: Any, to: str
) -> None:
    other = tmp_path / f"other{needs_safetensors(to)}"
    said = answer(capsys, "convert", model, other, "--to", to)
    assert {"restart", "rng", "optimizers"} <= set(said["lost"])
    assert ("optimizer_states" in said["lost"]) == (to != "lightning")
    assert run(capsys, "convert", other, tmp_path / "back.ckpt", "--to", "drivetrain")[0] == 0
    compared = answer(capsys, "diff", "--weights", model, tmp_path / "back.ckpt")
    assert (compared["equal"], compared["tensors_compared"]) == (True, 10)
    back = loaded(tmp_path / "back.ckpt")["state_dict"]
    assert back["again.weight"].data_ptr() == back["first.weight"].data_ptr()  # still tied
    CheckedNet.load_from_checkpoint(tmp_path / "back.ckpt")


@pytest.mark.parametrize("to", ["drivetrain", "lightning", "dcp"])
def test_a_fit_resumes_from_what_was_converted(model: Path, tmp_path: Path, capsys: Any, to: str) -> None:
    run(capsys, "convert", model, tmp_path / "other", "--to", to)
    run(capsys, "convert", tmp_path / "other", tmp_path / "back.ckpt", "--to", "drivetrain")
    resumed = []
    for path in (model, tmp_path / "back.ckpt"):
        trainer, net = quiet(max_epochs=3, enable_checkpointing=False), CheckedNet()
        trainer.fit(net, DATA, ckpt_path=path)
        resumed.append((trainer.global_step, {name: each.detach() for name, each in net.named_parameters()}))
    assert resumed[0][0] == resumed[1][0] == 12
    torch.testing.assert_close(resumed[1][1], resumed[0][1], rtol=0, atol=0)


def test_lightnings_format_has_its_keys_and_loads_as_plain_data(model: Path, tmp_path: Path, capsys: Any) -> None:
    said = answer(capsys, "convert", model, tmp_path / "light.ckpt", "--to", "lightning")
    found = loaded(tmp_path / "light.ckpt")
    assert {
        "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states",
        "lr_schedulers", "hparams_name", "hyper_parameters",
    } <= found.keys()  # fmt: skip
    assert "drivetrain_version" not in found
    assert "hyper_parameters/folder" in said["lost"]  # a path, which only drivetrain decodes
    assert found["hyper_parameters"] == {"width": 6}
    loop = found["loops"]["fit_loop"]
    assert loop["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 2, "completed": 2}
    assert loop["epoch_loop.batch_progress"]["total"]["completed"] == 8
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert steps["total"]["completed"] == found["global_step"] == 8
    assert answer(capsys, "inspect", tmp_path / "light.ckpt")["kind"] == "lightning"


def test_rank_files_are_copied_under_the_new_name(model: Path, tmp_path: Path, capsys: Any) -> None:
    tree = {**loaded(model)}
    beside = tmp_path / "folder.0000000b.rank1"
    with beside.open("wb") as stream:
        write({"rng": {}}, stream)
    from drivetrain.strategies.rank_files import entry_of

    tree["rank_files"] = [entry_of(str(beside), [1])]
    folder = shards_of(tree, tmp_path / "folder")
    for to in ("dcp", "drivetrain"):
        assert run(capsys, "convert", folder, tmp_path / to, "--to", to)[0] == 0
        assert (tmp_path / f"{to}.0000000b.rank1").read_bytes() == beside.read_bytes()
        assert run(capsys, "verify", tmp_path / to)[0] == 0
    (tmp_path / "again.0000000b.rank1").write_text("another file")
    code, _, said = run(capsys, "convert", folder, tmp_path / "again", "--to", "drivetrain")
    assert (code, "Choose another name" in said, (tmp_path / "again").exists()) == (2, True, False)
    assert (tmp_path / "again.0000000b.rank1").read_text() == "another file"
    beside.unlink()
    (tmp_path / "dcp.0000000b.rank1").unlink()
    assert run(capsys, "verify", tmp_path / "dcp")[0] == 1


def test_weights_of_other_programs_become_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    weights = CheckedNet().state_dict()
    training = {"model": weights, "optimizer": {"state": {}}, "epoch": 3}
    for name, content in {"plain": weights, "training": training}.items():
        torch.save(content, tmp_path / name)
        said = answer(capsys, "convert", tmp_path / name, tmp_path / f"{name}.ckpt", "--to", "drivetrain")
        assert said["lost"] == ([] if name == "plain" else ["epoch", "optimizer"])
        CheckedNet.load_from_checkpoint(tmp_path / f"{name}.ckpt")


def test_names_get_and_lose_prefixes(tmp_path: Path, capsys: Any, model: Path) -> None:
    torch.save({f"model.{name}": value for name, value in CheckedNet().state_dict().items()}, tmp_path / "weights.pt")
    options = ("--to", "drivetrain", "--strip-prefix", "model.", "--add-prefix", "net.")
    assert run(capsys, "convert", tmp_path / "weights.pt", tmp_path / "new.ckpt", *options)[0] == 0
    assert "net.first.weight" in loaded(tmp_path / "new.ckpt")["state_dict"]
    code, _, said = run(
        capsys, "convert", tmp_path / "weights.pt", tmp_path / "x", "--to", "dcp", "--strip-prefix", "q"
    )
    assert (code, "No weight's name begins with 'q'" in said) == (2, True)
    code, _, said = run(capsys, "convert", model, tmp_path / "x", "--to", "drivetrain", "--add-prefix", "q")
    assert (code, "also holds the state of a run" in said) == (2, True)


def test_what_cannot_be_written_is_refused_with_a_reason(model: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, text in (
        ([tmp_path / "x", "--to", "deepspeed"], 'Convert to "drivetrain": Trainer(strategy="deepspeed") resumes'),
        ([tmp_path / "x", "--to", "lightening"], "Did you mean 'lightning'?"),
        ([model, "--to", "dcp"], "exists already"),
        (["s3://bucket/x", "--to", "dcp"], "Upload the result"),
        ([tmp_path / "x", "--to", "safetensors"], "x.safetensors."),
    ):
        code, _, said = run(capsys, "convert", model, *arguments)
        assert (code, text in said) == (2, True)
    code, _, said = run(capsys, "consolidate", model, tmp_path / "x")
    assert (code, "is no folder of shards" in said) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["drivetrain", "dcp", "huggingface"])
def test_an_existing_file_or_folder_is_never_touched(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, to: str
) -> None:
    needs_safetensors(to)
    mine = tmp_path / "mine"
    if to == "drivetrain":
        mine.write_bytes(model.read_bytes())
    else:
        mine.mkdir()
        (mine / "thesis.txt").write_text("text")
    code, _, said = run(capsys, "convert", model, tmp_path / "typo" / ".." / "mine", "--to", to)
    assert (code, "There is no folder" in said) == (2, True)
    monkeypatch.setattr("os.path.lexists", lambda path: False)  # another process creates it after the check
    code, _, said = run(capsys, "convert", model, mine, "--to", to)
    assert code == 2
    assert "exists already" in said or "not empty" in said
    assert mine.read_bytes() == model.read_bytes() if to == "drivetrain" else (mine / "thesis.txt").exists()
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("to", ["safetensors", "drivetrain"])
def test_a_full_disk_is_said_once_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, to: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        if to == "safetensors":
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / f"x{needs_safetensors(to)}"
    if to == "safetensors":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    else:
        monkeypatch.setattr("drivetrain.base.files._Stream.write", full)
    code, _, said = run(capsys, "convert", model, out, "--to", to)
    assert (code, said.count("ENOSPC"), "Free some space" in said) == (2, 1, True)
    assert list(tmp_path.iterdir()) == []


def test_two_weights_never_become_one(tmp_path: Path, capsys: Any) -> None:
    torch.save({"model.w": torch.ones(2), "w": torch.zeros(2), "model.v": torch.ones(1)}, tmp_path / "weights.pt")
    options = ("--to", "drivetrain", "--strip-prefix", "model.")
    code, _, said = run(capsys, "convert", tmp_path / "weights.pt", tmp_path / "x", *options)
    assert (code, "two weights would be called 'w'" in said) == (2, True)
    assert not (tmp_path / "x").exists()


def test_objects_that_are_no_plain_data_are_an_error_that_names_them(model: Path, tmp_path: Path, capsys: Any) -> None:
    torch.save({**loaded(model), "own": Harmful(tmp_path / "harm")}, tmp_path / "objects.ckpt")
    for to in ("drivetrain", "dcp"):
        code, _, said = run(capsys, "convert", tmp_path / "objects.ckpt", tmp_path / "out", "--to", to)
        assert (code, "posix.mkdir" in said, (tmp_path / "out").exists()) == (2, True, False)
    assert not (tmp_path / "harm").exists()


def test_a_failed_write_leaves_nothing(model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", fail)
    code, _, said = run(capsys, "convert", model, tmp_path / "dcp", "--to", "dcp")
    assert (code, f"{tmp_path / 'dcp'} could not be written: " in said) == (2, True)
    assert not (tmp_path / "dcp").exists()


def test_a_damaged_source_is_not_converted(model: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shards_of(loaded(model), tmp_path / "shards")
    file = folder / "0000000a.rank1.bin"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    code, _, said = run(capsys, "consolidate", folder, tmp_path / "one.ckpt")
    assert (code, f"{file} is damaged" in said) == (2, True)
    assert not (tmp_path / "one.ckpt").exists()


# ---- memory ----------------------------------------------------------------------------------------------------------


class CountedReads:
    """Counts the bytes of tensors that were read and are still alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        stored = sharded.StoredTensor
        for cls, name in ((stored, "part"), (stored, "_read"), (checkpoint_dcp._DcpTensor, "_read")):
            monkeypatch.setattr(cls, name, self.counting(getattr(cls, name)))

    def counting(self, read: Any) -> Any:
        def counted(*arguments: Any) -> Tensor:
            found: Tensor = read(*arguments)
            storage = found.untyped_storage()
            self.read[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, sum(size for reference, size in self.read.values() if not reference.expired()))
            return found

        return counted


@pytest.mark.parametrize("kind", ["drivetrain", "dcp"])
def test_consolidating_takes_the_memory_of_one_tensor_and_one_shard(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """16 tensors of 1 MiB, of which two processes have written a half each."""
    tree = {"state_dict": {f"layer{index}": torch.full((2, 2**17), float(index)) for index in range(16)},
            "drivetrain_version": "0", "pytorch-lightning_version": "2.6.0"}  # fmt: skip
    folder = shards_of(tree, tmp_path / "shards")
    if kind == "dcp":
        run(capsys, "convert", folder, tmp_path / "dcp", "--to", "dcp")
        folder = tmp_path / "dcp"
    gc.collect()
    counted = CountedReads(monkeypatch)
    assert run(capsys, "consolidate", folder, tmp_path / "one.ckpt")[0] == 0
    largest, shard = 2**20, 2**20 if kind == "dcp" else 2**19
    assert largest <= counted.peak <= 1.2 * largest + shard
    torch.testing.assert_close(loaded(tmp_path / "one.ckpt")["state_dict"], tree["state_dict"], rtol=0, atol=0)
