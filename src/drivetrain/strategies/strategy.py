"""The contract of a strategy: how one model is trained on its devices."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain import parity
from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.compiled import own_names, plain_names
from drivetrain.base.introspect import overrides
from drivetrain.base.registry import Registry, check_contract_version, names_itself
from drivetrain.base.restoring import check_optimizer_state, load_states
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies._peers import Checks
from drivetrain.strategies.collectives import operation_of
from drivetrain.strategies.facts import Facts, check_declared
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.group import Group, LoneGroup
from drivetrain.strategies.layer_sync import LayerSync
from drivetrain.strategies.placement import optimizer_to, place
from drivetrain.strategies.stepping import Driver, Stepping


class Strategy(Stepping, Familiar, ABC):
    """Base class. It owns the accelerator, the precision and the checkpoint store; it does not know the Trainer.

    A subclass defines the root device and, if it has several processes, how the model is set up and what the ranks are.
    The plan fills in the constructor arguments that are ``None``.

    Subclasses are for experts: this contract may change in a minor version. The changelog says how.

    Attributes:
        own_accelerator, own_precision, own_devices: what the constructor was given, which the plan respects.
        parallel_devices: this machine's devices as the plan decided them, in rank order.
    """

    contract_version: ClassVar[int] = 1
    """The version of this contract. A subclass that writes its own is refused where that is another one."""

    facts: Facts = Facts()
    """What is declared of the class, or of an object by its constructor."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.accelerator = self.own_accelerator = accelerator
        self.own_precision = precision_plugin
        self.own_devices: tuple[torch.device, ...] = ()
        self.parallel_devices: tuple[torch.device, ...] = ()
        self.checkpoint_io: CheckpointIO = checkpoint_io or TorchCheckpointIO()
        self.layer_sync: LayerSync | None = None  # of the user's, which the plan fills in
        self.precision_plugin: Precision = precision_plugin or Precision()
        self.lightning_module: Any = None
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.driver = Driver()
        self.rank_files_written: dict[str, str] = {}  # this rank's last one by checkpoint: see rank_files.py
        self._converted: nn.Module | None = None
        self._groups: tuple[Group, Group] | None = None
        self._checks = Checks()

    def __getstate__(self) -> dict[str, Any]:
        # on its way into another process, where a run makes its own
        own = {"optimizers": [], "lr_scheduler_configs": [], "driver": Driver(), "_groups": None}
        return {**self.__dict__, **own}

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device this process computes on."""

    # ---- names ---------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Registry[Strategy]) -> None:
        """Give the class its names: ``strategy_registry.register("name", cls, description="...")``.

        Called once, when a subclass that defines it is defined, so that no other line is needed.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract_version(cls, Strategy.contract_version, "strategy")
        check_declared(cls)
        names_itself(cls, "register_strategies", StrategyRegistry)

    # ---- life ----------------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module) -> None:
        """Take the user's module, before any process or device exists."""
        self.lightning_module = self.model = model
        self.driver = Driver()
        self._converted = None

    def set_ranks(self, environment: Any, num_nodes: int) -> None:
        """Record rank and world size of this process; called before any process is started."""

    def leave_process_group(self) -> None:
        """Leave the job: this process will exchange nothing more."""

    def after_job(self) -> None:
        """Called in the launching process, which is no rank, when the processes it started have ended."""

    def setup_environment(self) -> None:
        """Make the device current (and, with several processes, create the group)."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
            self.precision_plugin.device_type = self.accelerator.autocast_device_type  # as an override may have set it

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which new tensors are made on the device and in the precision: that of ``configure_model``.

        Args:
            empty_init: not used; the caller decides whether parameters are initialized.
        """
        with self.root_device, self.precision_plugin.tensor_init_context() or nullcontext():
            yield

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context around ``configure_model``, in which a strategy may shard layers as they are created."""
        return nullcontext()

    def setup(self, trainer: Any) -> None:
        """Convert, move and wrap the model. Afterwards optimizers may be made from its parameters."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        module: nn.Module = self.lightning_module
        wrapped = self.model is not module
        if wrapped:
            raise ConfigurationError(
                f"{type(self).__name__} has wrapped the module before setup(), which sets up the module itself. Wrap "
                "it in setup_module(module), or after super().setup(trainer)."
            )
        self.model = self.setup_module(module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the Trainer make the run's optimizers and schedulers. Called after :meth:`setup`, unless that did it."""
        self.optimizers, self.lr_scheduler_configs = trainer.make_optimizers()

    def connect_precision(self) -> None:
        """Let the precision replace the model, the optimizers or the schedulers of the run, when they are made."""
        if overrides(self.precision_plugin, "connect", Precision):
            assert self.model is not None  # setup() came first
            self.model, self.optimizers, self.lr_scheduler_configs = self.precision_plugin.connect(
                self.model, self.optimizers, self.lr_scheduler_configs
            )

    def convert(self, module: nn.Module) -> nn.Module:
        """``module`` in the precision of the run; what is so already stays. Weights that are loaded need it before."""
        if self._converted is None or module is not self._converted:
            self._converted = module = self.precision_plugin.convert_module(module)
        return module

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """``module`` in this precision, on the root device unless it stays, and wrapped where processes share it."""
        own = module is self.lightning_module
        module = self.convert(module) if own else self.precision_plugin.convert_module(module)
        if move_to_device and overrides(self, "model_to_device", Strategy):
            self.model = module
            self.model_to_device()
            return self.model
        return place(module, self.root_device) if move_to_device else module

    def repeat_batch(self, repeats: bool) -> None:
        """Called before a batch that this rank repeats because other ranks have more: the batch must change nothing."""

    def teardown(self) -> None:
        """Move model and optimizer state to the host, free the device, and wait until all checkpoints are durable.

        Accepts a half-built run: an exception may come at any time.
        """
        if self.root_device != HOST:
            for optimizer in self.optimizers:
                optimizer_to(optimizer, HOST)
            if self.lightning_module is not None:
                place(self.lightning_module, HOST)
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.wait()
        self.checkpoint_io.teardown()

    # ---- between ranks -------------------------------------------------------------------------------------------

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

    def _make_groups(self) -> tuple[Group, Group]:
        world = self.make_world()
        data = self.make_data_group(world)
        if world.rank not in data.ranks:
            raise ConfigurationError(
                f"{type(self).__name__}.make_data_group() returned a group of the ranks {list(data.ranks)} on rank "
                f"{world.rank}. Return one that this rank is a member of, such as world.new([world.rank])."
            )
        self._groups = world, data
        return self._groups

    def agreed_options(self) -> dict[str, Any]:
        """Return what must be the same on all ranks of this strategy's options, by name; ranks compare it."""
        return {"strategy": type(self)}

    def check_collectives(self, check: bool | None) -> None:
        """Begin a run in which the ranks compare collectives on tensors before they run.

        Args:
            check: ``None``: the first 100 in each group; True: all; False: none. Exchanges of objects and of logged
                values, and barriers, are always compared.
        """
        self._checks.start_run(check)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank. Further arguments are not used: strategies of other libraries take them."""
        self.world.barrier(name)

    def wait_for_first(self, name: str) -> None:
        """A barrier without a time limit, for work that the others wait for: a download, for example."""
        self.world.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on every rank."""
        return self.world.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of ``tensor`` over the ranks of ``group``, or of all; other values are unchanged.

        Raises:
            UnknownNameError: there is no operation ``reduce_op``, also with one process.
        """
        operation_of(reduce_op)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return (group if isinstance(group, Group) else self.world).all_reduce(tensor, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks of ``group``, or of all, stacked; with one process, the tensor itself."""
        ranks = group if isinstance(group, Group) else self.world
        return tensor if ranks.size == 1 else ranks.all_gather(tensor, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any of them. Every rank gets the same answer, so all take the same branch."""
        return self.world.reduce_boolean_decision(decision, all)

    # ---- data ----------------------------------------------------------------------------------------------------

    def share(self, loader: Any, splits: bool = False, pads: bool = False) -> Any:
        """Return ``loader``, or a copy that yields this rank's part: see :func:`drivetrain.data.samplers.share`."""
        if not self.facts.is_distributed:
            return loader
        from drivetrain.data.samplers import share  # here, because one process does not need it

        pads = pads or parity.current().padded_evaluation
        mine = self.distributed_sampler_kwargs
        draws = self.world.index == 0
        shared = share(loader, mine["rank"], mine["num_replicas"], self.broadcast, splits, pads, draws=draws)
        return loader if shared is None else shared

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of ``module`` under the names that it has without ``torch.compile``; every rank calls it.

        Rank 0 writes what it returns; the result of the other ranks may be empty.

        Raises:
            CheckpointError: the module holds DTensors, and this strategy does not override the method.
        """
        state = plain_names(module.state_dict())
        self._refuse_dtensors(state, "module_state", module)
        return state

    def _refuse_dtensors(
        self, state: Mapping[str, Any], method: str, module: nn.Module | None = None, optimizer: Any = None
    ) -> None:
        if "torch.distributed.tensor" in sys.modules:  # whoever has made one has imported it
            from drivetrain.strategies.sharded_state import refuse_dtensors

            refuse_dtensors(state, f"{type(self).__name__}.{method}", module, optimizer)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load into ``module`` what :meth:`module_state` returned, of this strategy or of another."""
        module.load_state_dict(own_names(module, state), strict=strict)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        """Load one state into each optimizer, in their order; ``module_state`` is that of their module beside them.

        Raises:
            CheckpointError: the number of states is another one, or a state does not fit its optimizer.
        """
        load_states("optimizer", optimizers, states, check_optimizer_state)

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        """Return what of this rank must be kept to resume ``module``; every rank stores its own, even if others differ.

        Plain data and tensors. An empty dictionary stores nothing.
        """
        return {}

    def load_rank_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`rank_state` returned on this rank; not called where nothing was stored."""

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write on global rank 0; every rank calls it, with its own ``checkpoint``.

        Raises:
            CheckpointError: the checkpoint holds DTensors, and this strategy does not override the method.
        """
        self._refuse_dtensors(checkpoint, "save_checkpoint")
        if self.is_global_zero:
            wait_for(self.checkpoint_io, filepath)  # an earlier save to it may be under way
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into host memory.

        Args:
            checkpoint_path: the checkpoint.
            weights_only: ``None`` or True reads plain data only. False unpickles everything, which can run code.
            into: modules, optimizers and tensors by name, for a strategy that reads straight into them. This one
                ignores it: it returns all that the file holds, and the caller loads that.
        """
        if weights_only is None:
            return self.checkpoint_io.load_checkpoint(checkpoint_path)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def reads_folder(self, path: str) -> bool:
        """Return whether :meth:`load_checkpoint` reads this folder, though it is none that drivetrain writes."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what a checkpoint holds of an optimizer; every rank must call it.

        Raises:
            CheckpointError: the state holds DTensors, and this strategy does not override the method.
        """
        state = optimizer.state_dict()
        self._refuse_dtensors(state, "optimizer_state", self.lightning_module, optimizer)
        return state

    def whole_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer`` as a process that is no rank can use it; every rank must call it."""
        return optimizer

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete on global rank 0, with the files that the ranks wrote beside it; every rank may call it."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)
        from drivetrain.strategies import rank_files  # here, so that importing the Trainer stays quick

        rank_files.remove(self, filepath)

    def explain(self, error: BaseException) -> Exception | None:
        """Return the exception to raise instead of ``error``, if this strategy can explain it better."""
        return None


class _Strategies(Registry[Strategy]):
    def available_strategies(self) -> list[str]:
        """Return the name of every strategy, sorted."""
        return self.available()


StrategyRegistry = _Strategies("drivetrain.strategies", "strategy", "strategy", by_file=False)
"""The strategies by name: those of the files beside this one, of users, and of installed packages."""
