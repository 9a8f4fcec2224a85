"""``Trainer(plan_check="warn")`` on simulated devices, which count the memory of tensors."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.distributed.pool import free_port
from tests.forecast.comparing import copied
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule
from drivetrain.accelerators import CPUAccelerator
from drivetrain.errors import ConfigurationError
from drivetrain.forecast.check import PlanCheck
from drivetrain.testing import FakeAccelerator

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
SIZE = 300 * 2**20


def memory() -> Tensor:
    """Memory of a device that is never written to."""
    return torch.empty(SIZE // 4, device=torch.device("cpu", 0))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(100, 400), nn.Dropout(0.1), nn.Linear(400, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = batch[0].nonzero()
        return super().training_step(batch, batch_idx) + len(kept)


class Keeps(Callback):
    """Holds memory that the plan does not know."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = memory()


class KeepsActivations(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers.register_forward_hook(lambda *_: setattr(self, "kept", memory()))

    def on_after_backward(self, *_: Any) -> None:
        self.kept = None


class TakesForAMoment(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: len(memory()) and None)


def data() -> Any:
    return DataLoader(TensorDataset(torch.ones(48, 100)), batch_size=8)


def fitted(make_trainer: Callable[..., Any], module: Any = None, **arguments: Any) -> tuple[list[Tensor], Tensor]:
    """Return the weights after a fit, and the random state."""
    torch.manual_seed(0)
    module = module or Net()
    with FakeAccelerator.recording():
        make_trainer(accelerator="fake", devices=1, **arguments).fit(module, data())
    return [each.detach() for each in module.parameters()], torch.get_rng_state()


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "drivetrain")
    return lambda: [text for text in caplog.messages if "plan_check" in text]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_the_plan_and_the_device_agree(
    options: dict[str, Any], make_trainer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    plain = fitted(make_trainer, **options)
    assert said() == []
    checked = fitted(make_trainer, plan_check="warn", **options)
    (line,) = said()
    planned, reported = (float(line.split(before)[1].split(" MiB")[0]) for before in ("tensors is ", "reported "))
    assert planned == pytest.approx(reported, rel=0.01)
    assert all(map(torch.equal, plain[0], checked[0]))
    assert torch.equal(plain[1], checked[1])


@pytest.mark.parametrize(
    ("callback", "kind"),
    [
        (Keeps(), "what is kept between steps"),
        (KeepsActivations(), "probably activations, or temporary"),
        (TakesForAMoment(), "probably temporary tensors of the optimizer's step"),
    ],
)
def test_what_differs_is_named(callback: Callback, kind: str, make_trainer: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match=rf"plan's peak of tensors is .* MiB, and cpu:0 reported 0.29 GiB .*{kind}"):
        fitted(make_trainer, callbacks=[callback], plan_check="warn")


@pytest.mark.parametrize(
    ("module", "options", "why"),
    [
        (Reads(), {}, "the plan failed: .* needs the values of a tensor, for aten.nonzero"),
        (Net(), {"max_steps": 1}, "training ended before its second optimizer step"),
    ],
)
def test_without_a_plan_nothing_is_compared(
    module: Any, options: dict[str, Any], why: str, make_trainer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    fitted(make_trainer, module, plan_check="warn", **options)
    (line,) = said()
    assert line.startswith("plan_check compares nothing")
    assert re.search(why, line)


def test_a_device_without_statistics(make_trainer: Callable[..., Any], said: Callable[[], list[str]]) -> None:
    make_trainer(plan_check="warn").fit(Net(), data())
    assert said() == ["plan_check compares nothing: CPUAccelerator reports no memory of tensors on cpu."]


def test_the_copy_ends_with_a_run_that_fails(make_trainer: Callable[..., Any]) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("fails")

    before = set(children())
    trainer = make_trainer(accelerator="fake", devices=1, plan_check="warn")
    with FakeAccelerator.recording(), pytest.raises(KeyError, match="fails"):
        trainer.fit(Fails(), data())
    (check,) = [each for each in trainer.callbacks if isinstance(each, PlanCheck)]
    assert check._copy is None
    assert set(children()) <= before


class Counting(CPUAccelerator):
    """Says what a device may say."""

    def memory_allocated(self, device: torch.device) -> int | None:
        return SIZE

    def max_memory_allocated(self, device: torch.device) -> int | None:
        return SIZE

    def reset_peak_memory(self, device: torch.device) -> None:
        pass


@LONG
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_zero_of_two_compares(strategy: str, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Its copy leaves the process group to the ranks."""
    copies = []
    port = str(free_port())

    def run() -> None:
        trainer = make_trainer(accelerator=Counting(), devices=2, strategy=strategy, plan_check="warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Net(), data())
        (tmp_path / f"said{trainer.global_rank}").write_text("\n".join(str(each.message) for each in caught))

    for rank in ("0", "1"):
        job = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        copies.append(copied(run, tmp_path / f"log{rank}", **job))
    assert [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in copies] == [0, 0]
    first, second = ((tmp_path / f"said{rank}").read_text() for rank in range(2))
    assert "plan_check: the plan's peak of tensors is" in first, first
    assert "plan_check" not in second


def test_other_values_are_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"plan_check='yes'.*'warn', None.*plan_check='warn'"):
        make_trainer(plan_check="yes")
