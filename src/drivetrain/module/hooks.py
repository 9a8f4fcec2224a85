"""The hooks of modules and datamodules, the defaults of ``self.log`` in each hook, and the table of hooks that a run
calls.

For each hook, the table returns the bound methods of all objects that override the hook. For a hook without overrides,
the table returns an empty tuple, so that a step calls no empty methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.tree import move
from drivetrain.errors import HookError, SignatureError
from drivetrain.logbook.entry import LogRule
from drivetrain.logbook.logbook import Logbook, Scope
from drivetrain.strategies.strategy import Strategy

Call = Callable[..., Any]

_STEP = LogRule(on_step=True, on_epoch=False)
_EVAL = LogRule(on_step=False, on_epoch=True)
_EPOCH = LogRule(on_step=False, on_epoch=True, step_allowed=False)

LOG_RULES: dict[str, LogRule] = {
    "training_step": _STEP, "on_train_batch_start": _STEP, "on_train_batch_end": _STEP,
    "on_before_zero_grad": _STEP, "optimizer_zero_grad": _STEP,
    "on_before_backward": _STEP, "backward": _STEP, "on_after_backward": _STEP,
    "on_before_optimizer_step": _STEP, "configure_gradient_clipping": _STEP, "clip_gradients": _STEP,
    "optimizer_step": _STEP, "lr_scheduler_step": _STEP,
    "on_train_start": _EPOCH, "on_train_epoch_start": _EPOCH, "on_train_epoch_end": _EPOCH,
    "validation_step": _EVAL, "on_validation_batch_start": _EVAL, "on_validation_batch_end": _EVAL,
    "on_validation_start": _EPOCH, "on_validation_epoch_start": _EPOCH, "on_validation_epoch_end": _EPOCH,
    "test_step": _EVAL, "on_test_batch_start": _EVAL, "on_test_batch_end": _EVAL,
    "on_test_start": _EPOCH, "on_test_epoch_start": _EPOCH, "on_test_epoch_end": _EPOCH,
}  # fmt: skip
"""The defaults of ``self.log`` in each hook. In hooks that are not in this dictionary, ``self.log`` raises an error."""


def _not_defined(owner: Any, hook: str) -> HookError:
    return HookError(
        f"{type(owner).__name__} does not define {hook}. Define it, or pass the loaders to the Trainer's method."
    )


class DataHooks:
    """The hooks of both LightningModule and LightningDataModule: they create loaders and transfer batches."""

    prepare_data_per_node: bool = True
    """True: :meth:`prepare_data` runs once on each node. False: it runs once in the complete job."""

    def prepare_data(self) -> None:
        """Download or write the run's data. Do not set attributes here, because only one process of each node, or of
        the job, calls this hook (see :attr:`prepare_data_per_node`).
        """

    def setup(self, stage: str) -> None:
        """Create datasets for ``stage`` ("fit", "validate", "test", "predict"). Every process calls this hook."""

    def teardown(self, stage: str) -> None:
        """Called when ``stage`` has ended without an exception."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        raise _not_defined(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of validation loaders."""
        raise _not_defined(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of test loaders."""
        raise _not_defined(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list of prediction loaders."""
        raise _not_defined(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch on the host, before it is moved."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch to ``device``. By default, move all tensors and objects with a method ``to``, also in
        containers.

        Returns:
            The batch on the device, or ``None`` if the hook has moved ``batch`` in place.
        """
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch after it is moved to the device, for example to augment it."""
        return batch


class ModelHooks:
    """The hooks of a LightningModule. Each hook does nothing by default, unless its docstring describes a default."""

    def on_fit_start(self) -> None:
        """Called when the model is on the device and the optimizers exist."""

    def on_fit_end(self) -> None:
        """Called when training is over and the strategy is torn down."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called when a training epoch begins, before the loader's iterator is created."""

    def on_train_epoch_end(self) -> None:
        """Called when a training epoch has ended. Callbacks can monitor values that this hook logs."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called when a training batch is on the device. Return -1 to skip the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch; for ``outputs``, see ``Callback.on_train_batch_end``."""

    def on_validation_start(self) -> None:
        """Called when validation begins; the module is in evaluation mode."""

    def on_validation_end(self) -> None:
        """Called when validation has ended and its metrics are logged."""

    def on_validation_epoch_start(self) -> None:
        """Called before the pass over the validation loaders."""

    def on_validation_epoch_end(self) -> None:
        """Called after the pass over the validation loaders. Values that this hook logs belong to the validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called when a validation batch is on the device."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch."""

    def on_test_start(self) -> None:
        """Called when testing begins; the module is in evaluation mode."""

    def on_test_end(self) -> None:
        """Called when testing has ended and its metrics are logged."""

    def on_test_epoch_start(self) -> None:
        """Called before the pass over the test loaders."""

    def on_test_epoch_end(self) -> None:
        """Called after the pass over the test loaders. Values that this hook logs belong to the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called when a test batch is on the device."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_predict_start(self) -> None:
        """Called when prediction begins; the module is in evaluation mode."""

    def on_predict_end(self) -> None:
        """Called when prediction has ended."""

    def on_predict_epoch_start(self) -> None:
        """Called before the pass over the prediction loaders."""

    def on_predict_epoch_end(self) -> None:
        """Called after the pass over the prediction loaders."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called when a prediction batch is on the device."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction batch."""

    def on_validation_model_train(self) -> None:
        """Switch back to training mode after validation. The Trainer calls this hook only if it is overridden;
        otherwise the Trainer restores the mode of every submodule.
        """

    def on_test_model_train(self) -> None:
        """Switch back to training mode after testing. The Trainer calls this hook only if it is overridden; otherwise
        the Trainer restores the mode of every submodule.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after ``training_step`` of an optimizer step's first batch, before the gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before the backward pass of ``loss``. The loss is already divided by the number of accumulated
        batches.
        """

    def on_after_backward(self) -> None:
        """Called after the backward pass of a batch, which has added gradients to each parameter's ``grad``."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer step. The gradients are complete and unscaled, but not yet clipped."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before ``checkpoint`` is written. This hook can add or change entries."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called after ``checkpoint`` was read, and before the module loads its weights."""


class HookParty(Protocol):
    """The members of a callback that the loops use; :class:`drivetrain.callback.Callback` describes them."""

    position: Literal["first", "any", "last"]
    monitors: bool
    idle_hooks: frozenset[str]
    changes_in_validation: bool

    @property
    def state_key(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(eq=False, repr=False)
class HookTable:
    """The hooks of one run, each bound to the callbacks, module and strategy that override it.

    The table calls the callbacks' overrides in the order of the callbacks, then the module's, then the strategy's.
    There are two exceptions. In ``on_train_epoch_end``, callbacks that monitor a value are called after the module,
    which may log the value. In ``on_train_batch_end``, ``on_validation_end`` and ``on_train_epoch_end``, callbacks that
    save are called after the module, so that a checkpoint contains the changes of the module's hook.

    Attributes:
        spans: measures hooks for a profiler: a :class:`drivetrain.loops.spans.Spans`; ``None`` without a profiler.
        completes: hooks in which the table calls all overrides even if one raises; afterwards, it raises the exception.
            If a callback saves on exceptions, these are the hooks at the end of a batch, a validation and an epoch: a
            resumed run does not call them again.
        observers: objects that observe the run without changing it. If an observer has a method with the name of a
            hook, the table calls this method without arguments after all overrides of the hook. Methods for hooks that
            run in each step are not called. The run also calls methods that are not hooks: ``nothing_trained``,
            ``window_without_step(output)``, ``before_validation`` (in a fit) and ``results_agreed(stage)``. It calls
            ``batches_ended`` before the hooks at the end of a training epoch, and ``epoch_closed`` when the epoch is
            complete. It calls ``values_left(rows)`` and ``logged_nan(names, step)`` when values are logged.
            ``before_save`` can raise to prevent a checkpoint. ``state_alone`` is called for a save after an exception,
            and must return equal values on ranks with equal states. ``checkpoint_saved(path, step)`` is called when a
            ModelCheckpoint's file is durable. ``step_bound(step)`` returns the function that the loop calls in place of
            ``step``.

    Args:
        trainer, module, callbacks, strategy: the Trainer, and the objects with hooks. The Trainer and the module are
            the first arguments of callbacks' hooks.
        bases: the base classes of modules, of callbacks, and of callbacks that save. Methods that are defined in the
            first two do not count as overrides.
        book: the logbook (the object that keeps logged values), which reads the defaults of ``self.log`` for the
            running hook.
    """

    _trainer: Any
    _module: Any
    callbacks: Sequence[HookParty]
    _strategy: Strategy
    _bases: tuple[type, type, type]
    _book: Logbook
    completes: frozenset[str] = frozenset()
    spans: Any = None
    observers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._module_base, self._callback_base, self._saver_base = self._bases

    def without_callbacks(self) -> HookTable:
        """Return a table of this module, without callbacks, profiler and observers."""
        return replace(self, callbacks=(), spans=None, observers=[])

    def scope(self, hook: str, dataloader_idx: int | None = None) -> Scope:
        """Return the scope in which ``hook`` logs values: the stage, the hook and the defaults of ``self.log``."""
        return self._book.scope_for(_group(hook), hook, LOG_RULES.get(hook), dataloader_idx)

    def stateful_callbacks(self) -> list[HookParty]:
        """Return the callbacks with a state, except callbacks that save, because their states describe files."""
        return [
            callback
            for callback in self.callbacks
            if not isinstance(callback, self._saver_base) and overrides(callback, "state_dict", self._callback_base)
        ]

    def bind(self, hook: str, dataloader_idx: int | None = None) -> tuple[Call, ...]:
        """Return a tuple with one function, which calls all overrides of ``hook`` in order; () without overrides."""
        before, after = self._callback_calls(hook)
        if after and hook == "on_train_epoch_end":  # the callbacks may read values that the module logs
            after = [lambda *_: self._book.agree_on_epoch("train"), *after]
        calls = [*before, *self._module_calls(hook), *after, *self._strategy_calls(hook)]
        bound = (self._scoped(hook, calls, dataloader_idx),) if calls else ()
        return bound if self.spans is None else cast("tuple[Call, ...]", self.spans.around(hook, bound))

    def bind_callbacks(self, hook: str) -> tuple[Call, ...]:
        """Do the same as :meth:`bind`, but the function calls only the callbacks' overrides of ``hook``."""
        before, after = self._callback_calls(hook)
        return (self._scoped(hook, [*before, *after]),) if before or after else ()

    def bind_method(self, name: str) -> Call | None:
        """Return the module's method ``name`` if overridden, else ``None``. Values that the method logs belong to the
        hook ``name``.
        """
        if not overrides(self._module, name, self._module_base):
            return None
        method = self._measured(self._module, "LightningModule", name)
        return self._book.within(self.scope(name), method)

    def bind_batch_start(self) -> Call | None:
        """Return a function that calls the module's ``on_train_batch_start`` and then the strategy's. If the module's
        hook returns -1, the strategy's hook is not called.
        """
        own, others = self.bind_method("on_train_batch_start"), self._strategy_calls("on_train_batch_start")
        if not others:
            return own

        def call(batch: Any, batch_idx: int) -> Any:
            answer = None if own is None else own(batch, batch_idx)
            if answer != -1:
                others[0](batch, batch_idx)
            return answer

        return call

    def overridden(self, name: str) -> str:
        """Return the class name of the first module or callback that overrides ``name``; "" if there is no override."""
        return next((type(owner).__name__ for owner, _ in self.overriders(name)), "")

    def overriders(self, name: str) -> Iterator[tuple[Any, type]]:
        """Yield the module and the callbacks that override ``name``, each with its base class."""
        parties = [(self._module, self._module_base), *((each, self._callback_base) for each in self.callbacks)]
        return (pair for pair in parties if hasattr(pair[1], name) and overrides(pair[0], name, pair[1]))

    def check_takes_index(self, word: str, several: bool) -> None:
        """Check the hooks before and after a batch. With several loaders, they must accept ``dataloader_idx``. With one
        loader, they must not require it.

        Args:
            word: the stage in the hooks' names: "validation", "test" or "predict".
            several: whether there are several loaders.

        Raises:
            ConfigurationError: a hook does not accept ``dataloader_idx``, or requires it although there is one loader.
        """
        for hook in (f"on_{word}_batch_start", f"on_{word}_batch_end"):
            for owner, base in self.overriders(hook):
                wanted = list(inspect.signature(getattr(base, hook)).parameters)
                own = inspect.signature(getattr(owner, hook))
                if not several and "dataloader_idx" not in own.parameters:
                    continue
                try:
                    own.bind(*wanted[1 : None if several else -1])
                except TypeError:
                    arguments = ", ".join((*wanted[:-1], "dataloader_idx=0"))
                    why = "must take dataloader_idx, because there are several loaders"
                    why = why if several else "requires dataloader_idx, and there is one loader"
                    raise SignatureError(
                        f"{type(owner).__name__}.{hook} {why}. Write def {hook}({arguments})."
                    ) from None

    def call(self, hook: str, *args: Any) -> None:
        """Call all overrides of a hook, and the observers. Only for hooks that do not run in each step."""
        for bound in self.bind(hook):
            bound(*args)
        self.notify(hook)

    def notify(self, phase: str, *args: Any) -> None:
        """Call the method ``phase`` of all observers that have this method."""
        for observe in self.bind_observers(phase):
            observe(*args)

    def bind_observers(self, phase: str) -> tuple[Call, ...]:
        """Return the calls that :meth:`notify` makes."""
        return tuple(getattr(each, phase) for each in self.observers if hasattr(each, phase))

    def call_callbacks(self, hook: str, *args: Any) -> None:
        """Call the callbacks' overrides of ``hook``."""
        for bound in self.bind_callbacks(hook):
            bound(*args)

    def call_method(self, name: str, *args: Any) -> Any:
        """Call the module's method ``name``. Values that an override logs belong to the hook ``name``."""
        return (self.bind_method(name) or getattr(self._module, name))(*args)

    def call_on(self, owner: Any, name: str, *args: Any) -> Any:
        """Call the method ``name`` of ``owner``: the module, through :meth:`call_method`, or the datamodule."""
        if owner is self._module:
            return self.call_method(name, *args)
        return self._measured(owner, "LightningDataModule", name)(*args)

    def bind_transfer(self, datamodule: Any, convert: Call | None = None) -> tuple[Call, Call | None]:
        """Return two functions, ``(move, hooks)``, one of which moves a batch to the device. ``convert`` converts the
        batch's numbers to the run's precision.

        A profiler measures ``move`` or ``hooks`` as the action "batch_to_device". It measures each overridden hook as
        an action inside "batch_to_device".

        ``move(batch)`` can be called as soon as the batch is fetched. ``hooks(batch, dataloader_idx)`` replaces
        ``move`` if the module or the datamodule overrides a transfer hook, or if the strategy overrides
        ``batch_to_device``. Otherwise ``hooks`` is ``None``. ``hooks`` must be called immediately before the batch's
        start hooks, because the documentation promises this. If both the datamodule and the module override a hook, the
        datamodule's hook is called.
        """
        module, strategy, spans, device = self._module, self._strategy, self.spans, self._strategy.root_device
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        parties = [each for each in (datamodule, module) if each is not None]
        owners = [next((each for each in parties if overrides(each, name, DataHooks)), None) for name in names]
        measured: Callable[[Call], Call] = partial(spans.wrap, "batch_to_device") if spans else lambda call: call
        to_device: Call = measured(partial(move, device=device))
        own = strategy.batch_to_device if overrides(strategy, "batch_to_device", Strategy) else None
        if not any(owners) and own is None:
            return to_device if convert is None else lambda batch: to_device(convert(batch)), None
        before, transfer, after = (
            getattr(module, name) if owner is None
            else self._measured(owner, "LightningDataModule" if owner is datamodule else "LightningModule", name)
            for owner, name in zip(owners, names, strict=True)
        )  # fmt: skip

        def by_hooks(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            batch = before(batch, dataloader_idx)
            moved = transfer(batch, device, dataloader_idx)
            return after(batch if moved is None else moved, dataloader_idx)  # None: the batch was moved in place

        strategy.driver.transfer = by_hooks
        through = by_hooks if own is None else own

        def hooks(batch: Any, dataloader_idx: int) -> Any:
            return through(batch if convert is None else convert(batch), device, dataloader_idx)

        scope = self._book.scope_for("train", "a transfer hook", None)
        return to_device, self._book.within(scope, measured(hooks))

    def _callback_calls(self, hook: str) -> tuple[list[Call], list[Call]]:
        saving = hook in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
        early_calls: list[Call] = []
        late_calls: list[Call] = []
        for callback in self.callbacks:
            if overrides(callback, hook, self._callback_base) and hook not in callback.idle_hooks:
                call = partial(self._measured(callback, "Callback", hook), self._trainer, self._module)
                late = saving and (callback.position == "last" or (callback.monitors and hook == "on_train_epoch_end"))
                (late_calls if late else early_calls).append(call)
        return early_calls, late_calls

    def _module_calls(self, hook: str) -> list[Call]:
        overridden = overrides(self._module, hook, self._module_base)
        return [self._measured(self._module, "LightningModule", hook)] if overridden else []

    def _strategy_calls(self, hook: str) -> list[Call]:
        return [self._measured(self._strategy, "Strategy", hook)] if overrides(self._strategy, hook, Strategy) else []

    def _measured(self, owner: Any, kind: str, hook: str) -> Call:
        """Return the method ``hook`` of ``owner``, measured as an action if there is a profiler."""
        method: Call = getattr(owner, hook)
        return method if self.spans is None else cast("Call", self.spans.of_hook(owner, kind, hook))

    def _scoped(self, hook: str, calls: Iterable[Call], dataloader_idx: int | None = None) -> Call:
        bound = tuple(calls)
        if hook in self.completes:
            bound = (partial(_call_all, bound),)
        return self._book.within(self.scope(hook, dataloader_idx), *bound)


def _call_all(calls: Sequence[Call], *args: Any) -> None:
    """Call all functions of ``calls``, even if one of them raises. Then raise the first exception."""
    first: BaseException | None = None
    for call in calls:
        try:
            call(*args)
        except BaseException as error:
            if first is not None:
                rank_zero_warn(f"After {first!r}, another override of the same hook failed: {error!r}.")
            first = first or error
    if first is not None:
        raise first


def _group(hook: str) -> str:
    if "validation" in hook:
        return "validate"
    return "test" if "test" in hook else "predict" if "predict" in hook else "train"
