"""What loggers share whose runs live with a service; each real service is in tests/extras."""

from __future__ import annotations

import argparse
import pickle
from typing import Any

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CometLogger, MLFlowLogger, NeptuneLogger, TrackioLogger, WandbLogger
from drivetrain.loggers._run import RunLogger, Tables, flat, mapping_of


class Service(RunLogger):
    """A service that is there."""

    name = "service"  # type: ignore[assignment]

    def __init__(self, run_id: str | None = None, refuses: bool = False) -> None:
        super().__init__("a", run_id, "json", "json")
        self.refuses = refuses

    def _begin(self) -> Any:
        if self.refuses:
            raise OSError("no answer")
        self._run_id = self._run_id or "new"
        return object()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any = None) -> None: ...


def test_a_package_that_is_missing_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.errors.importlib.util.find_spec", lambda name: None)
    for cls, package in ((WandbLogger, "wandb"), (MLFlowLogger, "mlflow"), (CometLogger, "comet_ml"),
                         (NeptuneLogger, "neptune"), (TrackioLogger, "trackio")):  # fmt: skip
        with pytest.raises(ConfigurationError, match=f"{cls.__name__} needs the package {package}.*pip install"):
            cls()


def test_neptune_warns_that_its_service_is_closed_and_names_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.loggers._run.check_installed", lambda *_: None)
    with pytest.warns(UserWarning, match="closed in March 2026.*Use a TrackioLogger, CSVLogger or TensorBoardLogger"):
        NeptuneLogger()


def test_a_run_begins_once_and_a_copy_continues_it() -> None:
    logger = Service()
    assert (logger.version, logger.is_undecided, logger.state_dict()) == (None, True, {})
    assert logger.experiment is logger.experiment
    assert (logger.version, logger.is_undecided, logger.state_dict()) == ("new", False, {"run_id": "new"})
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.version == "new"


def test_texts_are_logged_by_the_tables_of_a_subclass() -> None:
    written = []

    class OfOwnTables(Tables, Service):
        def log_table(self, key: str, *args: Any, **kwargs: Any) -> None:
            written.append((key, *args))

        def _write_table(self, *args: Any) -> None: ...

    OfOwnTables().log_text("a", ["b"], [["c"]])
    assert written == [("a", ["b"], [["c"]], None, None)]


def test_a_run_that_cannot_begin_is_an_error_with_its_cause() -> None:
    with pytest.raises(ConfigurationError, match="Service cannot begin a run: OSError: no answer"):
        _ = Service(refuses=True).experiment


def test_other_ranks_have_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = Service(refuses=True)
    logger.experiment.anything(1).here()
    logger.agree_on_run(lambda value: "of rank 0")
    assert logger.version == "of rank 0"


def test_which_run_a_checkpoint_continues() -> None:
    fresh, given, begun = Service(), Service("mine"), Service()
    fresh.load_state_dict({"run_id": "old"})
    assert fresh.version == "old"
    given.load_state_dict({"run_id": "old"})
    assert given.version == "mine"
    begun.begin_run()
    with pytest.warns(UserWarning, match="writes to run new, .* the checkpoint continues run old"):
        begun.load_state_dict({"run_id": "old"})
    assert begun.version == "new"


def test_lists_of_media_must_fit() -> None:
    logger = Service()
    assert list(logger._each("log_image", "a", [1, 2], {"caption": ["x", "y"]})) == [
        (1, {"caption": "x"}), (2, {"caption": "y"}),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="Service.log_image\\('a'\\) got 1 values and 2 of caption"):
        list(logger._each("log_image", "a", [1], {"caption": ["x", "y"]}))
    with pytest.raises(TypeError, match="got a str. Pass a list"):
        list(logger._each("log_image", "a", "one", {}))


def test_hyperparameters_of_every_form() -> None:
    assert mapping_of(None) == {}
    assert mapping_of(argparse.Namespace(a=1)) == {"a": 1}
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a/b": 1, "a/c": "{}", "d": "[1]"}
