"""Creates a run's callbacks and loggers, and checks that module, hooks and loaders support the requested run."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.advice import overlooked
from drivetrain.base import configs
from drivetrain.base.introspect import (
    check_base_init,
    check_part,
    defined_by_user,
    is_own_class,
    missing_arguments,
    near_misses,
    overrides,
    positional_arity,
    signature_of,
    takes_iterator,
    uncalled_hooks,
)
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.base.supplied import supplied, warn_of_uncalled
from drivetrain.base.tree import leaves
from drivetrain.callback import Callback
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.data.combined import arranged
from drivetrain.errors import ConfigurationError, RunError, SignatureError, WrongTypeError, closest, described
from drivetrain.loops import step_checks
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule
from drivetrain.plan import Plan
from drivetrain.settings import Settings
from drivetrain.trainer import telling

if TYPE_CHECKING:
    from drivetrain.loggers.logger import Logger
    from drivetrain.strategies.strategy import Strategy
    from drivetrain.trainer.trainer import Trainer

_CONTRACTS = ("Callback", "Checkpoint", "DummyLogger", "Logger", "ProgressBar")
_POSITIONS = {"first": 0, "any": 1, "last": 2}


def callbacks_of(settings: Settings, environment: ClusterEnvironment) -> list[Callback]:
    """Return the caller's callbacks and the default callbacks, in the order in which the Trainer calls them.

    Raises:
        ConfigurationError: an item is not a callback, or a callback contradicts an ``enable_...`` argument.
    """
    given = [] if settings.callbacks is None else settings.callbacks
    found = _checked_callbacks(given, "Trainer(callbacks=...) got")
    return ordered(with_defaults(found, settings, environment))


@supplied
def with_defaults(given: Sequence[Callback], settings: Settings, environment: ClusterEnvironment) -> list[Callback]:
    """Return the passed callbacks and the default callbacks.

    Raises:
        ConfigurationError: a passed callback contradicts an argument of the Trainer.
    """
    return [*given]


def _checked_callbacks(given: Any, start: str) -> list[Callback]:
    """Return ``given`` as a list. ``start`` begins the error message for an item that is not a callback."""
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for callback in found:
        if not isinstance(callback, Callback):
            cure = "Pass instances of drivetrain.Callback."
            if hasattr(callback, "start") and hasattr(callback, "describe"):
                cure = f"Write Trainer(profiler={type(callback).__name__}(...))."
            raise WrongTypeError(f"{start} {described(callback)}. {_cure(callback, 'drivetrain.callbacks', cure)}")
        check_base_init(callback)
    return found


def _cure(value: Any, package: str, cure: str) -> str:
    """Return the advice at the end of an error message. If ``value`` is a class or the name of a class, the advice is
    to write an instance of this class. Otherwise the advice is ``cure``.
    """
    if isinstance(value, type):
        return f"Write {value.__name__}(...)."
    if isinstance(value, str):
        names = [name for name in importlib.import_module(package).__all__ if name not in _CONTRACTS]
        likely = closest(value, {*names, *(name.removesuffix("Logger") for name in names)})
        if likely is not None:
            name = likely if likely in names else f"{likely}Logger"
            else_write = 'or a name such as "csv"' if package == "drivetrain.loggers" else "an object and not its name"
            return f"Did you mean {name}? Write {name}(...), {else_write}."
    return cure


def ordered(callbacks: Iterable[Callback]) -> list[Callback]:
    """Sort the callbacks: tuners first, then other callbacks in the given order, checkpoint callbacks last.

    Raises:
        ConfigurationError: a callback occurs twice, or two callbacks would save their states under the same
            ``state_key``.
    """
    found = sorted(callbacks, key=lambda callback: _POSITIONS[callback.position])
    stateful: dict[str, Callback] = {}
    for index, callback in enumerate(found):
        if any(callback is other for other in found[:index]):
            raise ConfigurationError(
                f"One {type(callback).__name__} object is listed twice in callbacks, so each of its hooks would run "
                "twice. List it once."
            )
        if overrides(callback, "state_dict", Callback):
            if callback.state_key in stateful:
                raise RunError(
                    f"Two {type(callback).__name__} callbacks would save their state under {callback.state_key!r}. "
                    "Give them different arguments, or override state_key."
                )
            stateful[callback.state_key] = callback
    return found


def with_module_callbacks(callbacks: Sequence[Callback], module: LightningModule) -> list[Callback]:
    """Return ``callbacks`` and the callbacks from ``module.configure_callbacks()``. If a callback in ``callbacks`` has
    the class of one of the module's callbacks, only the module's callback is kept.
    """
    own = _checked_callbacks(
        module.configure_callbacks() or [], f"{type(module).__name__}.configure_callbacks returned"
    )
    replaced = {type(callback) for callback in own}
    return ordered([*(c for c in callbacks if type(c) not in replaced), *own]) if own else list(callbacks)


def loggers_of(settings: Settings, plan: Plan, root_dir: str) -> list[Logger]:
    """Return the caller's loggers, or the default logger in ``plan``.

    Raises:
        ConfigurationError: an item is not a logger.
    """
    given: Any = settings.logger
    by_default = given is None or isinstance(given, bool)
    found = [] if by_default else list(given) if isinstance(given, (list, tuple)) else [given]
    contract, registry = load("drivetrain.loggers:Logger"), load("drivetrain.loggers:LoggerRegistry")
    named = load("drivetrain.loggers.logger:logger_named")
    found = [named(each, root_dir) if isinstance(each, str) and each in registry else each for each in found]
    for logger in found:
        if isinstance(logger, contract) and not is_own_class(type(logger)):
            check_part(type(logger))
            check_base_init(logger)
        if not isinstance(logger, contract):
            cure = "Pass a drivetrain.loggers.Logger, a list of them, True or False."
            raise ConfigurationError(
                f"Trainer(logger=...) got {described(logger)}. {_cure(logger, 'drivetrain.loggers', cure)}"
            )
    if plan.default_logger is not None and (by_default or settings.fast_dev_run):
        return [load(f"drivetrain.loggers:{plan.default_logger}")(root_dir)]
    return found


_STEPS = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def profiler_of(settings: Settings) -> Any:
    """Return the profiler for the Trainer's argument, or ``None``."""
    return None if settings.profiler is None else load("drivetrain.trainer.profiling:profiler_of")(settings.profiler)


def check_passed(model: Any, fn: TrainerFn, passed: Mapping[str, Any], datamodule: Any) -> None:
    """Check the types of the arguments of ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigurationError: an argument has a wrong type, or loaders and a datamodule were both passed.
    """
    call = f"trainer.{fn.value}"
    if not isinstance(model, LightningModule):
        cure = "Subclass drivetrain.LightningModule."
        if any(isinstance(thing, LightningModule) for thing in (*passed.values(), datamodule)) or _is_data(model):
            data = "datamodule=..." if isinstance(model, LightningDataModule) else "loader"
            cure = f"The model comes first: write {call}(model, {data})."
        elif isinstance(model, type) and issubclass(model, LightningModule):
            cure = f"Write {call}({model.__name__}(...))."
        raise WrongTypeError(f"{call} needs a LightningModule, not {described(model)}. {cure}")
    if datamodule is not None:
        if not isinstance(datamodule, LightningDataModule):
            cure = "Pass loaders as train_dataloaders or dataloaders."
            if isinstance(datamodule, type) and issubclass(datamodule, LightningDataModule):
                cure = f"Write datamodule={datamodule.__name__}(...)."
            raise WrongTypeError(
                f"{call} needs a LightningDataModule as datamodule, not {described(datamodule)}. {cure}"
            )
        if any(loaders is not None for loaders in passed.values()):
            raise ConfigurationError(
                f"{call} got both loaders and a datamodule. Pass the loaders, or datamodule=, not both."
            )
    for stage, loaders in passed.items():
        argument = {"fit": "train_dataloaders", "validate": "val_dataloaders"}.get(stage, "dataloaders")
        start = f"{call}({argument if fn is TrainerFn.FITTING else 'dataloaders'}=...) got"
        if loaders is None:
            continue
        tree = arranged(loaders, start)
        if stage == "fit" and not list(leaves(tree)):
            raise ConfigurationError(f"{start} an empty {type(loaders).__name__}. Give a loader.")


def _is_data(thing: Any) -> bool:
    """Whether ``thing`` is a loader, several loaders, a dataset or a datamodule."""
    if isinstance(thing, (str, bytes, type, torch.nn.Module)):
        return False
    return isinstance(thing, LightningDataModule) or hasattr(thing, "__iter__") or hasattr(thing, "__getitem__")


def check_module(module: LightningModule, fn: TrainerFn, settings: Settings, strategy: Strategy) -> None:
    """Check that ``module`` has the methods that ``fn`` needs. The Trainer calls this function before it creates
    anything.

    Raises:
        ConfigurationError: the module lacks a step or its optimizers, or a step cannot be called. Also raised if the
            module uses manual optimization, and an argument of the Trainer needs automatic optimization.
    """
    name = type(module).__name__
    if "_book" not in module.__dict__:
        raise ConfigurationError(f"{name}.__init__ has not called its base class's. Begin it with super().__init__().")
    check_former_hooks(module, strategy)
    needed = [] if fn is TrainerFn.PREDICTING else [_STEPS[fn][0]]  # predict_step has a default
    needed += ["configure_optimizers"] if fn is TrainerFn.FITTING else []
    for method in needed:
        if not overrides(module, method, LightningModule):
            near = next(near_misses(type(module), LightningModule, [method], alike=0.8), None)
            cure = "Define it." if near is None else f"Is it {near[0]}? Rename that to {method}."
            if method == "test_step" and overrides(module, "validation_step", LightningModule):
                cure = "To test as you validate, write test_step = validation_step in the class."
            raise ConfigurationError(f"{name} has no {method}, and trainer.{fn.value} calls it. {cure}")
    predicts = overrides(module, "predict_step", LightningModule) or overrides(module, "forward", LightningModule)
    if fn is TrainerFn.PREDICTING and not predicts:
        raise ConfigurationError(f"{name} has neither predict_step nor forward, so it cannot predict. Define one.")
    if fn is TrainerFn.FITTING and (settings.split_on_oom or settings.cuda_graphs or settings.replay_every):
        step_checks.check(module, settings, strategy)
    for method in _STEPS[fn]:
        if overrides(module, method, LightningModule):
            _check_step(name, method, getattr(module, method), strategy.facts.earlier.step_arguments)
    if fn is TrainerFn.FITTING and not module.automatic_optimization:
        overlooked.check_manual(name, settings)


@supplied
def check_former_hooks(module: LightningModule, strategy: Strategy) -> None:
    """Check that ``module`` defines no hook that is no longer called. Hooks that drivetrain still calls under a former
    name are allowed.

    Raises:
        HookError: the module defines a hook that is no longer called.
        ConfigurationError: the module defines a hook that is called only with a strategy that splits batches.
    """


@supplied
def former_hooks(of_callbacks: bool) -> Mapping[str, str]:
    """For each hook that is no longer called, return what to write instead."""
    return {}


def _check_step(name: str, method: str, step: Any, further: Container[str]) -> None:
    """Check that ``step`` accepts the loop's arguments and requires no others. ``further`` contains the names of
    arguments that the loop passes besides the batch and the indices.
    """
    index = "" if method == "training_step" else ", dataloader_idx=0"
    cure = f"Write def {method}(self, batch, batch_idx{index})."
    if not callable(step):
        raise ConfigurationError(f"{name}.{method} is no method but {described(step)}. {cure}")
    if takes_iterator(step):
        return
    parameters = signature_of(step).parameters
    named = [key for key, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = [key for key in named if parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY]
    if positional_arity(step) == 0 or (index and "dataloader_idx" in by_position[:2]):
        raise SignatureError(
            f"{name}.{method}({', '.join(parameters)}) does not take a batch and its index first. {cure}"
        )
    for key in named:
        if (
            key not in by_position[:2]
            and key not in further
            and parameters[key].default is inspect.Parameter.empty
            and not (index and (key == "dataloader_idx" or (further and key in by_position[:3])))
        ):
            raise SignatureError(f"{name}.{method} needs {key!r}, which the loop does not pass. {cure}")


def check_hooks(parties: Iterable[Any], called: frozenset[str] = frozenset()) -> None:
    """Check overrides of hooks in module, datamodule and callbacks. Warn of methods whose names resemble the name of a
    hook.

    ``called`` contains the names of further methods of callbacks that the strategy calls.

    Raises:
        ConfigurationError: a hook is not a method, or does not accept its arguments.
    """
    for party in parties:
        base = next((b for b in (LightningModule, LightningDataModule, Callback) if isinstance(party, b)), None)
        # To save time, a run does not check drivetrain's own classes. Tests check these classes.
        if base is None or type(party).__module__.startswith("drivetrain."):
            continue
        name = type(party).__name__
        hooks = {name for name in dir(base) if not name.startswith("_") and callable(getattr(base, name))}
        if base is LightningModule:
            hooks -= set(dir(torch.nn.Module))
        for hook in sorted(hooks):
            # read from the class, because reading a property of the object could raise an error
            own = getattr(type(party), hook)
            if _CALLED_BY_THE_LOOPS.fullmatch(hook) and (isinstance(own, property) or overrides(party, hook, base)):
                _check_hook(name, hook, own if isinstance(own, property) else getattr(party, hook), getattr(base, hook))
        if base is Callback:
            warn_of_uncalled(type(party), "Callback", "Trainer")
        for method, cure in _uncalled(party, base, hooks, called):
            rank_zero_warn(
                f"{name}.{method} is never called by the Trainer{cure}", about=getattr(type(party), method, None)
            )


def _uncalled(party: Any, base: type, hooks: set[str], called: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield each method of ``party`` that looks like a hook but is never called: its name, and the end of a warning."""
    former = former_hooks(of_callbacks=False)
    gone_from = former_hooks(of_callbacks=True) if base is Callback else {}
    told = {*former, *gone_from}
    for method, hook in near_misses(type(party), base, hooks):
        if method not in former:  # check_module has already refused former hooks that the strategy does not call
            told.add(method)
            yield method, f". Did you mean {hook}? If the name is meant, nothing is wrong."
    looks_like = _LIKE_A_HOOK_OF_A_CALLBACK if base is Callback else _LIKE_A_HOOK
    for method, meant in uncalled_hooks(type(party), base, hooks, looks_like):
        if method not in told:
            likely = f"Did you mean {meant}? " if meant else ""
            yield method, f", which has no hook of this name. {likely}If other code calls it, nothing is wrong."
    for gone, instead in gone_from.items():
        if gone not in called and defined_by_user(party, gone) and callable(getattr(party, gone)):
            yield gone, f": this hook no longer exists. Do its work in {instead}."


_LIKE_A_HOOK = re.compile(r"on_\w+|[a-z]\w*_(step|dataloader)|(train|val|valid|validation|test|predict)_loader")
_LIKE_A_HOOK_OF_A_CALLBACK = re.compile(r"(on|before|after)_\w+")

_CALLED_BY_THE_LOOPS = re.compile(
    r"on_\w+|configure_\w+|optimizer_\w+|\w+_dataloader|prepare_data|setup|teardown|transfer_batch_to_device|backward|"
    r"lr_scheduler_step|state_dict|load_state_dict"
)
"""The hooks that :func:`check_hooks` checks. The other public methods are steps, which :func:`_check_step` checks, and
methods that only user code calls.
"""


def _check_hook(name: str, hook: str, method: Any, contract: Any) -> None:
    if not callable(method):
        raise ConfigurationError(
            f"{name}.{hook} is no method but {described(method)}. Define {hook} with def, in the class"
            f"{', without the decorator' if isinstance(method, property) else ''}."
        )
    if (wanted := missing_arguments(method, contract)) is not None:
        raise ConfigurationError(
            f"{name}.{hook}{inspect.signature(method)} cannot be called with the arguments it is given. "
            f"Write def {hook}({wanted})."
        )


def log_hyperparameters(trainer: Trainer) -> None:
    """Pass the saved hyperparameters of module and datamodule to the loggers.

    Raises:
        ConfigurationError: module and datamodule have different values for one hyperparameter.
    """
    if not trainer.loggers or not trainer.is_global_zero:
        return
    params: dict[str, Any] = {}
    for party in (trainer.datamodule, trainer.lightning_module):
        if party is None or not party._log_hyperparams or not trainer.settings.enable_autolog_hparams:
            continue
        # The command line adds "_class_path", which is left out here, and "_instantiator", which load_from_checkpoint
        # needs.
        own = {name: value for name, value in party.hparams_initial.items() if name != "_class_path"}
        for name in set(own) & set(params):
            if not _same(own[name], params[name]):
                raise RunError(
                    f"The module and the datamodule both have a hyperparameter {name!r}, {own[name]!r} and "
                    f"{params[name]!r}. Rename one, or call save_hyperparameters(logger=False) in one of them."
                )
        params.update(own)

    if params:  # plain data, because an OmegaConf configuration raises an error for a missing value
        telling.tell(trainer, "log_hyperparams", configs.without_configs(params), begins=True)
    telling.tell(trainer, "log_graph", trainer.lightning_module, begins=True)
    telling.tell(trainer, "save", begins=True)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # for two arrays, == returns an array, which has no truth value
        return one is other


def check_loaders(module: LightningModule, loaders: Loaders, fn: TrainerFn, validates: bool) -> None:
    """Check that the loaders for ``fn`` exist. For a fit that ``validates``, warn of a validation loader without a
    ``validation_step``, and of a ``validation_step`` without a loader.

    Raises:
        ConfigurationError: the loader for ``fn`` itself is missing.
    """
    if not loaders.available(fn.value):
        raise loaders.missing(fn.value)
    if fn is not TrainerFn.FITTING or not validates:
        return
    has_step = overrides(module, "validation_step", LightningModule)
    has_loader = loaders.available("validate")
    if has_step and not has_loader:
        rank_zero_warn(
            f"{type(module).__name__} has a validation_step but there is no validation loader, so it is not validated. "
            "Pass val_dataloaders, or define val_dataloader. [DT1021]"
        )
    if has_loader and not has_step:
        rank_zero_warn(
            f"There is a validation loader but {type(module).__name__} has no validation_step, so it is not validated. "
            "Define it. [DT1021]"
        )
