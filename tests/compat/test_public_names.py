"""The original's public names against the table, and against the page that lists them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from drivetrain.compat import finder, table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("make_compat_names", ROOT / "docs" / "make_compat_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_served_and_unserved_names_is_up_to_date(maker: ModuleType) -> None:
    """So that a name that stops being served, or begins to be, is somebody's decision."""
    written = maker.PAGE.read_text(encoding="utf-8")
    assert written == maker.page(), "run python docs/make_compat_names.py"


def test_every_name_that_is_not_served_has_a_reason(maker: ModuleType) -> None:
    known = maker.reasons()
    missing = [(path, name) for path, names in maker.public_names().items() for name in names]
    without = [(path, name) for path, name in missing if not maker.is_served(path, name)]
    assert [each for each in without if not maker.reason(*each, known)] == [], "see NAMES in docs/compat_differences.py"
    assert maker.reason("pytorch", "Trainer", known) == ""


FORMER_PATHS = frozenset({
    "fabric.accelerators.tpu", "fabric.plugins.precision.tpu", "fabric.plugins.precision.tpu_bf16",
    "fabric.plugins.precision.xlabf16", "fabric.strategies.single_tpu", "pytorch.accelerators.tpu",
    "pytorch.plugins.precision.precision_plugin", "pytorch.plugins.precision.tpu", "pytorch.plugins.precision.tpu_bf16",
    "pytorch.plugins.precision.xlabf16", "pytorch.strategies.single_tpu",
})  # fmt: skip
"""Modules whose paths the original answers, though it has no file there."""


@pytest.mark.parametrize("path", table.LATEST.served)
def test_every_name_that_the_table_offers_is_there(path: str) -> None:
    for offered, home, ours in finder.offers(path):
        assert hasattr(importlib.import_module(home), ours), f"lightning.{path}.{offered} = {home}.{ours}"


def test_the_table_has_no_module_that_the_original_has_not(maker: ModuleType) -> None:
    assert set(table.LATEST.served) - FORMER_PATHS <= set(maker.public_names())
    assert set(table.LATEST.served) - set(maker.public_names()) >= FORMER_PATHS


@pytest.mark.parametrize(
    "name",
    [
        "pytorch.Trainer", "pytorch.LightningModule", "pytorch.LightningDataModule", "pytorch.Callback",
        "pytorch.callbacks.ModelCheckpoint", "pytorch.callbacks.EarlyStopping", "pytorch.loggers.TensorBoardLogger",
        "pytorch.cli.LightningCLI", "pytorch.utilities.types.STEP_OUTPUT", "pytorch.trainer.states.RunningStage",
        "pytorch.utilities.rank_zero.rank_zero_only", "fabric.Fabric", "fabric.utilities.seed.seed_everything",
    ],
)  # fmt: skip
def test_what_most_programs_import_is_served(maker: ModuleType, name: str) -> None:
    path, _, last = name.rpartition(".")
    assert maker.is_served(path, last)
    assert not maker.is_served(path, f"{last}s")
    assert not maker.is_served(f"{path}.nothing", last)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch.callbacks.device_stats_monitor.DeviceStatsMonitor", "pytorch.core.saving.get_filesystem",
        "pytorch.plugins.environments.SLURMEnvironment", "pytorch.strategies.ddp.DDPStrategy",
        "pytorch.strategies.deepspeed.DeepSpeedStrategy", "pytorch.strategies.parallel.ParallelStrategy",
        "pytorch.utilities.exceptions.SIGTERMException", "fabric.plugins.environments.slurm.SLURMEnvironment",
    ],
)  # fmt: skip
def test_what_exists_here_is_served_under_each_of_its_paths(name: str) -> None:
    path, _, last = name.rpartition(".")
    found = finder.find(path, last)
    assert found is not None
    assert hasattr(importlib.import_module(found[0]), found[1])
