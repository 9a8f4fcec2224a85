"""Tables of members: every member that a contract has in the field is called, refused, or harmless.

Strategies and precisions have tests of their own beside theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain import Engine, Trainer
from drivetrain.accelerators import CPUAccelerator
from drivetrain.callbacks import DeviceStatsMonitor
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.clusters import ClusterEnvironment, LocalEnvironment, SLURMEnvironment
from drivetrain.clusters.local import free_port
from drivetrain.compat.members import TABLES, check_members
from drivetrain.compat.overrides import Members, members_of, overridden_members
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import Launcher, LauncherRegistry
from drivetrain.loggers import CSVLogger, Logger
from drivetrain.precision import Precision
from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy, TorchSyncBatchNorm

# What the contracts of the 2.6 generation have; of environments also what their subclasses have
FAMILIAR: dict[str, frozenset[str]] = {
    "launcher": frozenset({"__init__", "is_interactive_compatible", "launch", "kill"}),
    "checkpoint store": frozenset({
        "__init__", "save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown",
    }),
    "layer sync": frozenset({"__init__", "apply", "revert"}),
    "logger": frozenset({
        "__init__", "name", "version", "root_dir", "log_dir", "save_dir", "group_separator", "log_metrics",
        "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint", "experiment",
    }),
    "cluster environment": frozenset({
        "__init__", "creates_processes_externally", "main_address", "main_port", "detect", "world_size",
        "set_world_size", "global_rank", "set_global_rank", "local_rank", "node_rank", "validate_settings", "teardown",
        "job_id", "job_name", "resolve_root_node_address", "_validate_srun_used", "_validate_srun_variables",
        "_get_main_address", "_get_main_port", "_get_node_rank", "_read_hosts", "_init_comm_local",
        "_set_init_progress_group_env_vars",
        "creates_children", "master_address", "master_port",  # of the first generation
    }),
}  # fmt: skip
BASES: dict[str, type] = {
    "launcher": Launcher, "checkpoint store": TorchCheckpointIO, "layer sync": TorchSyncBatchNorm,
    "logger": CSVLogger, "cluster environment": LocalEnvironment,
}  # fmt: skip
OF_SLURM = frozenset({"job_id", "job_name", "resolve_root_node_address"})


@pytest.mark.parametrize("kind", FAMILIAR)
def test_every_member_is_one_of_the_contract_or_in_the_table(kind: str) -> None:
    table = next((each for each in TABLES.values() if each.kind == kind), Members(kind))
    uncalled = table.refused.keys() | table.harmless
    assert uncalled <= FAMILIAR[kind]
    assert not table.refused.keys() & table.harmless
    assert FAMILIAR[kind] - uncalled - {"__init__"} - OF_SLURM <= members_of(BASES[kind])


# ---- called ----------------------------------------------------------------------------------------------------------


def recording(base: type, names: frozenset[str], called: set[str]) -> type:
    """A subclass that overrides ``names``, notes which of them are used, and does what the base does."""

    def method(name: str) -> Callable[..., Any]:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return override

    def getter(name: str) -> property:
        def read(self: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)

        return property(read)

    members = {name: method(name) if callable(getattr(base, name)) else getter(name) for name in names}
    made = type("Recording", (base,), members)
    return made


def test_the_members_of_a_logger_are_used(make_trainer: Any, validated: Any, loader: Any, tmp_path: Path) -> None:
    called: set[str] = set()
    names = FAMILIAR["logger"] - {"__init__", "experiment", "root_dir"}  # which only programs read

    class Plain(Logger):
        """Without a ``log_dir``, so that checkpoints are kept by its folder, name and version."""

        save_dir = str(tmp_path)
        name, version = "plain", 3

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            """Drop them."""

        def log_hyperparams(self, params: Any) -> None:
            """Drop them."""

    class Module(validated):  # type: ignore[misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = make_trainer(
        logger=recording(Plain, names, called)(), enable_checkpointing=True, log_every_n_steps=1,
        callbacks=[DeviceStatsMonitor()],
    )  # fmt: skip
    trainer.fit(Module(), loader, loader)
    assert names - called == set()
    assert str(trainer.checkpoint_callback.best_model_path).startswith(str(tmp_path / "plain" / "version_3"))


def test_the_members_of_a_cluster_environment_are_used(make_trainer: Any, regression: Any, loader: Any) -> None:
    called: set[str] = set()
    facts = {"creates_processes_externally": True, "main_address": "127.0.0.1", "main_port": free_port()}

    class Environment(ClusterEnvironment):
        def world_size(self) -> int:
            return 1

        def global_rank(self) -> int:
            return 0

        def local_rank(self) -> int:
            return 0

    for name, value in facts.items():
        setattr(Environment, name, value)
    of_others = {"detect", *OF_SLURM}  # of those that are not passed
    table = TABLES["ClusterEnvironment"]
    uncalled = table.refused.keys() | table.harmless
    of_starting = {"set_world_size", "set_global_rank"}  # of those that do not say themselves who they are
    of_first = {"creates_children", "master_address", "master_port"}
    names = FAMILIAR["cluster environment"] - uncalled - {"__init__"} - of_first - of_others
    make_trainer(plugins=[recording(Environment, names, called)()], strategy="ddp").fit(regression(), loader)
    assert names - called == of_starting


def test_who_starts_processes_tells_an_environment_of_the_users_its_ranks() -> None:
    called: set[str] = set()
    environment = recording(LocalEnvironment, frozenset({"set_world_size", "set_global_rank"}), called)({})
    Engine(accelerator="cpu", devices=1, strategy="ddp", plugins=[environment]).launch(lambda engine: None)
    assert called == {"set_world_size", "set_global_rank"}
    dist.destroy_process_group()


def test_slurm_asks_its_own_members() -> None:
    class Own(SLURMEnvironment):
        @staticmethod
        def resolve_root_node_address(nodes: str) -> str:
            return f"first of {nodes}"

        @staticmethod
        def job_id() -> int:
            return 7

    environment = Own()
    environment.environ = {"SLURM_NODELIST": "a,b"}
    assert (environment.main_address, environment.main_port) == ("first of a,b", 15007)


# ---- refused, and harmless -------------------------------------------------------------------------------------------

CONTRACTS = {"Launcher": Launcher, "ClusterEnvironment": LocalEnvironment}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in CONTRACTS for name in sorted(TABLES[kind].refused)]
)
def test_an_override_that_nobody_would_call_is_refused_by_name(kind: str, name: str) -> None:
    cls = type("Own", (CONTRACTS[kind],), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=rf"Own overrides {name}, which is never called here") as caught:
        check_members(cls)
    assert f"without it this {TABLES[kind].kind} would do something else than it says" in str(caught.value)
    assert str(caught.value).endswith(TABLES[kind].refused[name])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in CONTRACTS for name in sorted(TABLES[kind].harmless)]
)
def test_a_harmless_override_is_said_once(kind: str, name: str) -> None:
    cls = type("Own", (CONTRACTS[kind],), {name: lambda self: None})
    with pytest.warns(UserWarning, match=f"Own overrides {name}, which is not called here and not needed"):
        check_members(cls)
    check_members(cls)  # a second warning would be an error here


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table refuses ``unused``: where objects of the user's are taken, they are looked at."""
    for contract in (
        "CheckpointIO", "ClusterEnvironment", "Launcher", "LayerSync", "Logger", "Precision", "Strategy",
    ):  # fmt: skip
        monkeypatch.setitem(TABLES, contract, Members("part", {"unused": "Leave it out."}))


@pytest.mark.parametrize(
    "arguments",
    [
        lambda own: {"plugins": [own(TorchCheckpointIO)()]},
        lambda own: {"strategy": SingleDeviceStrategy(checkpoint_io=own(TorchCheckpointIO)())},
        lambda own: {"plugins": [own(LocalEnvironment)()]},
        lambda own: {"plugins": [own(TorchSyncBatchNorm)()]},
        lambda own: {"plugins": [own(Precision)()]},
        lambda own: {"strategy": own(SingleDeviceStrategy)()},
        lambda own: {"logger": own(CSVLogger)("logs")},
        lambda own: {"logger": [own(CSVLogger)("logs")]},
    ],
    ids=["store", "store of a strategy", "environment", "layer sync", "precision", "strategy", "logger", "loggers"],
)
def test_what_is_passed_to_a_trainer_is_looked_at(arguments: Any, refusing: None, make_trainer: Any) -> None:
    def own(base: type) -> type:
        return type("Own", (base,), {"unused": lambda self: None})

    with pytest.raises(ConfigurationError, match="Own overrides unused, which is never called here"):
        make_trainer(**arguments(own))


def test_a_launcher_and_the_loggers_of_an_engine_are_looked_at(refusing: None) -> None:
    own = type("Own", (Launcher,), {"unused": lambda self: None, "launch": lambda self, function: None})
    LauncherRegistry.register("own_of_a_test", own)
    try:
        with pytest.raises(ConfigurationError, match="Own overrides unused"):
            Engine(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="own_of_a_test"))
    finally:
        LauncherRegistry.remove("own_of_a_test")
    with pytest.raises(ConfigurationError, match="Own overrides unused"):
        Engine(accelerator="cpu", loggers=[type("Own", (CSVLogger,), {"unused": None})("logs")])


def test_what_a_users_class_defines_is_found_through_its_bases() -> None:
    class Mixin:
        def from_mixin(self) -> None: ...

    class Base(CSVLogger):
        def from_base(self) -> None: ...

    class Own(Mixin, Base): ...

    found = overridden_members(Own)
    assert (found["from_mixin"], found["from_base"]) == (Mixin, Base)
    assert "log_metrics" not in found


# ---- misspelt --------------------------------------------------------------------------------------------------------


def defined(base: type, **members: Any) -> Any:
    return type("Own", (base,), members)


def nothing(self: Any, *arguments: Any, **named: Any) -> None: ...


@pytest.fixture
def start_method() -> Iterator[str]:
    """A launcher with a misspelt attribute."""
    own = defined(Launcher, launch=nothing, is_interactive_compatable=True)
    yield LauncherRegistry.register("own_of_a_test", own).__name__
    LauncherRegistry.remove("own_of_a_test")


RANKS = {name: (lambda self: 0) for name in ("global_rank", "local_rank")}
PLAIN = {"name": "plain", "version": 0, "log_metrics": nothing, "log_hyperparams": nothing}
MISSPELT: list[tuple[str, str, Callable[[], Any]]] = [
    ("forward_contxt", "forward_context", lambda: Trainer(plugins=defined(Precision, forward_contxt=nothing)())),
    ("main_adress", "main_address", lambda: Trainer(
        plugins=defined(ClusterEnvironment, world_size=lambda self: 1, main_adress="host", **RANKS)())),
    ("save_chekpoint", "save_checkpoint", lambda: Trainer(
        plugins=defined(TorchCheckpointIO, save_chekpoint=nothing)())),
    ("revrt", "revert", lambda: Trainer(plugins=defined(TorchSyncBatchNorm, revrt=nothing)())),
    ("log_grph", "log_graph", lambda: Trainer(logger=defined(Logger, log_grph=nothing, **PLAIN)())),
    ("log_grph", "log_graph", lambda: Engine(accelerator="cpu", loggers=defined(Logger, log_grph=nothing, **PLAIN)())),
    ("setup_devise", "setup_device", lambda: Trainer(accelerator=defined(CPUAccelerator, setup_devise=nothing))),
    ("model_to_devices", "model_to_device", lambda: Trainer(
        strategy=defined(SingleDeviceStrategy, model_to_devices=nothing)())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "meant", "use"), MISSPELT, ids=[f"{each[0]}-{i}" for i, each in enumerate(MISSPELT)]
)
def test_a_misspelt_member_is_a_warning_that_names_the_member(written: str, meant: str, use: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match=rf"^Own\.{written} is never .*Did you mean {meant}\?"):
        use()


def test_a_misspelt_member_of_a_launcher_is_a_warning_once_for_the_class(start_method: str) -> None:
    strategy = DDPStrategy(start_method="own_of_a_test")
    with pytest.warns(UserWarning, match="Own.is_interactive_compatable .* Did you mean is_interactive_compatible"):
        Engine(accelerator="cpu", devices=2, strategy=strategy)
    Engine(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="own_of_a_test"))  # a warning is an error


def test_names_that_are_meant_are_no_misspelt_members() -> None:
    """Negative control."""
    helpers = {"forward_context_of": nothing, "scale": 3, "_forward_contxt": nothing, "as_text": property(str)}
    Trainer(accelerator="cpu", plugins=defined(Precision, **helpers)())


@pytest.mark.parametrize(
    ("members", "cure"),
    [
        ({}, r"would read what torchrun exports. Override world_size\(\), .* or pass TorchElasticEnvironment\(\)\."),
        ({"hosts": nothing}, "would read what torchrun exports"),
        ({"world_sise": nothing}, r"Is world_sise meant as world_size\? Rename it\."),
    ],
    ids=["nothing", "a helper", "misspelt"],
)
def test_a_cluster_environment_that_overrides_nothing_is_refused(members: dict[str, Any], cure: str) -> None:
    own = defined(ClusterEnvironment, **members)
    for arguments in ({"plugins": own()}, {"strategy": DDPStrategy(cluster_environment=own())}):
        with pytest.raises(ConfigurationError, match=f"Own overrides nothing of ClusterEnvironment. .*{cure}"):
            Trainer(accelerator="cpu", **arguments)
    assert Trainer(accelerator="cpu", plugins=defined(LocalEnvironment)({})).num_devices == 1  # that has its own ranks


@pytest.mark.parametrize("returned", [None, 3, ["a"]])
def test_a_launcher_that_returns_something_else_is_an_error(
    make_trainer: Any, regression: Any, loader: Any, returned: Any
) -> None:
    LauncherRegistry.register("own_of_a_test", defined(Launcher, launch=lambda self, function, *a, **k: returned))
    try:
        trainer = make_trainer(devices=2, strategy="ddp_own_of_a_test")
        with pytest.raises(
            ConfigurationError, match=r"^Own\.launch returned .* It must return what its function returned"
        ):
            trainer.fit(regression(), loader)
    finally:
        LauncherRegistry.remove("own_of_a_test")
