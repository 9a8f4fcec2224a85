"""The contract of a launcher: how it gets its names, and what plan and engine ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drivetrain import Engine
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import (
    ExternalLauncher,
    Launcher,
    LauncherRegistry,
    MultiProcessingLauncher,
    RayLauncher,
    ScriptLauncher,
    XLALauncher,
)
from drivetrain.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from drivetrain.testing import fake_devices


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    LauncherRegistry.available()
    before = dict(LauncherRegistry._registered)
    yield
    LauncherRegistry._registered.clear()
    LauncherRegistry._registered.update(before)


def define(name: str, **members: Any) -> type[Launcher]:
    """Define a launcher that gives itself a name and returns what it was called with."""

    class Own(Launcher):
        @classmethod
        def register_launchers(cls, launcher_registry: Any) -> None:
            launcher_registry.register(name, cls)

        def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return (self.num_processes, self.num_nodes)

    for key, value in members.items():
        setattr(Own, key, value)
    return Own


def engine(**arguments: Any) -> Engine:
    return Engine(**{"accelerator": "cpu", "devices": 2, **arguments})


def test_the_names_of_ours() -> None:
    assert {name: LauncherRegistry.entry(name).cls for name in LauncherRegistry.available()} == {
        "popen": ScriptLauncher, "spawn": MultiProcessingLauncher, "fork": MultiProcessingLauncher,
        "forkserver": MultiProcessingLauncher, "ray": RayLauncher, "xla": XLALauncher,
    }  # fmt: skip


def test_a_launcher_is_registered_by_being_defined_and_strategies_have_its_name() -> None:
    with pytest.raises(ConfigurationError, match="There is no strategy called 'ddp_own'"):
        engine(strategy="ddp_own")
    own = define("own")
    made = engine(strategy="ddp_own")
    assert type(made.launcher) is own
    assert made.launch(lambda engine: None) == (2, 1)
    assert "ddp_own_find_unused_parameters_false" in StrategyRegistry.available()
    assert "2, started by own" in str(made.plan)


def test_a_subclass_does_not_take_the_name_of_its_parent() -> None:
    own = define("own")
    type("Further", (own,), {})
    assert LauncherRegistry.entry("own").cls is own


def test_other_endings() -> None:
    for name in ("own", "zzz"):  # one before ours, one after
        define(name, endings={name: ("", f"theirs_{name}")})
        assert StrategyRegistry.entry(f"ddp_theirs_{name}").init_params == {"start_method": name}
        assert f"ddp_{name}" not in StrategyRegistry.available()
        assert StrategyRegistry.entry("ddp").init_params == {"start_method": "popen"}  # is not theirs to take


def test_a_job_may_get_another_launcher_and_knows_its_devices() -> None:
    def for_job(environment: Any, num_processes: int, num_nodes: int, devices: Any, **options: Any) -> Launcher:
        asked.append((num_processes, num_nodes, devices, options))
        return ExternalLauncher()

    asked: list[Any] = []
    define("own", for_job=staticmethod(for_job))
    assert isinstance(engine(strategy=DDPStrategy(start_method="own")).launcher, ExternalLauncher)
    assert asked == [(2, 1, (torch.device("cpu"), torch.device("cpu")), {})]


def test_what_reruns_the_program_is_not_asked_for_one_process() -> None:
    define("own", reruns_program=True)
    assert engine(strategy="ddp_own", devices=1).plan.start_method is None
    define("other")
    assert engine(strategy="ddp_other", devices=1).plan.start_method == "other"


def test_who_chooses_devices_itself_is_given_none() -> None:
    define("own", scheduler="The sky")
    assert engine(strategy="ddp_own", num_nodes=3).plan.num_nodes == 3  # no cluster has to say where they meet
    with (
        fake_devices(2),
        pytest.raises(ConfigurationError, match="names devices, but The sky chooses those that are free"),
    ):
        engine(strategy="ddp_own", accelerator="fake", devices=[1])


@pytest.mark.parametrize("works", [True, False])
def test_a_launcher_says_whether_it_works_in_a_notebook(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = define("own", is_interactive_compatible=works)
    assert type(engine(strategy="ddp_own").launcher) is own  # elsewhere both do
    monkeypatch.setattr("drivetrain.engine.parts.in_notebook", lambda: True)
    if works:
        assert type(engine(strategy="ddp_own").launcher) is own
        return
    with pytest.raises(ConfigurationError, match="Own starts 2 processes in a way that does not work in a notebook"):
        engine(strategy="ddp_own")


@pytest.mark.parametrize("known", [True, False])
def test_a_start_method_that_nobody_answers(known: bool) -> None:
    class Own(ParallelStrategy):
        facts = ParallelStrategy.facts.but(start_method="spwan")

    if known:
        define("spwan")
        assert engine(strategy=Own()).plan.start_method == "spwan"
        return
    for make in (lambda: engine(strategy=Own()), lambda: DDPStrategy(start_method="spwan")):
        with pytest.raises(ConfigurationError, match=r"start_method='spwan'\): .* Did you mean 'spawn'\? Known: fork"):
            make()


def test_a_start_method_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"start_method=.*\): a start method is a name.* write one of 'fork'"):
        DDPStrategy(start_method=Launcher)  # type: ignore[arg-type]
