"""The public names of drivetrain and of its packages: reachable, completed, and explained where there are none."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import drivetrain
from drivetrain.base.lazy import Later, UnknownNames, public_modules

FOLDER = Path(drivetrain.__file__).parent
STUBS = sorted(FOLDER.rglob("*.pyi"))

MODULES = [
    "accelerators", "callbacks", "checkpoints", "cli", "clusters", "compat", "data", "engine", "errors", "launchers",
    "loggers", "module", "parity", "plugins", "precision", "profilers", "strategies", "testing", "tuner",
]  # fmt: skip
PACKAGES = [
    *(f"drivetrain.{name}" for name in MODULES if name not in ("errors", "parity")),
    *(f"drivetrain.plugins.{name}" for name in ("environments", "io", "layer_sync", "precision")),
]


def test_every_public_package_is_an_attribute_after_import_drivetrain_which_imports_none_of_them() -> None:
    code = f"""
import sys, drivetrain as pl
assert not [name for name in sys.modules if name.startswith("drivetrain.") and "base" not in name]
for name in {MODULES!r}:
    assert getattr(pl, name).__name__ == "drivetrain." + name
print(pl.callbacks.ModelCheckpoint.__name__, pl.plugins.environments.SLURMEnvironment.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.stdout.split()) == ("", ["ModelCheckpoint", "SLURMEnvironment"])


def test_completion_of_drivetrain_shows_its_public_names_only() -> None:
    importlib.import_module("drivetrain.loops.fit")  # private, and an attribute of the package from now on
    assert [name for name in dir(drivetrain) if not name.startswith("__")] == sorted([*drivetrain.__all__, *MODULES])


@pytest.mark.parametrize("package", PACKAGES)
def test_completion_of_a_package_shows_its_public_names_only(package: str) -> None:
    module = importlib.import_module(package)
    modules = {"environments", "io", "layer_sync", "precision"} if package == "drivetrain.plugins" else set()
    shown = {name for name in dir(module) if not name.startswith("__")}
    assert shown == {*module.__all__, *modules}
    assert all(getattr(module, name) is not None for name in shown)


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What Python prints last of an exception that nothing has caught, with any suggestion of its own."""
    sys.__excepthook__(type(error), error, error.__traceback__)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("drivetrain.Traner", "has no attribute 'Traner'. Did you mean 'Trainer'?"),
        ("drivetrain.callbaks", "has no attribute 'callbaks'. Did you mean 'callbacks'?"),
        ("drivetrain.callbacks.ModelChekpoint", "Did you mean 'ModelCheckpoint'?"),
        ("from drivetrain import Traner", "cannot import name 'Traner' from 'drivetrain'. Did you mean 'Trainer'?"),
        ("from drivetrain.callbacks import EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("from drivetrain.plugins.io import CheckpointIo", "Did you mean 'CheckpointIO'?"),
        ("import drivetrain.logers", "Did you mean 'loggers'?"),
    ],
)
def test_a_misspelt_name_gets_one_suggestion(code: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(code, {"drivetrain": drivetrain})
    text = printed(caught.value, capsys)
    assert expected in text
    assert text.lower().count("did you mean") == 1


def test_python_adds_a_second_suggestion_where_the_error_lets_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control of the test above: the same message in an error of which Python knows the object."""
    module = ModuleType("other")
    vars(module)["Trainer"] = 1
    text = printed(AttributeError("Did you mean 'Trainer'?", name="Traner", obj=module), capsys)
    assert text.lower().count("did you mean") == 2


def test_a_name_like_no_other_is_left_to_python() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'quux' from 'drivetrain' \("):
        exec("from drivetrain import quux")
    with pytest.raises(AttributeError, match="has no attribute 'quux'. Known: Callback, "):
        _ = drivetrain.quux
    assert importlib.util.find_spec("drivetrain.quux") is None


@pytest.mark.parametrize("name", ["Traner", "serve", "quux", "__wrapped__", "_private"])
def test_asking_whether_there_is_a_name_is_no_error(name: str) -> None:
    assert not hasattr(drivetrain, name)
    assert getattr(drivetrain, name, None) is None


def test_the_import_hook_is_there_once() -> None:
    importlib.reload(importlib.import_module("drivetrain.callbacks"))
    assert sum(isinstance(finder, UnknownNames) for finder in sys.meta_path) == 1


def test_a_module_in_a_block_is_imported_when_it_is_first_used_and_another_thread_imports_as_always() -> None:
    code = """
import sys, threading
from drivetrain.base.lazy import on_first_use
found = []
with on_first_use:
    from drivetrain.base import spelling
    other = "from drivetrain.base import yaml_text; found.append(yaml_text)"
    thread = threading.Thread(target=exec, args=(other, globals()))
    thread.start()
    thread.join()
print("drivetrain.base.spelling" in sys.modules, found[0] is sys.modules["drivetrain.base.yaml_text"])
spelling.added = spelling.__name__
print(sys.modules["drivetrain.base.spelling"].added)
from drivetrain.base import spelling as now
print(now is sys.modules["drivetrain.base.spelling"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.stdout.split()) == ("", ["False", "True", "drivetrain.base.spelling", "True"])


def test_a_package_that_is_missing_raises_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.base.packages import te, wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        wandb.init()
    stand_in = ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    te.recipe = "one"
    assert stand_in.recipe == "one"
    with pytest.raises(ImportError, match="no_such_package"):
        exec("from drivetrain.base.packages import no_such_package")


def test_a_tool_that_looks_at_all_names_of_a_module_imports_none_of_them() -> None:
    """jsonargparse asks each for ``__args__``; a missing package must not be an error there."""
    for name in ("no_such_package_of_anyone", "turtle"):
        assert not hasattr(Later(name), "__args__")
    assert "turtle" not in sys.modules


def test_a_name_that_waits_for_its_module_can_be_copied_and_pickled() -> None:
    for other in (copy.deepcopy(Later("math")), pickle.loads(pickle.dumps(Later("math")))):
        assert other.floor(2.5) == 2


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_each_statement_of_a_stub_names_one_public_name(stub: Path) -> None:
    """They are read as text, so another form would be read wrongly."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    found = [(each.module, alias) for each in tree.body if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert all(alias.asname == alias.name for _, alias in found)
    assert {type(each) for each in tree.body} <= {ast.ImportFrom, ast.AnnAssign}
    package = "drivetrain." + ".".join(stub.relative_to(FOLDER).with_suffix("").parts)
    package = package.removesuffix("__init__").removesuffix(".")
    module = importlib.import_module(package)
    assert module.__all__ == sorted(alias.name for source, alias in found if source != package)
    assert public_modules(package) == [alias.name for source, alias in found if source == package]
