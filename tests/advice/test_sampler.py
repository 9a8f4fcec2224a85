"""Where the wall time of real fits goes, and why seeded ones are slow: eleven causes by name, none for healthy fits.

DRIVETRAIN_FAULTS=long runs the healthy fits for the time from which a Trainer gives a verdict.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.advice import sampler, verdict
from drivetrain.advice.time_spent import CAUSES, PARTS, TimeSpent
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.launchers import board
from drivetrain.loggers import CSVLogger, Logger
from drivetrain.testing import FakeAccelerator
from drivetrain.testing._machine import Machine

LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
NAP_S, STEPS = 0.02, 250 if LONG else 25  # of a seeded fit: each step naps in the seeded place


@pytest.fixture(autouse=True)
def _short_fits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if not (LONG and request.function is test_a_seeded_cause_is_named):
        monkeypatch.setattr(verdict, "SHORTEST_S", 0.2)
        monkeypatch.setattr(verdict, "FEWEST", 5)
        monkeypatch.setattr(sampler, "_EVERY_S", (0.02, 0.02))
    if request.node.name != "test_a_seeded_cause_is_named[cores]":  # others must not depend on how busy the machine is
        monkeypatch.setattr(sampler, "_core_wait_s", lambda file: 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a step of several threads takes tens of milliseconds on a machine that is loaded
    yield
    torch.set_num_threads(threads)


def nap(seconds: float = NAP_S) -> None:
    time.sleep(seconds)


class Net(LightningModule):
    def __init__(self, in_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.net, self.in_step = nn.Linear(4, 1), in_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.in_step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples(count: int, seed: int = 1) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


class SlowSamples(Dataset[Any]):
    def __init__(self, steps: int = STEPS, nap_s: float = NAP_S / 4, seed: int = 1) -> None:
        self.data, self.nap_s = samples(4 * steps, seed), nap_s

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        nap(self.nap_s)
        return self.data[index]


def loader(steps: int = STEPS) -> DataLoader[Any]:
    return DataLoader(samples(4 * steps), 4)


def fitted(make_trainer: Any, module: LightningModule, data: Any, *more: Any, **arguments: Any) -> TimeSpent:
    trainer = make_trainer(**arguments)
    trainer.fit(module, data, *more)
    assert trainer.time_spent is not None
    return trainer.time_spent  # type: ignore[no-any-return]


# ---- eleven seeded causes --------------------------------------------------------------------------------------------


def dataset(make_trainer: Any, _: Path, __: Any) -> TimeSpent:
    return fitted(make_trainer, Net(), DataLoader(SlowSamples(), 4))


def collate(make_trainer: Any, _: Path, __: Any) -> TimeSpent:
    def pad(rows: Any) -> Any:
        nap()
        return torch.utils.data.default_collate(rows)

    return fitted(make_trainer, Net(), DataLoader(samples(4 * STEPS), 4, collate_fn=pad))


class SlowRead:
    """``note_sync`` of simulated devices that work: the host waits. Its file is torch's, as if torch waited."""

    source = "def note_sync(machine, *given):\n    sleep(seconds)\n"

    def __init__(self) -> None:
        names = {"sleep": time.sleep, "seconds": NAP_S}
        exec(compile(self.source, torch.__file__, "exec"), names)
        self.function = names["note_sync"]


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss


def sync(make_trainer: Any, _: Path, monkeypatch: pytest.MonkeyPatch) -> TimeSpent:
    monkeypatch.setattr(Machine, "note_sync", SlowRead().function)
    with FakeAccelerator.recording():
        return fitted(make_trainer, Reads(), loader(), accelerator="fake", devices=1)


def launch(make_trainer: Any, _: Path, monkeypatch: pytest.MonkeyPatch) -> TimeSpent:
    monkeypatch.setattr(FakeAccelerator, "get_device_stats", lambda *_: {"utilization_percent": 15.0})
    return fitted(make_trainer, Net(nap), loader(), accelerator="fake", devices=1)


class SlowFiles(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        nap()
        super().save_checkpoint(*args, **kwargs)


def checkpoint(make_trainer: Any, folder: Path, _: Any) -> TimeSpent:
    saver = ModelCheckpoint(folder, every_n_train_steps=1)
    arguments = {"callbacks": saver, "enable_checkpointing": True, "plugins": SlowFiles()}
    return fitted(make_trainer, Net(), loader(), **arguments)


class Validates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        nap()


def validation(make_trainer: Any, _: Path, __: Any) -> TimeSpent:
    arguments = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    return fitted(make_trainer, Validates(), loader(), loader(1), **arguments)


class SlowTable(CSVLogger):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        nap()


def log(make_trainer: Any, folder: Path, _: Any) -> TimeSpent:
    return fitted(make_trainer, Net(), loader(), logger=SlowTable(folder), log_every_n_steps=1)


def memory(make_trainer: Any, _: Path, monkeypatch: pytest.MonkeyPatch) -> TimeSpent:
    kept: list[Tensor] = []

    def keep() -> None:
        kept.append(torch.ones(2**18))  # 1 MiB
        nap()

    if LONG:
        return fitted(make_trainer, Net(keep), loader(2 * STEPS))
    grown = itertools.count(2**30, 16 * 2**20)  # by look: a second in which the machine is busy changes nothing
    monkeypatch.setattr(sampler, "_host_memory", lambda: float(next(grown)))
    return fitted(make_trainer, Net(nap), loader(2 * STEPS))


def test_the_memory_of_the_host_is_what_this_process_has_taken() -> None:
    before = sampler._host_memory()
    kept = torch.ones(2**27)  # 512 MiB: what other tests give back meanwhile is less
    after = sampler._host_memory()
    assert before is not None
    assert after is not None
    assert after - before > kept.nbytes / 2


def slow_rank(folder: Path, where: str, slow: int) -> TimeSpent | None:
    """A fit of two ranks with a board, of which one is slow."""
    verdict.SHORTEST_S, verdict.FEWEST = 0.2, 5
    sampler._core_wait_s, sampler._EVERY_S = (lambda file: 0.0), (0.02, 0.02)  # however busy the machine is
    board.join_board(folder, int(os.environ["LOCAL_RANK"]))
    naps = [nap] * 2
    naps[1 - slow] = lambda *_: None
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    rank = trainer.global_rank
    data = DataLoader(SlowSamples(nap_s=NAP_S / 4 if where == "data" and rank == slow else 0.0, seed=rank), 4)
    try:
        trainer.fit(Net(naps[rank] if where == "compute" else lambda: None), data)
    finally:
        board._own.clear()
    return trainer.time_spent


def cores(make_trainer: Any, tmp_path: Path, monkeypatch: Any) -> TimeSpent:
    """Three processes compute on the one core that the fit may use."""
    if sys.platform != "linux":
        pytest.skip("how long a thread waits for a core is known on Linux alone")
    before = os.sched_getaffinity(0)
    spin = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        return fitted(make_trainer, Net(compute), DataLoader(samples(4 * STEPS), 4))
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, before)


def compute(seconds: float = NAP_S) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


SEEDS = {each.__name__: each for each in (dataset, collate, cores, sync, launch, checkpoint, validation, log, memory)}


@pytest.mark.parametrize("cause", SEEDS)
def test_a_seeded_cause_is_named(cause: str, make_trainer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    spent = SEEDS[cause](make_trainer, tmp_path, monkeypatch)
    assert spent.verdict is not None, spent
    assert spent.verdict.cause == cause, spent
    if cause == "sync":
        assert "test_sampler.py" in spent.verdict.text
        assert "in training_step: self.seen = loss.item()" in spent.verdict.text
    if cause in ("dataset", "collate"):  # the line that takes the time is in nap()
        assert "test_sampler.py" in spent.verdict.text


@pytest.mark.parametrize(("where", "slow"), [("data", 0), ("data", 1), ("compute", 1)])
def test_one_slow_rank_is_named(pool: Any, tmp_path: Path, where: str, slow: int) -> None:
    board.Board(tmp_path, [0, 1], 2)
    first, second = pool.run(slow_rank, tmp_path, where, slow, group=False)
    assert first.verdict is not None, first
    assert (first.verdict.cause, first.verdict.text[:6]) == (f"rank_{where}", f"Rank {slow}"), first
    assert sum(second.seconds.values()) == pytest.approx(second.wall_s)


def test_all_causes_are_seeded() -> None:
    assert {*SEEDS, "rank_data", "rank_compute"} == {*CAUSES}


def test_workers_that_are_started_in_each_epoch_are_not_a_slow_data_set(make_trainer: Any, monkeypatch: Any) -> None:
    start = _MultiProcessingDataLoaderIter._reset

    def slow_start(*given: Any, **more: Any) -> None:
        nap(0.5)
        start(*given, **more)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", slow_start)
    found = fitted(make_trainer, Net(), DataLoader(samples(8), 4, num_workers=1), max_epochs=3).verdict
    assert found is not None
    assert (found.cause, "persistent_workers=True" in found.advice) == ("dataset", True)


# ---- twenty healthy fits ---------------------------------------------------------------------------------------------


class Healthy(Net):
    """Computes for a few milliseconds in each step."""

    def __init__(self, width: int) -> None:
        super().__init__(lambda: nap(0.005))
        self.net: Any = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


class HealthyValidated(Healthy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("number", range(20))
def test_a_healthy_fit_has_no_verdict(number: int, make_trainer: Any, tmp_path: Path) -> None:
    steps = 600 if LONG else 50
    batch, width = (4, 16, 32)[number % 3], (8, 64, 256)[number // 3 % 3]
    arguments: dict[str, Any] = {
        "accumulate_grad_batches": 1 + number % 2 * 3, "logger": CSVLogger(tmp_path) if number % 4 < 2 else False,
        "log_every_n_steps": (10, 5)[number % 5 > 2],
        "enable_checkpointing": LONG and number % 3 == 0,  # one slow write is a large part of a short fit
        "gradient_clip_val": (None, 1.0)[number % 7 > 3], "precision": ("32-true", "bf16-mixed")[number % 6 == 5],
        "enable_progress_bar": number % 8 == 7,
    }  # fmt: skip
    data = DataLoader(samples(batch * steps), batch, shuffle=number % 2 == 0)
    more = [DataLoader(samples(5 * batch), batch)] if number % 2 else []
    spent = fitted(make_trainer, HealthyValidated(width) if more else Healthy(width), data, *more, **arguments)
    assert spent.verdict is None, spent
    assert spent.wall_s - spent.seconds["start"] > verdict.SHORTEST_S


# ---- the parts -------------------------------------------------------------------------------------------------------


class Phases(Callback):
    """Naps in a hook of each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        nap()


class InAllPhases(Validates):
    def backward(self, loss: Tensor) -> None:
        nap()
        loss.backward()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        nap()
        return batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        nap()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_parts_are_found_by_their_phase_and_add_up_to_the_wall_time(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        callbacks=[Phases(), ModelCheckpoint(tmp_path, every_n_train_steps=1)], plugins=SlowFiles(),
        enable_checkpointing=True, val_check_interval=1, limit_val_batches=1, logger=SlowTable(tmp_path),
        log_every_n_steps=1,
    )  # fmt: skip
    began_s = time.monotonic()
    trainer.fit(InAllPhases(nap), DataLoader(SlowSamples(15), 4), loader(1))
    wall_s, spent = time.monotonic() - began_s, trainer.time_spent
    assert tuple(spent.seconds) == PARTS
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s, rel=0.01)
    assert 0.8 * wall_s < spent.wall_s <= wall_s
    expected = {*PARTS} - {"restart"}
    assert {name for name, seconds in spent.seconds.items() if seconds > 5 * NAP_S or name == "start"} == expected


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_parameter("late", nn.Parameter(torch.ones(())))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch[0]).mean() * self.late
        loss.register_hook(lambda gradient: nap())
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_a_backward_pass_by_hand_is_backward(make_trainer: Any) -> None:
    spent = fitted(make_trainer, ByHand(), loader(20))
    assert spent.seconds["backward"] > 10 * NAP_S
    assert spent.seconds["forward"] < spent.seconds["backward"] / 2


def test_a_resumed_fit_restarts_and_a_new_one_starts(make_trainer: Any, tmp_path: Path) -> None:
    first = make_trainer(max_epochs=1)
    first.fit(Net(), loader(2))
    first.save_checkpoint(tmp_path / "one.ckpt")
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Net(), loader(2), ckpt_path=tmp_path / "one.ckpt")
    assert first.time_spent.seconds["start"] > 0 == first.time_spent.seconds["restart"]
    assert trainer.time_spent.seconds["restart"] > 0 == trainer.time_spent.seconds["start"]


# ---- the life of the measurement -------------------------------------------------------------------------------------


def sampling() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "drivetrain time"]


class Looks(Callback):
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.seen = fails, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append((trainer.time_spent, len(sampling())))
        if self.fails:
            raise RuntimeError("mine")


def test_it_can_be_read_during_the_fit_and_stays_after_other_runs(make_trainer: Any) -> None:
    looks = Looks()
    trainer = make_trainer(callbacks=looks)
    assert trainer.time_spent is None
    trainer.fit(Validates(), loader(3), loader(1))
    (first, threads), *_, (last, _) = looks.seen
    assert threads == 1
    assert not sampling()
    assert first.wall_s < last.wall_s < trainer.time_spent.wall_s
    spent = trainer.time_spent
    trainer.validate(Validates(), loader(1), verbose=False)
    assert trainer.time_spent is spent


def test_a_fit_that_fails_is_measured_until_then(make_trainer: Any) -> None:
    trainer = make_trainer(callbacks=Looks(fails=True))
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(Net(), loader(3))
    assert trainer.time_spent.wall_s > 0
    assert not sampling()


def test_barebones_measures_nothing() -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, barebones=True)
    trainer.fit(ByHand(), loader(2))
    assert trainer.time_spent is None


@pytest.mark.parametrize("bar", [True, False])
def test_the_verdict_is_the_last_line_of_a_fit(make_trainer: Any, caplog: pytest.LogCaptureFixture, bar: bool) -> None:
    caplog.set_level("INFO", "drivetrain")
    spent = fitted(make_trainer, Net(), DataLoader(SlowSamples(), 4), enable_progress_bar=bar)
    assert caplog.messages[-1] == str(spent.verdict)
    assert [each[:12] for each in caplog.messages[-2:-1]] == ["The fit took"] * bar


def test_a_healthy_fit_says_nothing(make_trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "drivetrain")
    fitted(make_trainer, Net(), loader(3), enable_progress_bar=True)
    assert "The fit took" in caplog.messages[-1]


def test_processes_that_the_trainer_starts_return_it(make_trainer: Any) -> None:
    trainer = make_trainer(devices=1, strategy="ddp_fork")
    trainer.fit(Net(), loader(4))
    assert trainer.time_spent.wall_s > 0


def test_loggers_are_not_asked_by_the_thread(make_trainer: Any) -> None:
    asked = set[int]()

    class Threads(Logger):
        name, version = "none", 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            asked.add(threading.get_ident())

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    fitted(make_trainer, Net(), loader(3), logger=Threads(), log_every_n_steps=1)
    assert asked == {threading.get_ident()}
