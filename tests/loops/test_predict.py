"""Prediction: what comes back, which hooks run, and who may know which samples it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningDataModule, LightningModule
from drivetrain.errors import ConfigurationError, LoggingError


class Doubling(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Dropout())

    def forward(self, x: Any) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        return x * 2


def numbers(count: int, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(list(range(count)), **{"batch_size": 2, **arguments})  # type: ignore[arg-type]


def test_predict_returns_the_outputs_of_every_batch(make_trainer: Any) -> None:
    module = Doubling()
    predictions = make_trainer().predict(module, numbers(5))

    assert [p.tolist() for p in predictions] == [[0, 2], [4, 6], [8]]
    assert module.training
    assert module.net[1].training


def test_predictions_of_several_loaders_are_nested(make_trainer: Any) -> None:
    predictions = make_trainer().predict(Doubling(), [numbers(3), numbers(1)])

    assert [[p.tolist() for p in part] for part in predictions] == [[[0, 2], [4]], [[0]]]


def test_predict_step_may_take_its_usual_arguments(make_trainer: Any) -> None:
    class Own(Doubling):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch_idx, dataloader_idx

    assert make_trainer().predict(Own(), [numbers(3), numbers(1)]) == [[(0, 0), (1, 0)], [(0, 1)]]


def test_predictions_need_not_be_kept(make_trainer: Any) -> None:
    trainer = make_trainer()
    assert trainer.predict(Doubling(), numbers(5), return_predictions=False) == []
    assert trainer.predict_loop.predictions == []


def test_t34_limits_hold(make_trainer: Any) -> None:
    trainer = make_trainer(limit_predict_batches=2)
    assert len(trainer.predict(Doubling(), numbers(9))) == 2
    assert trainer.num_predict_batches == [2]
    assert make_trainer(limit_predict_batches=0).predict(Doubling(), numbers(9)) == []


def test_a_datamodule_may_have_the_loader(make_trainer: Any) -> None:
    class Data(LightningDataModule):
        def predict_dataloader(self) -> Any:
            return numbers(2)

    trainer = make_trainer()
    assert len(trainer.predict(Doubling(), datamodule=Data())) == 1
    assert len(trainer.predict(Doubling(), Data())) == 1
    assert trainer.predict_dataloaders is not None


def test_without_a_model_the_last_one_predicts(make_trainer: Any, loader: Any, regression: Any) -> None:
    class Net(regression):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    trainer = make_trainer()
    with pytest.raises(ConfigurationError, match="no model, and none was run before"):
        trainer.predict(dataloaders=loader)
    trainer.fit(Net(), loader)
    assert len(trainer.predict(dataloaders=loader)) == 4


def test_a_module_that_cannot_predict_is_told_so(make_trainer: Any, regression: Any, loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="neither predict_step nor forward"):
        make_trainer().predict(regression(), loader)
    with pytest.raises(ConfigurationError, match="trainer.predict has no loader"):
        make_trainer().predict(Doubling())


def test_nothing_may_be_logged_in_prediction(make_trainer: Any) -> None:
    class Logging(Doubling):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.raises(LoggingError, match="in predict_step"):
        make_trainer().predict(Logging(), numbers(2))


@pytest.mark.parametrize(("inference_mode", "expected"), [(True, True), (False, False)])
def test_t44_inference_mode_is_for_standalone_prediction(
    make_trainer: Any, inference_mode: bool, expected: bool
) -> None:
    class Asking(Doubling):
        def predict_step(self, batch: Any, batch_idx: int) -> bool:
            return torch.is_inference_mode_enabled()

    assert make_trainer(inference_mode=inference_mode).predict(Asking(), numbers(1)) == [expected]


class Indexed(Callback):
    """Asks which samples each batch holds."""

    needs_batch_indices = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.predict_loop.current_batch_indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_know_their_samples_where_somebody_asks(make_trainer: Any, workers: int) -> None:
    asking = Indexed()
    trainer = make_trainer(callbacks=asking)
    loader = numbers(5, shuffle=True, num_workers=workers)
    predictions = trainer.predict(Doubling(), loader)

    assert [[2 * index for index in batch] for batch in asking.seen] == [p.tolist() for p in predictions]
    assert trainer.predict_loop.epoch_batch_indices == [asking.seen]
    assert sorted(index for batch in asking.seen for index in batch) == [0, 1, 2, 3, 4]


def test_nobody_asked_so_nothing_is_recorded(make_trainer: Any) -> None:
    trainer = make_trainer()
    trainer.predict(Doubling(), numbers(4))

    assert trainer.predict_loop.epoch_batch_indices == [[[], []]]
    assert trainer.predict_loop.current_batch_indices == []
