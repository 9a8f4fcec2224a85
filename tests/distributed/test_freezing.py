"""Parameters that freeze or thaw anywhere in a fit train on two ranks as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, FSDPStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*(frozen|no gradient has reached)")


def _averaged() -> DDPStrategy:
    """Each rank trains by itself, and parameters are averaged after every second step."""
    state = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    hook = post_localSGD_hook.post_localSGD_hook
    return DDPStrategy(find_unused_parameters=True, ddp_comm_state=state, ddp_comm_hook=hook, model_averaging_period=2)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "averaged": _averaged,
    "ddp": lambda: "ddp",
    "unused": lambda: "ddp_find_unused_parameters_true",
    "view": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
    "horovod": lambda: "horovod",
    "fsdp": lambda: "fsdp",
    "fsdp by window": lambda: FSDPStrategy(gradient_exchange="window"),
}


class Net(LightningModule):
    """``changes``: at which batches of the fit, counted from 0, the middle layer thaws, and freezes again."""

    def __init__(self, changes: dict[int, bool], hook: str, used_until: int = 99, swaps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.spare = nn.Linear(4, 1)
        self.changes, self.hook, self.used_until, self.swaps = changes, hook, used_until, swaps
        self.change(-1)

    def change(self, batch: int) -> None:
        if batch in self.changes:
            self.net[2].requires_grad_(self.changes[batch])
            if self.swaps:
                self.net[0].requires_grad_(not self.changes[batch])

    def on_train_epoch_start(self) -> None:
        if self.hook == "epoch":
            self.change(self.current_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hook == "start":
            self.change(batch_idx + 8 * self.current_epoch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "end":
            self.change(batch_idx + 8 * self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        if batch_idx % 4 < self.used_until:
            output = output + self.spare(batch[0])
        return nn.functional.mse_loss(output, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


class Saves(Callback):
    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(name: str, module: Net, accumulate: int = 4, resume: Path | None = None, **arguments: Any) -> Any:
    """The parameters after two epochs of eight batches."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    trainer = Trainer(
        accelerator="cpu", devices=2 if name else 1, strategy=STRATEGIES[name]() if name else "auto",
        precision="64-true", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, split_batches=bool(name), **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    shards: list[Any] = [*module.parameters()]
    return torch.cat(
        [(each.full_tensor() if hasattr(each, "full_tensor") else each).detach().flatten() for each in shards]
    )


def fit_new(name: str, net: Any, arguments: Any, more: Any) -> Any:
    return fit(name, Net(*net), *arguments, **more)


def check(pool: Any, name: str, net: Any, *arguments: Any, **more: Any) -> None:
    expected = fit_new("", net, arguments, {})
    for found in pool.run(fit_new, name, net, arguments, more, group=False):
        assert torch.allclose(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("changes", "accumulate"), [({2: False}, 1), ({-1: False, 2: True, 3: False}, 2)], ids=["freezes", "thaws between"]
)
def test_what_freezes_between_two_averages_of_a_model_is_averaged_once_more(
    pool: Any, changes: dict[int, bool], accumulate: int
) -> None:
    net, last = (changes, "start"), {"max_steps": 3}  # an average follows the first step, and the last
    one, other = pool.run(fit_new, "averaged", net, (accumulate,), last, group=False)
    assert torch.equal(one, other)


INSIDE = {-1: False, 2: True, 6: False, 9: True}  # in windows of four batches


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("averaged", "ddp")])
def test_layers_thaw_and_freeze_inside_a_window(pool: Any, name: str, swaps: bool) -> None:
    check(pool, name, (INSIDE, "end", 99, swaps))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_they_do_where_gradients_are_exchanged_after_the_window(pool: Any, name: str) -> None:
    check(pool, name, (INSIDE, "end"), split_on_oom=True)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["ddp", "horovod"])
def test_layers_thaw_right_before_a_batch(pool: Any, name: str, accumulate: int) -> None:
    check(pool, name, ({-1: False, 2: True}, "start"), accumulate)
    check(pool, name, ({-1: False, 3: True}, "start"), accumulate)


def test_layers_freeze_and_thaw_between_epochs_under_plain_ddp(pool: Any) -> None:
    check(pool, "ddp", ({0: True, 1: False}, "epoch"), 3)


def frozen_inside() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit("ddp", Net({2: False}, "end"), 1)
    return str(caught.value)


def test_plain_ddp_names_what_was_frozen_in_the_middle_of_an_epoch(pool: Any) -> None:
    for message in pool.run(frozen_inside, group=False):
        assert "'net.2.weight', 'net.2.bias': frozen in the middle of an epoch" in message


def fit_twice(path: Path) -> Any:
    """A fit that is interrupted inside a window, whose rest does not use the spare layer."""
    fit("unused", Net({}, "", 2), callbacks=[Saves(1, path)])
    return fit("unused", Net({}, "", 2), resume=path)


def test_gradients_from_before_an_interruption_are_averaged_though_the_rest_of_the_window_adds_none(
    pool: Any, tmp_path: Path
) -> None:
    expected = fit("", Net({}, "", 2))
    for found in pool.run(fit_twice, tmp_path / "inside.ckpt", group=False):
        assert torch.allclose(found, expected, atol=1e-12, rtol=0)
