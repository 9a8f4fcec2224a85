"""Compute a training step twice during training, and warn or stop when the step is not deterministic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

from drivetrain.base.operations import first_other
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.engine.wrappers import requires_closure
from drivetrain.errors import ConfigurationError, DrivetrainError, check_choice, check_count
from drivetrain.loops.replay import Replay, ReplayedWindow
from drivetrain.loops.step_checks import why_not_replayed

_TRIES = 3


class ReplayMismatchError(DrivetrainError, RuntimeError):
    """A training step was computed twice from the same state, with different results."""


class ReplayCheck(Callback):
    """Computes every n-th optimizer step a second time from the same state, and compares the results bit by bit.

    The losses, the gradients and the random states are compared before the optimizer's step. If a result differs, a
    message names the result, the first operation with a different result, and the operation's line in the program.
    Training continues with the results of the first computation. See docs/replay.md for the state that is restored.

    Args:
        every_n_steps: replay every n-th optimizer step; ``Trainer(replay_every=n)`` does the same.
        on_mismatch: "warn" logs a warning at the first difference. When training ends, it logs the number of
            differences. "stop" raises an error on all ranks, before the optimizer's step.

    Raises:
        ConfigurationError: an argument has a wrong value, or the module's steps cannot be replayed.
        ReplayMismatchError: during training, the results differ and ``on_mismatch`` is "stop". All ranks raise the
            error.
    """

    needs_every_rank = True
    changes_in_validation = False

    def __init__(self, every_n_steps: int = 100, on_mismatch: Literal["warn", "stop"] = "warn") -> None:
        super().__init__()
        check_count("ReplayCheck", "every_n_steps", every_n_steps, lowest=1)
        check_choice("ReplayCheck", "on_mismatch", on_mismatch, ["warn", "stop"])
        self.every_n_steps, self.on_mismatch = every_n_steps, on_mismatch

    @property
    def state_key(self) -> str:
        """The key of the callback's state. The key contains the options, so the Trainer notices if the ranks' options
        differ.
        """
        return self._generate_state_key(every_n_steps=self.every_n_steps, on_mismatch=self.on_mismatch)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and (why := why_not_replayed(pl_module, trainer.settings, trainer.strategy)):
            raise ConfigurationError(f"ReplayCheck {why} Leave it out.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if needing := [type(each).__name__ for each in trainer.strategy.optimizers if requires_closure(each)]:
            raise ConfigurationError(
                f"ReplayCheck computes a step's gradients again before the optimizer's step, and {needing[0]} computes "
                "them inside of its step. Use another optimizer, or leave the check out."
            )
        self._windows = self._replayed = self._different = 0
        run = trainer.current_run
        assert run is not None  # this hook is called during a run
        replay = Replay(run, lambda: self._is_due(trainer), lambda window: self._compare(trainer, window))
        trainer.hooks.observers.append(SimpleNamespace(step_bound=replay.bind))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._different > 1:
            rank_zero_warn(
                f"{self._different} of the {self._replayed} optimizer steps that were computed again gave other "
                "results; the first warning names an operation."
            )

    def _is_due(self, trainer: Trainer) -> bool:
        self._windows += 1
        # The first optimizer step is not replayed: DistributedDataParallel regroups the gradients after this step,
        # which can change the order of summation.
        return self._windows > 1 and (trainer.global_step + 1) % self.every_n_steps == 0

    def _compare(self, trainer: Trainer, window: ReplayedWindow) -> None:
        """Compare an optimizer step with its second computation. All ranks make the same decision.

        Raises:
            ReplayMismatchError: the results differ, and ``on_mismatch`` is "stop".
        """
        found = trainer.strategy.world.gather_objects(window.differences())
        self._replayed += 1
        if not any(found):
            return
        self._different += 1
        if self._different > 1:
            return
        rank, operation = self._first_operation(trainer, window)
        if rank is None or not found[rank]:
            rank = next(rank for rank, differences in enumerate(found) if differences)
        where = f" on rank {rank}" if len(found) > 1 else ""
        message = (
            f"Optimizer step {trainer.global_step + 1} is not deterministic: its batches were computed again from the "
            f"same weights, buffers and random states, and{where} {' and '.join(found[rank])} differ. {operation} "
            "Runs of this program are not repeatable, and a resumed run is not exact. Keep what the step reads in "
            "buffers, draw numbers from seeded generators, and try Trainer(deterministic=True)."
        )
        if self.on_mismatch == "stop":
            raise ReplayMismatchError(message)
        rank_zero_warn(message)

    def _first_operation(self, trainer: Trainer, window: ReplayedWindow) -> tuple[int | None, str]:
        """Find the earliest operation that differs on any rank. Return the rank, and a sentence that names the
        operation.
        """
        world = trainer.strategy.world
        old = window.operations()
        for _ in range(_TRIES):
            new = window.operations()
            index = first_other(old, new)
            first = None if index is None else (index, world.rank, new[index][0], new[index][2])
            if everyones := sorted(each for each in world.gather_objects(first) if each is not None):
                _, rank, name, place = everyones[0]
                return rank, f"The first operation that differs is {name}{f' in {place}' if place else ''}."
        return None, f"In {_TRIES + 1} further passes, no operation differed."
