"""``drivetrain checkpoint prune``: what goes, what stays, and that nothing goes unasked."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import answer, flipped, loaded, run, shards_of, trained

from drivetrain.checkpoints.container import write
from drivetrain.strategies.rank_files import entry_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Five checkpoints, the newest last."""
    for index in range(5):
        aged(shutil.copy(model, tmp_path / f"{index}.ckpt"), 10 - index)
    return tmp_path


def aged(path: Any, hours: float) -> Path:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))
    return Path(path)


def actions(capsys: Any, folder: Path, *options: str) -> dict[str, tuple[str, str]]:
    entries = answer(capsys, "prune", folder, *options)["entries"]
    return {Path(each["path"]).name: (each["action"], each["reason"]) for each in entries}


def going(found: dict[str, tuple[str, str]]) -> list[str]:
    return sorted(name for name, (action, _) in found.items() if action == "remove")


def test_nothing_is_removed_unless_it_is_asked_for(folder: Path, capsys: Any) -> None:
    before = sorted(os.listdir(folder))
    code, out, _ = run(capsys, "prune", folder, "--keep", "2")
    assert code == 0
    assert f"would remove {folder / '0.ckpt'} (" in out
    assert "would be freed, with --delete" in out
    assert sorted(os.listdir(folder)) == before
    assert going(actions(capsys, folder)) == []  # without --keep, only leftovers
    assert going(actions(capsys, folder, "--keep", "2", "--delete")) == ["0.ckpt", "1.ckpt", "2.ckpt"]
    assert sorted(os.listdir(folder)) == ["3.ckpt", "4.ckpt"]


def test_the_newest_complete_one_stays_even_if_newer_ones_are_damaged(folder: Path, capsys: Any, model: Path) -> None:
    weight = loaded(model)["state_dict"]["last.bias"].numpy().tobytes()
    flipped(folder / "4.ckpt", weight)
    aged(folder / "4.ckpt", 1)
    found = actions(capsys, folder, "--keep", "1", "--delete")
    assert going(found) == ["0.ckpt", "1.ckpt", "2.ckpt"]
    assert found["3.ckpt"] == ("keep", "the newest complete checkpoint")
    assert "damaged, so it is not counted" in found["4.ckpt"][1]
    assert sorted(os.listdir(folder)) == ["3.ckpt", "4.ckpt"]
    code, _, said = run(capsys, "prune", folder, "--keep", "0")
    assert (code, "--keep is at least 1" in said) == (2, True)


def test_the_best_and_the_target_of_a_link_stay(folder: Path, capsys: Any, model: Path) -> None:
    tree = loaded(model)
    state = next(iter(tree["callbacks"].values()))
    state["best_model_path"] = "/elsewhere/1.ckpt"  # the folder was moved
    with (folder / "4.ckpt").open("wb") as stream:
        write(tree, stream)
    (folder / "last.ckpt").symlink_to("2.ckpt")
    found = actions(capsys, folder, "--keep", "1")
    assert going(found) == ["0.ckpt", "3.ckpt"]
    assert found["1.ckpt"][1] == "ModelCheckpoint recorded it as its best one"
    assert found["2.ckpt"][1] == "last.ckpt is a link to it"


def test_checkpoints_of_weights_do_not_replace_those_that_can_be_resumed(
    folder: Path, capsys: Any, model: Path
) -> None:
    kept = ("state_dict", "drivetrain_version", "pytorch-lightning_version")
    with (folder / "weights.ckpt").open("wb") as stream:
        write({key: each for key, each in loaded(model).items() if key in kept}, stream)
    found = actions(capsys, folder, "--keep", "1")
    assert found["weights.ckpt"] == ("keep", "the newest complete checkpoint with weights only")
    assert found["4.ckpt"] == ("keep", "the newest complete checkpoint")


def test_rank_files_go_with_their_checkpoint_and_orphans_alone(folder: Path, capsys: Any, model: Path) -> None:
    for name, number in (
        ("0.ckpt", "0000000a"),
        ("4.ckpt", "0000000b"),
        ("gone.ckpt", "0000000c"),
        ("4.ckpt", "0000000d"),
    ):
        beside = folder / f"{name}.{number}.rank1"
        with beside.open("wb") as stream:
            write({"rng": {}}, stream)
        if number in ("0000000a", "0000000b"):
            with (folder / name).open("wb") as stream:
                write({**loaded(model), "rank_files": [entry_of(str(beside), [1])]}, stream)
        aged(beside, 20)
    aged(folder / "0.ckpt", 20)
    (folder / "broken.ckpt").write_bytes(b"broken")
    aged(shutil.copy(folder / "gone.ckpt.0000000c.rank1", folder / "broken.ckpt.0000000e.rank1"), 20)
    found = actions(capsys, folder, "--keep", "4", "--delete")
    assert going(found) == ["0.ckpt", "4.ckpt.0000000d.rank1", "gone.ckpt.0000000c.rank1"]
    assert found["gone.ckpt.0000000c.rank1"][1] == "a rank file that no checkpoint lists"
    assert found["broken.ckpt.0000000e.rank1"] == ("keep", "broken.ckpt cannot be read, so it may belong to it")
    assert not (folder / "0.ckpt.0000000a.rank1").exists()
    assert run(capsys, "verify", folder / "4.ckpt")[0] == 0


@pytest.mark.parametrize("way", ["relative", "link"])
def test_rank_files_of_a_kept_checkpoint_stay_whatever_the_spelling_of_the_folder(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, way: str
) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    for number in ("0000000a", "0000000b"):  # the second is not listed: the control
        beside = aged(shutil.copy(model, folder / f"0.ckpt.{number}.rank1"), 20)
        if number == "0000000a":
            with (folder / "0.ckpt").open("wb") as stream:
                write({**loaded(model), "rank_files": [entry_of(str(beside), [1])]}, stream)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("real")
    found = actions(capsys, Path("real" if way == "relative" else "linked"), "--delete")
    assert going(found) == ["0.ckpt.0000000b.rank1"]
    assert (folder / "0.ckpt.0000000a.rank1").exists()


def test_files_of_others_stay_though_their_names_look_like_leftovers(tmp_path: Path, capsys: Any) -> None:
    for name in ("mydir.deadbeef.incomplete", "shards"):
        (tmp_path / name).mkdir()
    (tmp_path / "mydir.deadbeef.incomplete" / "thesis.txt").write_text("text")
    (tmp_path / "shards" / "20240101.data.bin").write_text("text")  # eight digits, but not a name of drivetrain
    (tmp_path / "cafe.bead.incomplete").write_text("text")
    torch.save({"w": torch.ones(2)}, tmp_path / "download.deadbeef.incomplete")
    for name in ("foo.deadbeef.rank1", ".0123456789abcdef0123456789abcdef.part"):
        (tmp_path / name).write_text("text")
    os.mkfifo(tmp_path / "pipe.deadbeef.rank1")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(os.listdir(tmp_path))
    for name in before:
        aged(tmp_path / name, 20)
    found = answer(capsys, "prune", tmp_path, "--delete")
    assert (found["entries"], found["others"]) == ([], len(before))
    assert sorted(os.listdir(tmp_path)) == before


def test_an_older_file_with_a_higher_step_stays(folder: Path, capsys: Any, model: Path) -> None:
    for name, step in (("0.ckpt", 90), ("1.ckpt", 100)):
        with (folder / name).open("wb") as stream:
            write({**loaded(model), "global_step": step}, stream)
        aged(folder / name, 20 - int(name[0]))
    found = actions(capsys, folder, "--keep", "1")
    assert going(found) == ["0.ckpt", "2.ckpt", "3.ckpt"]
    assert found["1.ckpt"] == ("keep", "its step 100 is higher than those of the newer files")


def test_leftovers_of_saves_go_unless_they_may_be_running(folder: Path, capsys: Any, model: Path) -> None:
    leftovers = [folder / ".0123456789abcdef0123456789abcdef.part", folder / "model.ckpt.0a0b0c0d.incomplete"]
    shutil.copy(model, leftovers[1])
    leftovers[0].write_bytes(leftovers[1].read_bytes()[:100])  # cut short
    unfinished = folder / "shards.0a0b0c0d.incomplete"
    unfinished.mkdir()
    (unfinished / "0.part").write_bytes(b"x")
    begun = shards_of(loaded(model), folder / "begun")
    (begun / "manifest.json").unlink()
    assert going(actions(capsys, folder)) == []
    assert "it may be running" in actions(capsys, folder)["begun"][1]
    for path in (*leftovers, unfinished, begun):
        aged(path, 2)
    assert going(actions(capsys, folder, "--delete")) == sorted(
        [".0123456789abcdef0123456789abcdef.part", "begun", "model.ckpt.0a0b0c0d.incomplete", unfinished.name]
    )
    assert sorted(os.listdir(folder)) == [f"{index}.ckpt" for index in range(5)]


def test_what_others_have_written_stays(folder: Path, capsys: Any, model: Path) -> None:
    run(capsys, "convert", model, folder / "light.ckpt", "--to", "lightning")
    torch.save({"w": torch.ones(2)}, folder / "weights.pt")
    (folder / "notes.txt").write_text("text")
    (folder / "sub").mkdir()
    for name in ("light.ckpt", "weights.pt", "notes.txt"):
        aged(folder / name, 30)
    found = answer(capsys, "prune", folder, "--keep", "1", "--delete")
    assert found["others"] == 4
    assert sorted(os.listdir(folder)) == ["4.ckpt", "light.ckpt", "notes.txt", "sub", "weights.pt"]


def test_a_folder_of_shards_is_a_checkpoint_too(folder: Path, capsys: Any, model: Path) -> None:
    shards = shards_of(loaded(model), folder / "shards.ckpt")
    aged(shards / "manifest.json", 40)
    assert "shards.ckpt" in going(actions(capsys, folder, "--keep", "4", "--delete"))
    assert not shards.exists()


def test_a_newest_one_that_was_cut_short_is_listed(folder: Path, capsys: Any) -> None:
    (folder / "4.ckpt").write_bytes((folder / "4.ckpt").read_bytes()[:-200])
    found = actions(capsys, folder, "--keep", "1")
    assert found["4.ckpt"] == ("keep", "damaged or cut short, so it is not counted")
    assert found["3.ckpt"] == ("keep", "the newest complete checkpoint")


def test_what_cannot_be_removed_is_reported_with_the_rest(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "1.ckpt":
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    code, out, _ = run(capsys, "prune", folder, "--keep", "2", "--delete", "--json")
    found = {Path(each["path"]).name: each["action"] for each in json.loads(out)["entries"]}
    assert code == 2
    assert [found[name] for name in ("0.ckpt", "1.ckpt", "2.ckpt")] == ["remove", "failed", "remove"]
    assert sorted(os.listdir(folder)) == ["1.ckpt", "3.ckpt", "4.ckpt"]
