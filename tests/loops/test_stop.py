"""A fit that is asked to end saves once, after the same batch on all ranks, and ends with the code of its reason."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, SIGTERMException
from drivetrain.loggers import Logger
from drivetrain.loops.run import Stopping
from drivetrain.loops.stop import TIME_LIMIT, Stop
from drivetrain.strategies import SingleDeviceStrategy

BATCHES = 6  # of an epoch, on each rank


class Model(LightningModule):
    """Sends itself a signal in a batch of training or of validation, counted over the fit, on one rank."""

    def __init__(self, number: int = 0, at: int = -1, rank: int = 0, in_validation: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.number, self.at, self.rank, self.in_validation = number, at, rank, in_validation
        self.trained = self.validated = 0

    def signalled(self, done: int, in_validation: bool) -> None:
        if self.number and (done, in_validation, self.global_rank) == (self.at, self.in_validation, self.rank):
            signal.raise_signal(self.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.signalled(self.trained, False)
        self.trained += 1
        loss = torch.nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.signalled(self.validated, True)
        self.validated += 1
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Hears(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.heard.append(type(exception).__name__)


class Rows(Logger):
    name, version = "rows", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None: ...


def fit(folder: Any, model: Model, ckpt_path: Any = None, ranks: int = 1, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(2 * BATCHES * ranks, 4, generator=torch.Generator().manual_seed(2)))
    several = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    trainer = Trainer(**{
        "accelerator": "cpu", "max_epochs": 2, "default_root_dir": folder, "logger": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, **several, **arguments,
    })  # fmt: skip
    trainer.fit(
        model, DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=2), ckpt_path=ckpt_path
    )
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def found(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*stopped*"))


CODES = [(signal.SIGTERM, 143, "SIGTERMException"), (signal.SIGINT, 130, "KeyboardInterrupt")]


@pytest.mark.parametrize(("number", "code", "name"), CODES)
@pytest.mark.parametrize(("at", "accumulate"), [(0, 1), (8, 1), (8, 4), (BATCHES - 1, 1)])
def test_t32_a_signal_saves_once_and_the_next_run_ends_as_an_undisturbed_one(
    tmp_path: Path, number: int, code: int, name: str, at: int, accumulate: int, caplog: Any
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    whole = fit(tmp_path / "whole", Model(), **options)
    hears, model = Hears(), Model(number, at)
    with caplog.at_level(logging.INFO, logger="drivetrain"), pytest.raises(SystemExit) as ended:
        fit(tmp_path, model, callbacks=hears, **options)
    assert (ended.value.code, hears.heard) == (code, [name])
    assert isinstance(ended.value, SIGTERMException) == (number == signal.SIGTERM)
    assert model.trained == at + 1  # it ends with the batch in which the signal came
    assert found(tmp_path) == ["checkpoints/stopped.ckpt"]
    assert caplog.text.count("Saved ") == 1
    assert 'stopped.ckpt. To continue: trainer.fit(model, ckpt_path="last"), or DRIVETRAIN_RESUME=auto' in caplog.text
    rest = Model()
    assert torch.equal(fit(tmp_path, rest, ckpt_path="last", **options), whole)
    assert rest.trained == 2 * BATCHES - at - 1
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_sigterm_that_comes_again_ends_no_rank_before_its_on_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching process sends it to all when one has ended, and others may not have come so far."""
    hears, handled = Hears(), []

    def explain(self: Any, error: BaseException) -> None:
        handled.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        if handled[0]:  # else it would end this test
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SingleDeviceStrategy, "explain", explain)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, Model(signal.SIGTERM, 2), callbacks=hears)
    assert (handled, hears.heard) == ([True], ["SIGTERMException"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_validation_does_not_wait_for_the_next_training_batch(tmp_path: Path, number: int) -> None:
    whole = fit(tmp_path / "whole", Model())
    model = Model(number, at=2, in_validation=True)
    with pytest.raises(SystemExit):
        fit(tmp_path, model)
    assert (model.trained, model.validated) == (BATCHES, 3)
    rest = Model()
    assert torch.equal(fit(tmp_path, rest, ckpt_path="last"), whole)
    assert (rest.trained, rest.validated) == (BATCHES, 2 * BATCHES)  # the validation begins again


def test_a_signal_in_the_sanity_check_saves_the_start(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Model(), num_sanity_val_steps=2)
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, at=0, in_validation=True), num_sanity_val_steps=2)
    assert torch.equal(fit(tmp_path, Model(), ckpt_path="last", num_sanity_val_steps=2), whole)


def test_it_is_saved_into_the_folder_of_model_checkpoint(tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "own")

    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, 2), callbacks=saver())
    assert found(tmp_path) == ["own/stopped.ckpt"]
    rest = Model()
    fit(tmp_path, rest, ckpt_path="last", callbacks=saver())
    assert rest.trained == 2 * BATCHES - 3


@pytest.mark.filterwarnings("ignore:The checkpoint's ModelCheckpoint wrote to")
def test_last_finds_it_in_the_folder_of_an_earlier_run_of_the_logger(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, 2), logger=True)
    [path] = found(tmp_path)
    assert path.endswith("version_0/checkpoints/stopped.ckpt")
    rest = Model()
    fit(tmp_path, rest, ckpt_path="last", logger=True)
    assert rest.trained == 2 * BATCHES - 3
    again = Model()  # a fit after one that has ended, as that of the next fold, is another run
    fit(tmp_path, again, ckpt_path="last", logger=True)
    assert again.trained == 2 * BATCHES


@pytest.mark.parametrize("others", [True, False])
def test_one_that_another_number_of_processes_has_to_resume_is_not_the_last(tmp_path: Path, others: bool) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, save_last=True)

    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, BATCHES + 2), callbacks=saver())
    if others:
        store, path = TorchCheckpointIO(), tmp_path / "stopped.ckpt"
        saved = store.load_checkpoint(path)
        store.save_checkpoint({**saved, "ranks": [{}, {}]}, path)  # as if two processes had saved it
    rest = Model()
    why = "saved in the middle of an epoch by 2 processes, and there are 1"
    with pytest.warns(UserWarning, match=why) if others else nullcontext():
        fit(tmp_path, rest, ckpt_path="last", callbacks=saver())
    assert rest.trained == BATCHES - (0 if others else 3)


@pytest.mark.filterwarnings("ignore:The checkpoint's ModelCheckpoint wrote to")
def test_the_refusal_of_one_names_the_newest_of_the_end_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, 2 * BATCHES + 2), max_epochs=3, callbacks=ModelCheckpoint(
            tmp_path, filename="{epoch}", save_top_k=-1
        ))  # fmt: skip
    store, path = TorchCheckpointIO(), tmp_path / "stopped.ckpt"
    saved = store.load_checkpoint(path)
    store.save_checkpoint({**saved, "ranks": [{}, {}]}, path)  # as if two processes had saved it
    (tmp_path / "damaged.ckpt").write_bytes(b"not a checkpoint")  # the newest of all
    store.save_checkpoint({"state_dict": saved["state_dict"]}, tmp_path / "weights.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r"there are 1: they did not share .*\. Resume with as many, or from \S*epoch=1\.ckpt, the newest",
    ):
        fit(tmp_path, Model(), ckpt_path=path, max_epochs=3)
    for each in tmp_path.glob("epoch=*.ckpt"):
        each.unlink()
    with pytest.raises(CheckpointError, match="or from a checkpoint that was saved at the end of an epoch"):
        fit(tmp_path, Model(), ckpt_path=path, max_epochs=3)


def test_without_checkpointing_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, Model(signal.SIGTERM, 2), enable_checkpointing=False)
    assert ended.value.code == 143
    assert list(tmp_path.rglob("*.ckpt")) == []


@pytest.mark.parametrize("saver", ["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_a_callback_that_saves_on_exceptions_does_it_alone(tmp_path: Path, saver: str) -> None:
    own = OnExceptionCheckpoint(tmp_path) if saver[0] == "O" else ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signal.SIGTERM, 2), callbacks=own)
    expected = "on_exception.ckpt" if saver[0] == "O" else "epoch=0-step=3.ckpt"
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == [expected]


def test_a_save_that_fails_does_not_keep_the_fit_from_ending(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("drivetrain.checkpoints.file.os.replace", full)
    with (
        pytest.warns(UserWarning, match="could not save .*stopped.ckpt.*disk full"),
        pytest.raises(SystemExit) as ended,
    ):
        fit(tmp_path, Model(signal.SIGTERM, 2))
    assert ended.value.code == 143


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    class Twice(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trained == 3:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                self.trained = 99  # not reached
            return super().training_step(batch, batch_idx)

    hears, model = Hears(), Twice()
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model, callbacks=hears)
    assert (ended.value.code, hears.heard, model.trained) == (130, ["KeyboardInterrupt"], 3)
    assert found(tmp_path) == []


def test_handlers_of_the_users_are_called_or_left_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, lambda number, frame: heard.append(number))
    try:
        fit(tmp_path / "a", Model(signal.SIGINT, 2))  # the user's handler decides what Ctrl-C does
        with pytest.raises(SIGTERMException):
            fit(tmp_path / "b", Model(signal.SIGTERM, 2))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("stage", ["set-up", "teardown", "validate"])
def test_outside_of_the_batches_a_signal_ends_the_run_at_once(tmp_path: Path, stage: str) -> None:
    class Signals(Hears):
        def setup(self, trainer: Any, pl_module: Any, stage_: str) -> None:
            if stage in ("set-up", stage_):
                signal.raise_signal(signal.SIGTERM)

        def teardown(self, trainer: Any, pl_module: Any, stage_: str) -> None:
            if stage == "teardown":
                signal.raise_signal(signal.SIGTERM)

    hears = Signals()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)
    trainer = Trainer(accelerator="cpu", callbacks=hears, max_epochs=1, enable_model_summary=False, **quiet)
    loaders = (loader,) if stage == "validate" else (loader, loader)
    with pytest.raises(SIGTERMException):
        (trainer.validate if stage == "validate" else trainer.fit)(Model(), *loaders)
    assert hears.heard == ["SIGTERMException"]
    assert found(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_after_the_last_batch_saves_too_and_the_next_run_trains_nothing_again(tmp_path: Path) -> None:
    class Late(Hears):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    hears, model = Late(), Model()
    saves = ModelCheckpoint(tmp_path / "own", every_n_train_steps=BATCHES - 1)  # not after the last step
    with pytest.raises(SIGTERMException):
        fit(tmp_path, model, callbacks=[hears, saves])
    assert hears.heard == ["SIGTERMException"]
    assert found(tmp_path) == ["own/stopped.ckpt"]
    rest = Model()
    weights = fit(tmp_path, rest, ckpt_path="last", callbacks=saves)
    assert rest.trained == 0
    assert torch.equal(weights, torch.cat([each.detach().flatten() for each in model.parameters()]))


def test_a_time_limit_saves_and_fit_returns(tmp_path: Path) -> None:
    timer, hears = Timer(timedelta(seconds=30)), Hears()
    timer._clock = iter(range(0, 10_000, 10)).__next__
    model = Model()
    fit(tmp_path, model, callbacks=[timer, hears])
    assert 0 < model.trained < 2 * BATCHES
    assert hears.heard == []
    assert found(tmp_path) == ["checkpoints/stopped.ckpt"]
    rest = Model()
    fit(tmp_path, rest, ckpt_path="last", callbacks=Timer())
    assert rest.trained == 2 * BATCHES - model.trained


class AsksForTime(Callback):
    """The time is over after so many batches of training."""

    def __init__(self, batches: int, rank: int = 0) -> None:
        self.batches, self.rank = batches, rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.trained == self.batches and trainer.global_rank == self.rank:
            trainer.current_run.stopping.stopper.ask(TIME_LIMIT)


@pytest.mark.parametrize("batches", [2, BATCHES, BATCHES + 3])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"val_check_interval": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:.*val_loss")
def test_t32_a_fit_that_resumes_after_a_time_limit_ends_as_an_undisturbed_one(
    tmp_path: Path, batches: int, options: dict[str, Any]
) -> None:
    """Although the fit that ends validates once more, and its callbacks save after that."""

    def ended(name: str, *callbacks: Callback, **more: Any) -> tuple[Model, torch.Tensor, list[Any]]:
        model, rows = Model(), Rows()
        saver = ModelCheckpoint(tmp_path / name, save_last=True, monitor="val_loss")
        of_run: dict[str, Any] = {"logger": rows, "callbacks": [*callbacks, saver]}
        return model, fit(tmp_path, model, **options, **of_run, **more), rows.rows

    _, weights, rows = ended("whole")
    first, _, early = ended("cut", AsksForTime(batches))
    assert first.trained == batches
    rest, resumed, late = ended("cut", ckpt_path="last")
    assert rest.trained == 2 * BATCHES - batches
    assert torch.equal(resumed, weights)
    assert late == rows[-len(late) :]
    assert early[: len(rows) - len(late)] == rows[: -len(late)]


def test_a_time_limit_that_min_epochs_delays_saves_where_the_fit_ends(tmp_path: Path) -> None:
    model = Model()
    fit(tmp_path, model, callbacks=AsksForTime(2), min_epochs=1)
    rest = Model()
    fit(tmp_path, rest, ckpt_path="last")
    assert (model.trained, rest.trained) == (BATCHES, BATCHES)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def signalled(folder: Path, sent: dict[str, Any], options: dict[str, Any]) -> tuple[Any, int, int, list[str]]:
    hears, module = Hears(), Model(**sent)
    callbacks = [hears, *options.pop("callbacks", [])]
    try:
        fit(folder, module, ranks=2, callbacks=callbacks, **{"max_epochs": 10_000, **options})
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    return code, module.trained, module.validated, hears.heard


def whole_and_rest(folder: Path) -> tuple[bool, int]:
    """Whether the run that resumes ends as an undisturbed one, and how many batches both have trained on."""
    epochs = torch.load(folder / "checkpoints" / "stopped.ckpt", weights_only=True)["epoch"] + 2
    whole, rest = fit(folder / "whole", Model(), ranks=2, max_epochs=epochs), Model()
    return torch.equal(fit(folder, rest, ckpt_path="last", ranks=2, max_epochs=epochs), whole), rest.trained


@pytest.mark.parametrize(
    ("number", "code", "name", "in_validation"), [(*CODES[0], False), (*CODES[1], True)], ids=["SIGTERM", "Ctrl-C"]
)
def test_t32_a_signal_to_one_rank_ends_all_after_the_same_batch(
    pool: Any, tmp_path: Path, number: int, code: int, name: str, in_validation: bool
) -> None:
    sent = {"number": number, "at": 8, "rank": 1, "in_validation": in_validation}
    first, other = pool.run(signalled, tmp_path, sent, {}, group=False)
    assert first == other
    assert (first[0], first[3]) == (code, [name])
    assert [path for path in found(tmp_path) if path.endswith(".ckpt")] == ["checkpoints/stopped.ckpt"]
    results = pool.run(whole_and_rest, tmp_path, group=False)
    assert all(equal for equal, _ in results)
    assert 0 < results[0][1] <= 2 * BATCHES


def timed(folder: Path) -> tuple[Any, int, int, list[str]]:
    return signalled(folder, {}, {"callbacks": [Timer(timedelta(seconds=0.3))]})


def test_a_time_limit_ends_all_ranks_after_the_same_batch(pool: Any, tmp_path: Path) -> None:
    """Each rank has its own clock."""
    first, other = pool.run(timed, tmp_path, group=False)
    assert first == other
    assert (first[0], first[3]) == (0, [])
    assert [path for path in found(tmp_path) if path.endswith(".ckpt")] == ["checkpoints/stopped.ckpt"]


def cut_and_resumed(folder: Path, in_validation: bool) -> tuple[bool, bool, int]:
    """Whether weights and rows are those of an undisturbed fit, and after how many batches this one was cut."""

    class Asks(Model):
        def signalled(self, done: int, here: bool) -> None:
            if (done, here, self.global_rank) == (8, in_validation, 1):
                self.trainer.current_run.stopping.stopper.ask(TIME_LIMIT)

    def ended(model: Model, epochs: int, name: str, **more: Any) -> tuple[torch.Tensor, list[Any]]:
        rows, saver = Rows(), ModelCheckpoint(folder / name, save_last=True)
        options: dict[str, Any] = {"logger": rows, "callbacks": [saver], "val_check_interval": 4}
        return fit(folder, model, ranks=2, max_epochs=epochs, **options, **more), rows.rows

    first = Asks()
    ended(first, 10_000, "cut")
    epochs = first.trained // BATCHES + 2
    weights, rows = ended(Model(), epochs, "whole")
    resumed, late = ended(Model(), epochs, "cut", ckpt_path="last")
    return torch.equal(resumed, weights), late == rows[len(rows) - len(late) :], first.trained


@pytest.mark.parametrize("in_validation", [False, True])
def test_t32_a_time_limit_of_one_rank_ends_all_where_a_resumed_fit_is_equal(
    pool: Any, tmp_path: Path, in_validation: bool
) -> None:
    first, other = pool.run(cut_and_resumed, tmp_path, in_validation, group=False)
    assert first == other
    assert first[:2] == (True, True)
    assert first[2] >= BATCHES


class Ranks:
    """Threads that run batches at their own speeds, and never wait for each other."""

    SIZE, BATCHES = 3, 10**9

    def __init__(self) -> None:
        self.store = HashStore()
        self.stopped: dict[int, Any] = {}
        self.began = threading.Barrier(self.SIZE)

    def run(self, rank: int) -> None:
        world = SimpleNamespace(size=self.SIZE)
        strategy = SimpleNamespace(global_rank=rank, world=world)
        progress = SimpleNamespace(slot=[0, 0, 0])
        engine = SimpleNamespace(strategy=strategy)
        run: Any = SimpleNamespace(engine=engine, progress=progress, stop=None, stopping=Stopping())
        stop = Stop(run, lambda reason: None, timeout_s=30)
        with suppress(SIGTERMException), stop.listening():
            self.began.wait()
            for batch in range(self.BATCHES):
                progress.slot[1] += 1
                if batch == 100 and rank > 0:
                    stop.ask("SIGTERM")
                for _ in range(rank):  # the speed
                    pass
                if run.stop is not None:
                    run.stop.at_batch_end()
        self.stopped[rank] = progress.slot[1] if stop.agreed else None

    def all(self, monkeypatch: Any) -> list[Any]:
        """The numbers of batches after which they stopped."""
        own = SimpleNamespace(clone=lambda: self.store)
        monkeypatch.setattr("drivetrain.loops.stop.waiting.store_of_job", lambda: own)
        monkeypatch.setattr(Stop, "_key", lambda stop, name: str(name))  # those of one fit, in one process
        threads = [threading.Thread(target=self.run, args=(rank,)) for rank in range(self.SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [self.stopped[rank] for rank in range(self.SIZE)]


def test_ranks_that_never_wait_for_each_other_stop_after_the_same_batch(monkeypatch: Any) -> None:
    [number] = set(Ranks().all(monkeypatch))
    assert 100 < number < Ranks.BATCHES


def test_without_an_agreement_they_would_not(monkeypatch: Any) -> None:
    """The negative control."""

    def alone(stop: Any) -> None:
        stop._last = stop._run.progress.slot[1] + 1
        stop._run.stop = stop
        stop._written.set()
        stop._answered.set()

    monkeypatch.setattr(Stop, "_agree", alone)
    assert len(set(Ranks().all(monkeypatch))) > 1


def test_a_rank_that_has_left_its_fit_keeps_nobody_waiting(monkeypatch: Any) -> None:
    monkeypatch.setattr(Ranks, "BATCHES", 101)
    assert set(Ranks().all(monkeypatch)) <= {None, 101}


def test_a_rank_that_has_died_keeps_nobody_waiting(monkeypatch: Any) -> None:
    strategy = SimpleNamespace(global_rank=0, world=SimpleNamespace(size=2))
    engine, progress = SimpleNamespace(strategy=strategy), SimpleNamespace(slot=[0, 1, 0])
    run: Any = SimpleNamespace(engine=engine, progress=progress, stopping=Stopping())
    stop = Stop(run, lambda reason: None, timeout_s=10_000)
    stop._reason = "SIGTERM"
    stop._written.set()
    monkeypatch.setattr("drivetrain.launchers.stacks.dead_ranks", lambda: [1])
    with pytest.warns(UserWarning, match="rank 1 has ended, so this fit ends without"), pytest.raises(SIGTERMException):
        stop.at_batch_end()
