"""Call a strategy's methods for an Engine, with the modules, optimizers, loaders and checkpoints of a user's loop.

If the strategy does not override a method, the Engine runs torch's operation directly. User code can override a method
in a class or on an instance, also after the set-up.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakMethod, WeakSet, ref

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.introspect import defined_by_user, is_own_class, overrides
from drivetrain.base.no_init import NoInit
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import expect, naming, restoring, shown_error
from drivetrain.base.supplied import warn_of_uncalled
from drivetrain.base.tree import move
from drivetrain.checkpoints.io import background_of, reading
from drivetrain.checkpoints.plain import decode, encode
from drivetrain.engine import snapshots
from drivetrain.engine.wrappers import OptimizerHandle, TakeStep, check_closure, follow, unwrapped
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies import familiar, rank_files
from drivetrain.strategies.strategy import Strategy

_RANK_STATE = "drivetrain_rank_state"  # a saved file's key for the results of the strategy's ``rank_state``
_PRECISION = "drivetrain_precision"  # the key of the precision's state is this prefix, a dot and the name of its class
_RANK_FILES = "drivetrain_rank_files"  # the key for the list of rank files, of which rank 0 has none


class Verbs:
    """Calls the methods of one strategy for an Engine.

    Args:
        strategy: the Engine's strategy.

    Attributes:
        backward: the strategy's method; ``None`` if the Engine calls ``loss.backward()`` instead.
        batch_to_device: the strategy's method; ``None`` if the strategy does not override it.
        modules: for each module that was set up, the module and a weak reference to the strategy's wrapper.
    """

    takes_prepared = False
    """Whether the strategy's methods get the module that :meth:`set_up` returns. If False, they get the user's module.
    """

    backward: Callable[..., Any] | None
    batch_to_device: Callable[..., Any] | None

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.modules: list[tuple[nn.Module, ReferenceType[nn.Module]]] = []
        self._handles: WeakSet[OptimizerHandle] = WeakSet()
        self._steps_through_handle = False
        # a weak reference, because a reference cycle would keep models and the process group until garbage collection
        bind = WeakMethod(self.bind)
        strategy.driver.rebind = lambda: None if (again := bind()) is None else again()
        self.bind()

    def __reduce__(self) -> Any:
        return type(self), (self.strategy,)  # the modules are not pickled, because each process sets up its own

    def __deepcopy__(self, memo: Any) -> Verbs:
        return self  # copies of a loader share this object

    def overridden(self, *names: str) -> bool:
        """Return whether the strategy overrides any of these methods."""
        return any(overrides(self.strategy, name, Strategy) for name in names)

    def bind(self) -> None:
        """Look up the strategy's methods that a step calls. If user code replaces a method of the strategy, the look-up
        is repeated.
        """
        strategy = self.strategy
        self.backward = None if familiar.differentiates_plainly(strategy) else strategy.backward
        self.batch_to_device = strategy.batch_to_device if self.overridden("batch_to_device") else None
        for handle in self._handles:
            plain = unwrapped(handle)
            handle.bind(self._known_step(plain), self._zero_grad(plain))

    def start_store(self) -> None:
        """Start the background process that writes checkpoints, so that problems with this process are logged before
        training.
        """
        if (background := background_of(self.strategy.checkpoint_io)) is not None:
            background.start()

    # ---- set up --------------------------------------------------------------------------------------------------

    def set_up(
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any, move_to_device: bool
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Let the strategy prepare the module, the optimizers and the scheduler, and return the prepared objects."""
        for part, contract in ((self.strategy, "Strategy"), (self.strategy.precision_plugin, "Precision")):
            if not is_own_class(type(part)):
                warn_of_uncalled(type(part), contract, "Engine")
        before = dict(module.named_parameters())
        prepared = self.strategy.setup_module(module, move_to_device)
        follow(optimizers, before, module)
        self.modules.append((module, ref(prepared)))
        return prepared, list(optimizers), scheduler

    def exposed(self, module: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return the module whose attributes the program sees: ``prepared`` if its parameters are not those of
        ``module``, else ``module``.
        """
        return module if _ids(module.parameters()) == _ids(prepared.parameters()) else prepared

    def set_up_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let the strategy prepare an optimizer that is set up without its module, and return the optimizer."""
        return optimizer

    def handle(self, optimizer: Optimizer) -> OptimizerHandle:
        """Wrap an optimizer, so that its step uses the precision and the strategy.

        Raises:
            ConfigurationError: the precision scales the loss, and the optimizer evaluates the loss several times per
                step.
        """
        precision = self.strategy.precision_plugin
        check_closure(optimizer, precision)
        handle = OptimizerHandle(optimizer)
        handle.bind(self._known_step(optimizer), self._zero_grad(optimizer))
        if precision.scales_loss:
            refuse = WeakMethod(self._refuse_direct_step)  # weak, because a reference cycle keeps models in memory
            optimizer.register_step_pre_hook(lambda *given: None if (own := refuse()) is None else own(*given))
        self._handles.add(handle)
        return handle

    def _take_step(self, optimizer: Optimizer) -> TakeStep | None:
        precision = self.strategy.precision_plugin
        own = self.overridden("optimizer_step") or defined_by_user(precision, "optimizer_step")
        if not (precision.scales_loss or own):
            return None
        step = self.strategy.optimizer_step
        return lambda optimizer, closure, kwargs: step(optimizer, closure, **kwargs)

    def _known_step(self, optimizer: Optimizer) -> TakeStep | None:
        """Return the result of :meth:`_take_step`. If the precision scales the loss, return a wrapper that first
        unscales the gradients. The wrapper also sets ``_steps_through_handle``, so that :meth:`_refuse_direct_step`
        does not raise.
        """
        step, precision = self._take_step(optimizer), self.strategy.precision_plugin
        if step is None or not precision.scales_loss:
            return step

        def known(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
            def unscaled() -> Any:
                value = closure() if closure is not None else None
                precision.unscale_gradients(optimizer)
                return value

            self._steps_through_handle = True
            try:
                if closure is not None:
                    return step(optimizer, unscaled, kwargs)
                unscaled()
                return step(optimizer, None, kwargs)
            finally:
                self._steps_through_handle = False

        return known

    def _refuse_direct_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._steps_through_handle:
            raise ConfigurationError(
                f"The {type(optimizer).__name__} itself was stepped, and not the wrapped optimizer that Engine.setup "
                f"returned. With precision={self.strategy.precision_plugin.name!r} its gradients are scaled, and it "
                "would step much too far. Write model, optimizer = engine.setup(model, optimizer)."
            )

    def _zero_grad(self, optimizer: Optimizer) -> Callable[..., None]:
        if not self.overridden("zero_grad"):
            return optimizer.zero_grad
        strategy = self.strategy
        own = strategy.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not set_to_none:
                raise ConfigurationError(
                    f"optimizer.zero_grad(set_to_none=False): {type(strategy).__name__} overrides "
                    "zero_grad(optimizer), which decides this itself. Write optimizer.zero_grad()."
                )
            own(optimizer)

        return zero_grad

    def process(self, loader: Any) -> Any:
        """Return the loader, or the loader with which the strategy replaces it."""
        return self.strategy.process_dataloader(loader) if self.overridden("process_dataloader") else loader

    # ---- one step ------------------------------------------------------------------------------------------------

    def to_device(self, obj: Any) -> Any:
        """Return ``obj`` on the strategy's device. A module is moved in place."""
        device, own = self.strategy.root_device, self.batch_to_device
        return move(obj, device) if own is None or isinstance(obj, nn.Module) else own(obj, device)

    @contextmanager
    def no_backward_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        """Context in which backward passes through the prepared ``model`` exchange no gradients."""
        held_back = familiar.bind_accumulating(self.strategy, model) if enabled else None
        with (held_back or nullcontext)():
            yield

    # ---- building models -----------------------------------------------------------------------------------------

    @contextmanager
    def module_context(self, empty_init: bool | None) -> Iterator[None]:
        """Context in which new layers are created on the device and in the precision, uninitialized if
        ``empty_init``.
        """
        precision, drawn = self.strategy.precision_plugin, NoInit() if empty_init else nullcontext()
        with self.tensor_context(), precision.module_init_context() or nullcontext(), drawn:
            yield

    @contextmanager
    def tensor_context(self) -> Iterator[None]:
        """Context in which new tensors are created on the device and in the precision."""
        # an override may return None
        precision = self.strategy.precision_plugin.tensor_init_context() or nullcontext()
        with self.strategy.tensor_init_context(), precision:
            yield

    def sharded_context(self) -> AbstractContextManager[Any]:
        """Context in which the strategy can shard new layers."""
        return self.strategy.model_sharded_context()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path, state: Mapping[str, Any], filters: snapshots.Filters) -> None:
        """Write ``state`` to ``path``. The strategy returns the states of modules and optimizers.

        The file also contains the precision's state. If the strategy overrides ``rank_state``, each rank writes its
        state into a separate file.
        """
        snapshot = snapshots.of(self._with_precision(state), filters, self)
        if not snapshot.get(self._precision_entry, True):  # most precisions have no state
            del snapshot[self._precision_entry]
        keeps = self.overridden("rank_state")
        if own := self._rank_states(state) if keeps else {}:
            snapshot[_RANK_STATE] = own
        if keeps and self.strategy.world_size > 1:
            self.strategy.barrier("Engine.save")  # if a rank does not call save, the error names this barrier
            if any(self.strategy.world.gather_objects(bool(own))):
                part = {_RANK_STATE: own}
                rank_files.save(self.strategy, snapshot, part, path, waits=False, listed=_RANK_FILES)
                return
        self.strategy.save_checkpoint(snapshot, path)

    def load(self, path: str | Path, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        """Load the file ``path`` into the objects of ``state``, and return the file's remaining entries."""
        if not isinstance(path, (str, PathLike)):
            raise snapshots.wrong_argument("load", path, "path")
        held = self.strategy.load_checkpoint(path, **reading(weights_only))
        own: Mapping[str, Any] = {}
        if isinstance(held, Mapping) and (_RANK_STATE in held or _RANK_FILES in held):
            own = self._own_part(held, str(path), strict, weights_only) if isinstance(state, Mapping) else {}
            held = {name: value for name, value in held.items() if name not in (_RANK_STATE, _RANK_FILES)}
        kept = isinstance(held, Mapping) and self._precision_entry in held
        rest = snapshots.into(self._with_precision(state) if kept else state, held, strict, str(path), self)
        self._load_rank_states(state, own, str(path))
        return {name: value for name, value in rest.items() if not str(name).startswith(f"{_PRECISION}.")}

    def _with_precision(self, state: Any) -> Any:
        """Return ``state``. If ``state`` contains optimizers, but not the precision, the result also contains the
        precision.
        """
        precision = self.strategy.precision_plugin
        values = list(state.values()) if isinstance(state, Mapping) else ()
        if not any(isinstance(each, Optimizer) for each in values) or any(each is precision for each in values):
            return state
        return ChainMap(state, {self._precision_entry: precision})

    @property
    def _precision_entry(self) -> str:
        return f"{_PRECISION}.{type(self.strategy.precision_plugin).__qualname__}"

    def _rank_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of ``strategy.rank_state`` for each module in ``state`` that was set up."""
        kept = {name: self.strategy.rank_state(module) for name, module in self._set_up_of(state).items()}
        return {name: encode(own, f"{type(self.strategy).__name__}.rank_state()") for name, own in kept.items() if own}

    def _own_part(self, held: Mapping[str, Any], path: str, strict: bool, weights_only: bool | None) -> Any:
        """Return the result of :meth:`_rank_states` that was saved for this rank. Every rank must call this method.

        Raises:
            CheckpointError: ``strict`` is true, and a rank's file is missing or damaged. Every rank raises the error.
        """
        strategy, listed, own, failure = self.strategy, held.get(_RANK_FILES, ()), held.get(_RANK_STATE, {}), None
        if (saved_by := rank_files.saved_by(listed)) != strategy.world_size:
            rank_zero_warn(f"{path}: {rank_files.of_other_ranks(strategy, saved_by)}")
            return {}
        if strategy.global_rank > 0:
            try:
                with restoring(f"the file of rank {strategy.global_rank}"):
                    own = rank_files.read(strategy, listed, strategy.global_rank, path, weights_only)
                    own = own.get(_RANK_STATE, {})
            except Exception as error:
                failure = shown_error(error)
        failures = [text for text in strategy.world.gather_objects(failure) if text]
        if not failures:
            return own
        lost = f"{path}: what {type(strategy).__name__} has kept of each rank cannot be read: {failures[0]}."
        if strict:
            raise CheckpointError(
                f"{lost} Put that file back beside the checkpoint, or pass strict=False to load the rest without it."
            )
        rank_zero_warn(f"{lost} It is left out, because of strict=False.")
        return {}

    def _load_rank_states(self, state: Any, own: Any, path: str) -> None:
        with naming(path), restoring(f"the strategy ({type(self.strategy).__name__})"):
            for name, module in self._set_up_of(state if expect(own, Mapping) else {}).items():
                if name in own:
                    self.strategy.load_rank_state(module, expect(decode(own[name], str(name)), Mapping))

    def _set_up_of(self, state: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Return the modules in ``state`` that were set up, by their names in ``state``."""
        named = ((name, snapshots.original(value)) for name, value in state.items() if isinstance(value, nn.Module))
        return {name: module for name, module in named if any(module is known for known, _ in self.modules)}

    def load_raw(self, path: str | Path, obj: nn.Module | Optimizer, strict: bool, weights_only: bool | None) -> None:
        """Read a file that contains only the state of one module or optimizer."""
        held = {"object": self.strategy.load_checkpoint(path, **reading(weights_only))}
        snapshots.into({"object": obj}, held, strict, str(path), self)

    def prepared(self, module: nn.Module) -> nn.Module:
        """If ``module`` was set up, return the strategy's wrapper. Return any other module unchanged."""
        found = next((prepared() for known, prepared in self.modules if known is module), None)
        return module if found is None else found

    @property
    def loads_modules(self) -> bool:
        """Whether the strategy has its own method for loading a module's state. This method then checks whether a state
        fits.
        """
        return self.overridden("load_module_state", "load_model_state_dict")

    @property
    def loads_optimizers(self) -> bool:
        """Whether the strategy has its own method for loading an optimizer's state. This method then checks whether a
        state fits.
        """
        return self.overridden("load_optimizer_states", "load_optimizer_state_dict")

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state for a checkpoint."""
        return familiar.module_state(self.strategy, module, self.prepared(module))

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Let the strategy load a result of :meth:`module_state`."""
        familiar.load_module_state(self.strategy, module, self.prepared(module), state, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint."""
        return familiar.optimizer_state(self.strategy, optimizer, self._module_of(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Let the strategy load a result of :meth:`optimizer_state`."""
        familiar.load_optimizer_state(self.strategy, optimizer, self._module_of(optimizer), state)

    def _module_of(self, optimizer: Optimizer) -> nn.Module | None:
        """Return the first set-up module that has a parameter of the optimizer; ``None`` if there is none."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return next((module for module, _ in self.modules if not stepped.isdisjoint(_ids(module.parameters()))), None)


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters}
