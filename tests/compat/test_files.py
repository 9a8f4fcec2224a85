from __future__ import annotations

import importlib.util
import io
import pickle
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from drivetrain import parity
from drivetrain.compat.files import (
    _load,
    get_filesystem,
    load_hparams_from_yaml,
    save_hparams_to_yaml,
    update_hparams,
)
from drivetrain.errors import ConfigurationError


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
