"""What of the actors of Ray can be seen without Ray; tests/real_clusters/test_ray.py has the rest."""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Engine
from drivetrain.clusters import LocalEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import RayLauncher
from drivetrain.launchers.ray import Seat, _handler_kept, count_of, resources_for, variables_for
from drivetrain.strategies import StrategyRegistry


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, as it speaks of its accelerator on a machine with two CUDA devices."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def seat(node: str, port: int = 1, **devices: str) -> Seat:
    return Seat(node, f"address of {node}", port, devices=devices)


def standing(nodes: str, here: str) -> list[tuple[str, ...]]:
    """Rank, local rank, node rank and size of the machine of actors on ``nodes``, one letter each."""
    told = variables_for([seat(node) for node in nodes], here)
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE")
    return [tuple(variables[name] for name in names) for variables in told]


@pytest.mark.parametrize(
    ("nodes", "here", "expected"),
    [
        ("a", "a", [("0", "0", "0", "1")]),
        ("aa", "a", [("0", "0", "0", "2"), ("1", "1", "0", "2")]),
        ("abab", "a", [("0", "0", "0", "2"), ("2", "0", "1", "2"), ("1", "1", "0", "2"), ("3", "1", "1", "2")]),
        ("abab", "b", [("2", "0", "1", "2"), ("0", "0", "0", "2"), ("3", "1", "1", "2"), ("1", "1", "0", "2")]),
        ("bac", "elsewhere", [("0", "0", "0", "1"), ("1", "0", "1", "1"), ("2", "0", "2", "1")]),
        ("bac", "c", [("1", "0", "1", "1"), ("2", "0", "2", "1"), ("0", "0", "0", "1")]),
    ],
)
def test_ranks_are_consecutive_on_a_machine_and_begin_here(
    nodes: str, here: str, expected: list[tuple[str, ...]]
) -> None:
    assert standing(nodes, here) == expected


def test_t45_all_meet_at_rank_zero() -> None:
    told = variables_for([seat("a", 1), seat("b", 2), seat("a", 3), seat("b", 4)], "b")
    meeting = {(each["MASTER_ADDR"], each["MASTER_PORT"], each["WORLD_SIZE"]) for each in told}
    assert meeting == {("address of b", "2", "4")}
    assert {each["MASTER_ADDR"] for each in variables_for([seat("a", 1), seat("a", 2)], "a")} == {"127.0.0.1"}


def test_processes_see_the_devices_of_all_on_their_machine_in_the_order_of_local_ranks() -> None:
    seats = [seat("a", ID_VISIBLE="5"), seat("b", ID_VISIBLE="0"), seat("a", ID_VISIBLE="2"), seat("b", ID_VISIBLE="1")]
    told = variables_for(seats, "a")
    assert [each["ID_VISIBLE"] for each in told] == ["5,2", "0,1", "5,2", "0,1"]
    assert "ID_VISIBLE" not in variables_for([seat("a"), seat("b")], "a")[0]


def test_what_a_process_needs_by_its_device() -> None:
    found = {name: resources_for(torch.device(name)) for name in ("cpu", "cuda", "xpu", "hpu")}
    gpu = {"CPU": 1.0, "GPU": 1.0}
    assert found == {"cpu": {"CPU": 1.0}, "cuda": gpu, "xpu": gpu, "hpu": {"CPU": 1.0, "HPU": 1.0}}


def test_which_machines_are_large_enough() -> None:
    nodes = [{"CPU": 2.0, "GPU": 2.0}, {"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert [count_of(wanted, nodes) for wanted in ({"CPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}, {"HPU": 1.0})] == [3, 1, 0]


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match="needs the package ray, .* Run `pip install ray`, or use strategy="):
        RayLauncher(LocalEnvironment({}), 2).launch(print)


def test_ray_is_imported_only_to_launch(programs: Any, tmp_path: Path) -> None:
    program = """
import sys
sys.modules["ray"] = None  # an import of it fails from here on
from drivetrain import Trainer
from drivetrain.launchers import RayLauncher
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_ray", logger=False, enable_checkpointing=False)
assert type(trainer.engine.launcher) is RayLauncher
"""
    done = programs.run("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "unused"),
    [("ddp_ray", None), ("ddp_ray_find_unused_parameters_true", True), ("ddp_ray_find_unused_parameters_false", False)],
)
def test_it_is_chosen_by_name(name: str, unused: bool | None) -> None:
    arguments: dict[str, Any] = StrategyRegistry.entry(name).init_params
    assert (arguments["start_method"], arguments.get("find_unused_parameters")) == ("ray", unused)


def test_a_trainer_launches_it_for_all_of_its_machines(two_gpus: None) -> None:
    launcher: Any = Engine(accelerator="gpu", devices=2, num_nodes=3, strategy="ddp_ray").launcher
    assert (launcher.num_processes, launcher.num_nodes) == (2, 3)
    assert launcher.resources == {"CPU": 1.0, "GPU": 1.0}
    launcher = Engine(accelerator="cpu", devices=2, strategy="ddp_ray").launcher
    assert launcher.resources == {"CPU": 1.0}


def test_it_travels_with_the_trainer_and_works_in_a_notebook() -> None:
    launcher = pickle.loads(pickle.dumps(RayLauncher(LocalEnvironment({}), 2, resources={"CPU": 4})))
    assert (launcher.num_processes, launcher.resources) == (2, {"CPU": 4})
    assert launcher.is_interactive_compatible
    assert not launcher.is_external


def test_a_signal_is_handled_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _handler_kept(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before
