"""Lightning's ``fabric.strategies``: base classes for a program's own strategies.

In Lightning, a strategy for Fabric has other signatures than one for the Trainer, for example ``backward(tensor,
module)`` and ``save_checkpoint(path, state)``. The classes here have Fabric's signatures, so a subclass can override
their methods and call ``super()``. Each class inherits from a strategy of drivetrain, whose methods do the work. An
Engine calls the methods through :class:`FabricVerbs`.
"""

from __future__ import annotations

import inspect
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain import strategies as plain
from drivetrain.base.introspect import calls, overrides, reads, temporarily
from drivetrain.base.no_init import NoInit
from drivetrain.checkpoints.io import reading
from drivetrain.compat.members import TRAINER_ONLY, names, refused
from drivetrain.compat.overrides import Members, overridden_members
from drivetrain.engine import snapshots
from drivetrain.engine.verbs import Verbs
from drivetrain.engine.wrappers import EngineModule, OptimizerHandle, TakeStep, follow, unwrapped
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies.placement import place
from drivetrain.strategies.replicas import Replicas

Target: TypeAlias = nn.Module | Optimizer | MutableMapping[str, Any] | None
"""The objects into which a checkpoint is loaded: a module, an optimizer, or several objects by name. ``None``: no
object.
"""

REFUSED = refused("Fabric's strategies")
"""For each member of Fabric's strategies that must not be overridden, what to write instead."""

MEMBERS = names("may be overridden")["Fabric's strategies"]
"""Members that a strategy for Fabric can override."""

_OF_RANKS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision")


def constructor(of: Any, *names: str) -> Any:
    """Return an ``__init__`` with the arguments ``names`` that calls ``of.__init__``. The defaults are those of ``of``.
    The argument ``precision`` is passed as ``precision_plugin``.
    """
    parameters = dict(inspect.signature(of.__init__).parameters)
    parameters["precision"] = parameters["precision_plugin"].replace(name="precision")
    signature = inspect.Signature([parameters[name] for name in ("self", *names)])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{of.__name__}: {error}.") from None
        others = given.pop("ddp_arguments", {})
        of.__init__(**{"precision_plugin" if name == "precision" else name: given[name] for name in given}, **others)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


class FabricVerbs(Verbs):
    """Lets an Engine call a strategy that has Fabric's signatures."""

    strategy: Strategy
    takes_prepared = True

    @staticmethod
    def check(cls: type) -> None:
        """Raise a ConfigurationError if a user's class defines a member that drivetrain would never call, or call with
        other arguments.
        """
        own = overridden_members(cls)
        Members("strategy", REFUSED).check(cls)
        ours = {name for owner in cls.__mro__ if _is_ours(owner) and owner is not object for name in vars(owner)}
        called = MEMBERS | TRAINER_ONLY["Strategy"]
        taken = {name for name in own.keys() & ours if not name.startswith(("__", "_abc_"))} - called
        for name in sorted(taken):
            raise ConfigurationError(
                f"{own[name].__name__} defines {name}, a name that drivetrain's strategies use for something else. "
                "Rename it."
            )

    @staticmethod
    def refuse_trainer(cls: type) -> NoReturn:
        """Raise the error for ``Trainer(strategy=...)`` with a strategy for Fabric."""
        base = next(owner.__name__ for owner in cls.__mro__ if _is_ours(owner)).removeprefix("Fabric")
        raise ConfigurationError(
            f"Trainer got the strategy {cls.__name__}, a class of lightning.fabric.strategies, whose methods are "
            f"written for Fabric. Subclass lightning.pytorch.strategies.{base}."
        )

    def overridden(self, *names: str) -> bool:
        return any(overrides(self.strategy, name, Strategy) for name in names)

    def bind(self) -> None:
        super().bind()
        strategy, precision = self.strategy, self.strategy.precision_plugin
        scales = precision.scales_loss or overrides(precision, "backward", Precision)
        self.backward = self._backward if scales or overrides(strategy, "backward", Strategy) else None

    def set_up(
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any, move_to_device: bool
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        strategy, before, made = self.strategy, dict(module.named_parameters()), list(optimizers)
        converted = strategy.precision_plugin.convert_module(module)
        if move_to_device:
            strategy.module_to_device(converted)
        follow(optimizers, before, module)
        # ``_converted`` tells setup_module() not to convert the module to the precision's dtype again.
        with temporarily(vars(strategy), lightning_module=converted, _converted=converted):
            if optimizers:
                given = () if scheduler is None else (scheduler,)
                prepared, made, *rest = strategy.setup_module_and_optimizers(converted, made, *given)
                scheduler = rest[0] if rest else scheduler
            else:
                prepared = strategy.setup_module(converted)
        follow(optimizers, before, module)
        self.modules.append((module, ref(prepared)))
        return prepared, made, scheduler

    set_up_optimizer = calls("strategy.setup_optimizer")

    def _backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self.strategy.backward(tensor, _bare(module), *args, **kwargs)

    def _take_step(self, optimizer: Optimizer) -> TakeStep | None:
        if super()._take_step(optimizer) is None:
            return None
        step = self.strategy.optimizer_step

        def take_step(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
            return step(optimizer, **kwargs) if closure is None else step(optimizer, closure=closure, **kwargs)

        return take_step

    def to_device(self, obj: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return super().to_device(obj)
        self.strategy.module_to_device(obj)
        return obj

    # These methods use contextmanager(), so that their results can also decorate a function. The context of a user's
    # strategy may not support that.

    @contextmanager
    def no_backward_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        control = self.strategy._backward_sync_control
        block = super().no_backward_sync if control is None else control.no_backward_sync
        with block(model, enabled):
            yield

    @contextmanager
    def module_context(self, empty_init: bool | None) -> Iterator[None]:
        with self.strategy.module_init_context(empty_init=empty_init):
            yield

    @contextmanager
    def tensor_context(self) -> Iterator[None]:
        with self.strategy.tensor_init_context():
            yield

    def sharded_context(self) -> AbstractContextManager[Any]:
        own = getattr(self.strategy, "module_sharded_context", None)
        return super().sharded_context() if own is None else own()

    def save(self, path: str | Path, state: Mapping[str, Any], filters: snapshots.Filters) -> None:
        given = {name: _bare(value) for name, value in state.items()}
        self.strategy.save_checkpoint(path=path, state=given, filter=filters or None)

    def load(self, path: str | Path, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        if not isinstance(state, MutableMapping):
            # None reads all entries; a module or another object raises an error.
            return super().load(path, state, strict, weights_only)
        given = {name: _bare(value) for name, value in state.items()}
        rest = self.strategy.load_checkpoint(path=path, state=given, strict=strict, **reading(weights_only))
        for name in given:
            if _bare(state[name]) is state[name]:  # if the program passed the Engine's wrapper, keep the wrapper
                state[name] = given[name]
        return rest

    def load_raw(self, path: str | Path, obj: nn.Module | Optimizer, strict: bool, weights_only: bool | None) -> None:
        self.strategy.load_checkpoint(path=path, state=_bare(obj), strict=strict, **reading(weights_only))


class States:
    """Reads and loads the states of modules and optimizers by the methods of a strategy for Fabric."""

    loads_optimizers = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.loads_modules = overrides(strategy, "load_module_state_dict", Strategy)

    module_state = calls("_strategy.get_module_state_dict")
    optimizer_state = calls("_strategy.get_optimizer_state")

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        self._strategy.load_module_state_dict(module, state, strict=strict)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        raise NotImplementedError  # never called: optimizers load their states themselves


class _BackwardSyncControl(ABC):
    """Base class of the objects in a strategy's attribute ``_backward_sync_control``."""

    @abstractmethod
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Context in which backward passes through ``module`` exchange no gradients, if ``enabled``."""


class _HeldBackByDDP(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not (enabled and isinstance(module, DistributedDataParallel)):
            return nullcontext()
        return module.no_sync()


@contextmanager
def entered(*contexts: AbstractContextManager[Any] | None) -> Iterator[None]:
    """Enter all ``contexts`` in order, except ``None``."""
    with ExitStack() as stack:
        for context in filter(None, contexts):
            stack.enter_context(context)
        yield


def not_drawn(empty_init: bool | None) -> AbstractContextManager[Any] | None:
    """Return a context in which new layers do not initialise their parameters; ``None`` without ``empty_init``."""
    return NoInit() if empty_init else None


class _Served(ABCMeta):
    """Makes ``isinstance(engine.strategy, Strategy)`` True also for drivetrain's own strategies."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(instance.__class__)

    def __subclasscheck__(cls, subclass: type) -> bool:
        # Without issubclass(), which would ask all subclasses of ``cls``, and so call this method again.
        return cls.__dict__.get("_plain", cls) in subclass.__mro__


class Strategy(plain.Strategy, metaclass=_Served):
    """Base class of strategies written for Fabric.

    Args:
        accelerator: the accelerator; ``None``: the Engine's choice.
        checkpoint_io: the checkpoint store; ``None``: files.
        precision: the precision; ``None``: the Engine's choice.
    """

    _plain: type = plain.Strategy
    facts = plain.Strategy.facts.but(engine_verbs=FabricVerbs)
    states: type[States] = States
    _backward_sync_control: Any = None
    _precision: Precision

    __init__: Any = constructor(plain.Strategy, "accelerator", "checkpoint_io", "precision")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_plain" in vars(cls):  # not a user's subclass: copy the facts of `_plain`
            cls.facts = cls._plain.facts.but(engine_verbs=FabricVerbs, engine_class=None)  # type: ignore[attr-defined]
        super().__init_subclass__(**kwargs)

    precision: Precision = reads("_precision", "The precision.", writable=True)

    @property
    def precision_plugin(self) -> Precision:
        """The precision, under the name that drivetrain's strategies use."""
        return self.precision

    @precision_plugin.setter
    def precision_plugin(self, precision: Precision) -> None:
        self._precision = precision

    # ---- set up --------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Move ``module`` to the root device."""
        place(module, self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return ``module``, or with several processes a wrapper such as ``DistributedDataParallel``. ``module`` is
        already on the device.
        """
        return super().setup_module(module, move_to_device=False)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use in place of ``optimizer``."""
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up a module, its optimizers and a scheduler."""
        module = self.setup_module(module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which to create layers on the device, in the precision's dtype. With ``empty_init``, layers do not
        initialise their parameters.
        """
        of_tensors, of_layers = super().tensor_init_context(), self.precision_plugin.module_init_context()
        return entered(of_tensors, of_layers, not_drawn(empty_init))

    # ---- one step ------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:  # type: ignore[override]
        """Return ``batch`` on ``device``; ``None``: on the root device."""
        return super().batch_to_device(batch, device)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Compute the gradients of ``tensor``. If the precision scales losses, as "16-mixed" does, first scale it."""
        super().backward(tensor, None, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step ``optimizer``. A closure must be passed as ``closure=``."""
        return super().optimizer_step(optimizer, kwargs.pop("closure", None), **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of ``optimizer`` by their total norm, and return the norm."""
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

    # ---- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return ``tensor`` reduced over the ranks, for example the mean."""
        return super().reduce(tensor, group, reduce_op)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Call :meth:`all_reduce`; the Engine calls this method."""
        return self.all_reduce(tensor, group=group, reduce_op=reduce_op)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(  # type: ignore[override]
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: snapshots.Filters | None = None,
    ) -> None:
        """Write the entries of ``state``: modules, optimizers, stateful objects and plain data. Every rank must call
        this method.
        """
        super().save_checkpoint(snapshots.of(state, filter or {}, self.states(self)), path, storage_options)

    def load_checkpoint(  # type: ignore[override]
        self, path: str | Path, state: Target = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the file into the objects of ``state``, or into one module or optimizer. Return the file's other
        entries.
        """
        held, states = super().load_checkpoint(path, weights_only), self.states(self)
        if isinstance(state, (nn.Module, Optimizer)):
            snapshots.into({"object": self._loaded(state)}, {"object": held}, strict, str(path), states)
            return {}
        if not isinstance(state, MutableMapping):
            return snapshots.into(state, held, strict, str(path), states)
        targets = {name: self._loaded(value) for name, value in state.items()}
        rest = snapshots.into(targets, held, strict, str(path), states)
        state.update({name: value for name, value in targets.items() if not isinstance(value, (nn.Module, Optimizer))})
        return rest

    def _loaded(self, value: Any) -> Any:
        """Return ``value`` without its wrapper. Keep the wrapper if a subclass overrides ``load_module_state_dict``."""
        return value if overrides(self, "load_module_state_dict", Strategy) else _inside(value)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of ``module``, without the prefixes that a wrapper adds to names."""
        state: dict[str, Any] = _inside(module).state_dict()
        self._refuse_dtensors(state, "get_module_state_dict", module)
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a result of :meth:`get_module_state_dict`."""
        _inside(module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of ``optimizer`` for a checkpoint; every rank must call this method."""
        return super().optimizer_state(optimizer)


class FabricSingleDeviceStrategy(Strategy, plain.SingleDeviceStrategy):
    """One device, one process.

    Args:
        device: the device of the model; ``None``: the accelerator's first device.
        accelerator, checkpoint_io, precision: as for :class:`Strategy`.
    """

    _plain: type = plain.SingleDeviceStrategy
    __init__ = constructor(plain.SingleDeviceStrategy, "device", "accelerator", "checkpoint_io", "precision")


class FabricParallelStrategy(Strategy, plain.ParallelStrategy):
    """One process per device.

    Args:
        accelerator, checkpoint_io, precision: as for :class:`Strategy`.
        parallel_devices: this machine's devices in rank order; ``None``: as the Engine decides.
        cluster_environment: tells this process its ranks; ``None``: the environment that the Engine detects.
    """

    _plain: type = plain.ParallelStrategy
    __init__ = constructor(plain.ParallelStrategy, *_OF_RANKS)


class FabricDDPStrategy(FabricParallelStrategy, plain.DDPStrategy):  # type: ignore[misc]  # the signatures, on purpose
    """The complete model on every device; see :class:`drivetrain.strategies.DDPStrategy`.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as for
            :class:`FabricParallelStrategy`.
        process_group_backend, timeout, start_method, ddp_arguments: as for drivetrain's DDPStrategy.
    """

    _plain: type = plain.DDPStrategy
    _backward_sync_control = _HeldBackByDDP()
    __init__ = constructor(
        plain.DDPStrategy, *_OF_RANKS, "process_group_backend", "timeout", "start_method", "ddp_arguments"
    )


def _is_ours(owner: type) -> bool:
    return owner in (object, ABC) or owner.__module__.partition(".")[0] == __name__.partition(".")[0]


def _bare(value: Any) -> Any:
    if isinstance(value, EngineModule):
        return value._forward_module
    return unwrapped(value) if issubclass(type(value), OptimizerHandle) else value


def _inside(value: Any) -> Any:
    return value.module if isinstance(value, (DistributedDataParallel, Replicas)) else value
