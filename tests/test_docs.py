"""The pages against the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import drivetrain.callbacks
import drivetrain.loggers
from drivetrain import Callback, Trainer
from drivetrain.errors import NotSupportedError
from drivetrain.module.hooks import LOG_RULES, DataHooks, ModelHooks
from drivetrain.strategies.facts import Facts
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.model import Model
from drivetrain.strategies.ranks import Ranks
from drivetrain.strategies.state import State
from drivetrain.strategies.step import Step

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]


def test_the_page_of_arguments_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_arguments", ROOT / "docs" / "make_arguments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8") == module.page(), (
        "run python docs/make_arguments.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_lead_to_a_heading(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert section in anchors((page.parent / target if target else page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("picture", [*ROOT.glob("docs/images/*.svg")], ids=lambda picture: picture.name)
def test_a_picture_fetches_nothing_and_is_small(picture: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", picture.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"(?:href|src)=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg\b)", text) == []
    assert len(text) < 60_000


def test_the_page_of_hooks_names_only_hooks_that_exist() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bon_[a-z_]+", text))
    known = {name for base in (Callback, ModelHooks, DataHooks) for name in vars(base)} | {
        "on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train",
    }  # fmt: skip
    assert named - known == set()


def test_the_readme_example_has_at_most_20_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 20


def test_the_logging_table_covers_every_hook_that_may_log() -> None:
    """The page groups hooks by word; each hook of the rule table falls into exactly one group."""
    for hook, rule in LOG_RULES.items():
        per_epoch = hook.endswith(("_epoch_start", "_epoch_end")) or re.fullmatch(
            r"on_(train|validation|test)_start", hook
        )
        assert rule.step_allowed == (not per_epoch), hook


OWN_STRATEGY = (ROOT / "docs" / "own_strategy.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("position", "name", "most"), [(0, "rounded_gradients", 60), (1, "fsdp2_strategy", 30)], ids=["rounded", "fsdp2"]
)
def test_the_page_of_strategies_shows_the_examples_as_they_stand(position: int, name: str, most: int) -> None:
    shown = re.findall(r"^```python\n(.*?)^```", OWN_STRATEGY, re.DOTALL | re.MULTILINE)[position]
    example = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert shown == example, f"copy examples/{name}.py into docs/own_strategy.md"
    lines = [line for line in re.sub(r'^""".*?"""\n', "", example, flags=re.DOTALL).splitlines() if line.strip()]
    assert len(lines) <= most


@pytest.mark.parametrize("contract", [Ranks, Model, Step, State], ids=lambda contract: contract.__name__)
def test_the_page_of_strategies_shows_the_contract_as_it_is(contract: type) -> None:
    """Each member in the part of its class, with its arguments; all of it on one screen."""
    [screen] = re.findall(r"^```text\n(.*?)^```", OWN_STRATEGY, re.DOTALL | re.MULTILINE)
    assert screen.count("\n") <= 65
    [part] = re.findall(rf"^{contract.__name__} (.*?)(?:^\n|\Z)", screen, re.DOTALL | re.MULTILINE)
    shown = dict(re.findall(r"(\w+)\(([^()]*)\)", part))
    own = {name: value for name, value in vars(contract).items() if name[0] != "_"}
    methods = {name: inspect.signature(value) for name, value in own.items() if inspect.isfunction(value)}
    assert {name: shown.get(name, "missing").replace("*", "").split(", ") for name in methods} == {
        name: list(signature.parameters)[1:] or [""] for name, signature in methods.items()
    }
    declared = {name for cls in contract.__mro__ for name in vars(cls).get("__annotations__", ())}
    attributes = (own.keys() | declared) - methods.keys() - vars(Familiar).keys()
    assert {name for name in attributes if name[0] != "_" and name not in screen} == set()


@pytest.mark.parametrize("fact", dataclasses.fields(Facts), ids=lambda fact: fact.name)
def test_the_page_of_strategies_names_every_fact(fact: dataclasses.Field[object]) -> None:
    assert re.search(rf"^\|.*`{fact.name}`.*\|", OWN_STRATEGY, re.MULTILINE)


def test_the_page_of_searches_shows_the_recipes_as_they_stand() -> None:
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    recipes = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / "recipes").glob("search_*.py"))]
    shown = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(shown) == 3
    assert [block for block in shown if not any(block in recipe for recipe in recipes)] == []


README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text of one section of the page of features."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^## |\Z)", FEATURES, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 7_000


def test_the_page_of_features_lists_every_extra() -> None:
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert extras is not None
    named = set(re.findall(r"^(\w+) = \[", extras[1], re.MULTILINE)) - {"dev"}
    assert set(re.findall(r"^\| `(\w+)` \|", section("Extras"), re.MULTILINE)) == named


def test_the_page_of_features_lists_every_callback_and_logger() -> None:
    offered = {*drivetrain.callbacks.__all__, *drivetrain.loggers.__all__}
    offered -= {
        "Callback",
        "Checkpoint",
        "ProgressBar",
        "Logger",
        "DummyLogger",
        "LoggerRegistry",
    }  # contracts, a trial
    assert offered - set(re.findall(r"`(\w+)`", section("What there is"))) == set()


def test_the_page_of_features_lists_every_recipe_and_notebook() -> None:
    files = {path.name for folder in ("recipes", "notebooks") for path in (ROOT / "examples" / folder).glob("*.*")}
    assert set(re.findall(r"\(\.\./examples/(?:recipes|notebooks)/([\w.]+)\)", section("Examples"))) == files


def test_the_page_of_features_lists_every_example() -> None:
    examples = {path.name for path in (ROOT / "examples").iterdir() if path.suffix == ".py" or path.is_dir()}
    linked = set(re.findall(r"\(\.\./examples/([\w.]+)", section("Examples")))
    assert linked == examples - {"__pycache__"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_registry", "models"),
    ],
)  # fmt: skip
def test_what_the_page_calls_not_there_yet_is_refused_and_nothing_else_is_in_that_list(name: str, value: str) -> None:
    listed = section("What there is").partition("Not yet: ")[2].partition("Lightning.")[0]
    assert value in listed or f"`{name}`" in listed
    with pytest.raises(NotSupportedError, match="not supported by this version"):
        Trainer(**{name: value})
    for works in ("LightningCLI", "DDP", "processes", "command line", "background"):
        assert works not in listed


def test_the_plan_in_the_readme_is_what_the_trainer_prints() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-mixed", logger=False)
    shown = [line.strip() for line in str(trainer.plan).splitlines()[1:] if not line.strip().startswith("logger")]
    assert "\n".join(shown) in re.sub("^ +", "", README, flags=re.MULTILINE)
