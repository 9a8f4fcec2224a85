"""What a user does with one training, in any order, comes to what a plain loop comes to.

Hypothesis draws the calls: fits that are interrupted, resumed from any file, and repeated in one Trainer or a new one
with other limits; saves, validations and removed files in between. `plain_life.py` says what must be true after each
call. What fails is shrunk to few calls.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.faults import plain_program as plain
from tests.faults.plain_life import Disk, Life
from tests.faults.plain_program import FOLDER, Event, Limits, Program
from torch import Tensor

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.errors import CheckpointError, DrivetrainError, SIGTERMException
from drivetrain.loops import resume

pytestmark = [
    pytest.mark.timeout(3600),  # the long form takes minutes
    pytest.mark.filterwarnings("ignore"),  # of what is drawn: inexact points, files that are passed over
]

OWN = [f"{FOLDER}/own.ckpt", f"{FOLDER}/second.ckpt", "apart.ckpt"]  # files that the user saves


class LivedNet(LightningModule):
    """The module of the plain loop; its hooks do what was drawn."""

    def __init__(self, program: Program, folder: str) -> None:
        super().__init__()
        self.program, self.folder = program, folder
        self.net = plain.build(program)
        self.begin([])

    def begin(self, events: list[Event]) -> None:
        self.events, self.calls, self.trained = events, Counter[str](), list[int]()

    def act(self, hook: str) -> None:
        if self.trainer.sanity_checking or self.trainer.state.fn != "fit":
            return
        self.calls[hook] += 1
        for event in self.events:
            if (event.hook, event.count) == (hook, self.calls[hook]):
                self.do(event.action)

    def do(self, action: str) -> None:
        if action == "raise":
            raise RuntimeError("planned")
        if action == "interrupt":
            raise KeyboardInterrupt
        if action == "sigterm":
            signal.raise_signal(signal.SIGTERM)
        elif action == "stop":
            self.trainer.should_stop = True
        else:
            self.trainer.save_checkpoint(os.path.join(self.folder, action))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.act("training_step")
        self.trained += batch.tolist()
        return plain.loss_of(self.net, batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.act("validation_step")
        self.log("val_loss", plain.loss_of(self.net, batch, plain.VALIDATION_SAMPLES), batch_size=len(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act("on_train_batch_end")

    def on_validation_end(self) -> None:
        self.act("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.act("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = plain.optimizer_of(self.net, self.program)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.program.scheduler}}


ENDS = {"": type(None), "raise": RuntimeError, "interrupt": SystemExit, "sigterm": SIGTERMException}

PROGRAMS = st.builds(
    Program,
    shuffle=st.booleans(), dropout=st.booleans(), scheduler=st.sampled_from(["none", "step", "epoch"]),
    every_n_steps=st.sampled_from([None, 1, 2, 3, 1]), keeps_all=st.booleans(), save_last=st.booleans(),
    saves_on_exception=st.booleans(), sanity=st.integers(0, 1),
)  # fmt: skip
LIMITS = st.builds(
    Limits,
    max_epochs=st.sampled_from([2, 3, 1, 4, 2, 3, 0]), max_steps=st.sampled_from([-1] * 5 + [0, 1, 3, 5, 8]),
    train_batches=st.sampled_from([1.0, 1.0, 1.0, 2, 3]), accumulate=st.integers(1, 3),
    val_interval=st.sampled_from([1.0, 1, 2]), batch_size=st.sampled_from([2, 2, 2, 3]),
)  # fmt: skip
ACTIONS = st.sampled_from(["raise", "interrupt", "sigterm", "stop", *OWN])
EVENTS = st.lists(
    st.builds(Event, st.sampled_from(["training_step", *plain.HOOKS]), st.integers(1, 6), ACTIONS), max_size=3,
    unique_by=lambda event: (event.hook, event.count),
)  # fmt: skip


class Session:
    """A Trainer and its module, and beside them the plain loop."""

    def __init__(self, program: Program, folder: str, disk: Disk, number: int) -> None:
        torch.manual_seed(number)
        self.folder = folder
        self.module = LivedNet(program, folder)
        self.saver = ModelCheckpoint(
            os.path.join(folder, FOLDER), save_top_k=-1 if program.keeps_all else 1,
            save_last=program.save_last or None, every_n_train_steps=program.every_n_steps,
        )  # fmt: skip
        on_exception = [OnExceptionCheckpoint(os.path.join(folder, FOLDER))] if program.saves_on_exception else []
        self.trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=program.sanity, callbacks=[self.saver, *on_exception], default_root_dir=folder,
        )  # fmt: skip
        self.life = Life(program, disk, self.module.net.state_dict())

    def limit(self, limits: Limits) -> None:
        trainer = self.trainer
        trainer.max_epochs, trainer.max_steps = limits.max_epochs, limits.max_steps
        trainer.limit_train_batches, trainer.accumulate_grad_batches = limits.train_batches, limits.accumulate
        trainer.val_check_interval = limits.val_interval


class Training(RuleBasedStateMachine):
    """A folder with files, and one Trainer at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="stateful-")
        self.disk, self.sessions = Disk(), 0
        torch.manual_seed(0)
        self.rng: Tensor | None = None  # of the plain loop
        self.session: Session | None = None
        self.read: dict[str, int] = {}  # the files that were compared, by the time of their writing

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(program=PROGRAMS, limits=LIMITS, events=EVENTS, fits=st.sampled_from([True, True, True, False]))
    def begin(self, program: Program, limits: Limits, events: list[Event], fits: bool) -> None:
        self.program = program
        if fits:
            self.run_fit(self.open(), limits, events, "")

    def open(self) -> Session:
        self.sessions, self.rng = self.sessions + 1, None
        self.session = Session(self.program, self.folder, self.disk, self.sessions)
        return self.session

    def both(self, expected: Callable[[], Any], found: Callable[[], Any]) -> tuple[Any, Any]:
        """Run the plain loop and the library, each from the same random state."""
        before = torch.get_rng_state()
        result = expected()
        self.rng = torch.get_rng_state()
        torch.set_rng_state(before)
        return result, found()

    # ---- what the user does --------------------------------------------------------------------------------------

    @rule(limits=LIMITS, events=EVENTS, new=st.booleans(), source=st.sampled_from(["", "last", "best", *OWN]))
    def fit(self, limits: Limits, events: list[Event], new: bool, source: str) -> None:
        self.run_fit(self.open() if new or self.session is None else self.session, limits, events, source)

    @precondition(lambda self: self.disk.files)
    @rule(limits=LIMITS, events=EVENTS, again=st.booleans(), pick=st.integers(0, 8))
    def resume(self, limits: Limits, events: list[Event], again: bool, pick: int) -> None:
        """Resume from any file, by default as a program that is started again."""
        source = sorted(self.disk.files)[pick % len(self.disk.files)]
        self.run_fit(self.session if again and self.session is not None else self.open(), limits, events, source)

    def run_fit(self, session: Session, limits: Limits, events: list[Event], source: str) -> None:
        path, error = self.named(session, source, fits=True)
        session.module.begin(events)
        session.limit(limits)
        loader = plain.loader_of(self.program, limits.batch_size)
        given = source if source in ("", "last", "best") else os.path.join(self.folder, source)

        def fit() -> BaseException | None:
            try:
                session.trainer.fit(session.module, loader, plain.validation_loader(), ckpt_path=given or None)
            except BaseException as caught:
                return caught
            return None

        if error:
            caught = fit()
            assert isinstance(caught, CheckpointError), (error, caught)
            return
        how, caught = self.both(lambda: session.life.fit(limits, events, path), fit)
        if how in ENDS:
            kind = ENDS[how]
            if type(caught) is not kind or (kind is RuntimeError and str(caught) != "planned"):
                raise AssertionError(f"{how!r}: {caught!r}") from caught
            assert session.module.trained == session.life.trained
        else:
            assert isinstance(caught, DrivetrainError), (how, caught)
            self.session = self.rng = None  # a part of the file may have been restored

    @rule(call=st.sampled_from(["save", "save", "validate", "remove"]), path=st.sampled_from(OWN),
          weights_only=st.sampled_from([False, False, True]), source=st.sampled_from(["", "last", "best", *OWN]),
          new=st.sampled_from([False, False, True]), pick=st.integers(0, 8))  # fmt: skip
    def between_fits(self, call: str, path: str, weights_only: bool, source: str, new: bool, pick: int) -> None:
        if call == "save":
            self.save(path, weights_only, new)
        elif call == "validate":
            self.validate(source, new)
        elif self.disk.files:
            self.remove(pick)

    def save(self, path: str, weights_only: bool, new: bool) -> None:
        session = self.open() if new or self.session is None else self.session
        target = os.path.join(self.folder, path)
        if not session.life.attached:
            with pytest.raises(DrivetrainError, match="no model to save yet"):
                session.trainer.save_checkpoint(target, weights_only=weights_only)
            return
        self.both(
            lambda: session.life.save(path, weights_only),
            lambda: session.trainer.save_checkpoint(target, weights_only=weights_only),
        )

    def validate(self, source: str, new: bool) -> None:
        session = self.open() if new or self.session is None else self.session
        path, error = self.named(session, source, fits=False)
        given = source if source in ("", "last", "best") else os.path.join(self.folder, source)

        def validate() -> Any:
            return session.trainer.validate(
                session.module, plain.validation_loader(), ckpt_path=given or None, verbose=False
            )

        if error:
            with pytest.raises(CheckpointError):
                validate()
            return
        expected, [found] = self.both(lambda: session.life.validate(path), validate)
        assert found == {"val_loss": pytest.approx(expected, rel=1e-5)}

    def remove(self, pick: int) -> None:
        path = sorted(self.disk.files)[pick % len(self.disk.files)]
        os.remove(os.path.join(self.folder, path))
        self.disk.remove(path)

    def named(self, session: Session, source: str, fits: bool) -> tuple[str | None, str]:
        """Return the file that ``ckpt_path=source`` means, and why there is none if that is an error."""
        disk, saver = self.disk, session.life.saver
        if source == "best":
            return (saver.best, "") if saver.best in disk.files else (None, "there is no best file")
        if source == "last":
            found = disk.newest()
            usable = [path for path in found if not fits or disk.files[path].point is not None]
            if usable:
                return usable[0], ""
            gone = saver.last and saver.last not in disk.files
            return None, "nothing can be used" if found or gone or not fits else ""
        if source:
            return (source, "") if source in disk.files else (None, "there is no such file")
        return None, ""

    # ---- what must be true ---------------------------------------------------------------------------------------

    @invariant()
    def files_are_those_of_the_plain_loop(self) -> None:
        found = {
            os.path.relpath(os.path.join(folder, name), self.folder)
            for folder, _, names in os.walk(self.folder) for name in names
        }  # fmt: skip
        assert found == self.disk.files.keys()
        for path, file in self.disk.files.items():
            full = os.path.join(self.folder, path)
            written = os.stat(full).st_mtime_ns
            if self.read.get(path) == written:
                continue
            loaded = torch.load(full, weights_only=True)
            assert loaded["global_step"] == file.step, path
            weights = {name.removeprefix("net."): value for name, value in loaded["state_dict"].items()}
            assert _equal(weights, file.weights), path
            self.read[path] = written

    @invariant()
    def the_trainer_is_where_the_plain_loop_is(self) -> None:
        if (session := self.session) is None:
            return
        trainer, life = session.trainer, session.life
        assert (trainer.global_step, trainer.current_epoch) == (life.step, life.epoch)
        assert self.rng is None or torch.equal(torch.get_rng_state(), self.rng)
        assert _equal(session.module.net.state_dict(), life.net.state_dict())
        expected = None if life.resumed_from is None else os.path.join(self.folder, life.resumed_from)
        assert trainer.ckpt_path == expected
        names = [life.saver.best, life.saver.last]
        full = [name and os.path.join(self.folder, name) for name in names]
        assert [session.saver.best_model_path, session.saver.last_model_path] == full


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def run(seed: int, examples: int, calls: int, phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink)) -> None:
    profile = settings(
        max_examples=examples, stateful_step_count=calls, deadline=None, database=None, phases=phases,
        suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        # half of the time of making a Trainer is for reading the environment's metadata, which stay the same
        patch.setattr(metadata, "entry_points", functools.cache(metadata.entry_points))
        run_state_machine_as_test(seeded(seed)(Training), settings=profile)


EXAMPLES, AT_ONCE, MINUTES = 500, 25, 8
"""Of the long form: how many it draws, but no further ones after these minutes; an example takes 0.3 s of a core."""


def test_any_order_of_calls_comes_to_what_a_plain_loop_comes_to(long_form: bool, seed: int) -> None:
    if not long_form:
        run(seed, 8, 8)
        return
    began, done = time.monotonic(), 0
    while done < EXAMPLES and time.monotonic() - began < MINUTES * 60:
        print(f"examples from {done} on: seed {seed + done}")  # pytest shows it with a failure
        run(seed + done, AT_ONCE, 14)
        done += AT_ONCE
    print(f"{done} examples of up to 14 calls in {time.monotonic() - began:.0f} s")


def test_a_fit_that_cannot_repeat_a_validation_saves_that_it_must_be_repeated() -> None:
    """The calls that the seed 900001 has found; the plain loop did not know the random state of such a validation."""
    training = Training()
    program = Program(
        shuffle=False, dropout=True, scheduler="none", every_n_steps=None, keeps_all=True, save_last=False,
        saves_on_exception=True, sanity=0,
    )  # fmt: skip
    limits = [Limits(each, -1, 1.0, 1, 1.0, 2) for each in (2, 1, 3)]
    in_second_epoch = len(list(plain.validation_loader())) + 1
    training.begin(program, limits[0], [Event("validation_step", in_second_epoch, "raise")], True)
    raised, saved = f"{FOLDER}/on_exception.ckpt", OWN[0]
    training.resume(limits[1], [], False, sorted(training.disk.files).index(raised))
    training.save(saved, False, False)
    points = [training.disk.files[path].point for path in (raised, saved)]
    assert [point and point.stage for point in points] == ["validating", "validating"]
    training.resume(limits[2], [], False, sorted(training.disk.files).index(saved))
    training.files_are_those_of_the_plain_loop()
    training.the_trainer_is_where_the_plain_loop_is()
    training.teardown()


def _skips_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    restore: Any = vars(resume)["_restore_position"]
    skips = lambda run, data, rng: restore(run, {**data, "given": data["given"] + 1}, rng)  # noqa: E731
    monkeypatch.setattr(resume, "_restore_position", skips)


def _loses_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "set_rng_state", lambda state: None)


def _removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCheckpoint, "_remove_checkpoint", lambda *_: None)


@pytest.mark.parametrize("breaks", [_skips_a_batch, _loses_the_random_state, _removes_nothing])
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The negative control; without shrinking, which takes most of the time."""
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        run(20, 60, 8, phases=(Phase.generate,))
