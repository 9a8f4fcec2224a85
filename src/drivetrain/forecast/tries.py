"""Measure the unchanged program, and changes with which the program may fit in memory. Each measurement runs in a fork
of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from drivetrain.forecast import blocks
from drivetrain.forecast.memory import Change, Measured, multiplied
from drivetrain.forecast.rank_classes import MOST_CLASSES
from drivetrain.forecast.standins import Job, refused_strategy
from drivetrain.forecast.values import UnreadableError, Values
from drivetrain.forecast.windows import Case, Windows, program_files
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.fsdp_blocks import class_name
from drivetrain.strategies.model_parallel import TENSOR, ModelParallelStrategy
from drivetrain.strategies.tp_plan import declared_plan

Fits = Callable[[Measured], bool]


class TryError(Exception):
    """A variant of the program could not be measured."""


class Planner:
    """Measures variants of a program that has created its Trainer and called ``fit``.

    Args:
        job: the planned job.
        mode: the fake mode.
        program: the path of the program.
        asked: the request of the command ``drivetrain plan``.
    """

    def __init__(self, job: Job, mode: Any, program: str, asked: dict[str, Any]) -> None:
        self.job, self.mode, self.program, self.asked = job, mode, program, asked
        self._base, self.rank = Case(foreach=not job.on_host), job.rank

    def run(self, trainer: Any, started: Any, fits: Fits) -> dict[str, Any]:
        """Return the result for the command: the measurement of the unchanged program, and measured changes if the
        program does not fit.
        """
        self._trainer, self._started = trainer, started
        if why := refused_strategy(trainer.strategy):
            return {"refused": why}
        try:
            base = self.measured(Change("", ""))
        except TryError as error:
            if str(error).startswith(UnreadableError.__name__) and self.asked["values"] is None:
                return {"reads": sum(each.nbytes for each in started.model.parameters())}
            return {"failed": str(error)}
        classes = self._by_class(base) if self.asked["rank"] is None else []
        if run := [(each.found, each.rank or 0) for _, each in classes if each.found is not None]:
            base, self.rank = max(run, key=lambda each: each[0].peak.total)
        found = {"base": base, "rank": self.rank, "classes": classes, "changes": [], "largest": None}
        if self.asked.get("tries") or (not fits(base) and self.asked.get("tries") is not False):
            found["changes"] = list(self._tried(fits))
            found["largest"] = self.largest_batch(base, fits)
        return found

    def _by_class(self, base: Measured) -> list[tuple[tuple[int, ...], Change]]:
        """Return the groups of ranks, each with the measurement of its first rank. At most :data:`MOST_CLASSES` groups
        are measured.
        """
        classes = [(ranks, Change("", "", rank=ranks[0])) for ranks in base.classes]
        if len(classes) == 1:
            return []
        run = [each for _, each in classes[:MOST_CLASSES]]
        for each in run:
            each.found = base if each.rank == self.rank else None
        self._measured_together([each for each in run if each.found is None])
        return classes

    # ---- changes -------------------------------------------------------------------------------------------------

    def _tried(self, fits: Fits) -> Iterator[Change]:
        """Measure and yield each change, the cheapest first. If no single change is enough, yield combinations of more
        and more changes until the program fits.
        """
        done = self._measured_together(list(self.changes()))
        yield from done
        if any(each.found is not None and fits(each.found) for each in done):
            return
        helpful = [each for each in done if each.found is not None]
        together: Change | None = None
        for change in sorted(helpful, key=lambda each: each.found.peak.total if each.found else 0):
            if together is not None and {*together.arguments, *together.case} & {*change.arguments, *change.case}:
                continue  # the combination already sets this argument
            together = change if together is None else self._measured_together([together.beside(change)])[0]
            if together is not change:
                yield together
                if together.found is None or fits(together.found):
                    return

    def _measured_together(self, changes: list[Change]) -> list[Change]:
        """Measure changes, with as many forks at a time as there are processors."""
        most, running = os.cpu_count() or 1, list[tuple[Change, Copy]]()
        for change in [*(each for each in changes if not each.failed), None]:
            while running and (change is None or len(running) >= most):
                done, copy = running.pop(0)
                found = copy.result()
                done.found, done.failed = (None, str(found)) if isinstance(found, TryError) else (found, "")
            if change is not None:
                running.append((change, Copy(functools.partial(self.measured, change))))
        return changes

    def changes(self) -> Iterator[Change]:
        """Yield the changes that the program can still make, the cheapest first."""
        trainer = self._trainer
        model, options = self._started.model, trainer.strategy.agreed_options()
        is_sharded = "sharding_strategy" in options
        if trainer.plan.precision.name == "32-true":
            for name in ("bf16-mixed", "bf16-true"):
                yield Change(name, f'Trainer(precision="{name}")', {"precision": name})
        accumulate = trainer.limits.accumulate
        yield Change(
            "half the micro-batch",
            f"half the loader's batch_size, Trainer(accumulate_grad_batches={2 * accumulate})", case={"divides": 2},
        )  # fmt: skip
        found = list(blocks.paths(model).values())
        name = class_name(found[0]) if found else ""
        if found and options.get("activation_checkpointing_policy") is None:
            line = f"{name}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
            if is_sharded:
                line = f"activation_checkpointing_policy={{{name}}} of the strategy"
            yield Change("recomputed activations", line, case={"recomputes": True})
        if self.job.devices > 1 and TENSOR not in options:
            yield from self._sharded(options, is_sharded)

    def _sharded(self, options: dict[str, Any], is_sharded: bool) -> Iterator[Change]:
        names = ("mixed_precision", "auto_wrap_policy", "activation_checkpointing_policy", "gradient_exchange")
        kept = {name: options[name] for name in names if name in options}
        for name in ("SHARD_GRAD_OP", "FULL_SHARD", *(["HYBRID_SHARD"] if self.job.nodes > 1 else [])):
            if options.get("sharding_strategy") != name:
                short = 'strategy="fsdp"' if name == "FULL_SHARD" and not is_sharded else ""
                line = short or f'strategy=FSDPStrategy(sharding_strategy="{name}")'
                yield Change(name, f"Trainer({line})", {"strategy": FSDPStrategy(sharding_strategy=name, **kept)})
        if not options.get("cpu_offload"):
            made = FSDPStrategy(cpu_offload=True, **kept)
            yield Change("offload", 'Trainer(strategy="fsdp_cpu_offload")', {"strategy": made})
        if (size := self.job.per_node if self.job.nodes > 1 else self.job.per_node // 2) > 1:
            line = f"Trainer(strategy=ModelParallelStrategy(tensor_parallel_size={size}))"
            parallel = ModelParallelStrategy(tensor_parallel_size=size, **kept)
            missing = "" if declared_plan(self._started.model) else (
                "the module declares no tp_plan, and a plan cannot know how its layers may be split"
            )  # fmt: skip
            yield Change("tp", line, {"strategy": parallel}, failed=missing)

    def largest_batch(self, base: Measured, fits: Fits) -> int | None:
        """Return the largest micro-batch that fits, but no more than the program's micro-batch. Return 0 if no
        micro-batch fits, and ``None`` if this is unknown.
        """
        size = base.batch_size
        if not size or fits(base):
            return size or None
        low, high = 0, size  # ``low`` fits or is 0, and ``high`` does not fit
        try:
            while high - low > 1:
                middle = max(1, (low + high) // 2) if low else 1 if high == size else (low + high) // 2
                if fits(self.measured(Change("", "", case={"samples": middle}))):
                    low = middle
                elif middle == 1:
                    return 0
                else:
                    high = middle
        except TryError:
            return None
        return low

    # ---- measurements --------------------------------------------------------------------------------------------

    def measured(self, change: Change) -> Measured:
        """Return the measurement of the program with a change.

        A model with long lists of blocks is measured with two and with three blocks in each list, and the result is
        extrapolated. If this measurement fails, for example because the model's code counts the blocks, the complete
        model is measured.

        Raises:
            TryError: the program fails with the change.
        """
        try:
            first = self._alone(change, (blocks.FEW,) * 64)
            more = [self._alone(change, each) for each in blocks.cases(first.lists)]
        except TryError:
            return self._alone(change, None)
        return multiplied(first, more, blocks.FEW) if more else first

    def _alone(self, change: Change, lengths: tuple[int, ...] | None) -> Measured:
        """Measure a change in a fork of this process, because a run changes the model.

        Raises:
            TryError: the program fails with the change.
        """

        def run() -> Measured:
            trainer = self._trainer
            rank = self.rank if change.rank is None else change.rank
            if change.arguments or rank != self.job.rank:
                self.job.rank = rank
                given = {
                    each.name: getattr(trainer.settings, each.name) for each in dataclasses.fields(trainer.settings)
                }
                trainer = type(trainer)(**{**given, **change.arguments})
            case = dataclasses.replace(self._base, **change.case, lengths=lengths)
            batch = self.asked.get("batch")
            values = Values(self.asked["values"])
            return Windows(self.job, case, self.mode, self.program, values, batch).run(trainer, self._started)

        found = Copy(run, program=self.program).result()
        if isinstance(found, TryError):
            raise found
        return found


class Copy:
    """A fork of this process, in which a function runs. On a system without ``fork``, the function runs in this
    process.

    Args:
        function: returns the measurement.
        alone_with: the only file descriptor that the fork shares with this process, apart from a pipe for the result.
            The fork then cannot change the position in an open file, or keep a connection open. With ``None``, the fork
            shares all descriptors.
        program: the path of the program. If the function fails, the message names the line of this program.
    """

    def __init__(self, function: Callable[[], Any], alone_with: int | None = None, program: str = "") -> None:
        self._here: Measured | TryError | None = None
        if not hasattr(os, "fork"):
            self._here = function()
            return
        self._reader, writer = os.pipe()
        inherited = {} if alone_with is None else _open_files()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._reader)
            if alone_with is not None:
                _close_inherited(inherited, {writer, alone_with})
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(_outcome(function, program), pipe)
            sys.stderr.flush()
            os._exit(0)
        os.close(writer)

    def result(self) -> Measured | TryError:
        """Return the result of the function, or the error of the function."""
        if self._here is not None:
            return self._here
        with os.fdopen(self._reader, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self._process, 0)
        if not data:
            return TryError("the process that measured it was killed, probably for want of memory on this machine")
        found: Measured | TryError = pickle.loads(data)
        return found

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """Whether the result arrives within ``timeout_s`` seconds."""
        return bool(select.select([self._reader], [], [], timeout_s)[0])

    def end(self) -> None:
        """End the fork without a result."""
        os.close(self._reader)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _open_files() -> dict[int, tuple[int, int]]:
    """Return the device and inode of each file descriptor of this process."""
    found = {}
    for each in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # os.listdir's own descriptor is closed by now
            status = os.fstat(each)
            found[each] = status.st_dev, status.st_ino
    return found


def _close_inherited(inherited: dict[int, tuple[int, int]], kept: set[int]) -> None:
    """Redirect the inherited descriptors to the null device. The descriptors are not closed, because their owners may
    close them later.

    Descriptors that a library has opened during the fork are not redirected. libuv opens such descriptors for torch's
    store.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each, file in _open_files().items():
        if each not in kept and inherited.get(each) == file:
            os.dup2(nowhere, each)


def _outcome(function: Callable[[], Measured], program: str) -> Measured | TryError:
    try:
        return function()
    except TryError as error:
        return error
    except BaseException as error:
        traceback.print_exc()
        return TryError(cause(error, program))


def cause(error: BaseException, program: str = "") -> str:
    """Return an exception as one line of text. Add the line of ``program`` that caused the exception, and a cure, if
    these are known.
    """
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    is_own = program_files(program)
    own = [each for each in traceback.extract_tb(error.__traceback__) if program and is_own(each.filename)]
    if own and not isinstance(error, UnreadableError):  # an UnreadableError already names the line
        text += f" (at {os.path.relpath(own[-1].filename)}:{own[-1].lineno})"
    if any(words in text for words in _NAMES_A_DEVICE):
        text += " A plan has no devices: write self.device where the program names one."
    return text


_NAMES_A_DEVICE = "not linked with support for", "not compiled with", "two different devices"
"""Parts of torch's messages about devices that are not available, and about tensors on different devices."""
