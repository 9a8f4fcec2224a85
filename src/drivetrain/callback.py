"""The contract of a callback: hooks that run your code at each phase of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from drivetrain.module.module import LightningModule as LightningModule
    from drivetrain.trainer.trainer import Trainer as Trainer
# callbacks need these names only in annotations, and at run time this module must not import modules of higher layers
else:
    LightningModule = Trainer = Any


class Callback:
    """Base class of callbacks. Override the hooks you need; hooks that are not overridden cost nothing in a step.

    Every hook gets ``(trainer, pl_module, ...)``. A callback's hook runs before the module's hook of the same name, and
    callbacks run in the order of the list; the attributes ``position`` and ``monitors`` declare exceptions from this
    order. A hook may call ``self.log`` if the module's hook of the same name may.
    """

    position: Literal["first", "any", "last"] = "any"
    """The callback's position in the list: tuners run first, checkpoints last."""

    monitors: bool = False
    """Whether the callback reads metrics at the end of an epoch. If so, its ``on_train_epoch_end`` runs after the
    module's.
    """

    idle_hooks: frozenset[str] = frozenset()
    """Hooks that the class overrides, but that need not be called on this instance, because the instance's options do
    not use them. The loop reads these names when a run starts; an idle hook costs nothing in a step.
    """

    ends_training: bool = False
    """Whether the callback has a limit of its own that ends training. If so, the default of ``max_epochs`` is
    no limit.
    """

    needs_batch_indices: bool = False
    """Whether the callback needs the sample indices of prediction batches, which are recorded only for such
    callbacks.
    """

    needs_every_rank: bool = False
    """Whether every rank needs this callback with the same options, because its hooks exchange values between ranks or
    change the training. When a run begins, the ranks compare the ``state_key`` of the callbacks for which this is
    true."""

    changes_in_validation: bool = True
    """Whether the callback's state may change during a validation. If a checkpoint was saved during a validation, a run
    that resumes from it repeats the validation, and warns about such callbacks.
    """

    keeps_weights: bool = False
    """Whether the callback is a :class:`KeepsWeights`."""

    pl_module: Any = None
    """The module of the run, through which :meth:`log` logs. The Trainer sets it."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Call the module's ``self.log`` with its arguments, from a hook that may log."""
        self.pl_module.log(name, value, **options)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        """Call the module's ``self.log_dict`` with its arguments, from a hook that may log."""
        self.pl_module.log_dict(dictionary, **options)

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; it must differ between instances with a state."""
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
        """Called when the run ends with ``exception``, also when Ctrl-C ends it. Parts of the run may not exist yet."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the model is on the device and the optimizers exist."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when training is over and the strategy is torn down."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the validation batches of the sanity check."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the sanity check, when metrics, progress and random generators are as before this check."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a training epoch begins, before the loader's iterator is created."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a training epoch has ended; its epoch metrics are in ``trainer.callback_metrics``."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called when a training batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch. ``outputs`` has the unscaled "loss" and the other items that the step
        returned, detached; ``None`` if the step returned ``None``.
        """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation begins; the module is in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation has ended and its metrics are logged."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the pass over the validation loaders."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the pass over the validation loaders; this hook may still log values of the epoch."""

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
        """Called after the pass over the test loaders; this hook may still log values of the epoch."""

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
        """Called before the gradients of the previous optimizer step are cleared: after the first ``training_step``
        that follows this optimizer step.
        """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Called before the backward pass of ``loss``, which is divided by the number of accumulated batches."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the gradients of this batch have been added to ``.grad``."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called when the gradients are complete, unscaled and not yet clipped."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called when ``checkpoint`` is complete but not yet written. The hook may add entries or change them."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called when ``checkpoint`` was read and the model has its weights, before :meth:`load_state_dict`."""


def connect_module(callbacks: Iterable[Callback], module: Any) -> None:
    """Set the run's module on its callbacks.

    ``object.__setattr__``, because a callback that is an ``nn.Module`` must not register the run's module as its child.
    """
    for callback in callbacks:
        object.__setattr__(callback, "pl_module", module)


class KeepsWeights(Callback):
    """Base class of callbacks that keep weights beside the module's, such as averages.

    Every checkpoint contains these weights, even one with ``save_weights_only``. They are not part of
    :meth:`state_dict`, because a fit copies this state at the first batch of each optimizer step if a callback saves on
    exceptions.
    """

    keeps_weights = True
    changes_in_validation = False

    def save_weights(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the weights to ``checkpoint``, whose "state_dict" contains the module's weights. Every rank calls
        this.
        """

    def load_weights(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], fitting: bool
    ) -> None:
        """Load the weights from ``checkpoint``. Afterwards the module loads ``checkpoint["state_dict"]``, which this
        method may change.
        """


class Checkpoint(Callback):
    """Base class of callbacks that write checkpoints.

    Such a callback runs last. At the end of a batch, a validation or an epoch, its hook runs even after the module's,
    so that the checkpoint contains the effect of all other hooks.
    """

    position = "last"
    monitors = True
    needs_every_rank = True

    saves_on_exception: bool = False
    """Whether the callback saves when an exception ends a run. If so, the loop copies the state at the first batch of
    each optimizer step.
    """

    def resume_candidates(self, trainer: Trainer) -> list[str]:
        """Return the files in a folder that the user chose. ``ckpt_path="last"`` may use any of these files, whichever
        program has saved it.

        Of the files that all callbacks return, the newest complete file is used.
        """
        return []

    def save_folders(self, trainer: Trainer) -> list[str]:
        """Return the folder into which a fit saves when a signal or a time limit ends the fit, followed by the folders
        of other runs, if there are any. ``ckpt_path="last"`` may use a file in these folders if the same program with
        the same configuration has saved it.
        """
        return []
