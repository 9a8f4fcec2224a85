"""Files, folders and names of profilers, as programs written for Lightning expect them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import LightningDataModule
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler


@pytest.mark.parametrize("dirpath", ["given", Path("given")])
def test_dirpath_reads_back_as_given(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dirpath: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = SimpleProfiler(dirpath, "times")
    seen: list[Any] = []

    class Looks(regression):  # type: ignore[misc]
        def on_train_start(self) -> None:
            seen.append(profiler.dirpath)

    make_trainer(profiler=profiler).fit(Looks(), loader)
    assert [*seen, profiler.dirpath] == [dirpath, dirpath]
    assert {type(each) for each in seen} == {type(dirpath)}
    assert [path.name for path in (tmp_path / "given").iterdir()] == ["fit-times.txt"]  # one process: no rank


def test_without_a_dirpath_it_is_the_folder_of_the_run(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    profiler = SimpleProfiler(filename="times")
    assert profiler.dirpath is None
    for version in ("first", "second"):
        trainer = make_trainer(profiler=profiler, logger=CSVLogger(tmp_path, version=version))
        trainer.fit(regression(), loader)
        assert profiler.dirpath == trainer.log_dir
        assert (Path(trainer.log_dir) / "fit-times.txt").exists()


def test_no_name_of_a_file_has_characters_that_other_systems_forbid(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    profiler = AdvancedProfiler(tmp_path / "out", 'a:b|"c"?*', dump_stats=True)

    class Acts(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with profiler.profile("C:\\runs/<x>"):
                return super().training_step(batch, batch_idx)

    make_trainer(profiler=profiler).fit(Acts(), loader)
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert "fit-a_b__c___-C__runs__x_.prof" in names
    assert not any(set(name) & set('<>:"/\\|?*') for name in names)


def test_table_kwargs_are_those_of_the_table_that_is_written(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    profiler = PyTorchProfiler(tmp_path / "out", "ops", table_kwargs={"header": "Mine", "max_name_column_width": 12})
    make_trainer(profiler=profiler).fit(regression(), loader)
    text = (tmp_path / "out" / "fit-ops.txt").read_text()
    assert "\nMine\n" in text
    assert "..." in text  # the end of a long name
    assert "run_validation" not in text
    assert "training_step" not in text


def test_hooks_and_loaders_of_a_datamodule_are_profiled_under_their_names(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Data(LightningDataModule):
        def prepare_data(self) -> None:
            self.prepared = True

        def setup(self, stage: str) -> None:
            self.stage = stage

        def train_dataloader(self) -> Any:
            return loader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    profiler = SimpleProfiler()
    make_trainer(profiler=profiler).fit(regression(), datamodule=Data())
    hooks = ("prepare_data", "setup", "train_dataloader", "on_after_batch_transfer", "teardown")
    calls = {hook: len(profiler.recorded_durations[f"[LightningDataModule]Data.{hook}"]) for hook in hooks}
    assert calls == {**dict.fromkeys(hooks, 1), "on_after_batch_transfer": 4}
