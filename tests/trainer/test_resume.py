"""Resuming is exactly as if nothing had happened, from every restart point (trap T26).

One run trains without a break and saves at every restart point. Then a new process's worth of objects, with disturbed
random generators, resumes from each of these files: its losses, parameters, optimizers, schedulers, logged rows and
random state must equal those of the run that was never stopped, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from drivetrain import Callback, LightningModule, WeightedLoss
from drivetrain.base.seed import rng_state
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.data import CombinedLoader
from drivetrain.errors import CheckpointError
from drivetrain.loggers.logger import Logger

EPOCHS = 3
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"  # the short form resumes after some of the batches only


class Augmented(Dataset[Any]):
    """Samples that are disturbed by every generator there is, where they are fetched."""

    def __init__(self, count: int = 20) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + random.random() + numpy.random.rand()
        return self.x[index] + 0.1 * noise.float(), self.x[index].sum(0, keepdim=True)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.count, step):
            yield torch.full((4,), float(index)) / 10 + torch.randn(4) * 0.1, torch.tensor([index / 5])


class Stateful:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.data, self.position, self.loaded = Augmented(), 0, False

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.position = self.position if self.loaded else 0
        self.loaded = False
        while self.position < 5:
            batch = [self.data[4 * self.position + index] for index in range(4)]
            self.position += 1
            yield [torch.stack(part) for part in zip(*batch, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.loaded = state["position"], True


class Shuffling:
    """A loader that knows where it is, draws its order from a generator of its own, and has no state before it runs."""

    def __init__(self, batches: int = 5) -> None:
        self.data, self.batches, self.loaded = Augmented(), batches, None
        self.generator_of_order = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.start, self.position = self.loaded or (self.generator_of_order.get_state(), 0)
        self.loaded = None
        self.generator_of_order.set_state(self.start)
        order = torch.randperm(self.batches, generator=self.generator_of_order).tolist()
        while self.position < self.batches:
            batch = [self.data[4 * order[self.position] + index] for index in range(4)]
            self.position += 1
            yield [torch.stack(part) for part in zip(*batch, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = (state["start"], state["position"])


def shuffled(workers: int = 0, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 4, shuffle=True, num_workers=workers, **arguments)


def short() -> DataLoader[Any]:
    return DataLoader(Augmented(8), 4, shuffle=True)


LOADERS: dict[str, Any] = {
    "shuffled": shuffled,
    "two workers": lambda: shuffled(2),
    "persistent workers": lambda: shuffled(2, persistent_workers=True),
    "two workers, fetching less": lambda: shuffled(2, prefetch_factor=1),
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "own generator, workers": lambda: shuffled(2, generator=torch.Generator().manual_seed(3)),
    "weighted sampler": lambda: DataLoader(Augmented(), 4, sampler=WeightedRandomSampler([1.0, 3.0] * 10, 20)),
    "stateful": Stateful,
    "stateful, shuffling": Shuffling,
    "combined, shuffling": lambda: CombinedLoader([Shuffling(), Shuffling(3)], "max_size_cycle"),
    "combined, the shortest": lambda: CombinedLoader(
        [shuffled(generator=torch.Generator().manual_seed(3)), shuffled(drop_last=True), Shuffling(4)], "min_size"
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "iterable, workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
    "combined": lambda: CombinedLoader(
        {"a": shuffled(), "b": DataLoader(Augmented(8), 4, shuffle=True)}, "max_size_cycle"
    ),
    "combined, workers": lambda: CombinedLoader(
        [shuffled(2), DataLoader(Augmented(8), 4, shuffle=True)], "max_size_cycle"
    ),
}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.losses: dict[tuple[int, int], float] = {}

    def loss(self, batch: Any) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        if isinstance(parts[0], torch.Tensor):
            parts = [parts]
        return sum(F.mse_loss(self.net(x), y) for x, y in parts)  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses[self.current_epoch, batch_idx] = loss.item()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()), on_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": plateau, "monitor": "loss_epoch"},
        ]


class Weighted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return WeightedLoss(super().training_step(batch, batch_idx), batch_idx + 1)


class Gan(Net):
    """Two optimizers by hand; one of them accumulates over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        if batch_idx % 2:
            self.manual_backward(self.other(batch[0]).pow(2).mean())
            second.step()
            second.zero_grad()
        else:
            self.manual_backward(self.other(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.5),
        ]


class Rows(Logger):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    name = "rows"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None: ...


class SaveAtEveryBatch(Callback):
    """Stands where a checkpoint callback stands."""

    position = "last"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, int] = {}
        self.steps: dict[str, int] = {}

    def save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(self.folder / name)
        self.steps[name] = trainer.global_step
        self.rows[name] = len(trainer.logger.rows) if trainer.logger is not None else 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, f"batch {trainer.current_epoch} {batch_idx}")


def disturb() -> None:
    """What a new process would bring: other random numbers."""
    torch.manual_seed(torch.seed() % 1000)
    random.seed()
    numpy.random.seed()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def result(trainer: Any, module: Net) -> dict[str, Any]:
    """Everything that must not differ when all is over."""
    return {
        "weights": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "counters": trainer.progress.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "rng": rng_state(),
    }


@pytest.fixture
def run(make_trainer: Any) -> Any:
    def fit(module: Net, train: Any, ckpt_path: Any = None, **arguments: Any) -> Any:
        trainer = make_trainer(
            **{"max_epochs": EPOCHS, "log_every_n_steps": 2, "logger": Rows(), "num_sanity_val_steps": 0, **arguments}
        )
        val = DataLoader(Augmented(6), 3)
        if ckpt_path is None:
            torch.manual_seed(5)
            random.seed(5)
            numpy.random.seed(5)
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
        return trainer

    return fit


def expect_rest(whole: Net, resumed: Net) -> None:
    assert resumed.losses
    assert {key: whole.losses[key] for key in resumed.losses} == resumed.losses


CASES: dict[str, tuple[type[Net], str, dict[str, Any]]] = {
    **{name: (Net, name, {}) for name in LOADERS},
    "accumulated": (Net, "shuffled", {"accumulate_grad_batches": 3}),
    "accumulated, workers": (Net, "two workers", {"accumulate_grad_batches": 2}),
    "accumulated, unknown length": (Net, "iterable", {"accumulate_grad_batches": 3}),
    "weighted": (Weighted, "shuffled", {"accumulate_grad_batches": 2}),
    "clipped": (Net, "shuffled", {"gradient_clip_val": 0.5}),
    "bf16": (Net, "shuffled", {"precision": "bf16-mixed"}),
    "16": (Net, "two workers", {"precision": "16-mixed", "accumulate_grad_batches": 2}),
    "manual": (Gan, "shuffled", {}),
    "manual, workers": (Gan, "two workers", {}),
    "validated inside": (Net, "shuffled", {"val_check_interval": 2}),
    "validated inside, workers": (Net, "two workers", {"val_check_interval": 2}),
    "limited": (Net, "shuffled", {"limit_train_batches": 3}),
    "limited, workers": (Net, "two workers", {"limit_train_batches": 3}),
    "limited, shuffling": (Net, "stateful, shuffling", {"limit_train_batches": 3}),
    "limited, own generator": (Net, "own generator", {"limit_train_batches": 3}),
    "limited combined": (Net, "combined", {"limit_train_batches": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_t26_resumed_at_the_end_of_any_batch(run: Any, tmp_path: Path, case: str) -> None:
    kind, loader, arguments = CASES[case]
    if "combined" in case and kind is not Net:
        pytest.skip("a batch of several loaders")
    saver = SaveAtEveryBatch(tmp_path)
    whole = kind()
    torch.manual_seed(1)
    start = {name: value.clone() for name, value in kind().state_dict().items()}
    whole.load_state_dict(start)
    trainer = run(whole, LOADERS[loader](), callbacks=saver, **arguments)
    expected, rows = result(trainer, whole), trainer.logger.rows
    names = sorted(saver.rows)
    slow = "workers" in case or "workers" in loader  # starting processes takes its time
    if not LONG:
        names = names[1 :: 5 if slow else 2]

    for name in names:
        disturb()
        resumed = kind()
        again = run(resumed, LOADERS[loader](), ckpt_path=tmp_path / name, **arguments)
        if name != names[-1] or resumed.losses:
            assert {key: whole.losses[key] for key in resumed.losses} == resumed.losses, name
        found = result(again, resumed)
        for part in expected:
            assert same(found[part], expected[part]), f"{part} differ after resuming at {name}"
        epoch, batch = map(int, name.split()[1:])
        assert len(resumed.losses) == len(whole.losses) - sum(key <= (epoch, batch) for key in whole.losses)
        flushed = saver.rows[name]
        later = [row for row in rows[flushed:]]
        assert again.logger.rows in (later, later[1:]), name  # the row that the first run wrote after saving


def test_without_the_checkpoints_place_in_the_data_it_would_not_be_exact(run: Any, tmp_path: Path) -> None:
    """The negative control: with the random state alone, the rest of the epoch is another."""
    saver = SaveAtEveryBatch(tmp_path)
    whole = Net()
    run(whole, shuffled(), callbacks=saver)
    saved = torch.load(tmp_path / "batch 1 2", weights_only=True)
    for moment in ("before", "drawing"):
        saved["restart"]["data"][moment]["torch"] = torch.get_rng_state()
    torch.save(saved, tmp_path / "changed")

    resumed = Net()
    run(resumed, shuffled(), ckpt_path=tmp_path / "changed")
    assert {key: whole.losses[key] for key in resumed.losses} != resumed.losses


class SaveElsewhere(SaveAtEveryBatch):
    """Inside and at the end of validations and epochs."""

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.save(trainer, f"validation {trainer.current_epoch} {trainer.progress.batches_done} {batch_idx}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, f"validated {trainer.current_epoch} {trainer.progress.batches_done}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, f"epoch {trainer.current_epoch}")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            self.save(trainer, f"start {trainer.current_epoch}")


@pytest.mark.parametrize(
    ("loader", "arguments"),
    [
        ("shuffled", {}),
        ("shuffled", {"val_check_interval": 2, "accumulate_grad_batches": 2}),
        ("two workers", {}),
        ("two workers", {"val_check_interval": 2, "accumulate_grad_batches": 2}),
        ("own generator", {"limit_train_batches": 3}),
        ("stateful", {}),
        ("stateful", {"limit_train_batches": 3}),
        ("stateful, shuffling", {}),
        ("stateful, shuffling", {"limit_train_batches": 3}),
        ("combined", {"limit_train_batches": 3}),
        ("combined, shuffling", {}),
        ("combined, the shortest", {}),
    ],
)
def test_t26_resumed_inside_a_validation_and_at_the_ends_of_validations_and_epochs(
    run: Any, tmp_path: Path, loader: str, arguments: dict[str, Any]
) -> None:
    saver, whole = SaveElsewhere(tmp_path), Net()
    trainer = run(whole, LOADERS[loader](), callbacks=saver, **arguments)
    expected = result(trainer, whole)
    names = sorted(saver.rows)
    assert {name.split()[0] for name in names} == {"validation", "validated", "epoch", "start"}

    for name in names[::4] if loader == "two workers" else names:
        disturb()
        resumed = Net()
        validations: list[int] = []
        counting = Callback()
        counting.on_validation_start = lambda t, m, v=validations: v.append(t.global_step)  # type: ignore
        again = run(resumed, LOADERS[loader](), ckpt_path=tmp_path / name, callbacks=counting, **arguments)
        found = result(again, resumed)
        assert {key: whole.losses[key] for key in resumed.losses} == resumed.losses, name
        for part in expected:
            assert same(found[part], expected[part]), f"{part} differ after resuming at {name}"
        assert len(validations) == len(set(validations))  # none was run twice
        if name.startswith("validated"):
            assert int(name.split()[1]) * int(trainer.num_training_batches) + int(name.split()[2]) not in [
                v * again.accumulate_grad_batches for v in validations
            ]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "where", ["training_step", "on_after_backward", "on_train_batch_end", "validation_step", "loader"]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_t26_resumed_after_an_exception(
    run: Any, tmp_path: Path, error: BaseException, where: str, accumulate: int
) -> None:
    class Breaking(Net):
        broken = False

        def maybe(self, here: str) -> None:
            if self.broken and here == where and self.trainer.progress.total_batches >= 8:
                raise error

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.maybe("training_step")
            return loss

        def on_after_backward(self) -> None:
            self.maybe("on_after_backward")

        def on_train_batch_end(self, *_: Any) -> None:
            self.maybe("on_train_batch_end")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.maybe("validation_step")

    class Loader:
        """Draws its order, and breaks while it fetches."""

        def __init__(self, module: Breaking) -> None:
            self.module, self.data = module, Augmented()

        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[Any]:
            for start in torch.randperm(5).tolist():
                batch = [self.data[4 * start + index] for index in range(4)]
                self.module.maybe("loader")
                yield [torch.stack(part) for part in zip(*batch, strict=True)]

    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    saving = {"callbacks": OnExceptionCheckpoint(tmp_path), "enable_checkpointing": True, **arguments}
    torch.manual_seed(1)
    whole = Breaking()
    trainer = run(whole, Loader(whole), **saving)
    expected = result(trainer, whole)

    torch.manual_seed(1)
    first = Breaking()
    first.broken = True
    with pytest.raises((RuntimeError, SystemExit)):
        run(first, Loader(first), **saving)
    disturb()
    resumed = Breaking()
    again = run(resumed, Loader(resumed), ckpt_path=tmp_path / "on_exception.ckpt", **arguments)

    assert {key: whole.losses[key] for key in resumed.losses} == resumed.losses
    found = result(again, resumed)
    for part in expected:
        assert same(found[part], expected[part]), f"{part} differ"


def test_an_interrupted_optimizer_step_is_not_saved(run: Any, tmp_path: Path) -> None:
    class Interrupted(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 3:
                self.param_groups[0]["params"][0].data.zero_()
                raise KeyboardInterrupt
            return super().step(closure)

    class Module(Net):
        def configure_optimizers(self) -> Any:
            return Interrupted(self.parameters(), lr=0.1)

    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match="interrupted while an optimizer was changing"), pytest.raises(SystemExit):
        run(Module(), shuffled(), callbacks=callback, enable_checkpointing=True)
    assert not Path(callback.ckpt_path).exists()


@pytest.mark.parametrize("source", ["after fit", "ModelCheckpoint"])
def test_t26_an_epoch_that_max_steps_cut_short_goes_on_where_it_was(run: Any, tmp_path: Path, source: str) -> None:
    torch.manual_seed(1)
    whole = Net()
    expected = result(run(whole, shuffled(), limit_val_batches=0, max_epochs=-1, max_steps=13), whole)
    torch.manual_seed(1)

    arguments: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": -1, "enable_checkpointing": True}

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    first = run(Net(), shuffled(), max_steps=7, callbacks=saving(), **arguments)
    path = tmp_path / "step=7.ckpt"
    if source == "after fit":
        path = tmp_path / "after"
        first.save_checkpoint(path)
    disturb()
    resumed = Net()
    found = result(run(resumed, shuffled(), ckpt_path=path, max_steps=13, callbacks=saving(), **arguments), resumed)

    assert {key: whole.losses[key] for key in resumed.losses} == resumed.losses
    assert len(resumed.losses) == 6
    assert same(found["weights"], expected["weights"])
    assert same(found["rng"], expected["rng"])


def test_hooks_of_a_resumed_epoch_are_not_called_twice(run: Any, tmp_path: Path) -> None:
    calls: list[str] = []

    class Noting(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            calls.append(f"start {trainer.current_epoch}")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            calls.append(f"end {trainer.current_epoch}")

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            calls.append("sanity")

    run(Net(), shuffled(), callbacks=[SaveAtEveryBatch(tmp_path), SaveElsewhere(tmp_path)][:1])
    for name, expected in (("batch 1 2", ["end 1", "start 2", "end 2"]), ("batch 1 4", ["end 1", "start 2", "end 2"])):
        calls.clear()
        run(Net(), shuffled(), ckpt_path=tmp_path / name, callbacks=Noting(), num_sanity_val_steps=2)
        assert calls == expected


def test_a_checkpoint_from_inside_a_batch_says_that_it_is_not_exact(run: Any, tmp_path: Path) -> None:
    class Saving(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 7:
                self.trainer.save_checkpoint(tmp_path / "middle")
            return super().training_step(batch, batch_idx)

    run(Saving(), shuffled())
    resumed = Net()
    with pytest.warns(UserWarning, match="saved in the middle of a batch"):
        run(resumed, shuffled(), ckpt_path=tmp_path / "middle")
    assert min(resumed.losses) == (1, 2)


def test_a_replayed_loader_is_named(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(Net(), LOADERS["iterable"](), callbacks=SaveAtEveryBatch(tmp_path))
    with caplog.at_level("INFO", logger="drivetrain"):
        run(Net(), LOADERS["iterable"](), ckpt_path=tmp_path / "batch 1 2")
    assert "does not know where it is: its first 3 batches are fetched again" in caplog.text


def test_resuming_with_other_data_is_an_error(run: Any, tmp_path: Path) -> None:
    run(Net(), shuffled(), callbacks=SaveAtEveryBatch(tmp_path))
    run(Net(), LOADERS["combined"](), callbacks=SaveAtEveryBatch(tmp_path / "combined"))
    with pytest.raises(CheckpointError, match="another kind of training loader, and a Stateful cannot continue"):
        run(Net(), Stateful(), ckpt_path=tmp_path / "batch 1 2")
    with pytest.raises(CheckpointError, match="Resume with the loaders? it was saved with"):
        run(Net(), LOADERS["combined"](), ckpt_path=tmp_path / "batch 1 2")
    with pytest.raises(CheckpointError, match="Resume with the loaders? it was saved with"):
        run(Net(), shuffled(), ckpt_path=tmp_path / "combined" / "batch 1 2")


def test_t26_weights_in_64_bits_come_back_in_64_bits(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    """A fresh module has 32 bits when the file is read."""

    def fit(epochs: int, module: Any, **arguments: Any) -> torch.Tensor:
        trainer = make_trainer(max_epochs=epochs, precision="64-true")
        trainer.fit(module, loader, **arguments)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    def fresh() -> Any:
        torch.manual_seed(3)
        module = torch.nn.Linear(4, 1)

        class Net(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = module

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.03)

        return Net()

    whole = fit(2, fresh())
    fit(1, fresh())
    assert torch.equal(fit(2, fresh(), ckpt_path=tmp_path / "1.ckpt"), whole)


@pytest.mark.parametrize("loader", ["combined, the shortest", "combined", "own generator", "shuffled"])
def test_t26_resumed_from_the_validation_that_a_resumed_run_began_with(run: Any, tmp_path: Path, loader: str) -> None:
    """The loader is asked for its end between the two files, and no run asks again."""
    saver, whole = SaveAtEveryBatch(tmp_path), Net()
    expected = result(run(whole, LOADERS[loader](), callbacks=saver), whole)
    first = max(name for name in saver.rows if name.startswith("batch 0"))
    again = SaveElsewhere(tmp_path)
    run(Net(), LOADERS[loader](), ckpt_path=tmp_path / first, callbacks=again)
    second = min(name for name in again.rows if name.startswith("validated 0"))

    disturb()
    resumed = Net()
    found = result(run(resumed, LOADERS[loader](), ckpt_path=tmp_path / second), resumed)
    expect_rest(whole, resumed)
    for part in expected:
        assert same(found[part], expected[part]), part


def test_resuming_says_from_where_and_that_nothing_is_left(
    make_trainer: Any, validated: Any, loader: Any, tmp_path: Path, caplog: Any
) -> None:
    def saved(name: str, **limits: Any) -> str:
        trainer = make_trainer(**limits)
        trainer.fit(validated(), loader, loader)
        trainer.save_checkpoint(tmp_path / name)
        return str(tmp_path / name)

    ended, cut = saved("ended.ckpt", max_epochs=2), saved("cut.ckpt", max_steps=6, max_epochs=2)
    with caplog.at_level("INFO", "drivetrain"):
        make_trainer(max_epochs=2).fit(validated(), loader, loader, ckpt_path=ended)
        assert f"Resuming from {ended}: epoch 2 (counted from 0), global step 8." in caplog.text
        assert "Nothing to train: 2 of 2 epochs are done." in caplog.text
        caplog.clear()
        make_trainer(max_epochs=2).fit(validated(), loader, loader, ckpt_path=cut)
        assert (
            f"Resuming from {cut}: epoch 1, after batch 1 (counted from 0; 16 samples), global step 6." in caplog.text
        )
        assert "Nothing to train" not in caplog.text
        make_trainer().test(validated(), loader, ckpt_path=ended)
        assert f"Test runs with the weights of {ended}." in caplog.text


def test_a_finished_run_of_a_callbacks_checkpoint_says_that_nothing_is_left(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path, caplog: Any
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    make_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(regression(), loader)
    with caplog.at_level("INFO", "drivetrain"):
        again = make_trainer(max_epochs=2, callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
        again.fit(regression(), loader, ckpt_path=saver.best_model_path)
    assert "Nothing to train: 2 of 2 epochs" in caplog.text


def _scheduled(regression: Any, make: Any) -> Any:
    class Scheduled(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [make(optimizer)]

    return Scheduled()


def test_another_scheduler_is_refused_and_other_arguments_of_it_are_said(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path, caplog: Any
) -> None:
    lr = torch.optim.lr_scheduler
    trainer = make_trainer()
    trainer.fit(_scheduled(regression, lambda optimizer: lr.StepLR(optimizer, 1, gamma=0.5)), loader)
    trainer.save_checkpoint(path := tmp_path / "x.ckpt")
    exponential = _scheduled(regression, lambda optimizer: lr.ExponentialLR(optimizer, 0.5))
    with pytest.raises(CheckpointError, match=r"is no entry of a ExponentialLR: another scheduler has saved this"):
        make_trainer(max_epochs=2).fit(exponential, loader, ckpt_path=path)
    with caplog.at_level("INFO", "drivetrain"):
        make_trainer(max_epochs=2).fit(
            _scheduled(regression, lambda optimizer: lr.StepLR(optimizer, 1, gamma=0.9)), loader, ckpt_path=path
        )
    assert "StepLR continues with gamma=0.5 instead of 0.9, as the checkpoint says" in caplog.text


def test_max_epochs_that_excludes_the_epoch_of_the_checkpoint_leaves_nothing_to_train(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path, caplog: Any
) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    make_trainer(max_epochs=2, callbacks=Saves()).fit(regression(), loader)
    for epochs, step in ((0, 3), (1, 6)):  # inside that epoch, whose number is the limit
        trainer = make_trainer(max_epochs=epochs)
        with caplog.at_level("INFO", "drivetrain"):
            trainer.fit(regression(), loader, ckpt_path=tmp_path / f"{step}.ckpt")
        assert (trainer.current_epoch, trainer.global_step) == (epochs, step)
        assert f"Nothing to train: {epochs} of {epochs} epochs" in caplog.text
        trainer.save_checkpoint(again := tmp_path / "again.ckpt")
        longer = make_trainer(max_epochs=2)
        longer.fit(regression(), loader, ckpt_path=again)
        assert (longer.current_epoch, longer.global_step) == (2, 8)


def test_a_fit_that_refuses_its_checkpoint_does_not_make_the_saved_state_inexact(
    make_trainer: Any, regression: Any, data: Any, tmp_path: Path
) -> None:
    """The exception of the refusal is saved to the very file from which the fit was to resume."""

    class Shuffled(regression):  # type: ignore[misc]
        fails_at = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == self.fails_at:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    def fit(fails_at: int = -1, ckpt_path: Path | None = None, **arguments: Any) -> Any:
        torch.manual_seed(1 if ckpt_path is None else 99)
        module = Shuffled(dropout=0.3)
        module.fails_at = fails_at
        saver = OnExceptionCheckpoint(tmp_path)
        trainer = make_trainer(max_epochs=3, callbacks=saver, enable_checkpointing=True, **arguments)
        trainer.fit(module, DataLoader(data, 8, shuffle=True), ckpt_path=ckpt_path)
        return module.state_dict()

    whole, path = fit(), tmp_path / "on_exception.ckpt"
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(fails_at=6)
    with pytest.raises(CheckpointError, match="Resume with limit_train_batches as it was"):
        fit(ckpt_path=path, limit_train_batches=2)
    resumed = fit(ckpt_path=path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize("batch_size", [8, 16])
def test_a_resumed_fit_that_max_steps_ends_at_once_saves_the_position_in_the_epoch(
    make_trainer: Any, regression: Any, data: Any, tmp_path: Path, hook: str, batch_size: int
) -> None:
    class Saves(Callback):
        pass

    class Counts(regression):  # type: ignore[misc]
        seen: list[Any]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    def fit(max_steps: int, size: int, ckpt_path: Any = None, **arguments: Any) -> Any:
        module = Counts()
        module.seen = []
        trainer = make_trainer(max_steps=max_steps, **arguments)
        trainer.fit(module, DataLoader(data, size), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_steps}-{size}.ckpt")
        return module

    setattr(Saves, hook, lambda self, trainer, *_: trainer.save_checkpoint(tmp_path / "first.ckpt"))
    fit(2, 8, callbacks=Saves())
    assert fit(2, batch_size, tmp_path / "first.ckpt").seen == []
    rest = torch.cat(fit(-1, 8, tmp_path / f"2-{batch_size}.ckpt").seen)
    assert torch.equal(rest, data.tensors[0][16:])
