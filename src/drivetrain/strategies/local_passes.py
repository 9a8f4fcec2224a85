"""Run forward and backward passes without communication between ranks, and exchange the gradients once afterwards.

After a failed pass, a rank can run the pass again, because no other rank waits in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from drivetrain.base import torch_private
from drivetrain.base.introspect import reads
from drivetrain.base.packages import fsdp
from drivetrain.strategies.fsdp_kept import forget_iteration, groups_in
from drivetrain.strategies.gradient_exchange import Bucket, alike
from drivetrain.strategies.strategy import Strategy


class LocalPasses:
    """Passes on one device, which need no exchange. Base class of the passes of strategies with several ranks.

    Args:
        strategy: the strategy of the fit.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy: Any = strategy

    def begin(self) -> None:
        """Exchange the tensors that the passes for one optimizer step need, such as parameters. All ranks call this
        method before the first batch of the step.
        """

    def without_exchange(self) -> AbstractContextManager[Any]:
        """Return the context in which a rank runs its passes."""
        return nullcontext()

    def forget(self) -> None:
        """Drop the state and the gradients that a failed pass has left."""

    def exchange(self) -> None:
        """Average the gradients over the ranks. All ranks call this method after the last batch of an optimizer
        step.
        """

    def end(self) -> None:
        """Undo :meth:`begin`. Also called when a run ends, even if an exception ends the run."""


class DDPPasses(LocalPasses):
    """Passes of a model that DistributedDataParallel wraps."""

    _model: Any = reads("_strategy.model")  # not stored: if layers are thawed, a new DDP replaces the old one

    def begin(self) -> None:
        model = self._model
        model.require_forward_param_sync = True
        if model.will_sync_module_buffers():
            torch_private.sync_buffers(model)

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        with self._strategy.accumulating(self._model):
            self._model.require_forward_param_sync = False  # if True, each pass would broadcast rank 0's buffers
            yield

    def exchange(self) -> None:
        group = self._strategy.data
        # ``averaged`` includes parameters that were frozen between the batches of this optimizer step
        averaged = [each for each in self._model.parameters() if id(each) in self._strategy._averaged]
        for bucket in map(Bucket, alike(averaged)):
            bucket.flat = group.all_reduce(bucket.pack().div_(group.size), "sum")
            bucket.unpack()


class FSDPPasses(LocalPasses):
    """Passes of a model that FSDP2 has sharded.

    Parameters are gathered once per optimizer step, so the ranks do not communicate in a pass.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._root: Any = strategy.lightning_module
        self._groups: list[Any] = []

    def begin(self) -> None:
        self.end()
        torch_private.prepare_passes(self._root)
        self._groups = list(groups_in(self._root))
        for module in self._root.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.unshard()
        for group in self._groups:
            # keep the parameters gathered until all batches of the optimizer step are done
            vars(group).update(dict.fromkeys(torch_private.RESHARDING, lambda: None))
        self._root.set_requires_gradient_sync(False)

    def forget(self) -> None:
        forget_iteration(self._root)

    def exchange(self) -> None:
        self.end()
        for group in groups_in(self._root):
            setattr(group, torch_private.TRAINING_STATE, torch_private.TrainingState.IDLE)
        torch_private.end_backward(self._root)
        for group in groups_in(self._root):
            # Copy ``requires_grad`` to the shards. The module contained gathered parameters, so the user's hooks may
            # have frozen these instead of the shards.
            for parameter in group.fsdp_params:
                parameter.sharded_param.requires_grad_(torch_private.gathered_of(parameter).requires_grad)
            group.reshard()

    def end(self) -> None:
        for group in self._groups:
            for name in torch_private.RESHARDING:
                vars(group).pop(name, None)
        if self._groups:
            self._root.set_requires_gradient_sync(True)
        self._groups = []


def of_ddp(strategy: Strategy) -> LocalPasses:
    """Return :class:`DDPPasses`, or :class:`LocalPasses` if DDP does not wrap the model."""
    return (LocalPasses if strategy.model is strategy.lightning_module else DDPPasses)(strategy)
