"""Plugins of Lightning 1.1: two that wrap the model in DDP, and two for mixed precision."""

from __future__ import annotations

from typing import Any

from drivetrain.base.introspect import calls
from drivetrain.base.lazy import on_first_use
from drivetrain.legacy.parts import OfAccelerator
from drivetrain.legacy.v1_3.training_type_plugins import shard_optimizers

with on_first_use:
    from drivetrain.legacy.v1_1 import named


class DDPPlugin(OfAccelerator):
    """Wraps the model in DDP; a subclass can override :meth:`configure_ddp` and :meth:`init_ddp_connection`.

    Args:
        kwargs: arguments of ``DistributedDataParallel``. ``find_unused_parameters`` is True by default, as in 1.1.
    """

    passing = "Pass it to a Trainer, in plugins=[{name}()]."

    def __init__(self, **kwargs: Any) -> None:
        self._ddp_kwargs: dict[str, Any] = {"find_unused_parameters": True, **kwargs}

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of drivetrain's Trainer for this plugin. Called if the program passes no accelerator."""
        return named.DDPAccelerator(ddp_plugin=self).as_settings()

    def configure_ddp(self, model: Any, device_ids: list[int] | None) -> Any:
        """Return the wrapper around ``model`` that exchanges gradients."""
        return self.strategy.usual._wrapped(model)

    def init_ddp_connection(
        self, trainer: Any, cluster_environment: Any, global_rank: int, world_size: int,
        is_slurm_managing_tasks: bool = True,
    ) -> None:  # fmt: skip
        """Create the process group."""
        self.strategy.usual._meet()

    def on_after_setup_optimizers(self, trainer: Any) -> None:
        """Called after the optimizers and the process group are created."""

    optimizer_state = calls("strategy.usual.optimizer_state")
    """``optimizer_state(optimizer)``: return the complete state; every rank must call this method."""


class DDPShardedPlugin(DDPPlugin):
    """:class:`DDPPlugin` with optimizer states sharded over the ranks by ``ZeroRedundancyOptimizer``."""

    def on_after_setup_optimizers(self, trainer: Any) -> None:
        shard_optimizers(self.strategy)


class NativeAMPPlugin:
    """torch's automatic mixed precision, now ``precision="16-mixed"``."""

    precision = "16-mixed"

    def __init__(self, trainer: Any = None) -> None:
        self.trainer = trainer

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of drivetrain's Trainer for this plugin."""
        return {"precision": self.precision}


class ApexPlugin(NativeAMPPlugin):
    """NVIDIA's Apex in Lightning 1.1; here torch's own automatic mixed precision is used instead."""
