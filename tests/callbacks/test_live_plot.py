"""LivePlot outside of a kernel; that one shows it is in ``test_notebook_progress.py``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from drivetrain.base import notebook
from drivetrain.callbacks import LivePlot
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.errors import ConfigurationError


class Logging(BoringModel):
    breaks = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", float(batch_idx))
        if self.breaks and batch_idx == 5:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each drawing: "new" in an output of its own, or "again" in the same."""
    found: list[str] = []
    monkeypatch.setattr(notebook, "can_display", lambda: True)

    def display(html: str, text: str, shown: Any) -> list[str]:
        found.append("new" if shown is None else "again")
        return found

    monkeypatch.setattr(notebook, "display", display)
    return found


@pytest.fixture
def make(make_trainer: Any) -> Any:
    return lambda plot: make_trainer(callbacks=[plot], limit_train_batches=6, limit_val_batches=0, log_every_n_steps=3)


def test_it_draws_in_place_and_each_fit_in_a_new_output(drawn: list[str], make: Any) -> None:
    plot = LivePlot("own", every_s=0)
    make(plot).fit(Logging())
    first = [*drawn]
    make(plot).fit(Logging())
    assert first[0] == "new"
    assert first.count("new") == 1
    assert len(first) > 2
    assert drawn[len(first)] == "new"


def test_it_draws_no_more_often_than_asked_and_once_at_the_end(drawn: list[str], make: Any) -> None:
    make(LivePlot("own", every_s=3600)).fit(Logging())
    assert drawn[-1] in ("new", "again")
    assert len(drawn) <= 2  # after a second, the first values; at the end, the last


def test_an_exception_leaves_the_last_values(drawn: list[str], make: Any) -> None:
    model = Logging()
    model.breaks = True
    with pytest.raises(RuntimeError, match="broken"):
        make(LivePlot("own", every_s=3600)).fit(model)
    assert drawn


@pytest.mark.parametrize("fits_first", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_validation_of_its_own_draws_nothing(
    drawn: list[str], make_trainer: Any, fits_first: bool, fails: bool
) -> None:
    class Validating(Logging):
        fails = False

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_own", 0.0)
            if self.fails:
                raise RuntimeError("broken")

    model = Validating()
    trainer = make_trainer(callbacks=[LivePlot("own", every_s=0)], limit_train_batches=2, log_every_n_steps=1)
    if fits_first:
        trainer.fit(model)
    before = [*drawn]
    assert bool(before) == fits_first
    model.fails = fails
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        trainer.validate(model, verbose=False)  # its table would be an output too
    assert drawn == before


def test_a_name_that_is_never_logged_is_a_warning_at_the_end(drawn: list[str], make: Any) -> None:
    with pytest.warns(UserWarning, match="LivePlot: .*'own_value'.*Known: own"):
        make(LivePlot("own_value", every_s=0)).fit(Logging())
    assert drawn == []


def test_outside_of_a_notebook_a_warning_names_what_to_call(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"Call trainer\.plot\(\) after the fit"):
        make(LivePlot()).fit(Logging())


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="every_s=-1"):
        LivePlot(every_s=-1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        LivePlot()
