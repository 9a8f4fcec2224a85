"""Ranks: this process's rank and device, and the groups of processes with which this process communicates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.facts import Shared
from drivetrain.strategies.familiar import own_collectives
from drivetrain.strategies.group import Group, LoneGroup


class Ranks(Shared, ABC):
    """The processes of a job. A subclass defines :attr:`root_device`. A subclass for several processes also sets the
    ranks, and defines the groups.

    Attributes:
        global_rank, local_rank, node_rank: the rank of this process in the job, its rank on its machine, and the rank
            of the machine; each from 0.
        world_size: the number of processes of the job.
        parallel_devices: the devices of this machine that the run uses, in rank order.
    """

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    parallel_devices: Sequence[torch.device] = ()

    _groups: tuple[Group, Group, Group] | None = None  # world, data, and world without a subclass's own collectives

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device on which this process computes."""

    def set_ranks(self, environment: Any, num_nodes: int) -> None:
        """Record rank and world size of this process. Called before any process is started."""

    def setup_environment(self) -> None:
        """Make the root device the current device. With several processes, also create the process group."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
            # an override of setup_device may have changed the accelerator's device type
            self.precision_plugin.device_type = self.accelerator.autocast_device_type

    def leave_process_group(self) -> None:
        """Leave the job. End this process's communication with other processes.

        Also called in the launching process, which is no rank, after all ranks have ended.
        """

    @property
    def world(self) -> Group:
        """The group of all ranks of the job."""
        return (self._groups or self._make_groups())[0]

    @property
    def data(self) -> Group:
        """The ranks that train on different samples, or on different parts of samples. Gradients and logs are reduced
        over this group.

        A rank outside this group has another part of the model, and sees the same samples as one of the ranks in the
        group.
        """
        return (self._groups or self._make_groups())[1]

    @property
    def _plain_world(self) -> Group:
        return (self._groups or self._make_groups())[2]

    def make_world(self) -> Group:
        """Return the group of all ranks. Override this method if the processes do not communicate through
        torch.distributed.

        Raises:
            ConfigurationError: there are several processes, and the strategy defines no group of these processes.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                f"{type(self).__name__} has world_size={self.world_size}, but no group in which its ranks communicate. "
                "Derive it from ParallelStrategy, or return a drivetrain.strategies.Group from make_world()."
            )
        return LoneGroup(self.global_rank)

    def make_data_group(self, world: Group) -> Group:
        """Return the group of ranks, including this process, that see different samples.

        Override this method in a strategy that spreads one model over several ranks. With two neighbouring ranks per
        model, return ``world.new(range(world.rank % 2, world.size, 2))``. All data groups must have the same size. The
        ranks of one model must have the same ``index`` in their groups. Before the process group exists, ``world`` and
        the results of ``world.new`` have ranks, but cannot communicate. The launching process after the job is no rank,
        and does not call this method.
        """
        return world

    def _make_groups(self) -> tuple[Group, Group, Group]:
        world = self.make_world()
        # after the job, the launching process is no rank, and needs no data group
        data = world if world.size == 1 < self.world_size else self.make_data_group(world)
        if world.rank not in data.ranks:
            raise ConfigurationError(
                f"{type(self).__name__}.make_data_group() returned a group of the ranks {list(data.ranks)} on rank "
                f"{world.rank}. Return one that this rank is a member of, such as world.new([world.rank])."
            )
        strategy: Any = self
        self._groups = own_collectives(strategy, world), data, world
        return self._groups

    def agreed_options(self) -> dict[str, Any]:
        """Return, by name, the options of this strategy that must be equal on all ranks. The ranks compare these
        options.
        """
        return {"strategy": type(self)}
