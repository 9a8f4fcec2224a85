"""Base classes of the accelerators and plugins of earlier Lightning generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.accelerators.choice import choose
from drivetrain.base.introspect import calls, reads
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.v1_3.epoch_ends import EpochEnds


class AsksStrategy:
    """Members that Lightning 1.1's accelerators and 1.3's training-type plugins have in common. Most call the strategy.

    Attributes:
        strategy: drivetrain's strategy, whose methods call the accelerator. ``strategy.usual`` gives access to the
            original methods of the strategy.
    """

    strategy: Any

    root_device = reads("strategy.usual.root_device")
    """The device of this process."""
    distributed_sampler_kwargs = reads("strategy.usual.distributed_sampler_kwargs")
    """The arguments ``num_replicas`` and ``rank`` for a DistributedSampler."""
    teardown = calls("strategy.usual.teardown")
    """Free the device, and move the model to the host."""
    barrier = calls("strategy.usual.barrier")
    """``barrier(name=None)``: wait for every rank."""
    broadcast = calls("strategy.usual.broadcast")
    """``broadcast(obj, src=0)``: return, on every rank, the argument ``obj`` of rank ``src``."""
    all_gather = calls("strategy.stack")
    """``all_gather(tensor, group=None, sync_grads=False)``: return the tensors of all ranks, of shape (world_size,
    ...).
    """
    process_dataloader = calls("strategy.usual.process_dataloader")
    """``process_dataloader(dataloader)``: return the loader to use in place of ``dataloader``."""
    block_backward_sync = calls("strategy.usual.block_backward_sync")
    """Return a context in which backward passes do not exchange gradients with other processes."""

    def training_step_end(self, output: Any) -> Any:
        """Return the output of ``training_step``. If the module has a ``training_step_end``, drivetrain calls that hook
        instead of this method.
        """
        return output

    validation_step_end = test_step_end = training_step_end

    def on_save(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint to write in place of ``checkpoint``."""
        return checkpoint


class EarlierAccelerator:
    """Base class of the accelerators of Lightning 1.1 and 1.3.

    Attributes:
        hardware: the name of drivetrain's accelerator.
        optimizer_frequencies: for each optimizer, the number of successive batches in which only this optimizer steps;
            empty: all optimizers step in every batch.
        ends_evaluation_epochs: whether evaluations also call ``on_epoch_start`` and ``on_epoch_end``.
        strategy: drivetrain's strategy, with methods that call this accelerator.
    """

    hardware = "auto"
    optimizer_frequencies: Sequence[int] = ()
    ends_evaluation_epochs = True
    strategy: Any
    _strategy: Any = None

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of drivetrain's Trainer for this accelerator.

        Raises:
            ConfigurationError: the accelerator's hardware is missing, or a required package is not installed.
        """
        choose(self.hardware)  # raises if the hardware is missing
        self.strategy.engine = None  # drop the engine that a loop without a Trainer may have set
        epoch_ends = EpochEnds(self.ends_evaluation_epochs)
        return {"accelerator": self.hardware, "strategy": self.strategy, "callbacks": [epoch_ends]}


class OfAccelerator:
    """A plugin that belongs to an accelerator.

    Attributes:
        accelerator: the accelerator to which this plugin belongs.
        passing: a sentence for error messages, which tells how to pass the plugin. The name of the plugin's class
            replaces "{name}".
    """

    accelerator: Any = None
    passing: str

    @property
    def strategy(self) -> Any:
        """drivetrain's strategy, with methods that call this plugin's accelerator.

        Raises:
            ConfigurationError: the plugin does not belong to an accelerator.
        """
        if self.accelerator is None:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} is not part of an accelerator yet. {self.passing.replace('{name}', name)}"
            )
        return self.accelerator.strategy
