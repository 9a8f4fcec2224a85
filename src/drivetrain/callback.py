"""The base class of callbacks, whose hooks run your code in each phase of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from drivetrain.module.module import LightningModule as LightningModule
    from drivetrain.trainer.trainer import Trainer as Trainer
# only annotations need these names, and this module must not import higher layers at run time
else:
    LightningModule = Trainer = Any


class Callback:
    """Base class of callbacks. Override the hooks that you need; other hooks take no time in a step.

    The first arguments of every hook are ``trainer`` and ``pl_module``. Callbacks run in the order of the list. A
    callback's hook runs before the module's hook of that name. The attributes ``position`` and ``monitors`` change this
    order. ``self.log`` works in the same hooks as in a module.
    """

    position: Literal["first", "any", "last"] = "any"
    """The callback's position in the list: tuners run first, checkpoints last."""

    monitors: bool = False
    """Whether the callback reads metrics at the end of an epoch. If so, the callback's ``on_train_epoch_end`` runs
    after the module's.
    """

    idle_hooks: frozenset[str] = frozenset()
    """Names of hooks that the class overrides, but that this instance does not need, because of its options. The loop
    reads the names when a run starts, and does not call these hooks.
    """

    ends_training: bool = False
    """Whether the callback ends training at a limit of its own, such as a time. If so, ``max_epochs=None`` means no
    limit instead of 1000 epochs.
    """

    needs_batch_indices: bool = False
    """Whether the callback needs the sample indices of prediction batches. The Trainer records the indices only for
    such callbacks.
    """

    needs_every_rank: bool = False
    """Whether every rank needs this callback with equal options, because its hooks exchange values between ranks or
    change the training. When a run begins, the ranks compare the ``state_key`` of each such callback.
    """

    changes_in_validation: bool = True
    """Whether the callback's state may change during a validation. If a checkpoint was saved during a validation, the
    resumed run repeats this validation, and warns about such callbacks.
    """

    keeps_weights: bool = False
    """Whether the callback is a :class:`KeepsWeights`."""

    pl_module: Any = None
    """The module of the run, which :meth:`log` uses. The Trainer sets this attribute."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Call the module's ``self.log`` with these arguments. This works in each hook in which the module can log."""
        self.pl_module.log(name, value, **options)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        """Call the module's ``self.log_dict`` with these arguments. This works in each hook in which the module can
        log.
        """
        self.pl_module.log_dict(dictionary, **options)

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint. Callbacks with a state must have different keys."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when ``stage`` ("fit", "validate", "test", "predict") begins; the model is not on the device yet."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when ``stage`` has ended without an exception."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called when ``exception``, such as a KeyboardInterrupt, ends the run. Parts of the run may not exist yet."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the model is on the device and the optimizers exist."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when training is over and the strategy is torn down."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the validation batches of the sanity check."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the sanity check. After this hook, the Trainer restores the earlier metrics, progress and random
        state.
        """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a training epoch begins, before the loader's iterator is created."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a training epoch has ended. The epoch's metrics are in ``trainer.callback_metrics``."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called when a training batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch. ``outputs`` is a dictionary with the unscaled "loss" and the other items that
        the step returned, all detached from the graph. If the step returned ``None``, the dictionary is empty.
        """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation begins; the module is in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation has ended and its metrics are logged."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the pass over the validation loaders."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the pass over the validation loaders. This hook can log further values of the validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a validation batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Called after a validation batch; ``outputs`` is the result of ``validation_step``."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when testing begins; the module is in evaluation mode."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when testing has ended and its metrics are logged."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the pass over the test loaders."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the pass over the test loaders. This hook can log further values of the test."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a test batch is on the device."""

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Called after a test batch; ``outputs`` is the result of ``test_step``."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when prediction begins; the module is in evaluation mode."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when prediction has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the pass over the prediction loaders."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the pass over the prediction loaders."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a prediction batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Called after a prediction batch; ``outputs`` is the result of ``predict_step``."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before the gradients are cleared, after ``training_step`` of the first batch of an optimizer step."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Called before the backward pass of ``loss``. The loss is already divided by the number of accumulated
        batches.
        """

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the backward pass of a batch, which has added the batch's gradients to each parameter's
        ``grad``.
        """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before an optimizer step. The gradients are complete and unscaled, but not yet clipped."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called before ``checkpoint`` is written. This hook can add or change entries."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called after the model has loaded its weights from ``checkpoint``, and before :meth:`load_state_dict`."""


def connect_module(callbacks: Iterable[Callback], module: Any) -> None:
    """Set the ``pl_module`` of each callback to ``module``.

    The function calls ``object.__setattr__``, because a callback that is an ``nn.Module`` must not register the module
    as a child.
    """
    for callback in callbacks:
        object.__setattr__(callback, "pl_module", module)


class KeepsWeights(Callback):
    """Base class of callbacks that keep additional weights, such as averages of the module's weights.

    Every checkpoint contains these weights, even with ``save_weights_only``. The weights are not part of
    :meth:`state_dict`, because a fit may copy the result of :meth:`state_dict` for each optimizer step.
    """

    keeps_weights = True
    changes_in_validation = False

    def save_weights(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the weights to ``checkpoint``, whose "state_dict" contains the module's weights. Every rank calls this
        method.
        """

    def load_weights(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], fitting: bool
    ) -> None:
        """Load the weights from ``checkpoint``. Afterwards the module loads ``checkpoint["state_dict"]``, which this
        method can change.
        """


class Checkpoint(Callback):
    """Base class of callbacks that write checkpoints.

    These callbacks run after all other callbacks. At the end of a batch, a validation or an epoch, they also run after
    the module's hook. The checkpoint therefore contains the effects of all other hooks.
    """

    position = "last"
    monitors = True
    needs_every_rank = True

    saves_on_exception: bool = False
    """Whether the callback saves a checkpoint if an exception ends the run. If so, the loop copies the run's state at
    the first batch of each optimizer step.
    """

    def resume_candidates(self, trainer: Trainer) -> list[str]:
        """Return the checkpoints in the folder that the user has chosen. ``ckpt_path="last"`` can use any of these
        files, even if another program has written it.

        The Trainer uses the newest complete file that a callback returns.
        """
        return []

    def save_folders(self, trainer: Trainer) -> list[str]:
        """Return the folder into which a fit saves after a signal or at a time limit, followed by the folders of other
        runs. ``ckpt_path="last"`` uses a file in these folders only if this program, with this configuration, has saved
        the file.
        """
        return []
