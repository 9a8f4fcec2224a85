"""TrainableModule, the part of a LightningModule that the loops use: steps, optimizers, and methods for gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.engine.wrappers import unwrapped
from drivetrain.errors import ConfigurationError
from drivetrain.module.hooks import DataHooks, ModelHooks


class TrainableModule(DataHooks, ModelHooks, nn.Module):
    """The part of a LightningModule that the loops use: methods that the user defines or may override."""

    automatic_optimization: bool = True
    """Whether the loop calls ``backward`` and the optimizer's ``step``. If False, ``training_step`` must call
    ``manual_backward`` and ``step``.
    """

    strict_loading: bool = True
    """Whether the names of weights in a loaded checkpoint must be exactly those in this module."""

    allow_zero_length_dataloader_with_multiple_devices: bool = False
    """Whether a loader without batches is allowed on a process if the loaders of other processes have batches."""

    _trainer: Any

    @property
    def fabric(self) -> Any:
        """The Engine that has set up this module; ``None`` if there is none, for example in a Trainer's run."""
        return self.__dict__.get("_engine")

    @property
    def _driver(self) -> Any:
        """The Trainer that runs this module, or the Engine that has set up this module, or ``None``."""
        return self.fabric if self._trainer is None else self._trainer

    # ---- what the user defines -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one batch. Define this method with the arguments ``(batch)`` or ``(batch, batch_idx)``.

        Returns:
            The loss (a tensor with one element and a graph), a :class:`~drivetrain.WeightedLoss`, a mapping that
            contains one of these under "loss", or ``None`` to skip backward for this batch. In manual optimization, the
            result is only passed to ``on_train_batch_end``.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch. Define this method with the arguments ``(batch)`` or ``(batch, batch_idx)``. If there are
        several loaders, add the argument ``dataloader_idx``.
        """
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of the test loaders. The arguments are those of :meth:`validation_step`."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one batch; by default, the result of ``forward``."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers. The parameters are already on the device.

        Returns:
            An optimizer, a list of optimizers, ``([optimizers], [schedulers])``, a dictionary with the key "optimizer",
            a list of such dictionaries, or ``None`` to train without an optimizer. The dictionary can also have the
            keys "lr_scheduler" and "monitor". The value of "lr_scheduler" is a scheduler, or a dictionary with the
            fields of :class:`~drivetrain.module.optimizers.LRSchedulerConfig`.
        """
        raise NotImplementedError

    def configure_model(self) -> None:
        """Create layers on the device and in the run's precision. Every run calls this hook, so an override must do
        nothing if the layers already exist.
        """

    # ---- what the loop calls and the user may override -----------------------------------------------------------

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients. The loop calls this method after ``training_step`` of the first batch of an optimizer
        step.
        """
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``. The loss is already divided by the number of accumulated batches, and
        scaled if the precision scales losses.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``. In manual optimization, call this method in place of ``loss.backward()``.

        Raises:
            ConfigurationError: ``automatic_optimization`` is True.
        """
        run = None if self._trainer is None else self._trainer.current_run
        if run is not None and self.automatic_optimization:
            raise ConfigurationError(
                f"{type(self).__name__} called manual_backward, but the loop calls backward itself. "
                "Set self.automatic_optimization = False in __init__, or return the loss instead. [DT1014]"
            )
        if self._trainer is None and self.fabric is not None:
            self.fabric.backward(loss, *args, **kwargs)
        elif run is None or run.optimizers.manual_backward is None:
            self.backward(loss, *args, **kwargs)
        else:
            run.optimizers.manual_backward(loss, *args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any = None) -> None:
        """Step ``optimizer``. ``optimizer_closure`` calls ``training_step`` and backward. An override must call the
        closure, or pass it to ``optimizer.step``.
        """
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients according to the Trainer's arguments. An override can clip in another way."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Limit the gradients of this optimizer: "norm" (the default) limits their total L2 norm, "value" limits the
        absolute value of each element.
        """
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ConfigurationError(
                f"clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r}) is unknown. "
                'Write "norm" or "value".'
            )
        if gradient_clip_val is not None and self._trainer is None and self.fabric is not None:
            argument = "clip_val" if gradient_clip_algorithm == "value" else "max_norm"
            self.fabric.clip_gradients(self, optimizer, **{argument: gradient_clip_val})
        elif gradient_clip_val is not None:
            trainer: Any = self.trainer
            if gradient_clip_algorithm == "value":
                trainer.strategy.clip_gradients_value(self, unwrapped(optimizer), gradient_clip_val)
            else:
                trainer.strategy.clip_gradients_norm(self, unwrapped(optimizer), gradient_clip_val)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step ``scheduler``. ``metric`` is the monitored value, or ``None`` if the scheduler monitors no value."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation inside a fit. If the validation runs between accumulated batches, this
        hook is not called.
        """
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.eval()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_validation_model_train(self) -> None:
        """Switch to training mode after a validation or a test. The Trainer calls this method only if it is overridden.
        Otherwise the Trainer restores the mode of each submodule.
        """
        self.train()

    on_test_model_train = on_validation_model_train


def is_strict(module: Any) -> bool:
    """Return the module's ``strict_loading``, or True if ``strict_loading`` is ``None``."""
    return bool(True if module.strict_loading is None else module.strict_loading)
