"""One process on each machine: it trains on all devices of its machine, and gradients are averaged between machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.strategies.batch_parts import split_batch
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.dp import bound_to, check_run
from drivetrain.strategies.facts import Earlier
from drivetrain.strategies.replicas import Replicas
from drivetrain.strategies.strategy import StrategyRegistry


class _BetweenMachines(DistributedDataParallel):
    """DDP around the replicas of one machine; it handles a call of any method as a forward pass."""

    def runs(self, method: Callable[..., Any]) -> Callable[..., Any]:
        replicas: Replicas = self.module
        run = replicas.runs(method)

        def through(*args: Any, **kwargs: Any) -> Any:
            replicas.next_run = run
            return self(*args, **kwargs)

        return through


@StrategyRegistry.register("ddp2")
class DDP2Strategy(DDPStrategy):
    """``dp`` on the devices of each machine, and ``ddp`` between machines.

    Each machine runs one process, which is one rank: the world size is the number of machines, and a loader yields the
    machine's batch. The process splits it over its devices as :class:`DataParallelStrategy` does, and calls
    ``training_step_end``, ``validation_step_end`` and ``test_step_end`` with the outputs of the machine's devices. One
    backward pass adds up the gradients of these devices, and averages them over the machines.

    Args: as for :class:`DDPStrategy`.
    """

    synchronises_batchnorm = False
    facts = DDPStrategy.facts.but(drives_all_devices=True, local_passes="", earlier=Earlier(step_ends=True))
    wrapper = _BetweenMachines

    _made: Sequence[Replicas] = ()

    def split_batch(self, batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
        """Return the parts of a machine's batch; see :meth:`DataParallelStrategy.split_batch`."""
        return split_batch(batch, devices)

    def setup(self, trainer: Any) -> None:
        check_run(self, trainer, len(self._devices))
        super().setup(trainer)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        return module if isinstance(module, DistributedDataParallel) else self._replicas(module)

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        return super()._wrapped(self._replicas(module))

    def _replicas(self, module: nn.Module) -> Replicas:
        made = Replicas(module, self._devices, self.accelerator, self.split_batch)
        self._made = (*self._made, made)
        return made

    @property
    def _devices(self) -> Sequence[torch.device]:
        return self.parallel_devices or self.own_parts.devices

    def bind(self, name: str) -> Callable[..., Any]:
        model = self.model
        replicas = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(replicas, Replicas)  # setup() has run
        bound = bound_to(replicas, self.lightning_module, name, len(self._devices))
        through_ddp = name == "training_step" and isinstance(model, DistributedDataParallel)
        return super().bind(name) if through_ddp else bound

    def teardown(self) -> None:
        for replicas in self._made:
            replicas.close()
        self._made = ()
        super().teardown()
