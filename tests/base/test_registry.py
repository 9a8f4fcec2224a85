"""Names for classes: a folder's files, registrations and entry points."""

from __future__ import annotations

import importlib.metadata
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from drivetrain.accelerators import AcceleratorRegistry, CPUAccelerator
from drivetrain.base.registry import Entry, Registry, load
from drivetrain.checkpoints import CheckpointRegistry, TorchCheckpointIO
from drivetrain.clusters import ClusterRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import Launcher, LauncherRegistry
from drivetrain.loggers import LoggerRegistry
from drivetrain.precision import Precision, PrecisionRegistry
from drivetrain.strategies import LayerSyncRegistry, SingleDeviceStrategy, StrategyRegistry, TorchSyncBatchNorm

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


def a_shape(shapes: Registry[Any], name: str = "Square", **members: Any) -> type[Any]:
    """A user's class of the kind."""
    return type(name, (shapes.entry("circle").cls,), members)


def test_register_adds_a_name_and_wins_over_a_file(shapes: Registry[Any]) -> None:
    Square = a_shape(shapes)

    assert shapes.register("square", Square) is Square
    assert shapes.entry("square").cls is Square
    assert "square" in shapes.available()
    shapes.register("circle", Square, override=True)
    assert shapes.entry("circle").cls is Square


def test_a_taken_name_is_refused_unless_overridden(shapes: Registry[Any]) -> None:
    Square, Other = a_shape(shapes), a_shape(shapes, "Other")
    shapes.register("square", Square)
    with pytest.raises(ConfigurationError, match=r"'square' already belongs to .*Square.*override=True"):
        shapes.register("square", Other)
    assert shapes.entry("square").cls is Square
    shapes.register("square", Other, override=True)
    assert shapes.entry("square").cls is Other


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (("train", "Square"), ("train", "Square"), True),
        (("__main__", "Square"), ("__mp_main__", "Square"), True),
        (("__mp_main__", "Square"), ("__main__", "Square"), True),
        (("train", "Square"), ("other", "Square"), False),
        (("train", "Square"), ("train", "Outer.Square"), False),
    ],
    ids=["a cell that is run again", "in a spawned child", "and the other way", "other module", "other class"],
)
def test_the_same_class_again_is_no_conflict(
    shapes: Registry[Any], first: tuple[str, str], second: tuple[str, str], same: bool
) -> None:
    before, after = (a_shape(shapes, __module__=module, __qualname__=qualname) for module, qualname in (first, second))
    shapes.register("square", before)
    if same:
        shapes.register("square", after)
        assert shapes.entry("square").cls is after
    else:
        with pytest.raises(ConfigurationError, match="already belongs"):
            shapes.register("square", after)


def test_installed_packages_offer_theirs(shapes: Registry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shapes.entry("circle").cls.__module__
    entries = [
        importlib.metadata.EntryPoint("disc", f"{folder}:Circle", "group"),
        importlib.metadata.EntryPoint("fraction", "fractions:Fraction", "group"),
    ]

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return entries if group.startswith("shapes_") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert {"disc", "fraction"} <= set(shapes.available())
    assert shapes.entry("disc").cls is shapes.entry("circle").cls
    with pytest.raises(ConfigurationError, match="The shape 'fraction' got the class Fraction, which is no shape"):
        shapes.entry("fraction")


def test_a_package_that_is_installed_while_the_program_runs_is_found(
    shapes: Registry[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a notebook; otherwise the entry points are read once, because that takes tens of milliseconds."""
    circle = shapes.entry("circle").cls
    asked: list[str] = []
    real = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or real(group=group))
    monkeypatch.syspath_prepend(tmp_path)
    assert "disc" not in shapes.available()
    assert shapes.available() == shapes.available()
    assert len(asked) == 1
    info = tmp_path / "discs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: discs\nVersion: 1.0\n")
    group = circle.__module__.rpartition(".")[0]
    (info / "entry_points.txt").write_text(f"[{group}]\ndisc = {circle.__module__}:Circle\n")
    assert shapes.entry("disc").cls is circle
    assert len(asked) == 2


def test_names_may_be_made_of_those_of_another_registry(shapes: Registry[Any]) -> None:
    Square = a_shape(shapes)
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
        shapes.register("small_square", a_shape(shapes, "Other"))
    other = shapes.register("small_square", a_shape(shapes, "Other"), override=True)
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
    processes = {start + form for start in starts for form in forms}
    others = {
        "single_device",
        "dp",
        "ddp2",
        "horovod",
        "fsdp",
        "fsdp_cpu_offload",
        "model_parallel",
        "pipeline",
        "single_xla",
        "xla",
        "xla_debug",
        "xla_spmd",
        "xla_spmd_full",
    }
    assert {name for name in names if not name.startswith("deepspeed")} == {*others, *processes}
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
    Other = a_shape(shapes, "Other")
    with pytest.raises(
        ConfigurationError, match=r"'circle' already belongs to Circle \(.*\.circle\)\. .*override=True"
    ):
        shapes.register("circle", Other)


class Square(CPUAccelerator):
    def __init__(self, size: int = 1) -> None:
        super().__init__()


class Measureless(Launcher):
    """A launcher that starts nothing, because its method is misspelt."""

    def lauch(self, function: Any) -> Any:
        return function()


class Empty(Launcher):
    """A launcher that starts nothing."""


REFUSED: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], str, str]] = [
    ("a number as name", AcceleratorRegistry, (3, Square), {}, "must be a text that is not empty, not an int: 3",
     'Write register("name", cls).'),
    ("no text as name", AcceleratorRegistry, ("", Square), {}, "that is not empty, not a str: \'\'",
     'Write register("name", cls).'),
    ("no name", AcceleratorRegistry, (Square,), {}, "not the class Square itself", 'Write register("name", Square).'),
    ("an instance", AcceleratorRegistry, ("mine", Square()), {}, "which is no class", "Write Square, the class."),
    ("a function", PrecisionRegistry, ("mine", print), {}, "which is no class", "Give a subclass of Precision."),
    ("another kind", AcceleratorRegistry, ("mine", SingleDeviceStrategy), {},
     "got the class SingleDeviceStrategy, which is no accelerator", "Write class SingleDeviceStrategy(Accelerator)."),
    ("a plain class", LoggerRegistry, ("mine", dict), {}, "got the class dict, which is no logger", "dict(Logger)."),
    ("a cluster", ClusterRegistry, ("mine", dict), {}, "which is no cluster environment", "(ClusterEnvironment)."),
    ("a store", CheckpointRegistry, ("mine", dict), {}, "which is no checkpoint store", "dict(CheckpointIO)."),
    ("a layer sync", LayerSyncRegistry, ("mine", dict), {}, "which is no layer sync", "dict(LayerSync)."),
    ("an unknown argument", AcceleratorRegistry, ("mine", Square), {"sise": 3}, "sise=3, and Square.__init__ has no",
     "Did you mean \'size\'? Known: size."),
    ("a misspelt method", LauncherRegistry, ("mine", Measureless), {}, "which has no launch, as every launcher must",
     "Is it lauch? Rename that to launch."),
    ("a missing method", LauncherRegistry, ("mine", Empty), {}, "the class Empty, which has no launch", "Define it."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("registry", "arguments", "named", "cause", "cure"),
    [each[1:] for each in REFUSED],
    ids=[each[0] for each in REFUSED],
)
@pytest.mark.parametrize("decorates", [False, True])
def test_what_is_registered_is_checked(
    registry: Any, arguments: tuple[Any, ...], named: dict[str, Any], cause: str, cure: str, decorates: bool
) -> None:
    before = registry.available()
    register = registry.register
    if decorates and len(arguments) == 2:  # as a decorator
        register = lambda name, cls, **named: registry.register(name, **named)(cls)  # noqa: E731
    with pytest.raises(ConfigurationError) as caught:
        register(*arguments, **named)
    assert cause in str(caught.value)
    assert str(caught.value).endswith(cure)
    assert registry.available() == before


def test_a_class_that_takes_any_argument_may_be_registered_with_any() -> None:
    class Open(CPUAccelerator):
        def __init__(self, **options: Any) -> None:
            self.options = options

    AcceleratorRegistry.register("open_of_a_test", Open, depth=3)
    try:
        assert AcceleratorRegistry.get("open_of_a_test").options == {"depth": 3}  # type: ignore[attr-defined]
    finally:
        AcceleratorRegistry.remove("open_of_a_test")


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (CPUAccelerator, "register_accelerators"), (SingleDeviceStrategy, "register_strategies"),
        (Precision, "register_precisions"), (Launcher, "register_launchers"),
        (TorchCheckpointIO, "register_checkpoint_ios"), (TorchSyncBatchNorm, "register_layer_syncs"),
    ],
)  # fmt: skip
def test_a_class_names_itself_in_a_classmethod(base: type, hook: str) -> None:
    called: list[Any] = []

    def plain(cls: Any, registry: Any) -> None:
        called.append(registry)

    with pytest.raises(ConfigurationError, match=rf"Own.{hook} is a function: .* Write @classmethod in the line above"):
        type("Own", (base,), {hook: plain})
    type("Own", (base,), {hook: classmethod(plain)})
    type("Own", (base,), {hook: staticmethod(called.append)})
    assert len(called) == 2
