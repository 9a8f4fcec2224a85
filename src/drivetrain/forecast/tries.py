"""Measure the unchanged program and the changes that may make it fit, each in a copy of the process."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from drivetrain.forecast import blocks
from drivetrain.forecast.memory import Measured, multiplied
from drivetrain.forecast.standins import Job, refused_strategy, sharding_options
from drivetrain.forecast.windows import Case, Windows
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.fsdp_blocks import class_name
from drivetrain.strategies.single_device import SingleDeviceStrategy

Fits = Callable[[Measured], bool]


class TryError(Exception):
    """A case could not be measured; the message is the cause."""


@dataclass
class Change:
    """Something to write in the program.

    Attributes:
        name: a few words.
        write: the line to write.
        arguments: of the Trainer.
        case: attributes of a :class:`Case`.
        found: what the program then needs; ``None``: it could not be measured, for the reason in ``failed``.
    """

    name: str
    write: str
    arguments: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    found: Measured | None = None
    failed: str = ""

    def beside(self, other: Change) -> Change:
        """Return both changes together."""
        return Change(
            f"{self.name} + {other.name}", f"{self.write} and {other.write}", {**self.arguments, **other.arguments},
            {**self.case, **other.case},
        )  # fmt: skip


class Planner:
    """Measures the cases of one program, whose Trainer and arguments of ``fit`` exist.

    Args:
        job: the planned job.
        mode: the fake mode.
        program: the path of the program.
        asked: what the command asks for.
    """

    def __init__(self, job: Job, mode: Any, program: str, asked: dict[str, Any]) -> None:
        self.job, self.mode, self.program, self.asked = job, mode, program, asked
        self.values = [tuple(each) for each in asked.get("values", ())]
        self._base = Case(foreach=not job.on_host)

    def run(self, trainer: Any, started: Any, fits: Fits) -> dict[str, Any]:
        """Return the result for the command: the unchanged program, and changes if it does not fit."""
        self._trainer, self._started = trainer, started
        if why := refused_strategy(trainer.strategy):
            return {"refused": why}
        try:
            base = self.measured(Change("", ""))
        except TryError as error:
            return {"failed": str(error)}
        found = {"base": base, "plan": str(trainer.plan), "changes": [], "largest": None}
        if self.asked.get("tries") or (not fits(base) and self.asked.get("tries") is not False):
            found["changes"] = list(self._tried(fits))
            found["largest"] = self.largest_batch(base, fits)
        return found

    # ---- changes -------------------------------------------------------------------------------------------------

    def _tried(self, fits: Fits) -> Iterator[Change]:
        """Yield each change alone, the cheapest first, and then the cheapest ones together that fit."""
        done = self._measured_together(list(self.changes()))
        yield from done
        if any(each.found is not None and fits(each.found) for each in done):
            return
        helpful = [each for each in done if each.found is not None]
        together: Change | None = None
        for change in sorted(helpful, key=lambda each: each.found.peak.total if each.found else 0):
            if together is not None and {*together.arguments, *together.case} & {*change.arguments, *change.case}:
                continue  # the same argument with another value
            together = change if together is None else self._measure(together.beside(change))
            if together is not change:
                yield together
                if together.found is None or fits(together.found):
                    return

    def _measure(self, change: Change) -> Change:
        return self._measured_together([change])[0]

    def _measured_together(self, changes: list[Change]) -> list[Change]:
        """Measure changes, as many at the same time as there are processors."""
        most, running = os.cpu_count() or 1, list[tuple[Change, Copy]]()
        for change in [*changes, None]:
            while running and (change is None or len(running) >= most):
                done, copy = running.pop(0)
                found = copy.result()
                done.found, done.failed = (None, str(found)) if isinstance(found, TryError) else (found, "")
            if change is not None:
                running.append((change, Copy(functools.partial(self.measured, change))))
        return changes

    def changes(self) -> Iterator[Change]:
        """Yield the changes that this program has not made yet, the cheapest first."""
        trainer = self._trainer
        strategy, model = trainer.strategy, self._started.model
        options = sharding_options(strategy)
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
        if found and getattr(options, "activation_checkpointing_policy", None) is None:
            line = f"{name}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
            if isinstance(strategy, FSDPStrategy):
                line = f"FSDPStrategy(activation_checkpointing_policy={{{name}}})"
            yield Change("recomputed activations", line, case={"recomputes": True})
        if self.job.devices > 1 and type(strategy) in (DDPStrategy, FSDPStrategy, SingleDeviceStrategy):
            yield from self._sharded(strategy, options)

    def _sharded(self, strategy: Any, options: Any) -> Iterator[Change]:
        kept = {} if options is None else {
            name: getattr(options, name)
            for name in ("mixed_precision", "auto_wrap_policy", "activation_checkpointing_policy", "gradient_exchange")
        }  # fmt: skip
        names = ["SHARD_GRAD_OP", "FULL_SHARD", *(["HYBRID_SHARD"] if self.job.nodes > 1 else [])]
        for name in names:
            if options is None or options.sharding != name:
                made = FSDPStrategy(sharding_strategy=name, **kept)
                short = 'strategy="fsdp"' if name == "FULL_SHARD" and options is None else ""
                line = short or f'strategy=FSDPStrategy(sharding_strategy="{name}")'
                yield Change(name, f"Trainer({line})", {"strategy": made})
        if options is None or not options.offloads:
            made = FSDPStrategy(cpu_offload=True, **kept)
            yield Change("offload", 'Trainer(strategy="fsdp_cpu_offload")', {"strategy": made})

    def largest_batch(self, base: Measured, fits: Fits) -> int | None:
        """Return the largest micro-batch that fits, up to the program's own; 0: none; ``None``: it is not known."""
        size = base.batch_size
        if not size or fits(base):
            return size or None
        low, high = 0, size  # ``low`` fits or is 0, ``high`` does not
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
        """Return what the program needs with a change.

        Of long lists of blocks, two and three are measured, and multiplied. If the model counts its blocks, all are.

        Raises:
            TryError: the program fails with it.
        """
        first = self._alone(change, (blocks.FEW,) * 64)
        if isinstance(first, TryError):
            first = self._alone(change, None)
        if isinstance(first, TryError):
            raise first
        if not first.lists or first.is_complete:
            return first
        more = [self._alone(change, each) for each in blocks.cases(first.lists)[1:]]
        if any(isinstance(each, TryError) for each in more):
            whole = self._alone(change, None)
            if isinstance(whole, TryError):
                raise whole
            return whole
        return multiplied(first, [each for each in more if isinstance(each, Measured)], blocks.FEW)

    def _alone(self, change: Change, lengths: tuple[int, ...] | None) -> Measured | TryError:
        """Measure a change in a copy of this process, because a run changes the model."""

        def run() -> Measured:
            trainer = self._trainer
            if change.arguments:
                given = {
                    each.name: getattr(trainer.settings, each.name) for each in dataclasses.fields(trainer.settings)
                }
                trainer = type(trainer)(**{**given, **change.arguments})
            case = dataclasses.replace(self._base, **change.case, lengths=lengths)
            return Windows(self.job, case, self.mode, self.program, self.values).run(trainer, self._started)

        return Copy(run).result()


class Copy:
    """A copy of this process, in which a function runs; on a system without copies, the function runs here.

    Args:
        function: returns what was measured.
    """

    def __init__(self, function: Callable[[], Measured]) -> None:
        self._here: Measured | TryError | None = None
        if not hasattr(os, "fork"):
            self._here = function()
            return
        self._reader, writer = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(_outcome(function), pipe)
            sys.stderr.flush()
            os._exit(0)
        os.close(writer)

    def result(self) -> Measured | TryError:
        """Return what the function has returned, or why it returned nothing."""
        if self._here is not None:
            return self._here
        with os.fdopen(self._reader, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self._process, 0)
        if not data:
            return TryError("the process that measured it was killed, probably for want of memory on this machine")
        found: Measured | TryError = pickle.loads(data)
        return found


def _outcome(function: Callable[[], Measured]) -> Measured | TryError:
    try:
        return function()
    except TryError as error:
        return error
    except BaseException as error:
        traceback.print_exc()
        return TryError(cause(error))


def cause(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
