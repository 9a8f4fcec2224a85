"""Train as Horovod does: average gradients asynchronously during the backward pass. The processes communicate through
the package horovod or torch.distributed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.torch_private import LAST_RATES, schedulers_in
from drivetrain.base.tree import parameters_of
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.precision.precision import Precision
from drivetrain.strategies.gradient_exchange import GradientExchanges
from drivetrain.strategies.group import Group, all_or_alone
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy, until_thawed
from drivetrain.strategies.strategy import StrategyRegistry

# keys of learning rates in a parameter group; cyclic schedules use the last two keys
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


class HorovodGroup(Group):
    """All processes of a Horovod job. The processes communicate through the package ``horovod``.

    Args:
        hvd: the module ``horovod.torch``, initialized.
    """

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank = int(hvd.rank())
        self.ranks = range(int(hvd.size()))

    def gather_objects(self, obj: Any) -> list[Any]:
        with torch.inference_mode(False):  # Horovod writes to the tensors in a thread that is not in inference mode
            gathered: list[Any] = self._hvd.allgather_object(obj)
        return gathered

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        src = 0 if src is None else src
        with torch.inference_mode(False):
            if isinstance(obj, Tensor) and obj.numel():
                return self._hvd.broadcast(obj.detach().clone(), src)
            return self._hvd.broadcast_object(obj, src)

    def new(self, ranks: Sequence[int]) -> Group:
        return all_or_alone(
            self, ranks, "groups of some ranks are not supported with the package horovod. Write "
            "HorovodStrategy(package=False), which exchanges through torch.distributed.",
        )  # fmt: skip


@StrategyRegistry.register("horovod")
class HorovodStrategy(ParallelStrategy):
    """The complete model on every rank; gradients are averaged in buckets during the backward pass.

    ``horovodrun``, ``mpirun`` or ``torchrun`` must start the processes. With ``horovodrun``, the processes communicate
    through the package ``horovod`` if the package is installed. With ``mpirun``, the package must also have been built
    with MPI. In all other cases, the processes communicate through ``torch.distributed``. When training begins, all
    ranks get the parameters, buffers and optimizer state of rank 0.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        scale_lr: multiply the learning rates of optimizers and schedulers by the number of ranks.
        package: True: communicate through the package ``horovod``; False: never; ``None``: if possible.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        scale_lr: bool = False,
        package: bool | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.process_group_backend, self.timeout = process_group_backend, timeout
        self.scale_lr, self.package = scale_lr, package
        self._hvd: Any = None
        self._trains = True
        self._exchanges = GradientExchanges()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hvd": None, "_exchanges": GradientExchanges()}

    def agreed_options(self) -> dict[str, Any]:
        return {**super().agreed_options(), "scale_lr": self.scale_lr, "package": self.package}

    # ---- processes -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._hvd is None:
            hvd, why = (None, "package=False") if self.package is False else horovod_package()
            if hvd is None and self.package:
                raise ConfigurationError(
                    f"HorovodStrategy(package=True): {why}. Start the program with horovodrun, where the package is "
                    "installed, or leave package out."
                )
            self._hvd = hvd
            over = "torch.distributed" if hvd is None else "the package horovod"
            rank_zero_info(f"HorovodStrategy exchanges through {over}, because {why}.")
        super().setup_environment()

    def _meet(self) -> None:
        if self._hvd is None:
            super()._meet()
            return
        self._hvd.init()
        found = (self._hvd.rank(), self._hvd.size())
        if found != (self.global_rank, self.world_size):
            raise ConfigurationError(
                f"Horovod says that this process is rank {found[0]} of {found[1]}, but its environment says rank "
                f"{self.global_rank} of {self.world_size}. Start the program with horovodrun, or write "
                "HorovodStrategy(package=False)."
            )

    def make_world(self) -> Group:
        if self._hvd is None or self.world_size == 1 or self._outlived:
            return super().make_world()
        return HorovodGroup(self._hvd)

    def _check_met(self) -> None:
        if self._hvd is not None and self.world_size > 1:
            raise NotSupportedError(
                "A process group of torch.distributed was passed to a collective, but the ranks exchange through the "
                "package horovod. Leave the group out, or write HorovodStrategy(package=False)."
            )
        super()._check_met()

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        self._trains = trainer is None or trainer.progress.fn == "fit"
        super().setup(trainer)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        self.share_from_rank_zero([*module.parameters(), *module.buffers()])
        if self._trains and self.data.size > 1:
            self._exchanges.begin(module, self.data.size, self._start, self._wait)
        return module

    def _start(self, tensor: Tensor, name: str) -> Any:
        if self._hvd is None:
            return dist.all_reduce(tensor, group=self.data.handle, async_op=True)
        return self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)

    def _wait(self, handle: Any) -> None:
        if self._hvd is None:
            handle.wait()
        else:
            self._hvd.synchronize(handle)

    def bind(self, name: str) -> Any:
        if name != "training_step":
            return super().bind(name)
        return until_thawed(super().bind(name), self._exchanges.include_thawed(self.model), lambda: self.bind(name))

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._exchanges.paused(model)

    # ---- optimizers ----------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self.scale_lr and self.world_size > 1:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group.update({key: group[key] * self.world_size for key in _RATES if key in group})
            for config in self.lr_scheduler_configs:
                _scale(config.scheduler, self.world_size)

    def on_train_start(self) -> None:
        """Broadcast the optimizer state of rank 0."""
        if self.data.size > 1:
            for optimizer in self.optimizers:
                self._share_state(optimizer)

    def _share_state(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        here = [
            (index, key, isinstance(value, Tensor))
            for index, parameter in enumerate(parameters)
            for key, value in sorted(optimizer.state.get(parameter, {}).items())
        ]
        everyones = self.data.gather_objects(here)
        if any(theirs != everyones[0] for theirs in everyones):
            raise ConfigurationError(
                f"The state of {type(optimizer).__name__} has other entries on some ranks than on rank 0 when training "
                "begins. Resume all ranks from one checkpoint, or start all of them without optimizer state."
            )
        tensors = [optimizer.state[parameters[index]][key] for index, key, is_tensor in here if is_tensor]
        self.share_from_rank_zero(tensors)

    def teardown(self) -> None:
        self._exchanges.close()
        super().teardown()


def horovod_package() -> tuple[Any, str]:
    """Return the module ``horovod.torch``, or ``None`` if the module cannot connect the processes of this job. Also
    return the reason for the choice as a text.
    """
    by_horovod, by_mpi = "HOROVOD_RANK" in os.environ, "OMPI_COMM_WORLD_RANK" in os.environ
    if not (by_horovod or by_mpi):
        return None, "neither horovodrun nor mpirun has started this process"
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        return None, f"the package horovod cannot be imported ({error})"
    if by_horovod:
        return hvd, "horovodrun has started this process"
    if hvd.mpi_built():
        return hvd, "mpirun has started this process, and horovod was built with MPI"
    return None, "mpirun has started this process, and horovod was built without MPI"


def _scale(scheduler: Any, factor: int) -> None:
    """Multiply the base learning rates of ``scheduler``, and of the schedulers inside ``scheduler``."""
    for name in ("base_lrs", LAST_RATES):
        if (rates := getattr(scheduler, name, None)) is not None:
            setattr(scheduler, name, [rate * factor for rate in rates])
    for inner in schedulers_in(scheduler):
        _scale(inner, factor)
