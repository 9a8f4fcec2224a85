"""The example of a strategy with error feedback, against a loop that holds the residuals of both ranks itself."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.sharded import near, token_data
from tests.distributed.test_fsdp2 import Scaled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Callback, Engine, Trainer, WeightedLoss
from drivetrain.callbacks import LambdaCallback, OnExceptionCheckpoint
from drivetrain.precision import MixedPrecision

EXAMPLE = Path(__file__).parents[2] / "examples" / "rounded_gradients.py"
RANKS, BATCH, BATCHES, EPOCHS = 2, 4, 6, 2  # samples of a rank's batch
CLIP = 0.5
SCALER = {"init_scale": 2.0**16, "growth_interval": 2}  # steps overflow, and the scale falls and grows


def strategy(**arguments: Any) -> Any:
    """What the documentation shows, from its own file."""
    if "rounded_gradients" not in sys.modules:
        spec = importlib.util.spec_from_file_location("rounded_gradients", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["rounded_gradients"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["rounded_gradients"].RoundedGradients(**arguments)


def by_hand(weighted: bool, accumulate: int, mixed: bool, feedback: bool = True) -> dict[str, Any]:
    """Train both ranks in this process. Residuals are parts of gradients as the optimizer gets them.

    Args:
        weighted: whether losses have weights.
        accumulate: batches of a window.
        mixed: whether the precision is "16-mixed"; else it is "64-true".
        feedback: without it, what rounding loses is lost.
    """
    module = Scaled(weighted).to(torch.float32 if mixed else torch.float64)
    optimizer, parameters = module.configure_optimizers(), list(module.parameters())
    scaler = torch.amp.GradScaler("cpu", **SCALER, enabled=mixed)
    residuals, skipped = [torch.zeros(()), torch.zeros(())], 0
    x, y, tokens = token_data(RANKS * BATCH * BATCHES).tensors
    batches = list(zip(*(each.split(BATCH) for each in (x, y, tokens)), strict=True))
    of_rank = [batches[rank::RANKS] for rank in range(RANKS)]
    for _ in range(EPOCHS):
        for first in range(0, BATCHES, accumulate):
            windows = [batches[first : first + accumulate] for batches in of_rank]
            counts = [[float(batch[2].sum()) for batch in window] for window in windows]
            largest, total = max(map(max, counts)), sum(map(sum, counts))
            factor = RANKS * largest / total if weighted else accumulate / len(windows[0])
            unit, received, complete = factor / scaler.get_scale(), [], []
            for rank, window in enumerate(windows):
                optimizer.zero_grad()
                for (*inputs, count), weight in zip(window, counts[rank], strict=True):
                    dtype = parameters[0].dtype
                    with torch.autocast("cpu", torch.float16) if mixed else nullcontext():
                        loss = module.training_step([*(each.to(dtype) for each in inputs), count], 0)
                    loss = loss.loss * (weight / largest) if isinstance(loss, WeightedLoss) else loss / accumulate
                    scaler.scale(loss).backward()
                gradient = torch.cat([each.grad.flatten() for each in parameters])
                complete.append(gradient + residuals[rank] / unit)
                received.append(complete[-1].bfloat16())
            mean = torch.stack(received).to(complete[0].dtype).mean(0)
            if mean.isfinite().all() and feedback:
                residuals = [(each - sent) * unit for each, sent in zip(complete, received, strict=True)]
            skipped += not bool(mean.isfinite().all())
            for parameter, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            scaler.unscale_(optimizer)
            for parameter in parameters:
                parameter.grad.mul_(factor)
            nn.utils.clip_grad_norm_(parameters, CLIP)
            scaler.step(optimizer)
            scaler.update()
    return {"weights": weights_of(module), "skipped": skipped}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def loader() -> Any:
    return DataLoader(token_data(RANKS * BATCH * BATCHES), batch_size=BATCH)


def precision(mixed: bool) -> dict[str, Any]:
    if mixed:
        return {"plugins": [MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", **SCALER))]}
    return {"precision": "64-true"}


def by_trainer(weighted: bool, accumulate: int, mixed: bool) -> dict[str, Tensor]:
    module = Scaled(weighted)
    Trainer(
        strategy=strategy(), accelerator="cpu", devices=RANKS, max_epochs=EPOCHS, accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **precision(mixed),
    ).fit(module, loader(), loader())  # fmt: skip
    return weights_of(module)


def by_engine(weighted: bool, accumulate: int, mixed: bool) -> dict[str, Tensor]:
    engine = Engine(strategy=strategy(), accelerator="cpu", devices=RANKS, **precision(mixed))
    engine.launch()
    module = Scaled()
    model, optimizer = engine.setup(module, module.configure_optimizers())
    batches = engine.setup_dataloaders(loader())
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, 1):
            with engine.no_backward_sync(model, enabled=number % accumulate > 0):
                engine.backward(model.training_step(batch, number) / accumulate)
            if number % accumulate == 0:
                engine.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(module)


CASES = {
    "plain": (False, 4, False),
    "weighted": (True, 4, False),
    "mixed": (False, 2, True),
    "weighted, mixed": (True, 1, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trainer_trains_as_written_by_hand(pool: Any, case: tuple[bool, int, bool]) -> None:
    expected = by_hand(*case)
    assert (expected["skipped"] > 0) == case[2]
    for rank in pool.run(by_trainer, *case, group=False):
        compare(rank, expected["weights"], case[2])


@pytest.mark.parametrize("mixed", [False, True])
def test_an_engine_trains_as_written_by_hand(pool: Any, mixed: bool) -> None:
    expected = by_hand(False, 2, mixed)["weights"]
    for rank in pool.run(by_engine, False, 2, mixed, group=False):
        compare(rank, expected, mixed)


def test_error_feedback_is_seen() -> None:
    """The control: without the residuals the weights are others."""
    with pytest.raises(AssertionError, match="not close"):
        near(by_hand(True, 4, False, feedback=False)["weights"], by_hand(True, 4, False)["weights"])


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], mixed: bool) -> None:
    if mixed:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        near(found, expected)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_after_an_exception_a_run_resumes_with_the_residual_of_the_windows_start(tmp_path: Path, hook: str) -> None:
    def trained(fails: bool = False, ckpt_path: Path | None = None) -> tuple[list[Tensor], Tensor]:
        def fail(trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and trainer.progress.batch_idx % 2:
                raise RuntimeError("planted")

        module, own = Scaled(weighted=False), strategy()
        callbacks: list[Callback] = [OnExceptionCheckpoint(tmp_path)]
        callbacks += [LambdaCallback(**{hook: fail})] if fails else []
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=own, max_epochs=2, accumulate_grad_batches=2, logger=False,
            callbacks=callbacks, enable_progress_bar=False, default_root_dir=tmp_path, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, DataLoader(token_data(BATCH * BATCHES), batch_size=BATCH), ckpt_path=ckpt_path)
        return [each.detach() for each in module.parameters()], own.residuals[module]

    whole, residual = trained()
    with pytest.raises(RuntimeError, match="planted"):
        trained(fails=True)
    resumed, other = trained(ckpt_path=tmp_path / "on_exception.ckpt")
    assert all(map(torch.equal, whole, resumed))
    assert torch.equal(residual, other)
    assert residual.any()
