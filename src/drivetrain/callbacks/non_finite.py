"""Stop at a non-finite loss, and find its origin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.seed import isolate_rng
from drivetrain.base.tree import leaves
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import DrivetrainError, check_count
from drivetrain.logbook.parts import without_logging
from drivetrain.loops.pieces import training_step_arguments
from drivetrain.strategies.sharded_state import local_shard


class NonFiniteLossError(DrivetrainError, ArithmeticError):
    """Raised if a loss is infinite or NaN."""


class TerminateOnNaN(Callback):
    """Stops training before an infinite or NaN loss changes weights, and reports the origin of the loss.

    The error names the rank, the epoch, the batch, and the first layer whose output is not finite although its inputs
    are. To find this layer, the callback repeats ``training_step`` on the batch, without gradients and without logging.

    Args:
        every_n_batches: check only every n-th batch. Each check waits for the device and for the other ranks.

    Raises:
        ConfigurationError: ``every_n_batches`` is not a positive integer.
        NonFiniteLossError: during training, the loss of any rank is not finite. All ranks raise the error.
    """

    needs_every_rank = True

    def __init__(self, every_n_batches: int = 1) -> None:
        super().__init__()
        check_count("TerminateOnNaN", "every_n_batches", every_n_batches, lowest=1)
        self.every_n_batches = every_n_batches
        self._batch: tuple[Any, int] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = (batch, batch_idx) if batch_idx % self.every_n_batches == 0 else None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._batch is None:
            return
        strategy, (batch, batch_idx) = trainer.strategy, self._batch
        finite = bool(torch.isfinite(loss.detach()).all())
        if strategy.reduce_boolean_decision(finite, all=True):
            return
        cause = _cause(trainer, pl_module, batch, batch_idx)
        own = "" if finite else f"On rank {trainer.global_rank} the loss is {float(loss.detach()):g}: {cause}."
        texts = [text for text in strategy.world.gather_objects(own) if text]
        raise NonFiniteLossError(
            f"The loss of batch {batch_idx} in epoch {trainer.current_epoch} is not finite. {' '.join(texts)} This "
            "batch has changed no weight. Lower the learning rate, clip gradients, or leave the batch out. [DT1017]"
        )

    def on_train_batch_end(self, *_: Any, **more: Any) -> None:
        self._batch = None

    on_exception = on_train_batch_end


def _cause(trainer: Any, module: Any, batch: Any, batch_idx: int) -> str:
    """Return where the first non-finite value is: in the batch, in a parameter, or in the output of a layer."""
    in_batch = [path for path, leaf in leaves(batch) if not _is_finite(leaf)]
    wrong = [name for name, each in module.named_parameters() if not _is_finite(local_shard(each.data))]
    found: list[str] = []
    # Every rank runs the step, because the strategy may exchange data between the ranks during the step.
    with torch.no_grad(), isolate_rng(), without_logging(module), _watched(module, found):
        trainer.strategy.training_step(*training_step_arguments(module, batch, batch_idx))
    if in_batch:
        place = f", in {in_batch[0]!r}" if in_batch[0] else ""
        return f"the batch itself has values that are not finite{place}"
    if wrong:
        return f"the parameter {wrong[0]} was not finite before this batch"
    if not found:
        return "all layers have finite outputs, so it came from the computation of the loss"
    return f"the first layer whose output is not finite is {found[0]}"


@contextmanager
def _watched(module: nn.Module, found: list[str]) -> Iterator[None]:
    def look(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all(_is_finite(leaf) for _, leaf in leaves(output)):
            found.append(f"{name} ({type(layer).__name__})")

    with ExitStack() as stack:
        for name, each in module.named_modules():
            if name:
                stack.enter_context(each.register_forward_hook(partial(look, name)))
        yield


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())
