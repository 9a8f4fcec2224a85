"""Command lines that are parsed in this process, in an empty folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import LightningCLI

PROGRAM = Path(__file__).parent / "cli_program.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's program as a module: ``program.Net``, ``program.Data``."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    return importlib.import_module("cli_program")


@pytest.fixture
def cli(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a quiet LightningCLI of the words it is given; wrong words raise instead of ending the process."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything exports them
        monkeypatch.setenv(name, "0")

    def make(*words: str, cls: type[LightningCLI] = LightningCLI, **arguments: Any) -> Any:
        quiet = {
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False,
        }  # fmt: skip
        defaults = {**quiet, **arguments.pop("trainer_defaults", {})}
        given: dict[str, Any] = {
            "model_class": program.Net, "datamodule_class": program.Data, "save_config_callback": None,
            "parser_kwargs": {"exit_on_error": False}, "args": list(words), **arguments,
        }  # fmt: skip
        return cls(trainer_defaults=defaults, **given)

    return make
