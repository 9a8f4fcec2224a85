"""Ranks: which process of a job this is, where it computes, and with which others it exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.facts import Shared
from drivetrain.strategies.group import Group, LoneGroup


class Ranks(Shared, ABC):
    """The processes of a job. A subclass defines :attr:`root_device`; with several processes, their ranks and groups.

    Attributes:
        global_rank, local_rank, node_rank: this process in the job and on its machine, and that machine; from 0.
        world_size: how many processes the job has.
        parallel_devices: this machine's devices as the plan decided them, in rank order.
    """

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    parallel_devices: Sequence[torch.device] = ()

    _groups: tuple[Group, Group, Group] | None = None  # the last is the first without the overrides of a subclass

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device this process computes on."""

    def set_ranks(self, environment: Any, num_nodes: int) -> None:
        """Record rank and world size of this process; called before any process is started."""

    def setup_environment(self) -> None:
        """Make the device current (and, with several processes, create the group)."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
            self.precision_plugin.device_type = self.accelerator.autocast_device_type  # as an override may have set it

    def leave_process_group(self) -> None:
        """Leave the job: this process will exchange nothing more.

        Also called in the launching process, which is no rank, when the processes that it started have ended.
        """

    @property
    def world(self) -> Group:
        """The group of all ranks of the job."""
        return (self._groups or self._make_groups())[0]

    @property
    def data(self) -> Group:
        """The group of ranks that see different samples, or parts of them; gradients and logs are reduced over it.

        Other ranks hold other parts of the same model, and see the same samples as one of these.
        """
        return (self._groups or self._make_groups())[1]

    @property
    def _plain_world(self) -> Group:
        return (self._groups or self._make_groups())[2]

    def make_world(self) -> Group:
        """Return the group of all ranks, for a strategy whose processes do not exchange through torch.distributed.

        Raises:
            ConfigurationError: there are several, and the strategy has no group of them.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                f"{type(self).__name__} has world_size={self.world_size}, and no group in which its ranks exchange "
                "anything. Derive it from ParallelStrategy, or return a drivetrain.strategies.Group from make_world()."
            )
        return LoneGroup(self.global_rank)

    def make_data_group(self, world: Group) -> Group:
        """Return the group of the ranks that see different samples, of which this process is one.

        For a strategy that spreads one model over several ranks: ``world.new(range(world.rank % 2, world.size, 2))``
        where each model takes two neighbouring ranks. The data groups have one size, and the ranks of one model the
        same ``index`` in theirs. Until the processes have met, ``world`` and what its ``new`` returns only know ranks.
        """
        return world

    def _make_groups(self) -> tuple[Group, Group, Group]:
        world = self.make_world()
        data = self.make_data_group(world)
        if world.rank not in data.ranks:
            raise ConfigurationError(
                f"{type(self).__name__}.make_data_group() returned a group of the ranks {list(data.ranks)} on rank "
                f"{world.rank}. Return one that this rank is a member of, such as world.new([world.rank])."
            )
        self._groups = self._honouring_overrides(world), data, world
        return self._groups

    def _honouring_overrides(self, world: Group) -> Group:
        """``world``, or a group in its place that asks this strategy for some exchanges."""
        return world

    def agreed_options(self) -> dict[str, Any]:
        """Return what must be the same on all ranks of this strategy's options, by name; ranks compare it."""
        return {"strategy": type(self)}
