"""LightningModule: a model that also defines its training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from drivetrain.base.compiled import context_of, own_names
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.supplied import instead_of
from drivetrain.base.torch_private import BUFFERS, COMPILED_CALL, MODULES, PARAMETERS, STORES
from drivetrain.base.tree import parameters_of
from drivetrain.engine.ranks import gathered
from drivetrain.engine.wrappers import unwrapped
from drivetrain.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    LoggingError,
    UnknownArgumentError,
    UnloggableError,
    WrongTypeError,
    described,
    shown,
)
from drivetrain.logbook.entry import Options
from drivetrain.logbook.logbook import Logbook
from drivetrain.module.export import ExportMixin
from drivetrain.module.hparams import HyperparametersMixin
from drivetrain.module.loading import LoadableMixin
from drivetrain.module.optimizers import loses_gradients
from drivetrain.module.trainable import TrainableModule

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Self

    from drivetrain.callback import Callback
    from drivetrain.loggers.logger import Logger
    from drivetrain.trainer.trainer import Trainer


class _Toggle(NamedTuple):
    """A call of ``toggle_optimizer``: the optimizer, and the ``requires_grad`` of each parameter before the call."""

    optimizer: Optimizer
    found: dict[nn.Parameter, bool]


class _NotYet(dict[str, Any]):
    """Replaces torch's registries of layers, parameters and buffers until ``nn.Module.__init__`` has run."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        raise ConfigurationError(
            f"{self.owner}.__init__ assigns self.{name}, {described(value)}, before its base class's __init__ was "
            "called. Begin it with super().__init__()."
        )


class LightningModule(TrainableModule, HyperparametersMixin, LoadableMixin, ExportMixin, nn.Module):
    """An ``nn.Module`` that also defines its training: steps, optimizers and hooks.

    Define ``training_step`` and ``configure_optimizers``. All other methods are optional. During a run, the module has
    a reference to the Trainer. Copies and pickles of the module do not contain the Trainer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a module. If ``__init__`` registers a layer before the call of ``super().__init__()``, the module
        raises an error that says what to change.
        """
        new: Any = super().__new__
        module: Self = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        registries = _NotYet(cls.__name__)
        for name in STORES:  # ``nn.Module.__init__`` replaces these attributes
            module.__dict__[name] = registries
        return module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_trainer"] = None
        self.__dict__["_book"] = None
        self.__dict__["_toggles"] = []

    if not TYPE_CHECKING:  # type checkers use torch's annotations

        def __getattr__(self, name):
            own = self.__dict__  # the same look-up as in ``nn.Module.__getattr__``, without the cost of calling it
            try:
                if name in (found := own[PARAMETERS]):
                    return found[name]
                if name in (found := own[BUFFERS]):
                    return found[name]
                if name in (found := own[MODULES]):
                    return found[name]
            # the object was created without this class's __new__, for example from a pickle of Lightning's module
            except KeyError:
                return super().__getattr__(name)
            cure = None if name.startswith("_") else instead_of("LightningModule", name)
            if name in own.get("_hparams", ()):
                cure = f"save_hyperparameters() keeps it in self.hparams: write self.hparams.{name}."
            if cure is None:
                return super().__getattr__(name)  # raises
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {cure}")

    def train(self, mode: bool = True) -> Any:
        """Switch to training mode; with ``mode=False``, switch to evaluation mode."""
        if not isinstance(mode, bool):
            raise WrongTypeError(
                f"model.train({shown(mode)}): this method only switches to training mode, with True or False. To "
                "train, write Trainer(max_epochs=3).fit(model, loader)."
            )
        return super().train(mode)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile ``forward`` in place with ``torch.compile``, as ``nn.Module.compile`` does."""
        if args or (kwargs.keys() & {"optimizer", "loss", "metrics"}):
            raise UnknownArgumentError(
                "model.compile() compiles forward with torch.compile, and takes its arguments, such as dynamic=True. "
                "Make the optimizer in configure_optimizers, and compute the loss in training_step."
            )
        super().compile(**kwargs)

    _book: Logbook | None
    _toggles: list[_Toggle]

    def configure_callbacks(self) -> list[Callback] | Callback:
        """Return callbacks for every run of this module. Each replaces the Trainer's callbacks of the same class."""
        return []

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, as ``nn.Module`` does. The state dict may come from a compiled or an uncompiled module.
        ``torch.compile`` adds ``_orig_mod.`` to the names of parameters. This method removes or adds it as needed.

        Raises:
            CheckpointMismatchError: ``state_dict`` is a complete checkpoint. Pass the checkpoint's entry "state_dict".
        """
        # with strict=False, torch would silently load nothing
        if isinstance(state_dict.get("state_dict"), Mapping):
            raise CheckpointMismatchError(
                'load_state_dict got a checkpoint, of which the weights are a part: pass checkpoint["state_dict"], or '
                f"write model = {type(self).__name__}.load_from_checkpoint(path)."
            )
        return super().load_state_dict(own_names(self, state_dict), strict=strict, assign=assign)

    # ---- logging -------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log one number under ``name``. The call does not wait for the device.

        Args:
            name: the name of the value. If ``on_step`` and ``on_epoch`` are both True, the step's value is logged as
                ``name_step``, and the epoch's value as ``name_epoch``.
            value: a number, a tensor with one element, or a metric object. A flat dictionary of such values is also
                valid. Its items are logged as ``name/key``.
            prog_bar: whether the progress bar shows the value.
            logger: whether the loggers get the value; ``None``: True.
            on_step: whether to log the value of each step; ``None``: True in ``training_step`` and in the hooks of a
                training batch, False in other hooks.
            on_epoch: whether to log one value, reduced over the epoch; ``None``: False in ``training_step`` and in the
                hooks of a training batch, True in other hooks.
            reduce_fx: "mean" (weighted by batch size), "sum", "min" or "max".
            enable_graph: whether to keep the value's autograd graph, which needs memory, for a later backward pass.
            sync_dist: whether to reduce over the values of all processes; means are weighted by batch size. If True,
                every process must log the value. If False, each process keeps its own value.
            sync_dist_group: accepted for compatibility and ignored: values are reduced over all processes.
            rank_zero_only: log on global rank 0 only.
            add_dataloader_idx: if there are several evaluation loaders, whether to append ``/dataloader_idx_<i>`` to
                names.
            batch_size: the weight in an epoch mean; ``None``: the first dimension of the batch's first tensor.
            metric_attribute: accepted for compatibility and ignored: attributes of metric objects are found
                automatically.

        Raises:
            LoggingError: values cannot be logged in this hook, the value is not a single number, or this hook has
                logged the name with other options.
        """
        book = self._book
        if book is None:
            if self._trainer is None and self.fabric is not None:
                items = value.items() if isinstance(value, Mapping) else [(None, value)]
                self.fabric.log_dict({name if key is None else f"{name}/{key}": item for key, item in items})
                return
            _warn_not_logged(type(self).__name__, self._trainer is None)
            return
        scope = book.scope
        if rank_zero_only and not self.trainer.is_global_zero:
            return
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, add_dataloader_idx, sync_dist)
        entry = None if scope is None else scope.entries.get(name)
        if entry is None or entry.options != options:
            if isinstance(value, Mapping):
                for key, item in value.items():
                    if isinstance(item, Mapping):
                        raise UnloggableError(
                            f"self.log({name!r}, ...) got a dictionary inside a dictionary under {key!r}. "
                            "Flatten it: one number per name."
                        )
                    self.log(f"{name}/{key}", item, *options[:6], sync_dist, sync_dist_group, add_dataloader_idx,
                             batch_size, metric_attribute, rank_zero_only)  # fmt: skip
                return
            entry = book.open_entry(name, value, Options(*options), batch_size)
        entry.push(value, batch_size)

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Call :meth:`log` for each item of ``dictionary``, all with the same options."""
        try:
            items = dictionary.items()
        except AttributeError:
            raise LoggingError(
                f"self.log_dict got {described(dictionary)}. Pass a dictionary of names and numbers, or use self.log."
            ) from None
        for name, value in items:
            self.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist,
                     sync_dist_group, add_dataloader_idx, batch_size, None, rank_zero_only)  # fmt: skip

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather the tensors and numbers of all ranks, as :meth:`drivetrain.Engine.all_gather` does.

        Args:
            data: a tensor, a number, or a tree of tensors and numbers. A number becomes a tensor on the device. Other
                leaves are returned unchanged.
            group: the participating processes; ``None``: all.
            sync_grads: whether gradients flow back to the rank from which each slice came.
        """
        return gathered(self.trainer.strategy, data, group, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on global rank 0 only. If there is a progress bar, print above it."""
        if self._driver is None or self._driver.is_global_zero:
            bar = getattr(self._driver, "progress_bar_callback", None)
            (print if bar is None or bar.is_disabled else bar.print)(*args, **kwargs)

    # ---- the run of the module -----------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module. If an Engine has set up this module, this is an object with the attributes
        that Trainer and Engine share.

        Raises:
            RuntimeError: the module is not attached to a Trainer or an Engine.
        """
        trainer = self.__dict__.get("_trainer")
        if trainer is None:
            if self.fabric is not None:
                return cast("Trainer", EngineAsTrainer(self.fabric))
            # not an AttributeError, because nn.Module.__getattr__ would replace its message
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer. Call trainer.fit(module) first. In __init__ "
                "there is no Trainer yet: use self.trainer in setup, configure_optimizers or a later hook. [DT1016]"
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, LightningModule):  # LightningModules inside this module log to the same run
                module.__dict__["_trainer"] = trainer
                module.__dict__["_book"] = None if trainer is None or trainer.settings.barebones else trainer.logbook

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there are none."""
        tensor: Tensor | None = next(itertools.chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter; torch's default dtype if there is none."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on an accelerator."""
        current = torch.accelerator.current_accelerator()
        return current is not None and self.device.type == current.type

    @property
    # Other libraries read this attribute to find out whether the module is compiled.
    def _compiler_ctx(self) -> dict[str, Any] | None:
        context = context_of(self)
        return None if context is None else {"compiler": "dynamo", "dynamo_ctx": context}

    @property
    def device_mesh(self) -> Any:
        """The device mesh of the strategy; ``None`` if the strategy has no mesh."""
        return None if self._driver is None else self._driver.strategy.device_mesh

    def attach_engine(self, engine: Any, optimizers: Sequence[Any]) -> None:
        """Connect this module's logging, backward pass and optimizers to an Engine. The Engine calls this method.

        Args:
            engine: the Engine that has set up this module.
            optimizers: the optimizers that were set up with this module.
        """
        for module in self.modules():
            if isinstance(module, LightningModule):
                module.__dict__["_engine"], module.__dict__["_engine_optimizers"] = engine, list(optimizers)

    @property
    def current_epoch(self) -> int:
        """Index of the running epoch, from 0; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Index of this process in the job."""
        return 0 if self._driver is None else int(self._driver.strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return 0 if self._driver is None else int(self._driver.strategy.local_rank)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return [] if self._driver is None else self._driver.loggers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of optimizers if there are several.

        Args:
            use_pl_optimizer: True: return :class:`~drivetrain.module.optimizers.LightningOptimizer` objects, whose
                ``step`` applies the precision and increases ``global_step``. False: return the original optimizers.
        """
        if self._trainer is None and self.fabric is not None:
            own = self.__dict__["_engine_optimizers"]
            return own[0] if len(own) == 1 else list(own)
        run = self.trainer.current_run
        found = run.optimizers.handles if use_pl_optimizer and run is not None else self.trainer.strategy.optimizers
        return found[0] if len(found) == 1 else list(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters: set them to ``None``, or, if ``set_to_none`` is False, to zeros.

        Raises:
            ConfigurationError: ``training_step`` calls ``zero_grad`` between the accumulated batches of one optimizer
                step. The call would delete the gradients of earlier batches.
        """
        run = None if self._trainer is None else self._trainer.current_run
        if run is not None and run.window.batches_done > 0 and run.progress.phase.name == "FORWARD":
            raise loses_gradients("self.zero_grad()", run.limits.accumulate)
        super().zero_grad(set_to_none)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, until :meth:`untoggle_optimizer`.

        A parameter that several optimizers share still requires gradients if this optimizer has it. Calls can be
        nested; the last call is in effect. A parameter that was frozen before the first call stays frozen.
        """
        chosen = set(parameters_of(optimizer))
        everyones = {p for other in self.trainer.strategy.optimizers for p in parameters_of(other)} | chosen
        toggles = self._toggles
        found = {parameter: parameter.requires_grad for parameter in everyones}
        if toggles and toggles[-1].found == found:
            # reuse the dictionary, so that a program that never untoggles does not fill the memory
            found = toggles[-1].found
        before = {**found, **{p: required for toggle in reversed(toggles) for p, required in toggle.found.items()}}
        toggles.append(_Toggle(unwrapped(optimizer), found))
        for parameter in everyones:
            parameter.requires_grad = before[parameter] and parameter in chosen

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo the last :meth:`toggle_optimizer` of this optimizer, and all later ones.

        Every parameter gets back its ``requires_grad`` from before these calls. If ``optimizer`` was not toggled or is
        ``None``, all calls are undone.
        """
        toggles, plain = self._toggles, unwrapped(optimizer)
        own = [index for index, toggle in enumerate(toggles) if toggle.optimizer is plain]
        for toggle in reversed(toggles[own[-1] if own else 0 :]):
            for parameter, required in toggle.found.items():
                parameter.requires_grad = required
            toggles.pop()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Context in which only this optimizer's parameters require gradients."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of schedulers if there are several, or ``None``."""
        found = [config.scheduler for config in self.trainer.strategy.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def freeze(self) -> Self:
        """Set ``requires_grad=False`` on all parameters, switch to evaluation mode, and return this module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad=True`` on all parameters, switch to training mode, and return this module."""
        return self.requires_grad_(True).train()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no Trainer, because threads, files and data of a run do not belong to a copy. The
        # compiled call is left out, because it would run the original module.
        own = {name: value for name, value in self.__dict__.items() if name != COMPILED_CALL}
        return {**own, "_trainer": None, "_book": None, "_engine": None, "_toggles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_book" in state:
            return
        # The state comes from a pickled module of Lightning. Lightning stores some attributes under private names.
        own = self.__dict__
        own.update({"_trainer": None, "_book": None, "_toggles": []})
        for name in ("automatic_optimization", "strict_loading", "example_input_array"):
            if (value := own.pop(f"_{name}", None)) is not None:
                own[name] = value


_warned_not_logged: set[str] = set()


def _warn_not_logged(module: str, no_trainer: bool) -> None:
    if module not in _warned_not_logged:
        _warned_not_logged.add(module)
        rank_zero_warn(
            f"{module}.log was called without a Trainer, so nothing is logged. That is fine in a test of a step."
            if no_trainer
            else f"{module}.log was called with barebones=True, which logs nothing. Leave barebones out to log."
        )


class EngineAsTrainer:
    """Gives ``self.trainer`` the attributes that a Trainer and an Engine both have, such as ranks, device and loggers.

    Args:
        engine: the Engine that has set up the module.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)  # _engine is not set yet during a copy
        try:
            return getattr(self._engine, name)
        except AttributeError:
            raise AttributeError(
                f"self.trainer.{name}: this module runs in an Engine, not in a Trainer, and an Engine has no {name!r}. "
                "Pass the value to the module yourself, or train it with Trainer.fit."
            ) from None
