"""The Engine: runs a model on devices, in a precision and with a strategy, for the Trainer and for your own loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.compiled import compiled_in_place
from drivetrain.base.introspect import defined_by_user, overrides, reads, taken
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import log, rank_from_environ
from drivetrain.base.seed import Generators, seed_everything
from drivetrain.base.supplied import instead_of
from drivetrain.base.tree import move
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.data.combined import has_data_loader
from drivetrain.data.feed import make_room_for_sockets, seed_workers
from drivetrain.engine import parts
from drivetrain.engine.state_files import StateFiles
from drivetrain.engine.wrappers import EngineLoader, EngineModule, OptimizerHandle, follow, unwrapped
from drivetrain.errors import ConfigurationError, MissingAttributeError, WrongTypeError, arguments_checked, described
from drivetrain.logbook.reading import read_together
from drivetrain.plan import Plan, resolve
from drivetrain.precision.precision import Precision
from drivetrain.settings import PrecisionName, Settings, StrategyName, documents_arguments
from drivetrain.strategies import familiar
from drivetrain.strategies.placement import place
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.loggers.logger import Logger

with on_first_use:
    from drivetrain.engine import command_line, verbs
    from drivetrain.strategies import agreement

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=Optimizer)
L = TypeVar("L", bound=Iterable[Any])
S = TypeVar("S")


@documents_arguments
class Engine(StateFiles):
    """Runs a model on devices, in a precision and with a strategy, in a training loop that you write.

    ::

        engine = Engine(precision="bf16-mixed")
        engine.launch()
        model, optimizer = engine.setup(model, optimizer)
        loader = engine.setup_dataloaders(loader)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            engine.backward(loss)
            engine.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

    A subclass can define the complete program in a method ``run``. Calling ``run`` starts the processes, and each
    process then runs the program. If the arguments accelerator, strategy, devices, num_nodes or precision are omitted,
    their values can come from the command line: ``drivetrain run --devices=2 train.py``. With
    ``check_collectives=None``, the first 100 tensor collectives of each process group are checked. Each call of
    :meth:`launch` starts this count again.

    Args:
        plugins: the Trainer's argument ``plugins``, except LayerSync.
        callbacks: objects with hooks. :meth:`call` calls one hook of all callbacks.
        loggers: the loggers that :meth:`log` calls. A logger that is given by name writes below the working directory.
        plan: a result of :func:`drivetrain.plan.resolve`. The arguments from accelerator to plugins are then ignored.

    Raises:
        ConfigurationError: an argument is wrong, or contradicts another argument or the command line.
        NotSupportedError: an argument is valid, but not supported in this version.
    """

    @arguments_checked
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: StrategyName | Strategy = "auto",
        devices: int | list[int] | str = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        plugins: Precision
        | CheckpointIO
        | ClusterEnvironment
        | str
        | list[Precision | CheckpointIO | ClusterEnvironment | str]
        | None = None,
        check_collectives: bool | None = None,
        callbacks: Any | list[Any] | None = None,
        loggers: Logger | str | Iterable[Logger | str] | None = None,
        plan: Plan | None = None,
    ) -> None:
        if plan is None:
            chosen = command_line.from_command_line(
                accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision
            )
            given: Any = plugins  # Any, because Settings declares another type for plugins
            plan = parts.for_engine(resolve(Settings(plugins=given, check_collectives=check_collectives, **chosen)))
            if plan.layer_sync is not None:
                raise ConfigurationError(
                    f"Engine got the {type(plan.layer_sync).__name__} in plugins, and only a Trainer's fit applies "
                    "one. Call its apply(model) before engine.setup(model)."
                )
        self.plan = plan
        parts.check_parts(plan)
        self.strategy = parts.strategy_of(plan)
        self.strategy.accelerator = plan.accelerator
        self.strategy.parallel_devices = plan.devices
        self.strategy.set_ranks(plan.environment, plan.num_nodes)
        self.strategy.precision_plugin = plan.precision
        parts.bind_device(plan)
        if plan.checkpoint_io is not None:
            self.strategy.checkpoint_io = plan.checkpoint_io
        self.strategy.layer_sync = plan.layer_sync
        self.callbacks: list[Any] = parts.listed(callbacks)
        self.loggers: list[Logger] = [parts.logger_of(each) for each in parts.listed(loggers)]
        self.launcher = parts.launcher_of(plan)
        self._check_collectives = check_collectives
        self._verbs = (self.strategy.facts.engine_verbs or verbs.Verbs)(self.strategy)

    if not TYPE_CHECKING:  # otherwise type checkers accept any attribute

        def __getattr__(self, name):
            if (cure := instead_of("Engine", name)) is not None:
                raise MissingAttributeError(f"An Engine has no attribute {name!r}. {cure}")
            return object.__getattribute__(self, name)  # raises the original AttributeError again

    # ---- parts ---------------------------------------------------------------------------------------------------

    accelerator: Accelerator = reads("strategy.accelerator", "The accelerator.")
    precision: Precision = reads("strategy.precision_plugin", "The numeric precision.")
    device: torch.device = reads("strategy.root_device", "The device this process computes on.")

    @property
    def rng(self) -> Generators:
        """The random generators of all processes. To resume exactly, save and load this object with the model."""
        return Generators(lambda obj: self.strategy.world.gather_objects(obj), self.global_rank)

    @property
    def logger(self) -> Logger:
        """The first logger.

        Raises:
            ConfigurationError: there is no logger.
        """
        if not self.loggers:
            raise parts.NoLoggerError("This Engine has no logger. Write Engine(loggers=[CSVLogger(...)]).")
        return self.loggers[0]

    # ---- set up --------------------------------------------------------------------------------------------------

    # The results are annotated with the arguments' types, so that type checkers accept model, optimizer =
    # engine.setup(model, optimizer).
    @overload
    def setup(self, module: M, *, scheduler: None = None, move_to_device: bool = ...) -> M: ...
    @overload
    def setup(
        self, module: M, optimizer: T, /, *, scheduler: None = None, move_to_device: bool = ...
    ) -> tuple[M, T]: ...
    @overload
    def setup(self, module: M, optimizer: T, /, *, scheduler: S, move_to_device: bool = ...) -> tuple[M, T, S]: ...
    @overload
    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = ..., move_to_device: bool = ...
    ) -> Any: ...

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Move ``module`` to the device, convert it to the precision, and wrap ``module`` and ``optimizers``.

        Args:
            module: the model, whose parameters are moved in place. If ``module`` is a result of ``torch.compile``, the
                original module is compiled in place, so that parameters keep their names.
            optimizers: optimizers of the module's parameters.
            scheduler: a scheduler of one of the optimizers; returned unchanged unless the strategy steps schedulers.
            move_to_device: whether to move the module to the device.
            _reapply_compile: ignored; accepted because some programs pass it.

        Returns:
            The wrapped module. With optimizers or a scheduler: a tuple of the wrapped arguments in their order.

        Raises:
            ConfigurationError: an argument is already set up, or has a wrong type.
        """
        module = compiled_in_place(module)
        self._check_module(module)
        self._check_optimizers(optimizers)
        parts.check_pair(module, optimizers)
        self._begin()
        if self.strategy.world.size > 1:
            self._compare(module, optimizers)
        self._verbs.start_store()
        prepared, made, scheduler = self._verbs.set_up(module, optimizers, scheduler, move_to_device)
        model = EngineModule(prepared, self._verbs.exposed(module, prepared), self)
        handles = [self._handle(optimizer) for optimizer in made]
        if callable(attach := getattr(module, "attach_engine", None)):
            attach(self, handles)
            if not any(each is module for each in self.callbacks):
                self.callbacks.append(module)  # so that call() also calls the module's hooks
        for callback in self.callbacks:
            if callable(hook := getattr(callback, "on_after_setup", None)):
                hook(**taken(hook, {"engine": self, "fabric": self, "module": model}))
        results = (model, *handles, *([] if scheduler is None else [scheduler]))
        return results if len(results) > 1 else model

    def _compare(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Compare the arguments of all ranks. If the arguments differ, raise an error on all ranks."""
        job = {"the method called": "Engine.setup", **agreement.of_program(self.strategy)}
        job["num_nodes"] = str(self.plan.num_nodes)
        model = {**agreement.of_module(module), **agreement.of_optimizers(optimizers)}
        agreement.compare(self.strategy.world, self.strategy.data, agreement.Facts(job, model, agreement.seed()))

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> EngineModule:
        """Set up a module. Afterwards, optimizers can be created from the wrapped module's parameters."""
        return cast("EngineModule", self.setup(module, move_to_device=move_to_device))

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Wrap ``optimizers``, so that ``step`` uses the precision and the strategy.

        Returns: the wrapped optimizer, or a tuple of the wrapped optimizers.
        """
        self._check_optimizers(optimizers)
        handles = [self._handle(self._verbs.set_up_optimizer(optimizer)) for optimizer in optimizers]
        if not handles:
            raise ConfigurationError("Engine.setup_optimizers() got no optimizer. Pass one.")
        return handles[0] if len(handles) == 1 else tuple(handles)

    @overload
    def setup_dataloaders(
        self, loader: L, /, *, use_distributed_sampler: bool = ..., move_to_device: bool = ..., sample_seeds: bool = ...
    ) -> L: ...
    @overload
    def setup_dataloaders(
        self, *loaders: Any, use_distributed_sampler: bool = ..., move_to_device: bool = ..., sample_seeds: bool = ...
    ) -> Any: ...

    def setup_dataloaders(
        self, *loaders: Iterable[Any], use_distributed_sampler: bool = True, move_to_device: bool = True,
        sample_seeds: bool = False,
    ) -> Any:  # fmt: skip
        """Wrap ``loaders``, so that they yield batches on the device.

        Args:
            loaders: DataLoaders or other re-iterable objects.
            use_distributed_sampler: whether each process gets its own part of the data. All parts have equal sizes. If
                the data does not divide evenly, the first samples of an epoch are repeated. With one process, this
                argument has no effect.
            move_to_device: whether to move batches to the device.
            sample_seeds: as in the Trainer. Each pass over the loader counts as an epoch.

        Returns: the wrapped loader, or a tuple of the wrapped loaders.
        """
        for loader in loaders:
            if isinstance(loader, EngineLoader) or not hasattr(loader, "__iter__"):
                raise WrongTypeError(
                    f"Engine.setup_dataloaders got {described(loader)}. "
                    "Pass a DataLoader, or what can be iterated, that is not set up already."
                )
            if isinstance(loader, (list, tuple, Mapping)) and has_data_loader(loader):
                raise ConfigurationError(
                    f"Engine.setup_dataloaders got a {type(loader).__name__} with a DataLoader in it as one loader. "
                    "Pass each loader as an argument: first, second = engine.setup_dataloaders(first, second)."
                )
            seed_workers(loader, familiar.part_of_data(self.strategy))
            make_room_for_sockets(loader)
        if not loaders:
            raise ConfigurationError("Engine.setup_dataloaders() got no loader. Pass one.")
        if use_distributed_sampler:
            loaders = tuple(familiar.share(self.strategy, loader, pads=True) for loader in loaders)
        device, pins = self.device if move_to_device else None, self.accelerator.supports_pinned_memory
        process, verbs = self._verbs.process, self._verbs
        wrapped = [EngineLoader(process(each), device, verbs, pins, sample_seeds) for each in loaders]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def bind_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Iterable[Any]) -> None:
        """Set the optimizers and the scheduler configurations of this run."""
        self.strategy.optimizers = list(optimizers)
        self.strategy.lr_scheduler_configs = list(schedulers)
        self.precision.bind(self.strategy.optimizers)

    def _handle(self, optimizer: Optimizer) -> OptimizerHandle:
        known = [other for other in self.strategy.optimizers if other is not optimizer]
        self.bind_optimizers([*known, optimizer], self.strategy.lr_scheduler_configs)
        for callback in self.callbacks:
            if callable(hook := getattr(callback, "on_after_optimizer_step", None)):
                call = partial(hook, strategy=self.strategy)
                optimizer.register_step_post_hook(lambda optimizer, *_, call=call: call(optimizer=optimizer))
        return self._verbs.handle(optimizer)

    def _check_module(self, module: Any) -> None:
        if isinstance(module, EngineModule):
            raise ConfigurationError(f"{module!r} is set up already. Set each module up once.")
        if not isinstance(module, nn.Module):
            raise WrongTypeError(f"Engine.setup got {described(module)} as the module. Pass an nn.Module first.")

    def _check_optimizers(self, optimizers: Sequence[Any]) -> None:
        for position, optimizer in enumerate(optimizers):
            if issubclass(type(optimizer), OptimizerHandle) or any(optimizer is o for o in optimizers[:position]):
                raise ConfigurationError(f"{type(optimizer).__name__} is set up already. Set each optimizer up once.")
            if not isinstance(optimizer, Optimizer):
                raise WrongTypeError(
                    f"Engine.setup got {described(optimizer)} where an optimizer belongs. "
                    "Pass optimizers after the module, and a scheduler as scheduler=."
                )

    # ---- one step ------------------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a new context for a forward pass. Return ``None`` if the precision has no context, or if a Trainer's
        step already enters it.
        """
        if self.strategy.lightning_module is not None and familiar.enters_step_contexts(self.strategy):
            return None
        return self.precision.forward_context()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context, for operations outside wrapped modules, such as the computation of a loss."""
        return self.precision.forward_context() or nullcontext()

    calls_through_forward: bool = reads(
        "strategy.facts.calls_through_forward",
        "Whether the strategy works in place, through the module's ``__call__``.",
    )

    def input_conversion(self) -> Callable[[Any], Any] | None:
        """Return the precision's function that converts a batch, for example to bfloat16; ``None`` if there is none."""
        return self.precision.convert_input if overrides(self.precision, "convert_input", Precision) else None

    def output_conversion(self) -> Callable[[Any], Any] | None:
        """Return the method ``convert_output`` of a user-defined precision; ``None`` if there is no such method."""
        precision = self.precision
        return precision.convert_output if defined_by_user(precision, "convert_output") else None

    def to_device(self, obj: Any) -> Any:
        """Return ``obj`` with all tensors on the device. A module is moved in place."""
        return move(obj, self.device) if self._verbs.batch_to_device is None else self._verbs.to_device(obj)

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Compute the gradients of ``tensor``. If the precision scales losses, the gradients are scaled, too.

        Args:
            tensor: the loss.
            args, kwargs: arguments of ``Tensor.backward``.
            model: the model whose gradients are computed; some strategies need this argument.
        """
        own = self._verbs.backward
        if own is None:
            tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            own(tensor, model if self._verbs.takes_prepared else None, *args, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool | None = None,
    ) -> Tensor | None:
        """Clip this optimizer's unscaled gradients, by value or by their total norm.

        Args:
            module: the module with the optimizer's parameters.
            optimizer: the optimizer whose parameters' gradients are clipped.
            clip_val: the largest absolute value of an element.
            max_norm: the largest total norm of the gradients. If ``max_norm`` is 0 or negative, no gradient is clipped.
            norm_type: the order of the norm; ``inf`` is the largest absolute value of an element.
            error_if_nonfinite: whether to raise RuntimeError if the norm is not finite. The check waits for the device.
                ``None``: True, unless the precision scales losses. Such a precision skips the step instead.

        Returns:
            The norm before clipping; ``None`` if no norm was computed, for example with ``clip_val``.

        Raises:
            ConfigurationError: both or neither of ``clip_val`` and ``max_norm`` are passed.
        """
        if (clip_val is None) == (max_norm is None):
            both = "neither clip_val nor max_norm" if clip_val is None else f"{clip_val=} and {max_norm=}"
            raise ConfigurationError(f"Engine.clip_gradients got {both}. Give one of them, max_norm=1.0.")
        plain, own = unwrapped(optimizer), module
        if isinstance(module, EngineModule):
            own = module._forward_module if self._verbs.takes_prepared else module.module
        elif self._verbs.takes_prepared:  # a LightningModule calls this method with itself and not with its wrapper
            own = self._verbs.prepared(module)
        if isinstance(optimizer, nn.Module) and not isinstance(module, EngineModule):
            raise ConfigurationError("Engine.clip_gradients got a module as the optimizer. Write (model, optimizer).")
        if clip_val is not None:
            self.strategy.clip_gradients_value(own, plain, clip_val=clip_val)
            return None
        assert max_norm is not None  # one of clip_val and max_norm was passed
        strict = not self.precision.scales_loss if error_if_nonfinite is None else error_if_nonfinite
        return self.strategy.clip_gradients_norm(
            own, plain, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=strict
        )

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Context in which backward passes exchange no gradients. Enter the context for all batches of an optimizer
        step except the last batch.

        Args:
            module: a module that :meth:`setup` returned.
            enabled: if False, the context does nothing.

        Raises:
            ConfigurationError: the module is not set up.
        """
        if not isinstance(module, EngineModule):
            raise WrongTypeError(f"no_backward_sync got {described(module)}. Pass what Engine.setup returned.")
        return self._verbs.no_backward_sync(module._forward_module, enabled)

    # ---- building models -----------------------------------------------------------------------------------------

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context in which new layers are created on the run's device and in its precision.

        Args:
            empty_init: whether to leave parameters uninitialized, because a checkpoint will be loaded; ``None``: False.
        """
        return self._verbs.module_context(empty_init)

    def init_tensor(self) -> AbstractContextManager[None]:
        """Context in which new tensors are created on the run's device and in its precision."""
        return self._verbs.tensor_context()

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Context in which a sharding strategy can shard new layers. With other strategies, it does nothing."""
        return self._verbs.sharded_context()

    # ---- callbacks and logging -----------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``hook_name`` of each callback that has this method. Of ``kwargs``, a method gets only those
        that it accepts.

        A LightningModule that was set up counts as a callback.
        """
        for callback in self.callbacks:
            if callable(method := getattr(callback, hook_name, None)):
                method(*args, **taken(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log one number with every logger. A tensor is read from the device immediately."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers with every logger, at ``step``. All tensors are read from the device immediately, in one copy."""
        if self.loggers and self.is_global_zero:
            numbers, _ = read_together(parts.loggable(metrics), self.accelerator.supports_float64)
            for logger in self.loggers:
                logger.log_metrics(metrics=dict(zip(metrics, numbers, strict=True)), step=step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Call :func:`drivetrain.seed_everything`; ``workers=None`` means True. ``verbose``: log the seed at INFO."""
        chosen = seed_everything(seed, workers is None or workers)
        if verbose and rank_from_environ() == 0:
            log.info("Seed set to %d", chosen)
        return chosen

    # ---- tear down ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Move all modules and optimizers that were set up back to the host, and free the device."""
        for module, _ in self._verbs.modules:
            before = dict(module.named_parameters())
            follow(self.strategy.optimizers, before, place(module, HOST))
        self._verbs.modules.clear()
        self.strategy.teardown()
        self._launched = False
