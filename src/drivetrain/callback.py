"""The contract of a callback: hooks that run your code at each phase of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from drivetrain.module.module import LightningModule
    from drivetrain.trainer.trainer import Trainer


class Callback:
    """Base class of callbacks. Override the hooks you need; the others cost nothing in a step.

    Every hook gets ``(trainer, pl_module, ...)``. Hooks run before the module's hook of the same name, in the order
    of the list, with the two exceptions that ``position`` and ``monitors`` declare. ``self.log`` of the module may be
    called from the same hooks as in the module itself.
    """

    position: Literal["first", "any", "last"] = "any"
    """Its position among the callbacks: tuners run first, checkpoints last."""

    monitors: bool = False
    """It reads metrics when an epoch ends, so its ``on_train_epoch_end`` runs after the module's."""

    idle_hooks: frozenset[str] = frozenset()
    """Hooks that the class overrides but this instance, as configured, need not be called for. Read when a run
    starts: an idle hook costs nothing in a step."""

    ends_training: bool = False
    """It ends training by a limit of its own, so ``max_epochs`` is unlimited unless it is given."""

    needs_batch_indices: bool = False
    """Whether it needs the sample indices of prediction batches; they are recorded only for such a callback."""

    needs_every_rank: bool = False
    """Its hooks exchange values with the other ranks, or change how they train, so every rank needs it with the same
    options. The ranks compare the ``state_key`` of these callbacks when a run begins."""

    changes_in_validation: bool = True
    """Whether its state may change during a validation. A run that resumes from a checkpoint of that time runs the
    validation again, and warns of such callbacks."""

    keeps_weights: bool = False
    """Whether it is a :class:`KeepsWeights`."""

    pl_module: Any = None
    """The module of the run, set by the Trainer: what :meth:`log` logs through."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        """``self.log`` of the module, with its arguments, from a hook that may log."""
        self.pl_module.log(name, value, **options)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        """``self.log_dict`` of the module, with its arguments, from a hook that may log."""
        self.pl_module.log_dict(dictionary, **options)

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint; it must differ between instances that have a state."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves of this callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """``stage`` ("fit", "validate", "test", "predict") begins; the model is not on the device yet."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """``stage`` has ended without an exception."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends by ``exception``, Ctrl-C included. Parts of the run may not exist yet."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is on the device and the optimizers exist."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over and the strategy is torn down."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The sanity check is about to run a few validation batches."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The sanity check is over; metrics, progress and random generators are as before it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first epoch is about to begin."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last epoch has ended."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A training epoch begins; the loader's iterator does not exist yet."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A training epoch has ended; its epoch metrics are in ``trainer.callback_metrics``."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A training batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A training batch is done. ``outputs`` has the unscaled "loss" and what else the step returned, detached;
        ``None`` if the step returned ``None``.
        """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation begins; the module is in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation has ended and its metrics are logged."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the validation loaders begins."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the validation loaders has ended; its values may still be logged here."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """A validation batch is done; ``outputs`` is what ``validation_step`` returned."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Testing begins; the module is in evaluation mode."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Testing has ended and its metrics are logged."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the test loaders begins."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the test loaders has ended; its values may still be logged here."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch is on the device."""

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """A test batch is done; ``outputs`` is what ``test_step`` returned."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prediction begins; the module is in evaluation mode."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prediction has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the prediction loaders begins."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The pass over the prediction loaders has ended."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A prediction batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """A prediction batch is done; ``outputs`` is what ``predict_step`` returned."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradients of the last window are about to be cleared, after this window's first ``training_step``."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """``loss``, divided by the number of accumulated batches, is about to be differentiated."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The gradients of this batch have been added."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradients are complete, in their true scale and not clipped yet."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` is complete but not written: add to it or change it."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` was read and the model has taken its weights; called before :meth:`load_state_dict`."""


def connect_module(callbacks: Iterable[Callback], module: Any) -> None:
    """Give the module of a run to its callbacks.

    A callback that is an ``nn.Module`` too, and part of the module, must not get it as a child of its own.
    """
    for callback in callbacks:
        object.__setattr__(callback, "pl_module", module)


class KeepsWeights(Callback):
    """Base class of callbacks that keep weights beside the module's, such as averages of them.

    Every checkpoint holds these weights, one that is saved with ``weights_only`` too. They are no part of
    :meth:`state_dict`, which a fit copies at the start of each window if a callback saves on exceptions.
    """

    keeps_weights = True
    changes_in_validation = False

    def save_weights(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the weights to ``checkpoint``, whose "state_dict" holds those of the module; every rank calls it."""

    def load_weights(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], fitting: bool
    ) -> None:
        """Take the weights from ``checkpoint``. The module gets what its "state_dict" holds after this call."""


class Checkpoint(Callback):
    """Base class of callbacks that write checkpoints.

    It runs last, and at the end of a batch, a validation or an epoch its hook runs after the module's, so that it saves
    the effect of all other hooks.
    """

    position = "last"
    monitors = True
    needs_every_rank = True

    saves_on_exception: bool = False
    """Whether it saves when a run ends by an exception. The loop then keeps a copy of each window's start."""

    def resume_candidates(self, trainer: Trainer) -> list[str]:
        """Files that ``ckpt_path="last"`` may mean, whoever saved them, because the user has chosen their folder.

        Of all callbacks', the newest complete one is taken.
        """
        return []

    def save_folders(self, trainer: Trainer) -> list[str]:
        """Return the folder that a fit which is asked to end saves into; then those of other runs, if any.

        ``ckpt_path="last"`` may mean a file in them if the same program with the same configuration has saved it.
        """
        return []
