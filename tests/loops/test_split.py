"""``Trainer(split_on_oom=True)`` with one process; out-of-memory errors are injected."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision


class Net(LightningModule):
    """Raises an out-of-memory error in a phase, wherever more samples than ``fits`` come at once."""

    def __init__(self, fits: int = 1000, phase: str = "forward", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.fits, self.phase = fits, phase
        self.sizes: list[int] = []
        self.validated: list[int] = []
        self.fails_in_validation = False

    def check(self, phase: str, samples: int) -> None:
        if phase == self.phase and samples > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.check("forward", len(x))
        self.sizes.append(len(x))
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.samples = len(x)
        if loss.requires_grad:
            loss.register_hook(lambda grad: self.check("backward", self.samples))
        return {"loss": loss, "x": x.sum(1)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(len(batch[0]))
        if self.fails_in_validation:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(40)]
    return DataLoader(data, batch_size=8)  # type: ignore[arg-type]


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in (*module.parameters(), *module.buffers())])


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1, "precision": "64-true"}],
    ids=["plain", "accumulated", "clipped"],
)
def test_gradients_and_logs_equal_those_of_the_whole_batch(
    phase: str, arguments: Any, loader: DataLoader[Any], make_trainer: Any, caplog: Any
) -> None:
    plain, split = Net(), Net(fits=3, phase=phase)
    expected = make_trainer(max_epochs=2, limit_val_batches=0, **arguments)
    expected.fit(plain, loader)
    trainer = make_trainer(max_epochs=2, limit_val_batches=0, split_on_oom=True, **arguments)
    with caplog.at_level(logging.WARNING):
        trainer.fit(split, loader)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-4, atol=1e-5)
    assert trainer.global_step == expected.global_step
    assert max(split.sizes[-8:]) <= 3
    for name in ("loss_step", "loss_epoch"):
        torch.testing.assert_close(trainer.callback_metrics[name], expected.callback_metrics[name])
    lines = [record.message for record in caplog.records if "micro-batches" in record.message]
    assert len(lines) == 2  # into 2, and into 4, and then no more
    assert "in epoch 0, batch 0: from here on, each batch runs in 2 micro-batches of at most 4 samples" in lines[0]
    assert "in 4 micro-batches of at most 2 samples" in lines[1]


def test_a_window_whose_last_batch_fails_runs_again_as_a_whole(loader: DataLoader[Any], make_trainer: Any) -> None:
    class Late(Net):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            self.phase = "forward" if self.calls >= 3 else ""
            return super().training_step(batch, batch_idx)

    plain, split = Net(), Late(fits=4)
    make_trainer(limit_val_batches=0, accumulate_grad_batches=3).fit(plain, loader)
    make_trainer(limit_val_batches=0, accumulate_grad_batches=3, split_on_oom=True).fit(split, loader)
    assert split.sizes[:2] == [8, 8]
    assert split.sizes[2:8] == [4] * 6
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-4, atol=1e-5)


def test_without_an_error_nothing_differs_by_a_bit(loader: DataLoader[Any], make_trainer: Any) -> None:
    plain, split = Net(dropout=0.5), Net(dropout=0.5)
    for module, on in ((plain, False), (split, True)):
        torch.manual_seed(3)
        make_trainer(limit_val_batches=0, max_epochs=2, split_on_oom=on).fit(module, loader)
    assert torch.equal(weights(plain), weights(split))
    assert split.sizes == [8] * 10


def test_without_the_argument_the_error_ends_the_fit(loader: DataLoader[Any], make_trainer: Any) -> None:
    """Negative control."""
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(limit_val_batches=0).fit(Net(fits=3), loader)


def test_batch_norm_and_metrics_forget_the_attempts_that_failed(loader: DataLoader[Any], make_trainer: Any) -> None:
    class Counts(Net):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += len(batch[0])
            return super().training_step(batch, batch_idx)

    module = Counts(fits=3, phase="backward")
    make_trainer(limit_val_batches=0, max_epochs=1, split_on_oom=True).fit(module, loader)
    assert module.seen == 40


def test_one_sample_that_does_not_fit_ends_the_fit_and_says_so(loader: DataLoader[Any], make_trainer: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        make_trainer(limit_val_batches=0, split_on_oom=True).fit(Net(fits=0), loader)
    if hasattr(error.value, "__notes__"):
        assert any("a micro-batch is one sample" in note for note in error.value.__notes__)


def test_an_error_in_validation_never_shrinks_the_training_batch(loader: DataLoader[Any], make_trainer: Any) -> None:
    class Caught(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            try:
                super().validation_step(batch, batch_idx)
            except torch.OutOfMemoryError:
                return

    module = Caught()
    module.fails_in_validation = True
    make_trainer(limit_val_batches=1.0, max_epochs=2, split_on_oom=True).fit(module, loader, loader)
    assert set(module.sizes) == {8}
    uncaught = Net()
    uncaught.fails_in_validation = True
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(limit_val_batches=1.0, num_sanity_val_steps=0, split_on_oom=True).fit(uncaught, loader, loader)
    assert set(uncaught.sizes) == {8}
    assert uncaught.validated == [8]  # and it is not run again


@pytest.mark.parametrize("scales", [False, True])
def test_a_precision_of_ones_own_makes_the_steps(scales: bool, loader: DataLoader[Any], make_trainer: Any) -> None:
    class Own(Precision):
        scales_loss = scales
        steps = 0

        def scale(self, loss: Any) -> Any:
            return loss * 2 if scales else loss

        def unscale_gradients(self, optimizer: Any) -> None:
            for parameter in self.main_params(optimizer):
                parameter.grad /= 2

        def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().optimizer_step(optimizer, *args, **kwargs)

    plain, module, own = Net(), Net(fits=4), Own()
    make_trainer(limit_val_batches=0).fit(plain, loader)
    make_trainer(limit_val_batches=0, split_on_oom=True, plugins=[own]).fit(module, loader)
    assert own.steps == len(loader)
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [False, True])
def test_an_optimizer_step_without_memory_is_repeated_if_nothing_was_changed(
    changes: bool, loader: DataLoader[Any], make_trainer: Any, caplog: Any
) -> None:
    class Fails(torch.optim.Adam):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 2:
                if changes:
                    with torch.no_grad():
                        self.param_groups[0]["params"][0].add_(1)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().step(closure)

    class OwnOptimizer(Net):
        def configure_optimizers(self) -> Any:
            return Fails(self.parameters(), lr=0.01)

    plain, module = Net(), OwnOptimizer()
    make_trainer(limit_val_batches=0).fit(plain, loader)
    trainer = make_trainer(limit_val_batches=0, split_on_oom=True)
    if changes:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(module, loader)
        return
    trainer.fit(module, loader)
    assert torch.equal(weights(module), weights(plain))
    assert trainer.global_step == 5
    assert "The optimizer step ran out of memory before it had changed anything" in caplog.text


def test_outputs_for_hooks_are_those_of_the_batch(loader: DataLoader[Any], make_trainer: Any) -> None:
    seen: list[Any] = []

    class Watches(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["x"].shape, outputs["loss"].ndim))

    make_trainer(limit_val_batches=0, split_on_oom=True).fit(Watches(fits=2), loader)
    assert set(seen) == {(torch.Size([8]), 0)}


class ByHand(Net):
    automatic_optimization = False


class OwnStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        return super().optimizer_step(*args, **kwargs)


class Fetches(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ByHand, {}, "ByHand optimizes manually"),
        (OwnStep, {}, "OwnStep has an optimizer_step"),
        (Fetches, {}, "fetches them itself"),
        (Net, {"strategy": "dp"}, "does not work with DataParallelStrategy. It works with one device, DDP and FSDP"),
        (Net, {"sync_batchnorm": True}, "batch norm over all processes would wait"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_built(
    kind: Any, arguments: Any, message: str, loader: DataLoader[Any], make_trainer: Any
) -> None:
    module = kind()
    module.configure_model = lambda: pytest.fail("built")
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(limit_val_batches=0, split_on_oom=True, **arguments).fit(module, loader)


def test_an_optimizer_with_a_closure_is_refused(loader: DataLoader[Any], make_trainer: Any) -> None:
    class ByLBFGS(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss several times"):
        make_trainer(limit_val_batches=0, split_on_oom=True).fit(ByLBFGS(), loader)


def test_a_weighted_loss_is_refused(loader: DataLoader[Any], make_trainer: Any) -> None:
    from drivetrain.module import WeightedLoss

    class Weighted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WeightedLoss(super().training_step(batch, batch_idx)["loss"], 8)

    with pytest.raises(ConfigurationError, match="returned a WeightedLoss"):
        make_trainer(limit_val_batches=0, split_on_oom=True).fit(Weighted(), loader)


def test_a_batch_size_finder_sees_what_does_not_fit(make_trainer: Any) -> None:
    from drivetrain.callbacks import BatchSizeFinder

    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            data = [(torch.ones(4), torch.ones(1)) for _ in range(64)]
            return DataLoader(data, batch_size=self.batch_size)  # type: ignore[arg-type]

    module = Sized(fits=8)
    make_trainer(
        limit_val_batches=0, split_on_oom=True, callbacks=BatchSizeFinder(mode="power", init_val=2, steps_per_trial=1)
    ).fit(module)
    assert module.batch_size == 8
    assert set(module.sizes[-8:]) == {8}


def test_a_step_that_is_bound_again_inside_a_window_still_knows_its_batches(
    loader: DataLoader[Any], make_trainer: Any
) -> None:
    class Rebinds(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.current_run.mark_stale()
            self.fits = 4 if batch_idx == 1 else 1000

    plain, split = Net(), Rebinds()
    make_trainer(limit_val_batches=0, accumulate_grad_batches=3).fit(plain, loader)
    make_trainer(limit_val_batches=0, accumulate_grad_batches=3, split_on_oom=True).fit(split, loader)
    assert split.sizes[:8] == [8, 8, 4, 4, 4, 4, 4, 4]
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-4, atol=1e-5)
