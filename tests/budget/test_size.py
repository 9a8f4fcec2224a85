"""How large the package and its contracts may be: budgets that only fall, unless ARCHITECTURE.md says for what."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import tokenize
from pathlib import Path

import pytest

import drivetrain
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO, FileAnswers
from drivetrain.loops.run import Run
from drivetrain.precision.precision import Precision
from drivetrain.strategies.facts import Facts
from drivetrain.strategies.model import Model
from drivetrain.strategies.ranks import Ranks
from drivetrain.strategies.single_device import SingleDeviceStrategy
from drivetrain.strategies.state import State
from drivetrain.strategies.step import Step
from drivetrain.strategies.strategy import Strategy

PACKAGE = Path(drivetrain.__file__).parent
LEAVES = {
    "cli", "compat", "doctor", "forecast", "integrations", "legacy", "loggers", "profilers", "proof", "report",
    "testing", "trials", "tuner",
}  # fmt: skip
"""Folders that are no part of the core, which trains without them."""

_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def code_lines(source: str) -> int:
    """How many lines hold code: no blank ones, comments or docstrings."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def test_code_is_counted_without_blanks_comments_and_docstrings() -> None:
    assert code_lines('"""Text\nof two lines."""\n\n# a comment\nx = (1,\n     2)  # and another\n') == 2
    assert code_lines('def f():\n    """Text."""\n    return """\n\n"""\n') == 4


def test_the_package_grows_no_further() -> None:
    sizes = {path: code_lines(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    core = sum(size for path, size in sizes.items() if path.relative_to(PACKAGE).parts[0] not in LEAVES)
    assert core <= CORE
    assert sum(sizes.values()) <= ALL


def test_no_file_and_no_function_is_too_long_to_read_at_once() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, text in sources.items() if (lines := text.count("\n")) > LONGEST_FILE} == {}
    functions = [
        (path, node)
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lines = {f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions}
    assert {name: count for name, count in lines.items() if count > LONGEST_FUNCTION} == {}


def test_strategies_inherit_from_few_others() -> None:
    """DDPStrategy is two below Strategy; three only where programs that ask for a DDPStrategy must find one."""
    assert deeper_than(2, "strategies") == {"DDP2Strategy", "XLAStrategy"}


def test_strategies_for_fabric_are_one_below_those_that_they_adapt() -> None:
    assert deeper_than(3, "compat") == {"FabricXLAStrategy", "FabricXLAFSDPStrategy"}


def deeper_than(most: int, folder: str) -> set[str]:
    """The strategies that the files of a folder define, and that are more than ``most`` below Strategy."""
    names = [path.stem for path in (PACKAGE / folder).glob("*.py") if not path.stem.startswith("__")]
    modules = [importlib.import_module(f"drivetrain.{folder}.{name}") for name in names]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    own = [each for each in classes if issubclass(each, Strategy) and f".{folder}." in each.__module__]
    return {each.__name__ for each in own if _below_strategy(each) > most}


def _below_strategy(cls: type) -> int:
    above = (each for each in cls.__bases__ if issubclass(each, Strategy))
    return 1 + max(map(_below_strategy, above)) if cls is not Strategy else 0


@pytest.mark.parametrize(
    ("contract", "built", "most"),
    [
        ((Ranks, Model, Step, State, Strategy), SingleDeviceStrategy(), 60), ((Facts,), Facts(), 16),
        ((Precision,), Precision(), 20), ((CheckpointIO,), TorchCheckpointIO(), 8),
        ((FileAnswers,), TorchCheckpointIO(), 10),
    ],
    ids=["strategy", "facts", "precision", "checkpoint_io", "file_answers"],
)  # fmt: skip
def test_a_contract_grows_no_further(contract: tuple[type, ...], built: object, most: int) -> None:
    """Public methods, properties and attributes; not the field's names for them, which are in ``familiar.py``."""
    members = {name for cls in contract for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}
    assert len({name for name in members | vars(built).keys() if not name.startswith("_")}) <= most


def test_a_run_has_few_parts() -> None:
    assert len(dataclasses.fields(Run)) <= 25


CORE, ALL = 38_463, 61_608
"""Lines of code of the core and of the whole package."""

LONGEST_FILE, LONGEST_FUNCTION = 500, 80
"""Lines of any kind, documentation included."""
