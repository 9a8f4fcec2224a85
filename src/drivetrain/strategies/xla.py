"""The complete model on every XLA device. torch_xla starts one replica for each device. Gradients are averaged over the
replicas.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.introspect import temporarily
from drivetrain.base.packages import torch_xla, xla_model, xla_multiprocessing, xla_parallel_loader, xla_runtime
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.clusters.xla import XLAEnvironment, check_no_launcher
from drivetrain.data.combined import without_restart
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies import rank_files
from drivetrain.strategies._xla import XLAExecution, checked, run_recorded
from drivetrain.strategies.collectives import with_gradient
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.gradient_exchange import GradientExchanges
from drivetrain.strategies.group import Group, LoneGroup, all_or_alone
from drivetrain.strategies.parallel import until_thawed
from drivetrain.strategies.peers import CURES, as_bytes, dumped, loaded
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


class XLAGroup(Group):
    """The group of all replicas that ``xmp.spawn`` has started. A replica is a process with one device.

    Tensors are exchanged on the device, by operations that torch_xla records. Objects are exchanged as pickled bytes.
    During an exchange of objects, the host waits for the device. A replica unpickles only objects that another replica
    of the same job has pickled.

    Args:
        device: the device of this replica.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = int(xla_runtime.global_ordinal())
        self.ranks = range(int(xla_runtime.world_size()))

    def gather_objects(self, obj: Any) -> list[Any]:
        data, problem = dumped(obj)
        if problem is not None:
            raise ConfigurationError(f"gather_objects() got {problem}. {CURES['gather_objects']}")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.inference_mode(False):
            sizes = self._stacked(torch.tensor(len(mine), device=self.device)).tolist()
            padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
            rows = self._stacked(padded.to(self.device)).cpu()
        each = zip(self.ranks, rows, sizes, strict=True)
        return [obj if rank == self.rank else loaded(as_bytes(row[:size]), self.device) for rank, row, size in each]

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
            return with_gradient(tensor, self._stacked, self._own_sum)
        return self._stacked(tensor.detach())

    def _stacked(self, tensor: Tensor) -> Tensor:
        """Return the stacked tensors of all replicas, on the device of ``tensor``."""
        if tensor.is_complex():
            return torch.view_as_complex(self._stacked(torch.view_as_real(tensor)))
        # torch_xla gathers by summation, and booleans cannot be summed
        numbers = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
        gathered: Tensor = xla_model.all_gather(numbers.to(self.device).unsqueeze(0), dim=0)
        return gathered.to(dtype=tensor.dtype, device=tensor.device)

    def _own_sum(self, stack: Tensor) -> Tensor:
        """Sum ``stack`` over all replicas, and return this replica's slice. This is the backward pass of
        :meth:`_stacked`.
        """
        summed = stack.to(device=self.device, copy=True).contiguous()
        self.total(summed)
        return summed[self.rank].to(stack.device, copy=True)

    def total(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all replicas. ``tensor`` must be on the device."""
        xla_model.all_reduce(xla_model.REDUCE_SUM, [tensor])

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        src = 0 if src is None else src
        form = (obj.shape, obj.dtype) if isinstance(obj, Tensor) else None
        forms = self.gather_objects(form if self.rank == src else None)
        if (theirs := forms[src]) is None:
            return self.gather_objects(obj if self.rank == src else None)[src]

        shape, dtype = theirs
        like = obj if isinstance(obj, Tensor) else torch.empty(0, device=self.device)
        # torch_xla multiplies the values of all replicas except src by 0, and sums all values. These replicas pass
        # zeros, because NaN times 0 would be NaN.
        mine = like.detach() if self.rank == src else torch.zeros(shape, dtype=dtype)
        summed = torch.uint8 if dtype is torch.bool else dtype  # torch_xla does not sum booleans
        sent = mine.to(device=self.device, dtype=summed, copy=True)
        xla_model.collective_broadcast([sent], root_ordinal=src)
        return sent.to(device=like.device, dtype=dtype)

    def barrier(self, name: str | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # xm.rendezvous itself calls a deprecated function
            xla_model.rendezvous("" if name is None else name)

    def new(self, ranks: Sequence[int]) -> Group:
        why = "the replicas of torch_xla exchange all together. Use the group of all ranks."
        return all_or_alone(self, ranks, why)


@StrategyRegistry.register("xla")
@StrategyRegistry.register("xla_debug", debug=True)
class XLAStrategy(XLAExecution, DDPStrategy):
    """One replica per XLA device, in a process that torch_xla starts. Gradients are averaged once per optimizer step.

    The strategy does not use ``torch.distributed``. With one device, this process is the only replica. Even then,
    :meth:`all_gather` adds a dimension. Before the replicas run, the ranks are 0, the world size is 1, and there is no
    root device.

    Args:
        accelerator, parallel_devices, precision_plugin: as for every strategy.
        checkpoint_io: the checkpoint store; ``None``: an ``XLACheckpointIO``.
        debug: let torch_xla report the reasons for compilations and the places where values are read
            (``PT_XLA_DEBUG``).
        sync_module_states: copy the parameters and buffers of rank 0 to all replicas before training.
        unknown: any other argument raises an error.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        TypeError: ``checkpoint_io`` or ``precision_plugin`` has a wrong type.
    """

    strategy_name = "xla"

    facts = XLAExecution.facts.but(is_distributed=True, start_method="xla")
    synchronises_batchnorm = False

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        **unknown: Any,
    ) -> None:
        checkpoint_io = checked(type(self), unknown, checkpoint_io, precision_plugin)
        super().__init__(
            accelerator, parallel_devices, XLAEnvironment(), checkpoint_io, precision_plugin, start_method="xla"
        )
        self.debug = debug
        self.sync_module_states = sync_module_states
        self._device: torch.device | None = None  # the device of this replica; None before the replica runs
        self._exchanges = GradientExchanges()
        self._loaders: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_device": None, "_exchanges": GradientExchanges(), "_loaders": []}

    def agreed_options(self) -> dict[str, Any]:
        return {**super().agreed_options(), "sync_module_states": self.sync_module_states}

    # ---- replicas ------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this replica.

        Raises:
            RuntimeError: the replicas do not run yet.
        """
        if self._device is None:
            raise RuntimeError(
                f"{type(self).__name__}.root_device is unknown before the replicas run. Read it inside fit, validate, "
                "test, predict or a function that Engine.launch calls."
            )
        return self._device

    def set_ranks(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        """Reset the ranks of an earlier job. torch_xla's runtime determines the ranks of this job."""
        self.num_nodes, self._outlived = num_nodes, False
        self._groups = self._device = None
        self._store_ranks(world_size=1, node_rank=0, global_rank=0, local_rank=0)

    def setup_environment(self) -> None:
        if self.num_processes == 1:
            check_no_launcher()
            xla_multiprocessing.spawn(_nothing, nprocs=1)  # torch_xla then sets up this process for one device
        self._device = torch.device(torch_xla.device())
        super().setup_environment()

    def _check_group(self) -> None:
        """Do nothing: a process group that the user has created is not used."""

    def _meet(self) -> None:
        """Do nothing: torch_xla's runtime has connected the replicas."""

    def make_world(self) -> Group:
        if self._device is None or self._outlived:
            return LoneGroup(self.global_rank)
        return XLAGroup(self._device)

    def _make_groups(self) -> tuple[Group, Group, Group]:
        made = super()._make_groups()
        if self._device is None:
            self._groups = None  # made again at the next use, because the replicas may be running then
        return made

    # ---- between ranks -------------------------------------------------------------------------------------------

    def reduce(  # type: ignore[override]  # Lightning's method has another name for this argument
        self, output: Any = None, group: Any = None, reduce_op: Any = "mean", *, tensor: Any = None
    ) -> Any:
        """Return the reduction of a tensor over all ranks. Return any other value unchanged.

        Args:
            output: a tensor of the same shape and dtype on every rank; ``tensor`` is an alias of this argument.
            tensor: the name of ``output`` in the other strategies.
            group: a ``drivetrain.strategies.Group``. Any other value is ignored, and torch_xla reduces over all
                replicas.
            reduce_op: "mean" (the default, also for ``None``), "sum", "min", "max", "product", or a ``ReduceOp``.
        """
        return super().reduce(output if tensor is None else tensor, group, reduce_op)

    def _group_of(self, group: Any) -> Group:
        return Familiar._group_of(self, group)  # ignores torch's groups: torch_xla's collectives involve all replicas

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked to ``(world_size, *tensor.shape)``. This is also the shape with one
        replica.

        Args:
            tensor: a tensor whose shape and dtype are the same on every rank. Before the replicas run, the tensor is
                returned unchanged.
            group: a ``drivetrain.strategies.Group``. Any other value is ignored, and torch_xla gathers from all
                replicas.
            sync_grads: let gradients flow back to the source rank of each slice.

        Raises:
            NotImplementedError: ``tensor`` is not a tensor.
        """
        if not isinstance(tensor, Tensor):
            raise NotImplementedError(
                f"{type(self).__name__}.all_gather() takes tensors, and got a {type(tensor).__name__}. Pass a tensor, "
                "or call world.gather_objects(obj)."
            )
        if self._device is None:
            return tensor
        return self._group_of(group).all_gather(tensor, sync_grads)

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = Strategy.setup_module(self, module, move_to_device)
        if self.sync_module_states and self.world.size > 1:
            self.share_from_rank_zero([*module.parameters(), *module.buffers()])
        if self._wraps and self.world.size > 1:
            self._exchanges.begin(module, self.world.size, self._total, lambda handle: None)
        run_recorded()
        return module

    def _total(self, tensor: Tensor, name: str) -> None:
        world = self.world
        assert isinstance(world, XLAGroup)  # the replicas run
        world.total(tensor)

    def bind(self, name: str) -> Any:
        if name != "training_step":
            return super().bind(name)
        return until_thawed(super().bind(name), self._exchanges.include_thawed(self.model), lambda: self.bind(name))

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        with self._exchanges.paused(model), super().accumulating(model):
            yield

    # ---- data and checkpoints ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return ``dataloader`` as torch_xla's ``MpDeviceLoader``. The batches of the result are on the device."""
        loader = on_device(dataloader, self.root_device)
        if hasattr(loader, "close"):
            self._loaders.append(loader)
        return loader

    def save_checkpoint(self, checkpoint: Any, filepath: str | Path, storage_options: Any = None) -> None:
        run_recorded()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete the checkpoint, on the first rank of every machine. Every rank can call this method."""
        if self.local_rank == 0:
            self.checkpoint_io.remove_checkpoint(filepath)
            rank_files.remove(self, filepath)

    def teardown(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._exchanges.close()
        with temporarily(vars(self), _device=self._device or HOST):  # before the replicas run, the model is on the host
            super().teardown()


def _nothing(index: int) -> None:
    """Do nothing."""


# ---- loaders --------------------------------------------------------------------------------------------------------


_KEPT = ("dataset", "batch_sampler", "sampler", "generator", "num_workers", "batch_size", "drop_last")


def on_device(loader: Any, device: torch.device) -> Any:
    """Return ``loader`` as a torch_xla ``MpDeviceLoader``. If ``loader`` is an ``MpDeviceLoader``, return ``loader``
    unchanged.

    The result has some attributes of ``loader``, such as the sampler and the batch size. Before the loader yields a
    batch, the device executes the operations that torch_xla has recorded. If the loader has workers, torch_xla's
    threads upload batches in advance. Without workers, a batch is fetched only when the loop requests the batch,
    because fetching may draw random numbers in this process.
    """
    kind = _device_loader()
    if isinstance(loader, kind.__mro__[1]):
        return loader
    wrapped = kind(loader, device)
    for name in _KEPT:
        if hasattr(loader, name):
            setattr(wrapped, name, getattr(loader, name))
    return wrapped


@functools.cache
def _device_loader() -> Any:
    class DeviceLoader(xla_parallel_loader.MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no types
        """Batches of a loader on an XLA device."""

        def __iter__(self) -> Iterator[Any]:
            self.close()
            if getattr(self._loader, "num_workers", 0) > 0:
                return self._uploaded_ahead()
            return self._one_by_one()

        def _one_by_one(self) -> Iterator[Any]:
            for batch in self._loader:
                torch_xla.sync(reset_scope=False)
                yield xla_model.send_cpu_data_to_device([batch], self._device)[0]
            torch_xla.sync(reset_scope=False)

        def _uploaded_ahead(self) -> Iterator[Any]:
            source = without_restart(iter(self._loader))
            # fetch the first batch in this thread, because samplers draw random numbers and call collectives
            first = next(source, _END)
            if first is _END:
                return iter(())
            self._parallel_loader = xla_parallel_loader.ParallelLoader(
                chain([first], source), [self._device], **self._parallel_loader_kwargs
            )
            return self._parallel_loader.per_device_loader(self._device)

        def close(self) -> None:
            """Stop the upload threads if the loop left a pass early."""
            if self._parallel_loader is not None:
                self._parallel_loader.close()
                self._parallel_loader = None

    return DeviceLoader


_END = object()
