"""The suite itself: each way of being wrong fails the row that is about it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.accelerators import Accelerator, CPUAccelerator
from drivetrain.testing.conformance import AcceleratorConformance

WAITING = {"test_two_processes_train_as_one", "test_a_sharded_model_trains"}


class Plain(Accelerator):
    """Like E0-1: the five methods, here on the host."""

    auto_priority = None

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return CPUAccelerator.parse_devices(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return CPUAccelerator.get_parallel_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {"used": 1.0}


def outcomes(accelerator: type[Accelerator], tmp_path: Path) -> dict[str, str]:
    """Every row's outcome: "passed", "failed" or why it was skipped."""
    suite = type("TestIt", (AcceleratorConformance,), {"accelerator": accelerator})()
    found = {}
    for name, row in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_") or name in WAITING:
            continue
        arguments = {"tmp_path": tmp_path / name} if "tmp_path" in inspect.signature(row).parameters else {}
        try:
            row(**arguments)
        except pytest.skip.Exception as skipped:
            found[name] = str(skipped)
        except Exception:
            found[name] = "failed"
        except BaseException as error:  # pytest.raises says with one that nothing was raised
            found[name] = "failed" if type(error).__name__ == "Failed" else str(error)
        else:
            found[name] = "passed"
    return found


def test_five_methods_pass_every_row_that_they_claim(tmp_path: Path) -> None:
    found = outcomes(Plain, tmp_path)
    assert {name: why for name, why in found.items() if why != "passed"} == {
        "test_no_more_devices_than_there_are": "not claimed: Plain.device_count_is_limit is False",
        "test_streams_and_events_order_work": "not claimed: Plain.supports_streams is False",
        "test_memory_is_counted": "not claimed: Plain.memory_allocated gives None",
    }
    assert len(found) >= 16


class NeedsAnArgument(Plain):
    def __init__(self, device: Any = None) -> None:
        self.uses = 0

    @property
    def name(self) -> str:
        return ""


class Unsure(Plain):
    @staticmethod
    def is_available() -> Any:
        return 1


class Countless(Plain):
    @staticmethod
    def auto_device_count() -> Any:
        return 1.0


class TakesAnything(Plain):
    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return 1


class Repeats(Plain):
    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("cpu", 0), torch.device("cpu", 1)]


class WrongAutocast(Plain):
    @property
    def autocast_device_type(self) -> str:
        return "meta"


class BadStats(Plain):
    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {"used": torch.tensor(1.0)}


class Infinite(Plain):
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {"used": float("nan")}


class NeverFrees(Plain):
    total = 0

    def memory_allocated(self, device: torch.device) -> int:
        type(self).total += 8 * 2**20
        return self.total


class Clamps(Plain):
    """Takes what there is where more is asked for."""

    device_count_is_limit = True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return min(CPUAccelerator.parse_devices(devices), 1)


class ClaimsStreams(Plain):
    supports_streams = True


class ClaimsPinnedMemory(Plain):
    supports_pinned_memory = True


@pytest.mark.parametrize(
    ("broken", "rows"),
    [
        (NeedsAnArgument, {"test_it_is_made_without_arguments"}),
        (Unsure, {"test_it_says_whether_it_is_there"}),
        (Countless, {"test_it_counts_its_devices"}),
        (TakesAnything, {"test_device_numbers_are_parsed"}),
        (WrongAutocast, {"test_a_run_is_on_its_device"}),
        (BadStats, {"test_its_figures_are_plain_numbers"}),
        (Infinite, {"test_its_figures_are_plain_numbers"}),
        (NeverFrees, {"test_memory_is_counted"}),
        (ClaimsStreams, {"test_streams_and_events_order_work"}),
        pytest.param(
            ClaimsPinnedMemory,
            {"test_copies_are_exact_although_their_source_is_freed"},
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is pinned memory"),
        ),
        (Clamps, {"test_no_more_devices_than_there_are"}),
        (Repeats, {"test_numbers_become_devices"}),
    ],
)
def test_what_is_wrong_fails_its_row(broken: type[Accelerator], rows: set[str], tmp_path: Path) -> None:
    failed = {name for name, why in outcomes(broken, tmp_path).items() if why == "failed"}
    assert rows <= failed
    assert not {"test_trees_of_tensors_move_there_and_back", "test_random_state_is_saved_and_restored"} & failed


def test_a_random_state_that_is_not_restored_fails_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.testing.conformance.set_rng_state", lambda state: None)
    monkeypatch.setattr("drivetrain.loops.resume.set_rng_state", lambda state: None)
    failed = {name for name, why in outcomes(Plain, tmp_path).items() if why == "failed"}
    assert failed == {"test_random_state_is_saved_and_restored", "test_a_stopped_fit_goes_on_exactly"}


def test_weights_that_come_apart_fail_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(module: nn.Module, device: torch.device) -> nn.Module:
        for child in module.modules():
            for name, parameter in list(child._parameters.items()):
                child._parameters[name] = None if parameter is None else nn.Parameter(parameter.detach().clone())
        return module

    monkeypatch.setattr("drivetrain.strategies.model.place", apart)
    failed = {name for name, why in outcomes(Plain, tmp_path).items() if why == "failed"}
    assert "test_tied_weights_stay_tied" in failed


def test_hardware_that_is_not_there_skips_every_row() -> None:
    class Absent(Plain):
        @staticmethod
        def is_available() -> bool:
            return False

        @classmethod
        def why_unavailable(cls) -> str:
            return "the cable is loose"

    suite = type("TestIt", (AcceleratorConformance,), {"accelerator": Absent})()
    with pytest.raises(pytest.skip.Exception, match="Absent is not available here: the cable is loose"):
        suite.skip_unless_available()
