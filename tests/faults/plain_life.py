"""A plain training loop that can be left and entered at any point, and the files that it would save.

It says what `tests/faults/test_stateful.py` expects of a Trainer, and knows nothing of the library: plain Python and
torch. A :class:`Point` is a training between two of its actions. Restoring one and going on is the same as never having
stopped, because nothing else exists.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.faults.plain_program import (
    FOLDER,
    VALIDATION_SAMPLES,
    Event,
    Limits,
    Program,
    build,
    loader_of,
    loss_of,
    optimizer_of,
    validation_loader,
)
from torch import Tensor

HELD_BACK = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")


class Planned(Exception):
    """Ends a fit on purpose."""


@dataclass
class Saver:
    """The state of ModelCheckpoint: the files that it keeps, oldest first; the newest state's file; what is saved."""

    kept: list[str] = field(default_factory=list)
    best: str = ""
    last: str = ""
    saved_at_step: int = -1
    last_at_batch: int = -1


@dataclass
class Point:
    """A training between two actions.

    Attributes:
        stage: the last action: "between" epochs, "fetch" (all that follows a batch is done), "batch" (its hooks are
            done), "validating", "validated", "epoch end" (its hooks are done).
        order: the samples of the epoch. done: how many of them are trained. divided: where its batches begin.
        batches, earlier: batches done in this epoch, and in all before it.
        cut: batches of an epoch that was ended early; 0: it was not.
        window: batches done of the window of ``size`` batches, with these gradients.
    """

    weights: dict[str, Tensor]
    optimizer: Any
    scheduler: Any
    rng: Tensor
    stage: str
    order: list[int]
    done: int
    divided: int
    batches: int
    earlier: int
    is_last: bool
    cut: int
    epoch: int
    step: int
    window: int
    size: int
    gradients: list[Tensor | None]
    saver: Saver


@dataclass(frozen=True)
class File:
    """A checkpoint; ``point`` is ``None`` if it has weights alone; ``number`` counts what was written."""

    weights: dict[str, Tensor]
    step: int
    number: int
    point: Point | None


class Disk:
    """The files that must be there, by their paths below the folder of the test."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.written = 0

    def write(self, path: str, weights: dict[str, Tensor], step: int, point: Point | None) -> None:
        self.written += 1
        self.files[path] = File(copy.deepcopy(weights), step, self.written, copy.deepcopy(point))

    def remove(self, path: str) -> None:
        self.files.pop(path, None)

    def newest(self) -> list[str]:
        """Return the files in the folder of ModelCheckpoint, the newest first."""
        found = [path for path in self.files if path.startswith(FOLDER)]
        return sorted(found, key=lambda path: -self.files[path].number)


class Life:
    """One Trainer with its module: what its fits must do to weights, counters and files.

    torch's global random generator is this loop's, as it is a user's.
    """

    def __init__(self, program: Program, disk: Disk, weights: dict[str, Tensor]) -> None:
        self.program, self.disk = program, disk
        self.net = build(program)
        self.net.load_state_dict(weights)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.saver = Saver()
        self.limits = Limits()
        self.attached = False  # whether the Trainer has seen a module
        self.epoch = self.step = self.earlier = 0
        self.trained: list[int] = []  # the samples of the newest fit, in order
        self.resumed_from: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.stage, self.order, self.done, self.divided = "between", list[int](), 0, 0
        self.batches = self.window = self.cut = 0
        self.size, self.is_last, self.stopping, self.term = 1, False, False, False
        self.kept: Point | None = None
        self.validation_rng: Tensor | None = None
        self.in_step = self.fits = self.draws_undone = False

    # ---- entry points --------------------------------------------------------------------------------------------

    def fit(self, limits: Limits, events: list[Event], path: str | None) -> str:
        """Train, from a file or from where the last run was; return how it ends: "", or why it does not."""
        self.limits, self.events, self.trained, self.calls = limits, events, [], Counter[str]()
        self.attached = True
        cut, self.resumed_from = self.cut, path
        self._reset()
        self.fits = True
        self.saver.saved_at_step = self.saver.last_at_batch = -1
        self.optimizer, self.scheduler = optimizer_of(self.net, self.program)
        self.net.zero_grad()
        if path is not None:
            if refused := self._restore(self.disk.files[path].point):
                return refused
        else:
            self.cut = cut  # until an epoch begins
        return self._run(resumes=path is not None)

    def validate(self, path: str | None) -> float:
        """Validate, with the weights of a file; return the loss."""
        self.attached, self.resumed_from = True, path
        if path is not None:
            self.net.load_state_dict(self.disk.files[path].weights)
        self._reset()
        self.fits = False
        self.calls, self.events = Counter[str](), []
        return self._validation_pass()

    def save(self, path: str, weights_only: bool = False) -> None:
        """Save from outside of a run."""
        self._write(path, self._point_to_save(), weights_only)

    # ---- points --------------------------------------------------------------------------------------------------

    def point(self, stage: str | None = None) -> Point:
        open_window = self.window > 0
        return copy.deepcopy(
            Point(
                self.net.state_dict(), None if self.optimizer is None else self.optimizer.state_dict(),
                None if self.scheduler is None else self.scheduler.state_dict(), torch.get_rng_state(),
                stage or self.stage, self.order, self.done, self.divided, self.batches, self.earlier, self.is_last,
                self.cut, self.epoch, self.step, self.window, self.size,
                [each.grad for each in self.net.parameters()] if open_window else [], self.saver,
            )
        )  # fmt: skip

    def _point_to_save(self) -> Point:
        """Return where a run goes on that resumes from a file which is saved now."""
        if self.in_step:  # this batch is trained again
            if self.fits and self.kept is not None:
                return replace(self.kept, saver=copy.deepcopy(self.saver))
            return self.point("fetch" if self.batches else "between")
        if self.stage == "validating" or self.draws_undone:
            assert self.validation_rng is not None
            return replace(self.point(), rng=self.validation_rng)
        return self.point()

    def _write(self, path: str, point: Point, weights_only: bool = False) -> None:
        self.disk.write(path, self.net.state_dict(), point.step, None if weights_only else point)

    def _restore(self, point: Point | None) -> str:
        """Go to a point; return why that is refused."""
        if point is None:
            return "only weights"
        if point.optimizer is None:
            return "no optimizer"
        point = copy.deepcopy(point)
        self.net.load_state_dict(point.weights)
        self.optimizer.load_state_dict(point.optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(point.scheduler)
        torch.set_rng_state(point.rng)
        self.validation_rng = point.rng if point.stage == "validating" else None  # of a validation that is repeated
        for name in ("stage", "order", "done", "divided", "batches", "earlier", "is_last", "cut", "epoch", "step",
                     "window", "size", "saver"):  # fmt: skip
            setattr(self, name, getattr(point, name))
        if point.gradients:
            for parameter, gradient in zip(self.net.parameters(), point.gradients, strict=True):
                parameter.grad = gradient
        if self.cut and not self._enough_steps():  # the epoch is completed
            if self.stage == "between":
                self.epoch, self.earlier = self.epoch - 1, self.earlier - self.cut
            self.batches, self.cut, self.stage = self.cut, 0, "validated"
        if self.epoch + (self.stage == "epoch end") > self.limits.max_epochs:
            return "max_epochs"
        return ""

    def _count_in_batches_of_this_size(self) -> str:
        limits = self.limits
        if limits.samples_in(self.batches, self.divided) != self.done:
            fits = [count for count in range(self.done) if limits.samples_in(count, self.divided) == self.done]
            if not fits:
                self.divided = self.done
            self.batches = fits[0] if fits else limits.before(self.done)
        return "" if self.is_last or self.batches < self.limits.count(self.divided) else "limit_train_batches"

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _enough_steps(self) -> bool:
        return 0 <= self.limits.max_steps <= self.step

    def _is_done(self) -> bool:
        return self.epoch >= self.limits.max_epochs or self._enough_steps() or self.stopping

    def _run(self, resumes: bool) -> str:
        begun = self.batches > 0 and self.epoch < self.limits.max_epochs
        inside = resumes and (self.stage == "epoch end" or begun)
        if self._is_done() and not inside:
            return ""
        begun = resumes and self.batches > 0
        if begun and self.cut:  # only its end is left
            self._count_in_batches_of_this_size()
            self.cut = self.batches
        elif begun and self.stage != "epoch end" and (refused := self._count_in_batches_of_this_size()):
            if self.program.saves_on_exception:  # the same again
                self._write(f"{FOLDER}/on_exception.ckpt", self.point())
            return refused
        try:
            while resumes or not self._is_done():
                if self.stage != "epoch end":
                    self._train_epoch()
                resumes = False
                self._close_epoch()
            self._save_last_at_end()
            if self.term:  # no batch has ended since
                if not self.program.saves_on_exception:
                    self._write(f"{FOLDER}/stopped.ckpt", self._point_to_save())
                raise Planned("sigterm")
        except Planned as planned:
            if self.program.saves_on_exception:
                self._write(f"{FOLDER}/on_exception.ckpt", self._point_after_exception())
            self.kept = None
            return str(planned)
        return ""

    def _point_after_exception(self) -> Point:
        inside_window = self.stage == "fetch" or (self.stage == "batch" and self.window > 0)
        if inside_window and self.kept is not None:  # the start of the window
            return replace(self.kept, saver=copy.deepcopy(self.saver))
        return self._point_to_save()

    def _train_epoch(self) -> None:
        self.net.train()
        if self.stage == "between":
            self.cut = self.batches = self.done = self.divided = self.window = 0
            self.is_last = False
            self._keep("between")
            loader = loader_of(self.program, self.limits.batch_size)
            self.order = [int(each) for batch in loader for each in batch]
            self.stage = "fetch"
        elif self.stage != "fetch":
            self._after_batch()
        self.stage = "fetch"
        if self.batches:
            self._keep("fetch")
        while not (self.is_last or self._enough_steps() or self.stopping):
            self._train_batch()
            self._after_batch()
            self.stage = "fetch"
            if self.window == 0:
                self._keep("fetch")
        stopped = self._enough_steps() or self.stopping
        self.cut = self.batches if stopped and not self.is_last else 0
        self.stage = "epoch end"
        at_end = isinstance(self.limits.val_interval, float)  # the integer 1 is each batch
        self._call("on_train_epoch_end", self._save_at_epoch_end if at_end else None)

    def _keep(self, stage: str) -> None:
        if self.program.saves_on_exception:
            self.kept = self.point(stage)

    def _train_batch(self) -> None:
        limits = self.limits
        last = self.batches + 1 == limits.count(self.divided)
        if self.window == 0:
            self.size = min(limits.accumulate, limits.count(self.divided) - self.batches)
        self.in_step = True
        self._call("training_step")
        numbers = self.order[self.done : self.done + limits.batch_size]
        self.trained += numbers
        loss = loss_of(self.net, torch.tensor(numbers))
        if self.window == 0:
            self.optimizer.zero_grad()
        (loss / self.size).backward()
        self.window += 1
        self.is_last = last
        stepped = self.window >= self.size or last
        if stepped:
            if self.window != self.size:  # the window ends earlier than it was to
                for parameter in self.net.parameters():
                    parameter.grad.mul_(self.size / self.window)
            self.optimizer.step()
            self.step, self.window = self.step + 1, 0
            if self.program.scheduler == "step":
                self.scheduler.step()
        if last and self.program.scheduler == "epoch":
            self.scheduler.step()
        self.done, self.batches, self.stage = self.done + len(numbers), self.batches + 1, "batch"
        self.in_step = False
        every = self.program.every_n_steps
        due = every is not None and stepped and self.step % every == 0
        self._call("on_train_batch_end", self._save_ranked if due else None)
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self.term:
            self.term = False
            if not self.program.saves_on_exception:
                self._write(f"{FOLDER}/stopped.ckpt", self._point_to_save())
            raise Planned("sigterm")

    def _after_batch(self) -> None:
        interval = self.limits.val_interval
        due = self.is_last if isinstance(interval, float) else self.batches % int(interval) == 0
        if self.stage != "validated" and (due or self.stopping or self.stage == "validating"):
            self._validate(extra=not due)
            if self.window > 0:
                self._keep("fetch")

    def _validate(self, extra: bool) -> None:
        """``extra``: only because the fit stops; it leaves the random state as it was."""
        self.stage, self.validation_rng, self.draws_undone = "validating", torch.get_rng_state(), extra
        try:
            self._validation_pass()
            self.stage = "validated"
            at_end = isinstance(self.limits.val_interval, float)
            self._call("on_validation_end", None if at_end else self._save_at_epoch_end)
        finally:
            self.draws_undone = False
            if extra:
                torch.set_rng_state(self.validation_rng)
        self.net.train()

    @torch.no_grad()
    def _validation_pass(self) -> float:
        was, total = self.net.training, 0.0
        self.net.eval()
        for numbers in validation_loader():
            self._call("validation_step")
            total += float(loss_of(self.net, numbers, VALIDATION_SAMPLES)) * len(numbers)
            self._end_if_asked()
        self.net.train(was)
        return total / VALIDATION_SAMPLES

    def _close_epoch(self) -> None:
        self.epoch, self.earlier = self.epoch + 1, self.earlier + self.batches
        self.batches, self.stage = 0, "between"

    def _call(self, hook: str, save: Any = None) -> None:
        """Let the user's code act in a hook, and then ModelCheckpoint."""
        self.calls[hook] += 1
        held: Planned | None = None
        for event in self.events:
            if (event.hook, event.count) != (hook, self.calls[hook]):
                continue
            if event.action == "stop":
                self.stopping = True
            elif event.action == "sigterm":
                self.term = True
            elif event.action in ("raise", "interrupt"):
                held = Planned(event.action)
                if not (hook in HELD_BACK and self.program.saves_on_exception):
                    raise held
            else:
                self._write(event.action, self._point_to_save())
        if save is not None:
            save()
        if held is not None:
            raise held

    # ---- ModelCheckpoint -----------------------------------------------------------------------------------------

    def _save_at_epoch_end(self) -> None:
        if self.program.every_n_steps is None:
            self._save_ranked()

    def _save_ranked(self) -> None:
        saver = self.saver
        if saver.saved_at_step == self.step:
            return
        saver.saved_at_step = self.step
        before = self._name_last()
        dropped = [] if self.program.keeps_all else list(saver.kept)
        own = [each for each in dropped if each != self.resumed_from]
        path = self._free(f"epoch={self.epoch}-step={self.step}", own)
        saver.kept = [each for each in saver.kept if each not in (*dropped, path)] + [path]
        saver.best = path
        self._write(path, self._point_to_save())
        if self.program.save_last:
            self._write_last(before)
        for each in dropped:
            if each not in (path, self.resumed_from):
                self.disk.remove(each)

    def _name_last(self) -> str:
        before = self.saver.last
        if self.program.save_last:
            self.saver.last = self._free("last", [before])
            self.saver.last_at_batch = self.earlier + self.batches
        return before

    def _write_last(self, before: str) -> None:
        self._write(self.saver.last, self._point_to_save())
        if before not in ("", self.saver.last, self.resumed_from):
            self.disk.remove(before)

    def _save_last_at_end(self) -> None:
        if self.program.save_last and self.saver.last_at_batch != self.earlier + self.batches:
            self._write_last(self._name_last())

    def _free(self, name: str, own: list[str]) -> str:
        """Return the first free name, or that of a file which may be replaced."""
        version, path = 0, f"{FOLDER}/{name}.ckpt"
        while path in self.disk.files and path not in own:
            version += 1
            path = f"{FOLDER}/{name}-v{version}.ckpt"
        return path
