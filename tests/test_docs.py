"""The pages against the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import drivetrain.callbacks
import drivetrain.loggers
from drivetrain import Callback, Trainer
from drivetrain.errors import NotSupportedError
from drivetrain.module.hooks import LOG_RULES, DataHooks, ModelHooks

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


def test_the_page_of_strategies_shows_the_example_as_it_stands() -> None:
    text = (ROOT / "docs" / "own_strategy.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    example = (ROOT / "examples" / "fsdp2_strategy.py").read_text(encoding="utf-8")
    assert shown == example, "copy examples/fsdp2_strategy.py into docs/own_strategy.md"
    lines = [line for line in re.sub(r'^""".*?"""\n', "", example, flags=re.DOTALL).splitlines() if line.strip()]
    assert len(lines) <= 30


README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text of one section of the README."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_readme_lists_every_extra() -> None:
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert extras is not None
    named = set(re.findall(r"^(\w+) = \[", extras[1], re.MULTILINE)) - {"dev"}
    assert set(re.findall(r"^\| `(\w+)` \|", section("Installing it"), re.MULTILINE)) == named


def test_the_readme_lists_every_callback_and_logger() -> None:
    offered = {*drivetrain.callbacks.__all__, *drivetrain.loggers.__all__}
    offered -= {
        "Callback",
        "Checkpoint",
        "ProgressBar",
        "Logger",
        "DummyLogger",
        "LoggerRegistry",
    }  # contracts, a trial
    assert offered - set(re.findall(r"`(\w+)`", section("What works now"))) == set()


def test_the_readme_lists_every_example() -> None:
    examples = {path.name for path in (ROOT / "examples").iterdir() if path.suffix == ".py" or path.is_dir()}
    linked = set(re.findall(r"\(examples/([\w.]+)", section("Examples")))
    assert linked == examples - {"__pycache__"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_registry", "models"),
    ],
)  # fmt: skip
def test_what_the_readme_calls_not_there_yet_is_refused_and_nothing_else_is_in_that_list(name: str, value: str) -> None:
    listed = section("What works now").partition("Not yet: ")[2].partition("Lightning.")[0]
    assert value in listed or f"`{name}`" in listed
    with pytest.raises(NotSupportedError, match="not supported by this version"):
        Trainer(**{name: value})
    for works in ("LightningCLI", "DDP", "processes", "command line", "background"):
        assert works not in listed


def test_the_plan_in_the_readme_is_what_the_trainer_prints() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-mixed", logger=False)
    shown = [line.strip() for line in str(trainer.plan).splitlines()[1:] if not line.strip().startswith("logger")]
    assert "\n".join(shown) in re.sub("^ +", "", README, flags=re.MULTILINE)
