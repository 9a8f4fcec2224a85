"""Golden tests of spec 3.3: every hook of module, callback, datamodule and strategy, in order.

The sequences were compared, name by name, with those of Lightning 2.6.6 under the same recording parties.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Callback

TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


def both(*hooks: str) -> list[str]:
    """Callback, then module."""
    return [party + hook for hook in hooks for party in ("cb.", "")]


def all_three(hook: str) -> list[str]:
    return ["cb." + hook, hook, "strategy." + hook]


SET_UP = [
    "strategy.connect", "configure_callbacks", "strategy.setup_environment", "dm.prepare_data", "prepare_data",
    "dm.setup", "cb.setup", "setup", "configure_model", "strategy.setup",
]  # fmt: skip
FIT_START = [*SET_UP, "configure_optimizers", *both("on_fit_start"), "zero_grad"]
EVALUATION_BATCH = {
    word: [*TRANSFER, *both(f"on_{word}_batch_start"), f"{word}_step", *both(f"on_{word}_batch_end")]
    for word in ("validation", "test", "predict")
}


def evaluation(word: str, batches: int = 1) -> list[str]:
    return [
        f"on_{word}_model_eval", *all_three(f"on_{word}_start"), *both(f"on_{word}_epoch_start"),
        *EVALUATION_BATCH[word] * batches, *both(f"on_{word}_epoch_end"), *all_three(f"on_{word}_end"),
    ]  # fmt: skip


SANITY = ["cb.on_sanity_check_start", "dm.val_dataloader", *evaluation("validation"), "cb.on_sanity_check_end"]
TRAIN_START = ["dm.train_dataloader", *all_three("on_train_start")]
BATCH_START = [*TRANSFER, *both("on_train_batch_start")]
BACKWARD = [*both("on_before_backward"), "backward", *both("on_after_backward")]
FIRST = ["training_step", *both("on_before_zero_grad"), "optimizer_zero_grad", *BACKWARD]
LATER = ["training_step", *BACKWARD]
OPTIMIZER = [*both("on_before_optimizer_step"), "configure_gradient_clipping", "clip_gradients"]
BATCH_END = both("on_train_batch_end")
VALIDATION = ["on_validation_model_zero_grad", "zero_grad", *evaluation("validation")]
TRAIN_END = [*both("on_train_epoch_end"), *all_three("on_train_end")]
FIT_END = ["strategy.teardown", *both("on_fit_end"), "dm.teardown", "cb.teardown", "teardown"]


@pytest.fixture
def parties(recorded: Any, validated: Any) -> Any:
    class Scheduled(validated):  # type: ignore[misc]
        fail_with: BaseException | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fail_with is not None and batch_idx == 1:
                raise self.fail_with
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return recorded(Scheduled)


def fit(parties: Any, make_trainer: Any, **arguments: Any) -> list[str]:
    trainer = make_trainer(
        **{
            "callbacks": [parties.callback], "strategy": parties.strategy, "limit_train_batches": 2,
            "limit_val_batches": 1, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0, **arguments,
        }
    )  # fmt: skip
    trainer.fit(parties.module, datamodule=parties.datamodule)
    calls: list[str] = parties.calls
    return calls


def test_fit_with_sanity_check_and_validation(parties: Any, make_trainer: Any) -> None:
    assert fit(parties, make_trainer) == [
        *FIT_START, *SANITY, *TRAIN_START, *both("on_train_epoch_start"),
        *BATCH_START, *FIRST, *OPTIMIZER, *BATCH_END,
        *BATCH_START, *FIRST, *OPTIMIZER, "lr_scheduler_step", *BATCH_END, *VALIDATION,
        *TRAIN_END, *FIT_END,
    ]  # fmt: skip


def test_a_fit_that_resumes_at_an_epochs_end_makes_the_validation_loader_in_the_sanity_check(
    parties: Any, make_trainer: Any, tmp_path: Any
) -> None:
    class Saver(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    fit(parties, make_trainer, callbacks=[Saver()])
    parties.calls.clear()
    trainer = make_trainer(callbacks=[parties.callback], max_epochs=2, num_sanity_val_steps=1, limit_val_batches=1)
    trainer.fit(parties.module, datamodule=parties.datamodule, ckpt_path=tmp_path / "end.ckpt")
    made, of_sanity = parties.calls.index("dm.val_dataloader"), parties.calls.index("cb.on_sanity_check_start")
    assert made == of_sanity + SANITY.index("dm.val_dataloader")
    assert parties.calls.count("dm.val_dataloader") == 1


def test_without_sanity_check_the_validation_loader_is_made_for_its_validation(parties: Any, make_trainer: Any) -> None:
    calls = fit(parties, make_trainer, num_sanity_val_steps=0)
    assert "cb.on_sanity_check_start" not in calls
    assert calls[calls.index("zero_grad") + 1 :][:2] == ["dm.train_dataloader", "cb.on_train_start"]
    made = calls.index("dm.val_dataloader")
    assert calls.index("on_train_batch_end") < made < calls.index("cb.on_validation_start")


def test_t12_accumulation_zeroes_on_the_first_and_steps_on_the_last_batch(parties: Any, make_trainer: Any) -> None:
    assert fit(parties, make_trainer, accumulate_grad_batches=2) == [
        *FIT_START, *SANITY, *TRAIN_START, *both("on_train_epoch_start"),
        *BATCH_START, *FIRST, *BATCH_END,
        *BATCH_START, *LATER, *OPTIMIZER, "lr_scheduler_step", *BATCH_END, *VALIDATION,
        *TRAIN_END, *FIT_END,
    ]  # fmt: skip


def test_validation_inside_the_epoch(parties: Any, make_trainer: Any) -> None:
    calls = fit(parties, make_trainer, limit_train_batches=4, val_check_interval=2)
    batch = [*BATCH_START, *FIRST, *OPTIMIZER]
    start = calls.index("cb.on_train_epoch_start")
    assert calls[start:] == [
        *both("on_train_epoch_start"), *batch, *BATCH_END, *batch, *BATCH_END, *VALIDATION,
        *batch, *BATCH_END, *batch, "lr_scheduler_step", *BATCH_END, *VALIDATION, *TRAIN_END, *FIT_END,
    ]  # fmt: skip


def test_validation_while_accumulating_keeps_the_gradients(parties: Any, make_trainer: Any) -> None:
    calls = fit(parties, make_trainer, limit_train_batches=4, val_check_interval=2, accumulate_grad_batches=4)
    first, last = [i for i, call in enumerate(calls) if call == "on_validation_model_eval"][1:]
    assert calls[first - 1] == "on_train_batch_end"
    assert calls[last - 2 : last] == ["on_validation_model_zero_grad", "zero_grad"]


def test_two_epochs(parties: Any, make_trainer: Any) -> None:
    calls = fit(parties, make_trainer, max_epochs=2, limit_train_batches=1)
    epoch = [
        *both("on_train_epoch_start"), *BATCH_START, *FIRST, *OPTIMIZER, "lr_scheduler_step", *BATCH_END,
        *VALIDATION, *both("on_train_epoch_end"),
    ]  # fmt: skip
    assert calls == [*FIT_START, *SANITY, *TRAIN_START, *epoch, *epoch, *all_three("on_train_end"), *FIT_END]


def test_an_overridden_optimizer_step_holds_the_batch_in_its_closure(
    recorded: Any, validated: Any, make_trainer: Any
) -> None:
    class Own(validated):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            parties.calls.append("optimizer_step begins")
            optimizer.step(closure=optimizer_closure)
            parties.calls.append("optimizer_step ends")

    parties = recorded(Own)
    calls = fit(parties, make_trainer, limit_train_batches=1)
    begin, end = calls.index("optimizer_step begins"), calls.index("optimizer_step ends")
    assert calls[begin + 1 : end] == [*FIRST, *OPTIMIZER]
    assert calls[begin - 1] == "on_train_batch_start"
    assert calls[end + 1] == "cb.on_train_batch_end"


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("broken"), RuntimeError), (KeyboardInterrupt(), SystemExit)]
)
def test_an_exception_or_ctrl_c_tells_everybody_then_tears_down(
    parties: Any, make_trainer: Any, error: BaseException, raised: type[BaseException]
) -> None:
    parties.module.fail_with = error
    with pytest.raises(raised) as caught:
        fit(parties, make_trainer)
    assert parties.calls == [
        *FIT_START, *SANITY, *TRAIN_START, *both("on_train_epoch_start"),
        *BATCH_START, *FIRST, *OPTIMIZER, *BATCH_END,
        *BATCH_START, "training_step",
        "cb.on_exception", "dm.on_exception", "strategy.on_exception", "strategy.teardown",
    ]  # fmt: skip
    if raised is SystemExit:
        assert caught.value.code == 130  # type: ignore[attr-defined]


def test_t58_an_exception_before_anything_is_built(parties: Any, make_trainer: Any) -> None:
    def broken() -> None:
        raise RuntimeError("no download")

    parties.datamodule.prepare_data = broken
    with pytest.raises(RuntimeError, match="no download"):
        fit(parties, make_trainer)
    assert parties.calls == [
        *SET_UP[:3], "cb.on_exception", "dm.on_exception", "strategy.on_exception", "strategy.teardown",
    ]  # fmt: skip


def test_a_failing_exception_hook_does_not_hide_the_exception(parties: Any, make_trainer: Any) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("while cleaning up")

    parties.module.fail_with = RuntimeError("the first")
    parties.callback.on_exception = broken
    with (
        pytest.warns(UserWarning, match="while cleaning up"),
        pytest.raises(RuntimeError, match="the first"),
    ):
        fit(parties, make_trainer)
    assert parties.calls[-3:] == ["dm.on_exception", "strategy.on_exception", "strategy.teardown"]


@pytest.mark.parametrize(("stage", "word"), [("validate", "validation"), ("test", "test")])
def test_validate_and_test(parties: Any, make_trainer: Any, stage: str, word: str) -> None:
    trainer = make_trainer(
        callbacks=[parties.callback], strategy=parties.strategy, limit_val_batches=2, limit_test_batches=2
    )
    getattr(trainer, stage)(parties.module, datamodule=parties.datamodule, verbose=False)
    loader = {"validate": "dm.val_dataloader", "test": "dm.test_dataloader"}[stage]
    assert parties.calls == [
        *SET_UP, "zero_grad", loader, *evaluation(word, batches=2), "strategy.teardown",
        "dm.teardown", "cb.teardown", "teardown",
    ]  # fmt: skip


def test_predict(parties: Any, make_trainer: Any) -> None:
    type(parties.module).forward = lambda self, batch: self.net(batch[0])
    trainer = make_trainer(callbacks=[parties.callback], strategy=parties.strategy, limit_predict_batches=2)
    trainer.predict(parties.module, datamodule=parties.datamodule)
    assert parties.calls == [
        *SET_UP, "zero_grad", "dm.predict_dataloader", *evaluation("predict", batches=4), "strategy.teardown",
        "dm.teardown", "cb.teardown", "teardown",
    ]  # fmt: skip


def test_t19_manual_optimization(recorded: Any, regression: Any, make_trainer: Any) -> None:
    class Manual(regression):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    step = ["training_step", "manual_backward", *BACKWARD, *both("on_before_optimizer_step")]
    arguments = {"gradient_clip_val": None, "limit_val_batches": 0}
    assert fit(recorded(Manual), make_trainer, **arguments) == [
        *FIT_START, *TRAIN_START, *both("on_train_epoch_start"),
        *(BATCH_START + step + BATCH_END) * 2, *TRAIN_END, *FIT_END,
    ]  # fmt: skip


def test_t49_a_module_that_returns_minus_one_ends_the_epoch_with_its_hooks(
    recorded: Any, validated: Any, make_trainer: Any
) -> None:
    class Skips(validated):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    parties = recorded(Skips)
    calls = fit(parties, make_trainer)
    assert calls.count("training_step") == 2 - 1
    start = calls.index("cb.on_train_batch_end")
    assert calls[start:] == [*BATCH_END, *BATCH_START, *TRAIN_END, *FIT_END]


def test_t49_zero_epochs_or_steps_run_nothing_but_set_up_and_teardown(parties: Any, make_trainer: Any) -> None:
    assert fit(parties, make_trainer, max_epochs=0) == [*FIT_START, *FIT_END]


def test_monitoring_callbacks_see_what_the_module_logs_when_the_epoch_ends(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    from drivetrain import Callback

    seen: dict[str, list[str]] = {}

    class Watches(Callback):
        def __init__(self, monitors: bool) -> None:
            self.monitors = monitors

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen["monitoring" if self.monitors else "plain"] = sorted(trainer.callback_metrics)

    class Logs(regression):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log("late", 1.0)

    make_trainer(callbacks=[Watches(True), Watches(False)]).fit(Logs(), loader)
    assert seen == {"plain": [], "monitoring": ["late"]}


def test_a_transfer_hook_runs_right_before_its_batch_also_when_the_batch_was_fetched_ahead(
    regression: Any, make_trainer: Any
) -> None:
    events: list[str] = []

    class Endless:
        def __iter__(self) -> Any:
            for index in range(3):
                events.append(f"fetch {index}")
                yield torch.ones(2, 4), torch.ones(2, 1)

    class Hooked(regression):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            events.append("transfer")
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            events.append(f"step {batch_idx}")
            return super().training_step(batch, batch_idx)

    make_trainer().fit(Hooked(), Endless())
    assert events == [
        "fetch 0", "fetch 1", "transfer", "step 0", "fetch 2", "transfer", "step 1", "transfer", "step 2",
    ]  # fmt: skip
