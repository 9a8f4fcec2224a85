"""Train with one process on several devices: each device computes on a part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.compiled import compiled_method
from drivetrain.base.introspect import takes_iterator
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.precision.precision import Precision
from drivetrain.strategies.batch_parts import split_batch
from drivetrain.strategies.facts import Earlier
from drivetrain.strategies.replicas import Replicas
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


class ReplicaStrategy(Strategy):
    """Base of the strategies in which one process trains replicas of the module, one replica per device."""

    _made: tuple[Replicas, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": ()}

    @property
    def _devices(self) -> Sequence[torch.device]:
        if devices := self.parallel_devices or self.own_parts.devices:
            return devices
        assert self.accelerator is not None  # a strategy without devices always has an accelerator
        return self.accelerator.get_parallel_devices([0])

    def split_batch(self, batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
        """Return the parts of a batch, each on its device, and the number of samples in each part.

        Override this method for batches that cannot be split along the first dimension of their tensors. There may be
        fewer parts than devices.
        """
        return split_batch(batch, devices)

    def setup(self, trainer: Any) -> None:
        if trainer is not None and trainer.progress.fn == "fit" and len(self._devices) > 1:
            self._check_fit(trainer)
        super().setup(trainer)

    def _check_fit(self, trainer: Any) -> None:
        """Check that replicas can run this fit.

        Raises:
            NotSupportedError: the module uses manual optimization.
            ConfigurationError: the Trainer has ``sync_batchnorm=True``, or a LayerSync in ``plugins``.
        """
        name, module = type(self).__name__, self.lightning_module
        if not module.automatic_optimization:
            raise NotSupportedError(
                f"{type(module).__name__}.automatic_optimization is False, and {name} runs training_step on "
                f"{len(self._devices)} devices at once, so each would step the optimizers with the gradients of its "
                'own part of the batch. Write strategy="ddp", or automatic_optimization = True.'
            )
        if trainer.settings.sync_batchnorm or self.layer_sync is not None:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True), or a LayerSync in plugins, needs statistics over all devices, but with "
                f'{name} each device computes its own. Leave it out, or write strategy="ddp".'
            )

    def _replicas(self, module: nn.Module) -> Replicas:
        made = Replicas(module, self._devices, self.accelerator, self.split_batch)
        self._made = (*self._made, made)
        return made

    def teardown(self) -> None:
        for replicas in self._made:
            replicas.close()
        self._made = ()
        super().teardown()


@StrategyRegistry.register("dp")
class DataParallelStrategy(ReplicaStrategy):
    """Runs each step in one process on all devices of this machine; each device computes on its part of the batch.

    A batch is split along its first dimension. The outputs of the parts are joined. Means are weighted by the numbers
    of samples. Loss, gradients and logged values are therefore the same as for the complete batch on one device. If the
    module defines ``training_step_end``, ``validation_step_end`` or ``test_step_end``, this hook gets the outputs of
    all parts. The hook can compute values that depend on all samples.

    Devices of an accelerator work concurrently. Replicas on the CPU run one after the other, so that the order of
    random numbers is fixed.

    Args:
        accelerator, checkpoint_io, precision_plugin: as for every strategy.
        parallel_devices: the devices. The module itself is on the first device. ``None``: the devices that the
            Trainer's arguments select.
    """

    facts = Strategy.facts.but(drives_all_devices=True, earlier=Earlier(step_ends=True))

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device | str] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.own_parts.devices = tuple(torch.device(device) for device in parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        return self._devices[0]

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        return self._replicas(super().setup_module(module, move_to_device))

    def bind(self, name: str) -> Callable[..., Any]:
        assert isinstance(self.model, Replicas)  # setup() has run
        return bound_to(self.model, self.lightning_module, name, len(self._devices))

    def teardown(self) -> None:
        self.model = self.lightning_module  # drop the replicas, which exist only during the run
        super().teardown()


def bound_to(replicas: Replicas, module: nn.Module, name: str, devices: int) -> Callable[..., Any]:
    """Return a function that runs the step ``name`` on the replicas of ``module``.

    Raises:
        NotSupportedError: the step takes ``dataloader_iter``, and there are several devices.
    """
    method = compiled_method(module, name)
    if devices > 1 and takes_iterator(getattr(module, name)):
        raise NotSupportedError(
            f"{type(module).__name__}.{name} takes dataloader_iter, and a strategy that splits batches over {devices} "
            f"devices must get them first. Write def {name}(self, batch, batch_idx), or devices=1."
        )
    return replicas.runs(method, name)
