"""Names for classes: a folder's files, registrations and entry points."""

from __future__ import annotations

import importlib.metadata
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from drivetrain.base.registry import Entry, Registry, load
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import SingleDeviceStrategy, StrategyRegistry

CONTRACT = """
from abc import ABC, abstractmethod
class Shape(ABC):
    @abstractmethod
    def area(self): ...
"""
CIRCLE = """
from shapes_PLACE.shape import Shape
class _Helper(Shape):
    def area(self): return 0
class AbstractRound(Shape): ...
class Circle(AbstractRound):
    def area(self): return 3
"""


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Registry[Any]:
    """A folder of backends of its own: a contract, one good file, two bad ones, a hidden one."""
    place = f"{abs(hash(request.node.name)):x}"
    folder = tmp_path / f"shapes_{place}"
    folder.mkdir()
    files = {
        "__init__": "",
        "shape": CONTRACT,
        "circle": CIRCLE,
        "broken": "raise RuntimeError('imported too early')",
        "_tools": "class Tool: ...",
        "empty": "",
        "twins": "from shapes_PLACE.circle import Circle\nclass A(Circle): ...\nclass B(Circle): ...",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text.replace("PLACE", place))
    monkeypatch.syspath_prepend(tmp_path)
    return Registry(f"shapes_{place}", "shape", "shape")


def test_the_folder_is_the_registry(shapes: Registry[Any]) -> None:
    assert shapes.available() == ["broken", "circle", "empty", "twins"]  # no contract, nothing with an underscore
    assert shapes.entry("circle").cls.__name__ == "Circle"
    assert shapes.get("circle").area() == 3


def test_nothing_is_imported_until_it_is_asked_for(shapes: Registry[Any]) -> None:
    assert "broken" in shapes.available()
    shapes.entry("circle")
    assert not [name for name in sys.modules if name.startswith("shapes_") and name.endswith(".broken")]
    with pytest.raises(RuntimeError, match="imported too early"):  # the control: importing it does fail
        shapes.entry("broken")


@pytest.mark.parametrize(("name", "found"), [("empty", r"not \[\]"), ("twins", r"not \['A', 'B'\]")])
def test_a_file_defines_exactly_one(shapes: Registry[Any], name: str, found: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must define exactly one public Shape, {found}"):
        shapes.entry(name)


@pytest.mark.parametrize("name", ["shape", "_tools", "__init__"])
def test_what_is_no_backend_has_no_name(shapes: Registry[Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match="There is no shape called"):
        shapes.entry(name)


def test_an_unknown_name_gets_a_suggestion(shapes: Registry[Any]) -> None:
    with pytest.raises(ConfigurationError, match="no shape called 'circel'. Did you mean 'circle'"):
        shapes.entry("circel")


def test_register_adds_a_name_and_wins_over_a_file(shapes: Registry[Any]) -> None:
    class Square:
        pass

    assert shapes.register("square", Square) is Square
    assert shapes.entry("square").cls is Square
    assert "square" in shapes.available()
    shapes.register("circle", Square, override=True)
    assert shapes.entry("circle").cls is Square


def test_a_taken_name_is_refused_unless_overridden(shapes: Registry[Any]) -> None:
    class Square:
        pass

    class Other:
        pass

    shapes.register("square", Square)
    with pytest.raises(ConfigurationError, match=r"'square' already belongs to .*Square.*override=True"):
        shapes.register("square", Other)
    assert shapes.entry("square").cls is Square
    shapes.register("square", Other, override=True)
    assert shapes.entry("square").cls is Other


def make_class(module: str, qualname: str = "Square") -> type:
    return type("Square", (), {"__module__": module, "__qualname__": qualname})


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (make_class("train"), make_class("train"), True),
        (make_class("__main__"), make_class("__mp_main__"), True),
        (make_class("__mp_main__"), make_class("__main__"), True),
        (make_class("train"), make_class("other"), False),
        (make_class("train"), make_class("train", "Outer.Square"), False),
    ],
    ids=["a cell that is run again", "in a spawned child", "and the other way", "other module", "other class"],
)
def test_the_same_class_again_is_no_conflict(shapes: Registry[Any], first: type, second: type, same: bool) -> None:
    shapes.register("square", first)
    if same:
        shapes.register("square", second)
        assert shapes.entry("square").cls is second
    else:
        with pytest.raises(ConfigurationError, match="already belongs"):
            shapes.register("square", second)


def test_installed_packages_offer_theirs(shapes: Registry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("fraction", "fractions:Fraction", "group")

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [entry] if group.startswith("shapes_") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    from fractions import Fraction

    assert "fraction" in shapes.available()
    assert shapes.entry("fraction").cls is Fraction


def test_names_may_be_made_of_those_of_another_registry(shapes: Registry[Any]) -> None:
    class Square:
        """Four sides."""

    asked: list[bool] = []

    def sizes(installed: bool) -> dict[str, Entry[Any]]:
        asked.append(installed)
        found = ["small_square", *(["large_square"] if installed else [])]
        return {name: Entry(name, Square, init_params={}) for name in found}

    shapes.derive(sizes)
    assert {"small_square", "large_square"} <= set(shapes.available())
    asked.clear()
    assert shapes.entry("small_square").cls is Square
    assert asked == [False]  # installed packages were not read for it
    assert shapes.entry("large_square").cls is Square
    with pytest.raises(ConfigurationError, match="'small_square' already belongs to .*Square"):
        shapes.register("small_square", type("Other", (), {}))
    other = shapes.register("small_square", type("Other", (), {}), override=True)
    assert shapes.entry("small_square").cls is other


def test_a_group_of_entry_points_may_have_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [])
    Registry("drivetrain.strategies", "strategy", "strategy", by_file=False, group="of.its.own").available()
    assert asked == ["of.its.own"]


def test_the_strategies() -> None:
    names = StrategyRegistry.available()
    starts = ("ddp", "ddp_spawn", "ddp_fork", "ddp_forkserver", "ddp_notebook", "ddp_ray")
    forms = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    assert set(names) == {"single_device", *(start + form for start in starts for form in forms)}
    assert StrategyRegistry.entry("single_device").cls is SingleDeviceStrategy


def test_a_contract_whose_file_name_has_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "under_scored"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "big_shape.py").write_text(CONTRACT.replace("Shape", "BigShape"))
    (folder / "disc.py").write_text(
        "from under_scored.big_shape import BigShape\nclass Disc(BigShape):\n    def area(self): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Any] = Registry("under_scored", "big_shape", "shape")
    assert registry.available() == ["disc"]
    assert registry.get("disc").area() == 1


def test_load_imports_when_asked() -> None:
    assert load("fractions:Fraction").__name__ == "Fraction"
    with pytest.raises(AttributeError):
        load("fractions:Nothing")


def test_the_contract_itself_is_abstract() -> None:
    class Shape(ABC):
        @abstractmethod
        def area(self) -> int: ...

    registry: Registry[Shape] = Registry("drivetrain.strategies", "strategy", "strategy")
    with pytest.raises(ConfigurationError, match="no strategy called 'nope'"):
        registry.entry("nope")


def test_a_name_of_the_folder_is_not_shadowed_by_accident(shapes: Registry[Any]) -> None:
    class Other:
        pass

    with pytest.raises(
        ConfigurationError, match=r"'circle' already belongs to Circle \(.*\.circle\)\. .*override=True"
    ):
        shapes.register("circle", Other)
