"""Installing: first in line, once, with switches, and not over an original that is already there."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from drivetrain import compat, parity
from drivetrain.compat.finder import CompatFinder
from drivetrain.errors import ConfigurationError


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    yield
    compat.uninstall()


def test_installing_twice_is_fine_and_keeps_it_first() -> None:
    compat.install()
    sys.meta_path.insert(0, later := CompatFinder())
    compat.install()
    assert [type(found) for found in sys.meta_path].count(CompatFinder) == 2
    assert sys.meta_path[0] is not later
    sys.meta_path.remove(later)
    compat.uninstall()
    assert not any(isinstance(found, CompatFinder) for found in sys.meta_path)


@pytest.mark.parametrize(
    ("numbers", "on"),
    [
        ((), set()),
        ("", set()),
        ("original", set(parity.NUMBERS)),
        (["original"], set(parity.NUMBERS)),
        ("undersized_windows", {"undersized_windows"}),
        ("undersized_windows,padded_evaluation", {"undersized_windows", "padded_evaluation"}),
        (("averaged_batch_sizes", "batch_counted_schedulers"), {"averaged_batch_sizes", "batch_counted_schedulers"}),
    ],
)
def test_t3_t6_t12_t14_the_switches_of_numbers(numbers: str | tuple[str, ...], on: set[str]) -> None:
    before = parity.current()
    compat.install(numbers)
    assert parity.current() == parity.Parity(pickle=True, **dict.fromkeys(on, True))
    compat.install()
    assert parity.current() == parity.Parity(pickle=True)
    compat.uninstall()
    assert parity.current() == before


def test_a_loader_of_an_earlier_generation_starts_when_its_pass_begins() -> None:
    compat.install("original", generation="1.3")
    assert parity.current() == parity.Parity(
        pickle=True, **{name: name != "early_iterators" for name in parity.NUMBERS}
    )
    compat.install("early_iterators", generation="1.3")
    assert parity.current() == parity.Parity(pickle=True, early_iterators=True)


def test_an_unknown_number_is_answered_and_nothing_is_installed() -> None:
    with pytest.raises(ConfigurationError, match=r"no switch 'undersized'.*Did you mean 'undersized_windows'\?"):
        compat.install("undersized")
    assert not any(isinstance(found, CompatFinder) for found in sys.meta_path)
    assert "DRIVETRAIN_COMPAT" not in os.environ


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning", "lightning_fabric.utilities"])
def test_an_original_that_has_been_imported_is_not_replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    imported = types.ModuleType(name)
    imported.__file__ = "/site-packages/lightning/__init__.py"
    monkeypatch.setitem(sys.modules, name, imported)
    with pytest.raises(ConfigurationError, match=rf"replace {name}, .*/site-packages/.* before the first import"):
        compat.install()
    assert not any(isinstance(found, CompatFinder) for found in sys.meta_path)


def test_an_original_that_is_installed_but_not_imported_loses(
    python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    for name in ("lightning", "pytorch_lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('the original')\n", encoding="utf-8")
        (tmp_path / name / "extra.py").write_text("", encoding="utf-8")
    (tmp_path / "program.py").write_text(
        "import lightning, pytorch_lightning\n"
        "print(lightning.__version__, pytorch_lightning.__version__)\n"
        "try:\n    import lightning.extra\nexcept ImportError as error:\n    print(error)\n",
        encoding="utf-8",
    )
    plain = python("-c", "import lightning")  # the control: it is there to be found
    assert plain.stdout == "the original\n"
    done = python("-m", "drivetrain.compat", "program.py")
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "2.6.6 2.6.6"
    assert second.startswith("drivetrain.compat has no lightning.extra (yet).")


def test_a_misconfiguration_of_the_original_catches_all_that_is_diagnosed_here() -> None:
    compat.install()
    from lightning.fabric.utilities.exceptions import MisconfigurationException as of_fabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    assert of_fabric is MisconfigurationException
    with pytest.raises(MisconfigurationException):
        Trainer(max_epochs="many")
    with pytest.raises(MisconfigurationException, match="mine"):
        raise MisconfigurationException("mine")
