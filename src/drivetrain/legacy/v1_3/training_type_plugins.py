"""Training-type plugins of Lightning 1.3; each uses a strategy of drivetrain."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base.packages import dist_optim
from drivetrain.base.torch_private import WATCHED, mark_as_stepped
from drivetrain.errors import ConfigurationError, described
from drivetrain.legacy.v1_3.training_type_plugin import TrainingTypePlugin
from drivetrain.strategies.strategy import StrategyRegistry


class SingleDevicePlugin(TrainingTypePlugin):
    """One process, one device.

    Args:
        device: the model's device; ``None``: the accelerator's first device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device

    def strategy_arguments(self) -> dict[str, Any]:
        return {"device": self.device}


class ParallelPlugin(TrainingTypePlugin):
    """Base class of the plugins for several devices.

    Args:
        parallel_devices: this machine's devices; ``None``: the Trainer's choice.
        cluster_environment: provides the ranks; ``None``: the detected environment.
    """

    def __init__(self, parallel_devices: Sequence[torch.device] | None = None, cluster_environment: Any = None) -> None:
        self._devices, self._cluster = parallel_devices, cluster_environment

    def strategy_arguments(self) -> dict[str, Any]:
        return {"parallel_devices": self._devices, "cluster_environment": self._cluster}


class DataParallelPlugin(ParallelPlugin):
    """One process for several devices; each device gets a part of every batch."""

    strategy_name = "dp"

    def strategy_arguments(self) -> dict[str, Any]:
        return {"parallel_devices": self._devices}


class DDPPlugin(ParallelPlugin):
    """One process per device; gradients are averaged.

    Args:
        parallel_devices, cluster_environment: as for :class:`ParallelPlugin`.
        num_nodes: number of machines; ``None``: the Trainer's number.
        sync_batchnorm: whether batch norm uses the statistics of all processes; ``None``: the Trainer's argument
            decides.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: DDP's communication hook, its state and its wrapper.
        kwargs: arguments of ``DistributedDataParallel``. ``find_unused_parameters`` is True by default, as in 1.3.
    """

    strategy_name = "ddp"
    wraps_in_setup = False

    def __init__(
        self,
        parallel_devices: Sequence[torch.device] | None = None,
        num_nodes: int | None = None,
        cluster_environment: Any = None,
        sync_batchnorm: bool | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(parallel_devices, cluster_environment)
        self._jobs = {"num_nodes": num_nodes, "sync_batchnorm": sync_batchnorm}
        self._ddp_kwargs = {"find_unused_parameters": True, **kwargs}
        self._comm = {
            "ddp_comm_state": ddp_comm_state, "ddp_comm_hook": ddp_comm_hook, "ddp_comm_wrapper": ddp_comm_wrapper,
        }  # fmt: skip

    def strategy_arguments(self) -> dict[str, Any]:
        return {**super().strategy_arguments(), **self._comm, **self._ddp_kwargs}

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self._jobs.items() if value is not None}

    def init_ddp_connection(self, global_rank: int | None = None, world_size: int | None = None) -> None:
        """Create the process group."""
        self.strategy.usual._meet()

    def pre_configure_ddp(self) -> None:
        """Called before the model is wrapped; an override can change ``self._ddp_kwargs``."""

    def configure_ddp(self) -> None:
        """Wrap ``self.model`` in DDP; an override can assign another wrapper to ``self.model``."""
        self.pre_configure_ddp()
        strategy = self.strategy
        strategy.ddp_arguments = dict(self._ddp_kwargs)
        strategy.model = strategy.usual._wrapped(strategy.model)

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return a list with the index of this process's GPU; ``None`` on the CPU."""
        index = self.root_device.index
        return None if index is None else [index]

    def _register_ddp_hooks(self) -> None:
        state, hook, wrapper = self.strategy.comm
        if hook is not None:
            self.model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))


class DDPSpawnPlugin(DDPPlugin):
    """:class:`DDPPlugin`, with child processes of this process."""

    strategy_name = "ddp_spawn"


class DDP2Plugin(DDPPlugin):
    """One process per machine, which uses all devices of the machine."""

    strategy_name = "ddp2"
    wraps_in_setup = True


class DDPShardedPlugin(DDPPlugin):
    """:class:`DDPPlugin` with optimizer states sharded over the ranks by ``ZeroRedundancyOptimizer``."""

    def init_optimizers(self, trainer: Any, model: nn.Module) -> None:
        super().init_optimizers(trainer, model)
        shard_optimizers(self.strategy)


class DDPSpawnShardedPlugin(DDPShardedPlugin):
    """:class:`DDPShardedPlugin`, with child processes of this process."""

    strategy_name = "ddp_spawn"


class HorovodPlugin(ParallelPlugin):
    """``horovodrun`` or ``mpirun`` starts the processes; gradients are averaged asynchronously."""

    strategy_name = "horovod"


class TPUSpawnPlugin(ParallelPlugin):
    """One process per TPU core, with ``torch_xla``."""

    strategy_name = "xla"
    setup_optimizers_in_pre_dispatch = True

    def strategy_arguments(self) -> dict[str, Any]:
        return {"parallel_devices": self._devices}


class SingleTPUPlugin(SingleDevicePlugin):
    """One core of a TPU."""

    strategy_name = "single_xla"


PLUGINS: dict[str, Callable[[], TrainingTypePlugin]] = {
    "single_device": SingleDevicePlugin, "dp": DataParallelPlugin, "ddp": DDPPlugin, "ddp_spawn": DDPSpawnPlugin,
    "ddp2": DDP2Plugin, "horovod": HorovodPlugin, "ddp_sharded": DDPShardedPlugin,
    "ddp_sharded_spawn": DDPSpawnShardedPlugin, "tpu_spawn": TPUSpawnPlugin, "single_tpu": SingleTPUPlugin,
}  # fmt: skip
"""The plugin class for each of Lightning 1.3's names for plugins."""


def training_type_plugin_of(given: Any) -> TrainingTypePlugin:
    """Return a plugin for ``given``: a plugin itself, the name of a plugin, or the name of a strategy.

    Raises:
        ConfigurationError: ``given`` is not a plugin or a name.
        UnknownNameError: the name is unknown.
    """
    if isinstance(given, TrainingTypePlugin):
        return given
    if isinstance(given, str):
        if given in PLUGINS:
            return PLUGINS[given]()
        StrategyRegistry.entry(given)  # raises an error for an unknown name
        plugin = TrainingTypePlugin()
        plugin.strategy_name = given
        return plugin
    raise ConfigurationError(
        f"training_type_plugin got {described(given)}. Pass a TrainingTypePlugin, or the name of a strategy."
    )


class TrainingTypePluginsRegistry:
    """Names of plugins, for ``Trainer(plugins="name")`` and ``training_type_plugin="name"``."""

    @staticmethod
    def register(name: str, plugin: Any = None, description: str = "", **init_params: Any) -> Any:
        """Register a plugin class under a name. Without ``plugin``, return a decorator that registers a class.
        ``init_params`` are arguments of the class's constructor.
        """

        def add(cls: Any) -> Any:
            PLUGINS[name] = functools.partial(cls, **init_params)
            return cls

        return add if plugin is None else add(plugin)

    @staticmethod
    def get(name: str) -> TrainingTypePlugin:
        """Return a new plugin of this name."""
        return training_type_plugin_of(name)

    @staticmethod
    def available_plugins() -> list[str]:
        """Return the names."""
        return sorted(PLUGINS)


def shard_optimizers(strategy: Any) -> None:
    """Shard the states of the strategy's optimizers over the ranks, and attach the run's schedulers to the sharded
    optimizers.
    """
    sharded = [_sharded(optimizer) for optimizer in strategy.optimizers]
    for config in strategy.lr_scheduler_configs:
        index = next(i for i, each in enumerate(strategy.optimizers) if each is config.scheduler.optimizer)
        _move_scheduler(config.scheduler, sharded[index])
    strategy.optimizers = sharded


def _sharded(optimizer: Optimizer) -> Any:
    """Return an optimizer with the class, the groups and the options of ``optimizer``. The new optimizer shards its
    state over the ranks.
    """
    with warnings.catch_warnings():
        # The import also loads another module, about which torch warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        sharding = dist_optim.ZeroRedundancyOptimizer
    groups = [dict(group) for group in optimizer.param_groups]
    return sharding(groups, type(optimizer), **optimizer.defaults)


def _move_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Attach ``scheduler`` to ``optimizer``. The scheduler then sets the learning rates of ``optimizer``, and notices
    its steps.
    """
    step = optimizer.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        mark_as_stepped(optimizer)
        return step(*args, **kwargs)

    setattr(watched, WATCHED, True)  # otherwise the scheduler would warn that ``step`` was replaced
    optimizer.step, scheduler.optimizer = watched, optimizer
