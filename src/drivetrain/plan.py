"""Make a frozen plan, with reasons, from the settings and the machine. No part of the run is created here.

For each part of a run, the first row that applies decides. ``tests/test_plan.py`` tests the rows without hardware:

============  ================================================  =======================================================
what          given                                             choice
============  ================================================  =======================================================
accelerator   an instance or a class                            that one; it must be available
accelerator   a strategy instance that carries one              the strategy's; a different one beside it is an error
accelerator   ``"gpu"``                                         torch's device of the highest priority; none: error
accelerator   a name                                            that one; unknown or not available is an error
accelerator   ``"auto"``                                        the available one of the highest priority
devices       ``"auto"``                                        what the accelerator counts; one for single_device
devices       a strategy instance that names one                the strategy's; ``devices=`` beside it is an error
devices       a count, a list, a text                           as the accelerator reads it, each there and once
strategy      an instance, or a name                            that one, completed with accelerator and precision
strategy      ``"auto"``                                        the accelerator's: for one device, or for several
processes     a ``ClusterEnvironment`` carried or in plugins    that one, else the first that detects its cluster
precision     a strategy instance that carries one              the strategy's; another one beside it is an error
precision     a ``Precision`` in ``plugins``                    that one; ``precision=`` beside it is an error
precision     ``precision=``                                    its class, if the device has the type; ``None``: 32-true
checkpoints   a ``CheckpointIO`` in ``plugins``                 that one, else a local file
layers        a ``LayerSync`` in ``plugins``                    that one; another beside ``sync_batchnorm=`` is an error
============  ================================================  =======================================================
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.accelerators.choice import available, check_limit, check_numbers, check_strategy, choose, reserved_of
from drivetrain.accelerators.torch_device import as_auto, as_numbers, no_numbers
from drivetrain.base.introspect import check_part
from drivetrain.base.lazy import on_first_use
from drivetrain.base.registry import Entry, Registry
from drivetrain.checkpoints.io import CheckpointIO, CheckpointRegistry
from drivetrain.clusters.environment import ClusterEnvironment, ClusterRegistry, detect
from drivetrain.clusters.local import LocalEnvironment
from drivetrain.errors import (
    ConfigurationError,
    UnknownNameError,
    WrongTypeError,
    described,
    did_you_mean,
    shown,
    whose,
)
from drivetrain.launchers.launcher import LauncherRegistry, in_notebook, was_started
from drivetrain.precision.precision import Precision, PrecisionRegistry, precision_meant
from drivetrain.settings import Settings
from drivetrain.strategies.layer_sync import LayerSync, LayerSyncRegistry
from drivetrain.strategies.strategy import OwnParts, Strategy, StrategyRegistry

with on_first_use:
    from drivetrain.base import notebook

_CLAIMS: dict[torch.dtype | None, tuple[str, str]] = {
    torch.float64: ("supports_float64", "64-bit floats"),
    torch.float16: ("supports_float16", "float16"),
    torch.bfloat16: ("supports_bfloat16", "bfloat16"),
}
"""For each dtype: the accelerator's attribute that must be true, and the dtype's name in messages."""

_PLUGINS: tuple[type, ...] = (Precision, CheckpointIO, ClusterEnvironment, LayerSync)
_PASS_PLUGINS = "Pass a Precision, a CheckpointIO, a ClusterEnvironment or a LayerSync, at most one of each."
_SYNC = "sync_batchnorm"  # an argument of the Trainer, and the name of a LayerSync


@dataclass(frozen=True)
class Machine:
    """The facts about this machine that a plan needs, as plain data, so that tests can invent facts.

    This class does not say which accelerators are available, because the plan asks the accelerators.

    Attributes:
        environment: the cluster environment of this process, and the reason; ``None``: the user started the process.
        has_tensorboard: whether the package that TensorBoardLogger needs is installed.
        is_rank_of_program: whether another process of this program has started this process as a rank.
        is_notebook: whether the program runs in a notebook. A launcher cannot run a notebook again.
    """

    environment: tuple[ClusterEnvironment, str] | None
    has_tensorboard: bool
    is_notebook: bool = False
    is_rank_of_program: bool = False

    @classmethod
    def detect(cls, environ: MutableMapping[str, str] = os.environ, given: ClusterEnvironment | None = None) -> Machine:
        """Return the facts about this machine and process. If ``given`` is an environment, do not look for another."""
        return cls(
            environment=detect(environ, given),
            has_tensorboard=find_spec("tensorboard") is not None,
            is_notebook=in_notebook(),
            is_rank_of_program=was_started(),
        )


@dataclass(frozen=True)
class Decision:
    """One line of a plan: the subject, the choice and the reason."""

    what: str
    choice: str
    why: str


@dataclass(frozen=True, repr=False)
class Plan:
    """All decisions about a run's parts, made before a part is created; ``print(plan)`` shows the reasons.

    Attributes:
        start_method: how this process starts the processes of its machine; ``None``: it starts no processes.
    """

    accelerator: Accelerator
    devices: tuple[torch.device, ...]
    strategy: Entry[Strategy] | Strategy
    environment: ClusterEnvironment
    num_nodes: int
    start_method: str | None
    precision: Precision
    checkpoint_io: CheckpointIO | None
    default_logger: str | None
    decisions: tuple[Decision, ...]
    layer_sync: LayerSync | None = None

    @property
    def strategy_class(self) -> type[Strategy]:
        """The class of the strategy."""
        return _class_of(self.strategy)

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return _processes_for(self.strategy, self.devices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{each.what}={each.choice!r}' for each in self.decisions)})"

    def _repr_html_(self) -> str:
        rows = [(d.what, d.choice, f"because {d.why}") for d in self.decisions]
        return notebook.table(rows, ("drivetrain plan", "", ""))

    def __str__(self) -> str:
        wide_what = max(len(d.what) for d in self.decisions)
        wide_choice = max(len(d.choice) for d in self.decisions)
        rows = [f"  {d.what:<{wide_what}}  {d.choice:<{wide_choice}}  because {d.why}" for d in self.decisions]
        return "\n".join(["drivetrain plan", *rows])


def resolve(settings: Settings, machine: Machine | None = None) -> Plan:
    """Return the plan for ``settings`` on ``machine``. ``None`` means this machine.

    Raises:
        ConfigurationError: a name is unknown, arguments contradict each other, or the hardware is missing.
    """
    plugins = _plugins(settings.plugins)
    strategy, why_strategy = _strategy(settings)
    own = strategy.own_parts if isinstance(strategy, Strategy) else OwnParts()
    machine = machine or Machine.detect(given=own.environment or plugins.get(ClusterEnvironment))
    accelerator, why_accelerator = _accelerator(settings, own)
    environment, why_environment = _environment(plugins.get(ClusterEnvironment), own, machine)
    if (nodes := environment.nodes_meant(settings.num_nodes)) != settings.num_nodes:
        settings = replace(settings, num_nodes=nodes)
    devices, why_devices = _devices(settings, accelerator, strategy, own, environment)
    if strategy is None:
        strategy, why_strategy = _auto_strategy(accelerator, devices, settings.num_nodes, environment, machine)
    cls = _class_of(strategy)
    check_strategy(accelerator, cls.__name__, cls.facts.accelerators)
    start_method = _start_method(settings, strategy, accelerator, devices, environment)
    processes = _processes(environment, why_environment, cls, _processes_for(strategy, devices), nodes, start_method)
    precision, why_precision = _precision(settings, plugins.get(Precision), own, accelerator)
    logger, why_logger = _logger(settings, machine)
    return Plan(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        environment=environment,
        num_nodes=nodes,
        start_method=start_method,
        precision=precision,
        checkpoint_io=plugins.get(CheckpointIO),
        default_logger=logger,
        layer_sync=_layer_sync(settings, plugins.get(LayerSync)),
        decisions=(
            Decision("accelerator", accelerator.name, why_accelerator),
            Decision("devices", ", ".join(map(str, devices)), why_devices),
            Decision("strategy", cls.__name__, why_strategy),
            Decision("processes", *processes),
            Decision("precision", precision.name, why_precision),
            Decision("logger", logger or "none", why_logger),
        ),
    )


def _class_of(strategy: Entry[Strategy] | Strategy) -> type[Strategy]:
    return strategy.cls if isinstance(strategy, Entry) else type(strategy)


def _processes_for(strategy: Entry[Strategy] | Strategy, devices: Sequence[torch.device]) -> int:
    """Return the number of processes that train on these devices of one machine."""
    return 1 if _class_of(strategy).facts.drives_all_devices else len(devices)


def _processes(
    environment: ClusterEnvironment, why: str, cls: type[Strategy], count: int, num_nodes: int, start_method: str | None
) -> tuple[str, str]:
    """Return a text about the job's processes, and the reason. The text must be true in every process, also in the one
    that starts the others.
    """
    if start_method is not None:
        each = f"{count}, started" if num_nodes == 1 else f"{count} on each of {num_nodes} machines, started"
        return f"{each} by {start_method}", f"{why}; {cls.__name__} starts them so"
    if not environment.creates_processes_externally:
        return "this one" if num_nodes == 1 else f"one on each of {num_nodes} machines", why
    if isinstance(environment, LocalEnvironment):
        return f"{environment.world_size()}, started already", why
    return f"{environment.world_size()}, started by {type(environment).__name__.removesuffix('Environment')}", why


def _plugins(given: Any) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for each in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        if each is None:
            continue
        plugin = _plugin_named(each) if isinstance(each, str) else each
        kind = next((kind for kind in _PLUGINS if isinstance(plugin, kind)), None)
        if kind is None:
            is_class = isinstance(plugin, type) and issubclass(plugin, _PLUGINS)
            cure = f"Write {plugin.__name__}(...)." if is_class else _PASS_PLUGINS
            raise WrongTypeError(f"plugins got {described(plugin)}. {cure}")
        if kind in found:
            raise ConfigurationError(
                f"plugins got two of a kind: {type(found[kind]).__name__} and {type(plugin).__name__}. Keep one."
            )
        found[kind] = plugin
    return found


def _plugin_named(name: str) -> Any:
    registries: list[Registry[Any]] = [ClusterRegistry, CheckpointRegistry, LayerSyncRegistry]
    found = [registry for registry in registries if name in registry]
    if len(found) == 1:
        return found[0].get(name)
    if found:
        kinds = " and of a ".join(registry.kind for registry in found)
        raise ConfigurationError(f"plugins got the name {name!r}, which is that of a {kinds}. Pass an object.")
    if name in PrecisionRegistry:
        raise ConfigurationError(
            f"plugins got {described(name)}, which names a precision. Write precision={name!r} instead."
        )
    known = [each for registry in registries for each in registry.available()]
    raise ConfigurationError(f"plugins got {described(name)}. {did_you_mean(name, known)} {_PASS_PLUGINS}")


def _strategy(settings: Settings) -> tuple[Entry[Strategy] | Strategy | None, str]:
    """Return the requested strategy, or ``None`` for "auto", and the reason."""
    given = settings.strategy
    if isinstance(given, Strategy):
        return given, "strategy= is an instance"
    if not isinstance(given, str):
        instead = f"{given.__name__}()" if isinstance(given, type) and issubclass(given, Strategy) else '"auto"'
        cure = whose(given) or f"Write strategy={instead}."
        raise ConfigurationError(f"strategy={shown(given)}: a strategy is a name or a Strategy instance. {cure}")
    if given == "auto":
        return None, ""
    return StrategyRegistry.entry(given), f'strategy="{given}"'


def _auto_strategy(
    accelerator: Accelerator,
    devices: Sequence[torch.device],
    num_nodes: int,
    environment: ClusterEnvironment,
    machine: Machine,
) -> tuple[Entry[Strategy], str]:
    parallel = accelerator.parallel_strategy
    if environment.creates_processes_externally and environment.world_size() > 1:
        return StrategyRegistry.entry(parallel), f"{environment.world_size()} processes were started"
    if len(devices) == 1 and num_nodes == 1:
        return StrategyRegistry.entry(accelerator.single_device_strategy), "there is one device"
    count = f"{len(devices)} devices" if num_nodes == 1 else f"{num_nodes} machines"
    if machine.is_notebook and parallel == "ddp":
        return StrategyRegistry.entry("ddp_notebook"), f"there are {count}, and this is a notebook"
    return StrategyRegistry.entry(parallel), f"there are {count}"


def _environment(plugin: ClusterEnvironment | None, own: OwnParts, machine: Machine) -> tuple[ClusterEnvironment, str]:
    carried = own.environment
    if carried is not None and plugin is not None and carried is not plugin:
        raise ConfigurationError(
            f"The strategy carries a {type(carried).__name__}, and plugins a {type(plugin).__name__}. "
            "Give the cluster environment once."
        )
    if (given := carried or plugin) is not None:
        check_part(type(given))  # checked here, before the methods of the environment are called
        return given, "it was passed in plugins=" if carried is None else "the strategy carries it"
    environment, evidence = machine.environment or (LocalEnvironment({}), LocalEnvironment.evidence)
    if isinstance(environment, LocalEnvironment) and environment.creates_processes_externally:
        who = "the process that you started" if machine.is_rank_of_program else "a launcher"
        evidence = f"{who} has started this one, with LOCAL_RANK={environment.local_rank()}"
    return environment, evidence


def _start_method(
    settings: Settings,
    strategy: Entry[Strategy] | Strategy,
    accelerator: Accelerator,
    devices: Sequence[torch.device],
    environment: ClusterEnvironment,
) -> str | None:
    """Return how this process starts the processes of its machine; ``None``: it starts no processes.

    Raises:
        ConfigurationError: the strategy, the devices and the existing processes do not fit together.
    """
    cls = _class_of(strategy)
    if not cls.facts.is_distributed:
        if environment.creates_processes_externally and environment.world_size() > 1:
            raise ConfigurationError(
                f"{cls.__name__} trains in one process, and {environment.world_size()} were started. "
                'Write strategy="ddp", or start the program once, without a launcher.'
            )
        if _processes_for(strategy, devices) > 1 or settings.num_nodes > 1:
            where = "in one process" if cls.facts.drives_all_devices else "on one device"
            raise ConfigurationError(
                f"{cls.__name__} trains {where}, and devices={settings.devices!r} with "
                f"num_nodes={settings.num_nodes} means {len(devices)} on each machine. "
                f'Write strategy="ddp", or {"num_nodes" if cls.facts.drives_all_devices else "devices"}=1.'
            )
        return None
    if not accelerator.supports_several_devices:
        raise ConfigurationError(
            f"{cls.__name__} trains on several devices, and those of the accelerator {accelerator.name!r} cannot "
            f'exchange gradients: devices={settings.devices!r} means {len(devices)}. Write devices=1, strategy="auto".'
        )
    facts = strategy.facts if isinstance(strategy, Strategy) else cls.facts
    named = strategy.init_params if isinstance(strategy, Entry) else {}
    start: str | None = named.get("start_method", facts.start_method)
    launcher = None if start is None else LauncherRegistry.of(start, cls.__name__).cls
    if launcher is not None and launcher.scheduler is not None and not environment.creates_processes_externally:
        if any(device.index not in (None, position) for position, device in enumerate(devices)):
            raise ConfigurationError(
                f"devices={settings.devices!r} names devices, but {launcher.scheduler} chooses those that are "
                f"free. Write devices={len(devices)}."
            )
        return start
    processes = _processes_for(strategy, devices)
    environment.validate_settings(processes, settings.num_nodes)
    if environment.creates_processes_externally:
        return None
    remains = launcher is not None and (launcher.reruns_program or launcher.leaves_one_here)
    return None if processes == 1 and remains else start  # None, because this process is the only one


def _accelerator(settings: Settings, own: OwnParts) -> tuple[Accelerator, str]:
    given: Any = settings.accelerator
    if (carried := own.accelerator) is not None:
        if given != "auto" and given is not carried:
            raise ConfigurationError(
                f"The strategy carries a {type(carried).__name__}, and accelerator={shown(given)} names another. "
                "Give the accelerator once."
            )
        if not carried.is_available():
            raise ConfigurationError(
                f"The strategy carries a {type(carried).__name__}, which is not available here: "
                f"{carried.why_unavailable()}. Available: {available()}. Give it another accelerator, or none."
            )
        return carried, "the strategy carries it"
    return choose(given)


def _devices(
    settings: Settings, accelerator: Accelerator, strategy: Entry[Strategy] | Strategy | None, own: OwnParts,
    environment: ClusterEnvironment,
) -> tuple[tuple[torch.device, ...], str]:  # fmt: skip
    given: Any = settings.devices
    if own.devices:
        if given != "auto" or own.devices[0].type != accelerator.autocast_device_type:
            raise ConfigurationError(
                f"The strategy names the device {own.devices[0]}, which contradicts devices={given!r} on the "
                f"accelerator {accelerator.name!r}. Name the device once, with its accelerator."
            )
        return own.devices, "the strategy names it"
    if given in (0, "0", [], "", None) or isinstance(given, bool):
        raise WrongTypeError(f'devices={given!r} names no device. Write devices=1 or devices="auto".')
    parsed: Any
    if (reserved := environment.reserved_devices()) is not None and accelerator.autocast_device_type == HOST.type:
        reserved = None  # clusters reserve GPUs
    if environment.creates_processes_externally:
        given = as_auto(given, accelerator, environment.devices_of_processes)
    if given == "auto":
        said = 'devices="auto"' if settings.devices == "auto" else f"devices={settings.devices!r}"
        count, why = reserved_of(reserved, accelerator.auto_device_count(), f"{said}, and this accelerator has")
        if environment.creates_processes_externally and accelerator.autocast_device_type == HOST.type:
            count = environment.local_world_size(settings.num_nodes)  # CPU devices have no indices
            why = f"{said}, and the processes on this machine are"
        why = f"{why} {count}"
        cls = None if strategy is None else _class_of(strategy)
        if count > 1 and cls is not None and not (cls.facts.is_distributed or cls.facts.drives_all_devices):
            count, why = 1, f"{why}; {cls.__name__} takes one"
        if count > 1 and not accelerator.supports_several_devices:
            count, why = 1, f"{why}; a job takes one of them"
        parsed = environment.devices_of_processes(count)
    else:
        parsed = as_numbers(accelerator.parse_devices(given))  # parse_devices may return its argument unchanged
        handed_through = parsed is given and not (
            isinstance(given, int) or (isinstance(given, (list, tuple)) and all(type(index) is int for index in given))
        )
        if isinstance(parsed, str) or handed_through:
            raise no_numbers(given)
        if isinstance(parsed, int):
            parsed = list(range(accelerator.auto_device_count() if parsed == -1 else parsed))
        else:
            check_numbers(given, parsed, accelerator)
        why = f"devices={given!r}"
    devices = tuple(accelerator.get_parallel_devices(parsed))
    if given != "auto" and devices and devices[0].index is not None:  # host devices have no indices
        check_numbers(given, parsed, accelerator)
    if not devices:
        raise ConfigurationError(f"devices={given!r} means no device of {accelerator.name!r}. Write devices=1.")
    count = len(set(devices) if given == "auto" else devices)  # several processes may share a device, which counts once
    check_limit(given, count, accelerator, reserved)
    return devices, why


def _precision(
    settings: Settings, plugin: Precision | None, own: OwnParts, accelerator: Accelerator
) -> tuple[Precision, str]:
    given = settings.precision
    if (carried := own.precision) is not None:
        if given is not None or (plugin is not None and plugin is not carried):
            other = f"precision={given!r}" if given is not None else f"a {type(plugin).__name__} in plugins"
            raise ConfigurationError(
                f"The strategy carries a {type(carried).__name__}, and Trainer got {other}. Give the precision once."
            )
        return carried, "the strategy carries it"
    if plugin is not None:
        if given is not None:
            raise ConfigurationError(
                f"precision={given!r} and a {type(plugin).__name__} in plugins both set the precision. "
                "Leave precision out."
            )
        return plugin, "it was passed in plugins="
    meant = precision_meant(given)
    if not isinstance(given, (int, str, type(None))) or isinstance(given, bool):
        raise ConfigurationError(
            f"precision={shown(given)}: a precision is a name or a number of bits. "
            f'Write precision="{meant or "bf16-mixed"}", or pass a Precision in plugins. [DT1045]'
        )
    if given is None:
        return Precision(), "it is the default"
    try:
        entry = PrecisionRegistry.entry(str(given))
    except UnknownNameError:
        known = PrecisionRegistry.available()
        raise ConfigurationError(
            f"precision={given!r}: there is no such precision. {did_you_mean(meant or str(given), known)} [DT1045]"
        ) from None
    precision = entry.build()
    claim, kind = _CLAIMS.get(precision.computes_in, (None, ""))
    if claim is not None and not getattr(accelerator, claim):
        raise ConfigurationError(
            f"precision={given!r}: the accelerator {accelerator.name!r} has no {kind}. "
            'Write precision="32-true". [DT1046]'
        )
    return precision, f"precision={given!r}"


def _layer_sync(settings: Settings, plugin: LayerSync | None) -> LayerSync | None:
    if plugin is not None and settings.sync_batchnorm and not isinstance(plugin, LayerSyncRegistry.entry(_SYNC).cls):
        raise ConfigurationError(
            f"Trainer(sync_batchnorm=True) and the {type(plugin).__name__} in plugins both change layers for all "
            "processes. Leave one of them out."
        )
    return plugin


def _logger(settings: Settings, machine: Machine) -> tuple[str | None, str]:
    if settings.logger is False:
        return None, "logger=False"
    if settings.barebones:
        return None, "barebones logs nothing"
    if settings.fast_dev_run:
        return "DummyLogger", "fast_dev_run logs nothing"
    if settings.logger is None or settings.logger is True:
        if machine.has_tensorboard:
            return "TensorBoardLogger", "tensorboard is installed"
        return "CSVLogger", "tensorboard is not installed"
    given = settings.logger if isinstance(settings.logger, (list, tuple)) else [settings.logger]
    names = (logger if isinstance(logger, str) else type(logger).__name__ for logger in given)
    return ", ".join(names) or None, "it was passed as logger="
