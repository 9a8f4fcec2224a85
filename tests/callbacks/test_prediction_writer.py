from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import LightningModule
from drivetrain.callbacks import BasePredictionWriter
from drivetrain.callbacks.prediction_writer import WriteInterval
from drivetrain.errors import ConfigurationError


class Doubling(LightningModule):
    def forward(self, x: Any) -> Any:
        return x * 2


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        self.batches.append((prediction.tolist(), batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def numbers(count: int, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(list(range(count)), batch_size=2, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "when"), [("batch", (True, False)), ("epoch", (False, True)), ("batch_and_epoch", (True, True))]
)
def test_a_writer_says_when_it_writes(interval: str, when: tuple[bool, bool]) -> None:
    for writer in (Writer(interval), Writer(WriteInterval(interval))):
        assert (writer.interval.on_batch, writer.interval.on_epoch) == when
        assert writer.interval == interval


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_written_as_they_come(make_trainer: Any, workers: int) -> None:
    writer = Writer("batch")
    kept = make_trainer(callbacks=writer).predict(Doubling(), numbers(3, num_workers=workers), return_predictions=False)

    assert writer.batches == [([0, 2], [0, 1], 0, 0), ([4], [2], 1, 0)]
    assert writer.epochs == kept == []


def test_everything_is_written_when_the_pass_has_ended(make_trainer: Any) -> None:
    writer = Writer("epoch")
    predictions = make_trainer(callbacks=writer).predict(Doubling(), [numbers(3), numbers(1)])

    assert writer.batches == []
    [(given, indices)] = writer.epochs
    assert given is predictions
    assert indices == [[[0, 1], [2]], [[0]]]


def test_what_is_written_at_the_end_need_not_be_returned(make_trainer: Any) -> None:
    writers = [Writer("epoch"), Writer("batch_and_epoch")]
    trainer = make_trainer(callbacks=writers)
    assert trainer.predict(Doubling(), numbers(3), return_predictions=False) == []

    for writer in writers:
        [(given, indices)] = writer.epochs
        assert [tensor.tolist() for tensor in given] == [[0, 2], [4]]
        assert indices == [[[0, 1], [2]]]
    assert len(trainer.predict(Doubling(), numbers(3))) == 2


def test_both(make_trainer: Any) -> None:
    writer = Writer("batch_and_epoch")
    make_trainer(callbacks=writer).predict(Doubling(), [numbers(3), numbers(1)])

    assert [entry[2:] for entry in writer.batches] == [(0, 0), (1, 0), (0, 1)]
    assert len(writer.epochs) == 1


def test_the_other_hook_is_idle_unless_a_subclass_has_it() -> None:
    class Own(Writer):
        def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_predict_epoch_end(trainer, pl_module)

    assert Writer("batch").idle_hooks == {"on_predict_epoch_end"}
    assert Writer("epoch").idle_hooks == {"on_predict_batch_end"}
    assert Writer("batch_and_epoch").idle_hooks == Own("batch").idle_hooks == frozenset()


def test_a_subclass_may_extend_the_hook_that_is_not_its_intervals(make_trainer: Any) -> None:
    class Own(Writer):
        ended = 0

        def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_predict_epoch_end(trainer, pl_module)
            self.ended += 1

    writer = Own("batch")
    make_trainer(callbacks=writer).predict(Doubling(), numbers(3))
    assert (len(writer.batches), writer.epochs, writer.ended) == (2, [], 1)


def test_a_subclass_may_do_the_work_of_its_interval_in_the_hook(make_trainer: Any) -> None:
    """As pytorch-forecasting's writer does, which keeps the predictions and writes nothing."""
    kept = []

    class Keeping(BasePredictionWriter):
        def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(trainer.predict_loop.predictions)

    predictions = make_trainer(callbacks=Keeping("epoch")).predict(Doubling(), numbers(3))
    assert kept == [predictions]


def test_wrong_intervals_and_missing_methods(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match='write_interval=\'step\'.* is "batch", "epoch" or'):
        BasePredictionWriter("step")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="calls write_on_epoch_end, which it does not define"):
        make_trainer(callbacks=BasePredictionWriter("epoch")).predict(Doubling(), numbers(2))


@pytest.mark.parametrize(
    ("interval", "method", "parameters"),
    [
        (
            "batch", "write_on_batch_end",
            "self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx",
        ),
        ("epoch", "write_on_epoch_end", "self, trainer, pl_module, predictions, batch_indices"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_called_is_refused_before_the_first_batch(
    make_trainer: Any, interval: Any, method: str, parameters: str
) -> None:
    class Short(Writer):
        pass

    setattr(Short, method, lambda self, trainer, pl_module, prediction: None)
    seen: list[Any] = []

    class Counting(Doubling):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch_idx)

    with pytest.raises(ConfigurationError) as caught:
        make_trainer(callbacks=Short(interval)).predict(Counting(), numbers(2))
    assert f"Short.{method}(trainer, pl_module, prediction) cannot be called" in str(caught.value)
    assert str(caught.value).endswith(f"Write def {method}({parameters}).")
    assert seen == []


def test_a_method_that_the_interval_does_not_call_is_not_looked_at(make_trainer: Any) -> None:
    class Own(Writer):
        def write_on_epoch_end(self) -> None:  # type: ignore[override]
            pass

    make_trainer(callbacks=Own("batch")).predict(Doubling(), numbers(2))
