from __future__ import annotations

import importlib.util
import io
import pickle
import threading
from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import LightningModule, parity
from drivetrain.compat.files import (
    _load,
    _load_from_checkpoint,
    _load_state,
    convert,
    get_filesystem,
    is_shared_filesystem,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_tags_csv,
    save_hparams_to_yaml,
    update_hparams,
)
from drivetrain.errors import CheckpointError, ConfigurationError


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    assert get_filesystem(tmp_path).exists(str(tmp_path))
    assert get_filesystem("memory://a").protocol == "memory"


def test_loading_from_a_path_an_address_and_an_open_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    written = (tmp_path / "a.pt").read_bytes()
    with get_filesystem("memory://a.pt").open("memory://a.pt", "wb") as stream:
        stream.write(written)
    for place in (tmp_path / "a.pt", str(tmp_path / "a.pt"), "memory://a.pt", io.BytesIO(written)):
        assert float(_load(place, map_location="cpu")["a"]) == 1


def test_objects_are_read_where_the_process_allows_them(tmp_path: Path) -> None:
    torch.save({"a": Fraction(1, 2)}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError):
        _load(tmp_path / "a.pt")
    before = parity.use(parity.Parity(pickle=True))
    try:
        assert _load(tmp_path / "a.pt")["a"] == Fraction(1, 2)
        with pytest.raises(pickle.UnpicklingError):
            _load(tmp_path / "a.pt", weights_only=True)
    finally:
        parity.use(before)


def test_hyperparameters_go_through_yaml(tmp_path: Path) -> None:
    path = tmp_path / "hparams.yaml"
    with pytest.warns(UserWarning, match="'odd' is left out: .* a Fraction"):
        save_hparams_to_yaml(path, {"lr": 0.5, "layers": [1, 2], "odd": Fraction(1)})
    assert load_hparams_from_yaml(path) == {"lr": 0.5, "layers": [1, 2]}
    save_hparams_to_yaml(path, Namespace(z=1, a=2))
    assert list(load_hparams_from_yaml(path)) == ["z", "a"]


def test_wrong_places_and_kinds_are_answered(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="There is no file"):
        assert load_hparams_from_yaml(tmp_path / "none.yaml") == {}
    with pytest.raises(ConfigurationError, match="Make it first"):
        save_hparams_to_yaml(tmp_path / "none" / "a.yaml", {})
    with pytest.raises(ConfigurationError, match="hparams is a list"):
        save_hparams_to_yaml(tmp_path / "a.yaml", [])  # type: ignore[arg-type]


def test_without_pyyaml_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "yaml" else found(name))
    save_hparams_to_yaml(tmp_path / "a.yaml", {"lr": 0.1})
    with pytest.raises(ConfigurationError, match="pip install pyyaml"):
        load_hparams_from_yaml(tmp_path / "a.yaml")


def test_updates_reach_into_mappings() -> None:
    hparams = {"a": {"b": 1}, "c": 1}
    update_hparams(hparams, {"a": {"d": 2}, "c": {"e": 3}})
    assert hparams == {"a": {"b": 1, "d": 2}, "c": {"e": 3}}


def test_hyperparameters_at_an_address() -> None:
    save_hparams_to_yaml("memory://hparams/a.yaml", {"lr": 0.1})
    assert load_hparams_from_yaml("memory://hparams/a.yaml") == {"lr": 0.1}


def test_hyperparameters_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "tags.csv"
    given = Namespace(batch_size=32, lr=0.001, name='a "word", and more', flags=[1, 2], nothing=None)
    save_hparams_to_tags_csv(path, given)
    assert path.read_text().splitlines()[:2] == ["key,value", "batch_size,32"]
    read = load_hparams_from_tags_csv(path)
    assert read == {**vars(given), "nothing": ""}  # as in every table, nothing is an empty cell
    save_hparams_to_tags_csv(str(path), {"a": "1e-3"})
    assert load_hparams_from_tags_csv(path) == {"a": 0.001}
    with pytest.warns(RuntimeWarning, match=r"no file .*absent\.csv"):
        assert load_hparams_from_tags_csv(tmp_path / "absent.csv") == {}
    with pytest.raises(RuntimeError, match="There is no folder"):
        save_hparams_to_tags_csv(tmp_path / "absent" / "tags.csv", {})


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("1.5", 1.5), ("True", True), ("[1]", [1]), ("a b", "a b"), ("./x", "./x"), ("", "")]
)
def test_text_becomes_the_literal_that_it_spells(text: str, value: Any) -> None:
    found = convert(text)
    assert (found, type(found)) == (value, type(value))


class Rank:
    """A rank of two, in a thread; ``sees`` is what it learns of what rank 0 sends."""

    world_size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, box: list[Any], sees: Any = lambda value: value) -> None:
        self.is_global_zero = rank == 0
        self.meeting, self.box, self.sees = meeting, box, sees

    def broadcast(self, value: Any) -> Any:
        if self.is_global_zero:
            self.box.append(value)
        self.meeting.wait()
        sent = self.box[-1]
        self.meeting.wait()
        return sent if self.is_global_zero else self.sees(sent)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.box.append(decision)
        self.meeting.wait()
        everywhere = self.box[-1] and self.box[-2]
        self.meeting.wait()
        return everywhere


def of_two_ranks(path: Any, sees: Any = lambda value: value) -> list[Any]:
    """What each of two ranks answers, or the error that it raises."""
    meeting, box = threading.Barrier(2, timeout=20), []  # type: ignore[var-annotated]
    answers: list[Any] = [None, None]

    def ask(rank: int) -> None:
        try:
            answers[rank] = is_shared_filesystem(Rank(rank, meeting, box, sees), path, timeout=0.1)
        except FileNotFoundError as error:
            answers[rank] = error

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_whether_ranks_see_the_same_files(tmp_path: Path) -> None:
    alone = SimpleNamespace(world_size=1)
    assert is_shared_filesystem(alone)
    assert is_shared_filesystem(Rank(1, threading.Barrier(2), []), "s3://bucket/folder")
    assert of_two_ranks(tmp_path) == [True, True]
    (tmp_path / "file").touch()
    assert of_two_ranks(tmp_path / "file") == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]  # its own file is gone


def test_a_rank_with_other_files_is_noticed(tmp_path: Path) -> None:
    """Rank 1 looks for rank 0's file on a disk of its own; and where it has another working folder."""

    def elsewhere(sent: str) -> str:
        return sent if sent == str(tmp_path) else f"{sent}-on-another-disk"

    assert of_two_ranks(tmp_path, elsewhere) == [False, False]
    assert of_two_ranks(tmp_path, lambda sent: "/another/folder") == [False, False]
    assert all(isinstance(answer, FileNotFoundError) for answer in of_two_ranks(tmp_path / "absent"))


# ---- checkpoints that were read already ------------------------------------------------------------------------------


class Sized(LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_from_a_checkpoint_that_was_read_already(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    trainer, module = make_trainer(), Sized(width=3)
    trainer.fit(module, loader)
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt")
    checkpoint = torch.load(path, weights_only=False)
    for loaded in (_load_state(Sized, checkpoint), _load_from_checkpoint(Sized, path)):
        assert loaded.hparams["width"] == 3
        torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="Build the module as it was trained"):
        _load_state(Sized, checkpoint, width=4)
