"""What ``importlib.metadata`` and those who build on it are told."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import Distribution
from types import SimpleNamespace

import pytest

from drivetrain import compat
from drivetrain.compat import table
from drivetrain.compat.distribution import distributions

pytestmark = pytest.mark.usefixtures("served")


@pytest.mark.parametrize(
    "name", ["lightning", "Lightning", "pytorch-lightning", "pytorch_lightning", "lightning.fabric", "lightning_fabric"]
)
def test_the_version_of_each_distribution_in_any_spelling(name: str) -> None:
    assert metadata.version(name) == table.LATEST.version


def test_what_a_distribution_says_of_itself() -> None:
    found = metadata.distribution("lightning")
    assert found.metadata["Name"] == "lightning"
    assert found.requires == ["drivetrain"]
    assert found.files is None
    assert list(found.entry_points) == []
    assert "drivetrain.compat" in str(found.metadata["Summary"])


def test_all_distributions_are_listed_with_those_of_others() -> None:
    names = [found.metadata["Name"] for found in metadata.distributions()]
    assert {"lightning", "pytorch-lightning", "lightning-fabric", "drivetrain", "torch"} <= set(names)
    assert metadata.packages_distributions()["pytorch_lightning"][0] == "pytorch-lightning"
    assert len(metadata.entry_points()) > 0


def test_other_distributions_are_left_to_others() -> None:
    assert list(distributions("torch")) == []
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("lightning-bolts")


def test_an_installed_original_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(Distribution):
        version = "1.0"

        def read_text(self, filename: str) -> str | None:
            return "Name: lightning\nVersion: 1.0\n" if filename == "METADATA" else None

        def locate_file(self, path: object) -> SimpleNamespace:
            return SimpleNamespace()

    class Finder:
        @staticmethod
        def find_spec(*_: object) -> None:
            return None

        @staticmethod
        def find_distributions(context: object) -> list[Distribution]:
            return [Installed()]

    import sys

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert metadata.version("lightning") == "1.0"  # the control: whoever is first is believed
    compat.install()
    assert metadata.version("lightning") == table.LATEST.version


def test_checks_of_lightning_utilities_and_packaging() -> None:
    imports = pytest.importorskip("lightning_utilities.core.imports")
    assert bool(imports.RequirementCache("lightning>=2.0,<3"))
    assert not bool(imports.RequirementCache("pytorch-lightning<2.6"))
    assert imports.package_available("lightning")
    assert imports.module_available("lightning.pytorch.callbacks")
    assert not imports.module_available("lightning.pytorch.nothing")
