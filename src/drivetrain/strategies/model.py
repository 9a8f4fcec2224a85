"""Model: the methods with which a strategy converts, moves and wraps the user's module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.introspect import overrides
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.facts import Shared
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.placement import optimizer_to, place
from drivetrain.strategies.step_parts import Driver


class Model(Shared):
    """The part of a strategy's contract that concerns the model of a run.

    Attributes:
        accelerator, precision_plugin, checkpoint_io: parts of the strategy. The Trainer sets the parts that were not
            passed to the constructor.
        lightning_module: the user's module.
        model: the wrapped module that :meth:`setup` creates; before ``setup``, the user's module.
        optimizers, lr_scheduler_configs: the optimizers and schedulers of the run.
    """

    _converted: nn.Module | None

    def connect(self, model: nn.Module) -> None:
        """Store the user's module. Called before any process or device is set up."""
        self.lightning_module = self.model = model
        self._converted = None
        self.driver = Driver()

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context for ``configure_model``. A strategy can shard new layers in this context."""
        return nullcontext()

    def setup(self, trainer: Any) -> None:
        """Convert, move and wrap the model. Afterwards the optimizers of the model's parameters can be created."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        module: nn.Module = self.lightning_module
        if self.model is not module:
            raise ConfigurationError(
                f"{type(self).__name__} has wrapped the module before setup(), which sets up the module itself. Wrap "
                "it in setup_module(module), or after super().setup(trainer)."
            )
        self.model = self.setup_module(module)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """Return ``module`` in the run's precision, and on the root device if ``move_to_device``. Strategies with
        several processes also wrap ``module``.
        """
        own = module is self.lightning_module
        module = self._convert(module) if own else self.precision_plugin.convert_module(module)
        if move_to_device and overrides(self, "model_to_device", Familiar):
            self.model = module
            self.model_to_device()
            return self.model
        return place(module, self.root_device) if move_to_device else module

    def _convert(self, module: nn.Module) -> nn.Module:
        """Return ``module`` in the precision of the run. A module that is already converted stays unchanged."""
        if module is not self._converted:
            self._converted = module = self.precision_plugin.convert_module(module)
        return module

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the Trainer create the run's optimizers and schedulers. Not called if :meth:`setup` has created the
        optimizers.
        """
        self.optimizers, self.lr_scheduler_configs = trainer.make_optimizers()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return ``dataloader`` or a replacement. Called for each loader after the sampler of the loader was set."""
        return dataloader

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, the complete training, evaluation or prediction, and return its result."""
        return function()

    def explain(self, error: BaseException) -> Exception | None:
        """Return an exception that explains ``error`` better, and that the run raises instead. Return ``None`` to raise
        ``error`` itself.
        """
        return None

    def teardown(self) -> None:
        """Move model and optimizer state to the host, free the device, and wait until all checkpoints are durable.

        An exception can end a run at any time, so the run may be only partly set up.
        """
        if self.root_device != HOST:
            for optimizer in self.optimizers:
                optimizer_to(optimizer, HOST)
            if self.lightning_module is not None:
                place(self.lightning_module, HOST)
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.wait()
        self.checkpoint_io.teardown()
