"""The contract of a strategy: how one model is trained on its devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.registry import Registry, check_contract_version, names_itself
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.precision.precision import Precision
from drivetrain.strategies.facts import Facts, check_declared
from drivetrain.strategies.familiar import COLLECTIVES, Familiar
from drivetrain.strategies.layer_sync import LayerSync
from drivetrain.strategies.model import Model
from drivetrain.strategies.peers import Checks
from drivetrain.strategies.ranks import Ranks
from drivetrain.strategies.step import Step
from drivetrain.strategies.step_parts import Driver

Plugin = Precision | CheckpointIO | ClusterEnvironment | LayerSync | str
"""An object in ``Trainer(plugins=...)``, or its name."""


@dataclass
class OwnParts:
    """The parts that were passed to a strategy's constructor. The Trainer or the Engine chooses all other parts.

    Attributes:
        accelerator, precision, environment, devices: the passed parts. A part that was not passed is ``None``, or an
            empty tuple of devices.
    """

    accelerator: Accelerator | None = None
    precision: Precision | None = None
    environment: ClusterEnvironment | None = None
    devices: tuple[torch.device, ...] = ()


class Strategy(Ranks, Model, Familiar):
    """Base class. A strategy owns the accelerator, the precision and the checkpoint store, and has no reference to a
    Trainer.

    The contract of a strategy has five parts: :class:`~drivetrain.strategies.facts.Facts`,
    :class:`~drivetrain.strategies.ranks.Ranks`, :class:`~drivetrain.strategies.model.Model`,
    :class:`~drivetrain.strategies.step.Step` and :class:`~drivetrain.strategies.state.State`. A subclass defines the
    root device. A subclass for several processes also defines the set-up of the model and the ranks. The Trainer or the
    Engine sets the parts whose constructor arguments are ``None``.

    Subclasses are for experts: this contract may change in a minor version. The changelog lists changes of the
    contract.

    Attributes:
        own_parts: the parts passed to the constructor.
        layer_sync: the user's LayerSync, which the Trainer sets.
    """

    contract_version: ClassVar[int] = 1
    """The version of this contract. A subclass can set the version for which the subclass was written. A version other
    than the current version causes an error.
    """

    facts: Facts = Facts()
    """The facts that the class declares. A constructor can set different facts for its object."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.own_parts = OwnParts(accelerator, precision_plugin)
        self.accelerator = accelerator
        self.parallel_devices = ()
        self.checkpoint_io = checkpoint_io or TorchCheckpointIO()
        self.layer_sync: LayerSync | None = None
        self.precision_plugin = precision_plugin or Precision()
        self.lightning_module = None
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs = []
        self.driver = Driver()
        self._rank_files_written = {}
        self._converted = None
        self._groups = None
        self._checks = Checks()

    def __getstate__(self) -> dict[str, Any]:
        # not sent to another process: each run creates new objects for these attributes
        own = {"optimizers": [], "lr_scheduler_configs": [], "driver": Driver(), "_groups": None}
        return {**self.__dict__, **own}

    @classmethod
    def register_strategies(cls, strategy_registry: Registry[Strategy]) -> None:
        """Call ``strategy_registry.register("name", cls, description="...")`` for each name of the class.

        Called once, when a subclass that defines this method is created. No other registration is necessary.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract_version(cls, Strategy.contract_version, "strategy")
        check_declared(cls)
        names_itself(cls, "register_strategies", StrategyRegistry)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _VERBS:
            self._verb_changed(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in _VERBS:
            self._verb_changed(name)

    def _verb_changed(self, name: str) -> None:
        if name in COLLECTIVES:
            self._groups = None
        if (driver := self.__dict__.get("driver")) is not None and driver.rebind is not None:
            driver.rebind()


_VERBS = frozenset(
    name for cls in (Step, Familiar) for name, value in vars(cls).items() if callable(value) and name[0] != "_"
)


class _Strategies(Registry[Strategy]):
    def available_strategies(self) -> list[str]:
        """Return the name of every strategy, sorted."""
        return self.available()


StrategyRegistry = _Strategies("drivetrain.strategies", "strategy", "strategy", by_file=False)
"""The strategies by name: drivetrain's own, the users', and those of installed packages."""
