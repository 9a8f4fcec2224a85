"""torch_xla's profiler around a run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.xla.rows import Model, loader, trainer

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import XLAProfiler


def test_batches_and_own_actions_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_xla.debug import profiler

    marked: list[str] = []
    enter = profiler.Trace.__enter__

    def noted(self: Any) -> Any:
        marked.append(self.name)
        return enter(self)

    monkeypatch.setattr(profiler.Trace, "__enter__", noted)
    own = XLAProfiler(port=9123)
    run = trainer("single_xla", max_epochs=1, limit_train_batches=2, profiler=own)
    assert run.profiler is own
    run.fit(Model(), loader())
    assert marked.count("run_training_batch") == 2
    assert marked.count("training_step") == 2
    with own.profile("mine") as name:
        assert name == "mine"
        with pytest.raises(ConfigurationError, match="has begun and not ended"):
            own.start("mine")
    assert marked[-1] == "mine"
    own.stop("never begun")
    assert (own.summary(), own.describe()) == ("", None)  # type: ignore[func-returns-value]
    assert pickle.loads(pickle.dumps(own)).port == 9123
