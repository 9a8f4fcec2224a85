"""Files that two runs have written: checkpoints by value, tables by row, in whatever order and however often."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.base.digest import numbers_of
from drivetrain.proof.outputs import Written, compare


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The folders of an undisturbed run, of one that was killed, and that of which both were copies."""
    found = (tmp_path / "one", tmp_path / "other", tmp_path / "before")
    for each in found:
        each.mkdir()
    return found


def compared(folders: Any, name: str, one: Any, other: Any, **options: Any) -> Written:
    for folder, content in zip(folders, (one, other), strict=False):
        if isinstance(content, str):
            (folder / name).write_text(content)
        elif content is not None:
            torch.save(content, folder / name)
    return compare(*folders, **options)


def test_a_tensor_that_differs_in_a_bit_is_named(folders: Any) -> None:
    one, other = ({"average": {"weight": torch.tensor([1.0, zero])}, "epoch": 3} for zero in (0.0, -0.0))
    found = compared(folders, "last.pt", one, other)
    assert found.different == ["last.pt: 'average/weight'"]
    assert compared(folders, "last.pt", one, one) == Written([], set(), [])


def test_a_number_in_a_checkpoint_is_compared_and_no_random_state_time_or_path(folders: Any) -> None:
    one = {"best": 0.5, "rng": torch.zeros(3), "seconds": 3.0}
    found = compared(folders, "last.pt", one, {"best": 0.75, "rng": torch.ones(3), "seconds": 4.0})
    assert found.different == ["last.pt: 'best', 0.75 instead of 0.5"]


def test_rows_that_a_restarted_run_writes_again_are_no_difference(folders: Any) -> None:
    found = compared(folders, "log.csv", "step,loss\n1,0.5\n2,0.25\n", "step,loss\n1,0.5\n2,0.25\n1,0.5\n2,0.25\n")
    assert found == Written([], set(), [])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("log.csv", ["step,loss\n1,0.5\n2,0.25\n", "step,loss\n1,0.5\n2,0.125\n"]),
        ("log.jsonl", ['{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n', '{"step": 2, "loss": 0.125}\n']),
    ],
)
def test_a_row_with_another_value_is_named(folders: Any, name: str, rows: list[str]) -> None:
    [line] = compared(folders, name, *rows).different
    assert line == f"{name}: 'loss', 0.125 instead of 0.25 in a row loss=0.125, step=2"


def test_a_row_under_another_number_is_named_with_that(folders: Any) -> None:
    [line] = compared(folders, "log.csv", "step,loss\n1,0.5\n2,0.25\n", "step,loss\n1,0.25\n").different
    assert line == "log.csv: 'step', 1 instead of 2 in a row loss=0.25, step=1"


def test_rows_that_are_lost_with_a_kill_are_listed(folders: Any) -> None:
    found = compared(folders, "log.csv", "step,loss\n1,0.5\n2,0.25\n", "step,loss\n1,0.5\n")
    assert (found.different, found.lacking) == ([], ["1 rows of log.csv"])


def test_a_file_of_the_undisturbed_run_alone_is_listed(folders: Any) -> None:
    assert compared(folders, "best.pt", {"a": torch.ones(1)}, None).lacking == ["best.pt"]


def test_columns_that_differ_between_undisturbed_runs_are_left_out(folders: Any) -> None:
    rows = ["step,load\n1,0.5\n", "step,load\n1,0.75\n"]
    assert compared(folders, "log.csv", *rows).columns == {("log.csv", "load")}
    assert compared(folders, "log.csv", *rows, ignored={("log.csv", "load")}).different == []


def test_paths_in_a_runs_own_folder_are_equal(folders: Any) -> None:
    one, other = (json.dumps({"best_path": f"{folder}/best.pt", "best": 1.0}) for folder in folders[:2])
    assert compared(folders, "state.json", one, other).different == []


def test_a_place_in_a_runs_own_folder_is_not_compared_in_a_checkpoint(folders: Any) -> None:
    """A logger's folder, which has another number after a start without a checkpoint."""
    one, other = ({"folder": f"{run}/logs/version_{number}", "best": 0.5} for number, run in enumerate(folders[:2]))
    assert compared(folders, "last.pt", one, other) == Written([], set(), [])
    found = compared(folders, "last.pt", {"folder": "logs/version_0"}, {"folder": "logs/version_1"})
    assert found.different == ["last.pt: 'folder', logs/version_1 instead of logs/version_0"]


def test_a_command_line_is_not_compared_and_a_list_of_numbers_is(folders: Any) -> None:
    for name, one, other, differs in (
        ("run.json", ["--out", "a"], ["--out", "a", "--resume", "b"], False),
        ("losses.json", [1.0, 2.0], [1.0, 2.5], True),
    ):
        found = compared(folders, name, json.dumps({"values": one}), json.dumps({"values": other}))
        assert any(name in each for each in found.different) is differs


def test_the_record_of_a_run_is_not_compared_and_another_file_of_its_name_is(folders: Any) -> None:
    record = {"schema": 1, "diffs": {}, "attempts": [{"status": "finished"}]}
    killed = {**record, "attempts": [{"status": "running"}, {"status": "finished"}]}
    assert compared(folders, "run.json", json.dumps(record), json.dumps(killed)) == Written([], set(), [])
    assert compared(folders, "run.json", '{"status": "finished"}', '{"status": "running"}').different


def test_files_that_were_there_before_are_not_compared(folders: Any) -> None:
    for folder in folders:
        (folder / "data.csv").write_text(f"a\n{folder.name == 'other'}\n")
    one, other, before = folders
    stat = (before / "data.csv").stat()
    assert compare(one, other, before).different != []
    (one / "data.csv").write_text((before / "data.csv").read_text())
    os.utime(one / "data.csv", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert compare(one, other, before).different == []


def test_what_is_no_checkpoint_is_not_compared(folders: Any) -> None:
    assert compared(folders, "log.csv", 'a\n"', "b\n") is not None
    for folder, text in zip(folders, ("PK\x03\x04 cut", "PK\x03\x04 cut short"), strict=False):
        (folder / "last.pt").write_text(text)
    assert compare(*folders).different == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(), torch.tensor([1 + 2j]).conj(), torch.ones(2, 3).t(), torch.tensor([True, False]),
        torch.tensor(3), torch.empty(0), torch.ones(3, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)  # fmt: skip
def test_every_kind_of_tensor_has_a_fingerprint_of_its_values(tensor: torch.Tensor) -> None:
    equal, other = tensor.clone(), tensor.to_dense().clone()
    other[other != 0] = 0
    first, second, third = numbers_of([tensor, equal, other])
    assert first == second
    assert tensor.numel() == 0 or first != third


def test_a_tensor_without_values_has_the_fingerprint_zero() -> None:
    assert numbers_of([torch.ones(3, device="meta")]) == [0]


def test_a_checkpoint_is_compared_with_that_of_the_last_start(folders: Any) -> None:
    one, other, before = folders
    for run, version, score in [(before, 0, 9), (one, 0, 9), (other, 0, 9), (one, 1, 3), (other, 1, 1), (other, 2, 3)]:
        path = run / f"logs/version_{version}/checkpoints/last.ckpt"
        path.parent.mkdir(parents=True)
        torch.save({"best": score}, path)
        os.utime(path, ns=(version, version))
    assert compare(one, other, before) == Written([], set(), [])
    torch.save({"best": 4}, other / "logs/version_2/checkpoints/last.ckpt")
    found = compare(one, other, before)
    assert found.different == ["logs/version_1/checkpoints/last.ckpt: 'best', 4 instead of 3"]


def test_where_a_run_makes_several_version_folders_each_is_compared_with_its_own(folders: Any) -> None:
    one, other, before = folders
    for run, version, score in [(one, 0, 1), (one, 1, 2), (other, 0, 1), (other, 1, 2)]:
        path = run / f"version_{version}/last.ckpt"
        path.parent.mkdir(parents=True)
        torch.save({"best": score}, path)
    assert compare(one, other, before) == Written([], set(), [])
