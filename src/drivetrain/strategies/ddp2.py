"""One process on each machine trains on all devices of the machine; gradients are averaged between machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.dp import ReplicaStrategy, bound_to
from drivetrain.strategies.facts import Earlier
from drivetrain.strategies.replicas import Replicas
from drivetrain.strategies.strategy import StrategyRegistry


class _BetweenMachines(DistributedDataParallel):
    """DDP around the replicas of one machine. A call of ``training_step`` becomes a forward pass of DDP."""

    def runs(self, method: Callable[..., Any]) -> Callable[..., Any]:
        replicas: Replicas = self.module
        run = replicas.runs(method)

        def through(*args: Any, **kwargs: Any) -> Any:
            replicas.next_run = run
            return self(*args, **kwargs)

        return through


@StrategyRegistry.register("ddp2")
class DDP2Strategy(ReplicaStrategy, DDPStrategy):
    """``dp`` on the devices of each machine, and ``ddp`` between machines.

    Each machine runs one process, which is one rank. The world size is the number of machines. A loader yields one
    batch for all devices of the machine. The process splits this batch over its devices, like
    :class:`DataParallelStrategy`. The hooks ``training_step_end``, ``validation_step_end`` and ``test_step_end`` get
    the outputs of the machine's devices. A backward pass sums the gradients of a machine's devices, and then averages
    the sums over the machines.

    Args: as for :class:`DDPStrategy`.
    """

    synchronises_batchnorm = False
    facts = DDPStrategy.facts.but(drives_all_devices=True, local_passes="", earlier=Earlier(step_ends=True))
    wrapper = _BetweenMachines

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        return module if isinstance(module, DistributedDataParallel) else self._replicas(module)

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        return super()._wrapped(self._replicas(module))

    def bind(self, name: str) -> Callable[..., Any]:
        model = self.model
        replicas = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(replicas, Replicas)  # setup() has run
        bound = bound_to(replicas, self.lightning_module, name, len(self._devices))
        through_ddp = name == "training_step" and isinstance(model, DistributedDataParallel)
        return super().bind(name) if through_ddp else bound
