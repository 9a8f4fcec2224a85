from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.profilers.rows import Model, loader, trainer

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import PyTorchProfiler


def test_a_fit_writes_a_trace_for_chrome_and_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # All rows: their order is one of times.
    run = trainer(profiler=PyTorchProfiler(dirpath=tmp_path, filename="ops", row_limit=200))
    module = Model()
    run.fit(module, loader(8))
    trace = tmp_path / "fit-ops-step5.pt.trace.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("training_step") == 3
    assert "[module] layer: Linear" in names
    assert "my forward" in names
    assert "aten::addmm" in (tmp_path / "fit-ops.txt").read_text()
    assert f"wrote {trace}" in caplog.text
    assert not module.layer._forward_hooks
    assert not module.layer._forward_pre_hooks
    assert pickle.loads(pickle.dumps(run.profiler)).summary() == ""


def test_a_run_that_is_too_short_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="has recorded nothing: .*fit had 1 batches. .* schedule=None"):
        trainer(profiler="pytorch").fit(Model(), loader(1))


def test_without_a_schedule_the_whole_run_is_recorded(tmp_path: Path) -> None:
    ready = []
    profiler = PyTorchProfiler(
        tmp_path, schedule=None, export_to_chrome=False, sort_by_key="cpu_time_total", row_limit=5,
        record_module_names=False, activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=ready.append,
    )  # fmt: skip
    trainer(profiler=profiler).test(Model(), loader(1), verbose=False)
    assert "run_test" in profiler.summary()
    assert list(tmp_path.iterdir()) == []
    assert len(ready) == 1


def test_an_exception_ends_the_recording() -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.layer(torch.ones(3))

    profiler = PyTorchProfiler(schedule=None, export_to_chrome=False)
    module = Fails()
    with pytest.raises(RuntimeError, match="shapes"):
        trainer(profiler=profiler).fit(module, loader(1))
    assert profiler.profiler is None
    assert not module.layer._forward_hooks
    profiler.setup("fit")  # torch allows one profiler at a time
    profiler.teardown("fit")


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match="has no argument with_stacks=True.* Did you mean 'with_stack'"):
        PyTorchProfiler(with_stacks=True)
    with pytest.raises(ConfigurationError, match="sort_by_key='cpu_tme'"):
        PyTorchProfiler(sort_by_key="cpu_tme")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_marks_for_nvidias_tools_need_cuda() -> None:
    with pytest.raises(ConfigurationError, match="emit_nvtx=True"):
        trainer(profiler=PyTorchProfiler(emit_nvtx=True)).fit(Model(), loader(1))


def test_arguments_for_the_table_reach_it(tmp_path: Path) -> None:
    for name, given in (("wide", {}), ("narrow", {"max_name_column_width": 12})):
        profiler = PyTorchProfiler(tmp_path, name, export_to_chrome=False, table_kwargs=given)
        trainer(profiler=profiler).fit(Model(), loader(6))
    wide, narrow = ((tmp_path / f"fit-{name}.txt").read_text() for name in ("wide", "narrow"))
    assert "run_training_batch" in wide
    assert "run_train..." not in wide
    assert "run_train..." in narrow


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup", "ignore:.*Profiler clears events")
def test_an_action_that_lasts_longer_than_a_recording_is_in_each_of_them(tmp_path: Path) -> None:
    """torch may crash if a mark begins in one recording and ends in another."""
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=1)
    trainer(profiler=PyTorchProfiler(tmp_path, schedule=schedule)).fit(Model(), loader(3))
    traces = sorted(tmp_path.iterdir())
    assert [trace.name for trace in traces] == [f"fit-step{step}.pt.trace.json" for step in (1, 2, 3)]
    for trace in traces:
        names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
        assert "run_training_epoch" in names
