"""Base class of strategies with several processes: sets the ranks and creates the process group."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.introspect import defined_by_user
from drivetrain.base.rank_zero import tell_rank
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, RunError
from drivetrain.precision.precision import Precision
from drivetrain.strategies.gradient_exchange import alike
from drivetrain.strategies.group import Group, LoneGroup, TorchGroup, WaitingGroup
from drivetrain.strategies.meeting import forget_interface, meet
from drivetrain.strategies.sharded_state import is_dtensor
from drivetrain.strategies.strategy import Strategy

_FOR_HOST = "gloo"
_LET_GO_S = 0.05
_TOGETHER = 2**26  # bytes per exchange: a larger exchange needs much memory and is not faster
DEFAULT_TIMEOUT = timedelta(minutes=30)

_GROUP: list[Any] = []  # the last process group that this module has created, and the timeout and backend of the group


class ParallelStrategy(Strategy):
    """One process per device, in a process group of ``torch.distributed``.

    Args:
        accelerator, checkpoint_io, precision_plugin: as for every strategy.
        parallel_devices: this machine's devices in rank order; ``None``: the devices that the Trainer's arguments
            select.
        cluster_environment: provides the ranks of this process; ``None``: the environment that the Trainer detects.
        process_group_backend: the backend of ``torch.distributed``; ``None``: the default backend of the accelerator.
        timeout: the longest time that a rank waits for other ranks in an exchange. After this time, the job fails.
    """

    facts = Strategy.facts.but(is_distributed=True, start_method="popen")

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.own_parts.devices = tuple(parallel_devices or ())
        self.cluster_environment = cluster_environment
        self.own_parts.environment = cluster_environment
        self.num_nodes = 1
        self._outlived = False
        self.process_group_backend = process_group_backend
        self.timeout = timeout

    @property
    def root_device(self) -> torch.device:
        if not (devices := self.parallel_devices or self.own_parts.devices):
            raise RunError(
                f"{type(self).__name__} has no devices yet: a Trainer or an Engine sets them. Read root_device in a "
                "hook of a run, or pass parallel_devices."
            )
        return devices[0 if self.facts.drives_all_devices else self.local_rank]

    def agreed_options(self) -> dict[str, Any]:
        own = {"timeout": self.timeout, "process_group_backend": self.process_group_backend}
        return {**super().agreed_options(), **own}

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return 1 if self.facts.drives_all_devices else len(self.parallel_devices or self.own_parts.devices)

    synchronises_batchnorm: bool = False
    """Whether the strategy supports ``Trainer(sync_batchnorm=True)`` and a ``LayerSync`` in ``plugins``. If not, both
    options raise an error with several processes.
    """

    def setup(self, trainer: Any) -> None:
        fits = trainer is not None and trainer.progress.fn == "fit"
        cannot = fits and self.world_size > 1 and not self.synchronises_batchnorm
        if cannot and (trainer.settings.sync_batchnorm or self.layer_sync is not None):
            sync = self.layer_sync
            asks = "Trainer(sync_batchnorm=True)" if sync is None else f"The {type(sync).__name__} in plugins"
            raise ConfigurationError(
                f"{asks} synchronises layers such as batch norm over all processes, which {type(self).__name__} does "
                'not do. Leave it out, write strategy="ddp", or change the layers in configure_model or in '
                "setup_module(module) and set synchronises_batchnorm = True on the strategy."
            )
        super().setup(trainer)

    def set_ranks(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        self.cluster_environment, self.num_nodes, self._outlived = environment, num_nodes, False
        self._groups = None
        if environment.creates_processes_externally:
            self._store_ranks_of_job()
        else:
            node_rank, on_each = environment.node_rank(), self.num_processes
            self._store_ranks(world_size=num_nodes * on_each, node_rank=node_rank, global_rank=node_rank * on_each)

    def _store_ranks_of_job(self) -> None:
        """Store this process's ranks from the cluster environment. Called only in a process that is a rank of
        the job.
        """
        environment = self.cluster_environment
        assert environment is not None  # set_ranks() has stored the environment
        # drivetrain has started the processes, so it tells the environment the world size and the rank
        if not environment.creates_processes_externally:
            environment.set_world_size(self.num_nodes * self.num_processes)
            environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
        self._store_ranks(
            local_rank=environment.local_rank(), node_rank=environment.node_rank(),
            global_rank=environment.global_rank(), world_size=environment.world_size(),
        )  # fmt: skip

    def _store_ranks(self, **ranks: int) -> None:
        """Set each of ``ranks`` as an attribute. A name that a subclass defines as a property is skipped."""
        for name, value in ranks.items():
            if not isinstance(getattr(type(self), name), property):
                setattr(self, name, value)

    def setup_environment(self) -> None:
        self._store_ranks_of_job()
        if self.world_size > 1:
            os.environ["RANK"] = str(self.global_rank)  # rank_zero functions read this, also in a loader's workers
            tell_rank(self.global_rank)
        super().setup_environment()
        if dist.is_initialized():
            self._check_group()
        else:
            self._groups = None  # the earlier groups belong to a process group that no longer exists
            self._meet()
        if self._groups is None:  # if the process group is that of an earlier run, its groups are still valid
            self._make_groups()

    def _check_group(self) -> None:
        """Check that an existing process group, from an earlier run or from the user, has the requested options.

        Raises:
            ConfigurationError: the group has a different backend or a different timeout, and cannot be changed.
        """
        made, *options = _GROUP or (None, None, None)
        timeout, backend = options if made is dist.group.WORLD else (self.timeout, None)
        differ: list[tuple[str, Any, Any]] = []
        if timeout != self.timeout:
            differ.append(("timeout", self.timeout, timeout))
        if self.process_group_backend not in (None, backend, dist.get_backend(), dist.get_backend_config()):
            differ.append(("process_group_backend", self.process_group_backend, backend or dist.get_backend()))
        for name, asked, there in differ:
            raise ConfigurationError(
                f"{type(self).__name__}({name}={asked!r}): the processes of this job already have a process group "
                f"with {name}={there!r}, and all Trainers of a program use it. Write the same {name} for each."
            )

    def _meet(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        assert self.accelerator is not None
        backend = self.process_group_backend or self._backends(self.accelerator)
        meet(backend, environment, self.global_rank, self.world_size, self.num_nodes, self.timeout)
        _GROUP[:] = dist.group.WORLD, self.timeout, backend
        atexit.register(_leave_group)

    def leave_process_group(self) -> None:
        # if this strategy has made no groups, the process group may be the user's, and stays
        joined = self._groups is not None and not self._outlived
        self._groups, self._outlived = None, True
        if joined:
            _leave_group()

    def _backends(self, accelerator: Accelerator) -> str:
        """Return a backend for the accelerator's devices, and Gloo for host memory. With Gloo, exchanges of host memory
        do not wait for the device.
        """
        own = accelerator.process_group_backend
        if self.root_device == HOST or own == _FOR_HOST or not dist.is_gloo_available():
            return own
        return f"{HOST.type}:{_FOR_HOST},{self.root_device.type}:{own}"

    def teardown(self) -> None:
        super().teardown()
        environment = self.cluster_environment
        if environment is not None and defined_by_user(environment, "teardown"):
            environment.teardown()  # drivetrain's own environments need no teardown before another run
        if self.world_size == 1 and _GROUP[:1] == [dist.group.WORLD]:
            _leave_group()  # processes that start later must not inherit this group

    # ---- buffers, which depend on each rank's batches ------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Copy the buffers of rank 0 to all ranks before a validation. Every rank then evaluates the model that a
        checkpoint contains.
        """
        self.share_from_rank_zero(self._own_buffers(self.lightning_module))

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the buffers of this rank. Rank 0 returns ``{}``, because the checkpoint already contains rank 0's
        buffers.
        """
        if self.global_rank == 0:
            return {}
        own = {id(buffer) for buffer in self._own_buffers(module)}
        named = module.named_buffers()
        return {"buffers": found} if (found := {name: each for name, each in named if id(each) in own}) else {}

    def load_rank_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        known = dict(module.named_buffers())
        for name, value in state.get("buffers", {}).items():
            if name in known and known[name].shape == value.shape:
                known[name].copy_(value)

    def _own_buffers(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the buffers whose values may differ between the ranks of one data group."""
        return [buffer for buffer in module.buffers() if not is_dtensor(buffer)]

    # ---- between ranks -------------------------------------------------------------------------------------------

    def make_world(self) -> Group:
        """Return the group of all processes. Until ``setup_environment`` has created the process group, the result
        cannot communicate.
        """
        if self.world_size == 1 or self._outlived:
            return LoneGroup(self.global_rank)
        if not dist.is_initialized():
            return WaitingGroup(self.global_rank, range(self.world_size), self._have_not_met)
        return TorchGroup(None, self.root_device, self._checks, self.timeout)

    def _make_groups(self) -> tuple[Group, Group, Group]:
        made = super()._make_groups()
        if isinstance(made[0], WaitingGroup):
            self._groups = None  # made again at the next use, because the process group may exist then
        return made

    def _check_met(self) -> None:
        """Check that the process group exists. Without a process group, each process would act like the only
        process.
        """
        if isinstance(self.world, WaitingGroup):
            raise self._have_not_met()

    def _have_not_met(self) -> ConfigurationError:
        return ConfigurationError(
            f"This process is one of {self.world_size}, which are not connected yet. Call engine.launch() first."
        )

    def _group_of(self, group: Any) -> Group:
        if group is None or isinstance(group, Group):
            return super()._group_of(group)
        self._check_met()
        return TorchGroup(group, self.root_device, self._checks, self.timeout)

    def share_from_rank_zero(self, tensors: Sequence[torch.Tensor], group: Group | None = None) -> None:
        """Copy the values of the first rank of ``group`` to every rank, in place.

        Args:
            tensors: plain tensors, or shards of DTensors; tensors of one dtype are sent together.
            group: the ranks; ``None``: the data group. With plain DDP, the first rank of the data group is rank 0.
        """
        group = self.data if group is None else group
        for together in alike([tensor.detach() for tensor in tensors], _TOGETHER):
            flat = group.broadcast(torch.cat([tensor.reshape(-1) for tensor in together]))
            for tensor, values in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
                tensor.copy_(values.view_as(tensor))


def until_thawed(
    step: Callable[..., Any], frozen: Sequence[nn.Parameter], bind: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function that calls ``step``. As soon as a parameter in ``frozen`` requires gradients, the function
    calls ``bind()`` once. From then on, it calls the result of ``bind()`` instead of ``step``.
    """

    def looking(*args: Any, **kwargs: Any) -> Any:
        nonlocal step, frozen
        if any(each.requires_grad for each in frozen):
            step, frozen = bind(), ()
        return step(*args, **kwargs)

    return looking if frozen else step


def _leave_group() -> None:
    if dist.is_initialized():
        gc.collect()  # objects that refer to the group, above all a DDP's reducer, must be freed before the group
        dist.destroy_process_group()
        forget_interface()
        _GROUP.clear()
        # The group's threads may still need Python's global lock to free the last exchanged tensors. A thread that gets
        # the lock during interpreter shutdown crashes the process.
        time.sleep(_LET_GO_S)
