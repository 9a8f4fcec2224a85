"""Signatures and members of the original's public names against drivetrain's, and the page that lists them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that compares and writes the page."""
    spec = importlib.util.spec_from_file_location("make_compat_members", ROOT / "docs" / "make_compat_members.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_difference_has_a_reason(maker: ModuleType) -> None:
    assert maker.unexplained() == [], "mend them, or write the reason in docs/compat_differences.py"


def test_every_reason_explains_a_difference(maker: ModuleType) -> None:
    assert maker.stale() == [], "these are no longer different: remove them from docs/compat_differences.py"


def test_what_is_open_is_named_in_full_and_is_different(maker: ModuleType) -> None:
    """So that no pattern hides a difference that comes later."""
    names = maker.reasons.OPEN.split()
    assert [name for name in names if "*" in name] == []
    assert [name for name in names if name not in maker.differences()] == []


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    """Without the lines that count the arguments of torch's own class, which each version of torch may add to."""

    def lines(page: str) -> list[str]:
        return [
            line for line in page.splitlines() if "types.DistributedDataParallel" not in line and "In all" not in line
        ]

    assert lines(maker.PAGE.read_text(encoding="utf-8")) == lines(maker.page()), (
        "run python docs/make_compat_members.py"
    )


@pytest.mark.parametrize(
    ("there", "here", "found"),
    [
        (["a", "b=1"], ["a", "b=1", "c=None"], {}),
        (["a", "b=1"], ["a"], {"f(b)": "missing"}),
        (["a", "b=1"], ["a", "**kwargs"], {}),
        (["a", "b=1"], ["a", "*args"], {}),
        (["*", "b=1"], ["*args"], {"f(b)": "missing"}),
        (["a", "b=1"], ["a", "b=2"], {"f(b)": "default 2; there 1"}),
        (["a", "b"], ["a", "b=2"], {}),
        (["a", "b"], ["b", "a"], {"f(a)": "number 2; there number 1", "f(b)": "number 1; there number 2"}),
        (["a", "b"], ["a", "*", "b"], {"f(b)": "by keyword only; there number 2"}),
        (["*", "b=1"], ["b=1"], {}),
        (["a"], ["a", "b"], {"f(b)": "required here"}),
        (["a", "**kwargs"], ["a"], {"f(**)": "takes no further arguments"}),
    ],
)
def test_what_counts_as_a_difference_of_a_call(
    maker: ModuleType, there: list[str], here: list[str], found: dict[str, str]
) -> None:
    assert dict(maker.call_differences("f", there, here)) == found


def test_what_counts_as_a_difference_of_a_member(maker: ModuleType) -> None:
    class Here:
        value = 1

        def __init__(self) -> None:
            self.set_by_it = 2

        def method(self, a: int) -> None: ...

        @property
        def read(self) -> int:
            return 3

    assert list(maker.member_differences("f", ["a"], Here, "method")) == []
    assert list(maker.member_differences("f", ["b"], Here, "method")) != []
    assert list(maker.member_differences("f", ["a"], Here, "gone")) == [("f", "missing")]
    for name in ("value", "read"):
        assert list(maker.member_differences("f", "property", Here, name)) == []
        assert list(maker.member_differences("f", ["a"], Here, name)) == [("f", "a value here; there a method")]
    assert list(maker.member_differences("f", "property", Here, "method")) == [("f", "a method here; there a property")]


@pytest.mark.parametrize(
    "name",
    [
        "pytorch.Trainer", "pytorch.LightningModule", "pytorch.LightningDataModule", "pytorch.Callback",
        "pytorch.callbacks.ModelCheckpoint", "pytorch.callbacks.TQDMProgressBar", "pytorch.loggers.WandbLogger",
        "pytorch.strategies.DDPStrategy", "pytorch.plugins.MixedPrecision", "fabric.Fabric",
    ],
)  # fmt: skip
def test_what_programs_use_most_is_compared(maker: ModuleType, name: str) -> None:
    assert name in maker.facts()
    assert len(maker.compared(name)) > 10
