"""Ray Train: plain programs in its workers on two nodes; its parts for Lightning, through the suite for strategies.

Each test starts Ray once, which takes up to a minute on a busy machine of two cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing.strategy_conformance import StrategyConformance

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

PROGRAM = Path(__file__).with_name("ray_train_program.py")
FITS = Path(__file__).with_name("ray_train_fits.py")
LIGHTNING = Path(__file__).with_name("ray_lightning_program.py")
RAY = Path(sys.executable).with_name("ray")
RUN_S = 500


@pytest.mark.timeout(RUN_S + 20)
@pytest.mark.parametrize("strategy", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_a_strategy_of_ray_trains_passes_the_suite(strategy: str, variables: dict[str, str], tmp_path: Path) -> None:
    for package in ("ray", "pandas", "pyarrow"):  # ray.train needs the last two
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.compat", str(PROGRAM), str(tmp_path), strategy], env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = {path.name: path.read_text() for path in tmp_path.glob("test_*.txt")}
    rows = [name for name in vars(StrategyConformance) if name.startswith("test_")]
    assert sorted(found) == sorted(f"{row}.{rank}.txt" for row in rows for rank in (0, 1))
    assert {name: text for name, text in found.items() if text != "ok"} == {}


# ---- a plain program -------------------------------------------------------------------------------------------------


def run(variables: dict[str, str], *command: Any) -> None:
    """Run a program that must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def facts_of(*folders: Path) -> list[dict[str, Any]]:
    """What each rank has left, by rank."""
    found = [json.loads(path.read_text()) for folder in folders for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda facts: facts["global_rank"])


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*.events") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def steps_of(events: list[dict[str, Any]], rank: int) -> list[int]:
    return [each["step"] for each in events if each["rank"] == rank and each["event"] == "step"]


GPUS = {"two": [0, 2], "half": [0, 0]}
CASES = ["killed", "s3", "gpus", "inside", "tune", "elastic"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one case of ray_train_fits.py has left, on two nodes of Ray."""
    for package in ("ray", "pandas", "pyarrow", *(["moto"] if request.param == "s3" else [])):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("fits")
    run(variables, FITS, folder, request.param)
    return folder / str(request.param)


only = partial(pytest.mark.parametrize, "case", indirect=True)
slow = pytest.mark.timeout(RUN_S + 60)


@slow
@only(argvalues=["killed", "s3"])
def test_a_plain_program_trains_on_two_nodes_and_resumes_after_a_worker_was_killed(
    case: Path, alone: Callable[..., list[float]]
) -> None:
    events = events_of(case)
    starts = [(each["rank"], each["step"]) for each in events if each["event"] == "start"]
    assert sorted(starts[:2]) == [(0, 0), (1, 0)]
    assert sorted(starts[2:]) == [(0, 4), (1, 4)]
    assert steps_of(events, 0)[:5] == [1, 2, 3, 4, 5]
    assert steps_of(events, 1) == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 12]
    found = facts_of(case)
    assert [(facts["local_rank"], facts["node_rank"], facts["world_size"]) for facts in found] == [(0, 0, 2), (0, 1, 2)]
    for facts in found:
        assert facts["environment"] == "RayTrainEnvironment"
        assert facts["weights"] == pytest.approx(alone(), rel=1e-12)
    assert found[0]["weights"] == found[1]["weights"]
    returned = found_in(case)
    assert returned["metrics"] == {"epoch": 2, "step": 12}
    assert [metrics["step"] for _, metrics in returned["reported"]] == [4, 8, 12]


@slow
@only(argvalues=["s3"])
def test_the_files_of_each_rank_are_in_the_bucket_of_ray_and_not_on_its_machines(case: Path) -> None:
    assert not (case / "storage").exists()
    found = found_in(case)
    for path, metrics in found["reported"]:
        name = f"epoch={metrics['epoch']}-step={metrics['step']}.ckpt"
        names = [each.removeprefix(f"{path}/") for each in found["objects"] if each.startswith(f"{path}/")]
        assert sorted(re.sub("[0-9a-f]{8}", "*", each) for each in names) == [
            "drivetrain.json",
            name,
            f"{name}.*.rank1",
        ]


@slow
@only(argvalues=["killed"])
def test_one_program_with_one_command_line_trains_on_a_laptop_on_slurm_and_in_ray_train(
    case: Path, slurm: Any, new_job: Callable[[], Any], alone: Callable[..., list[float]]
) -> None:
    same, on_slurm = ["--devices", "auto", "--save"], new_job()  # as ray_train_fits.py runs it
    slurm.expect("srun", "--nodes=1", "--ntasks-per-node=2", *on_slurm.command(*same))
    assert [facts["environment"] for facts in on_slurm.facts()] == ["SLURMEnvironment"] * 2
    assert [facts["environment"] for facts in facts_of(case)] == ["RayTrainEnvironment"] * 2
    for facts in (*on_slurm.facts(), *facts_of(case)):
        assert facts["weights"] == pytest.approx(alone(*same), rel=1e-12)


@slow
@only(argvalues=["gpus"])
def test_each_worker_takes_the_device_that_ray_names(case: Path) -> None:
    """Of four GPUs that the node does not have: two or a half for each of two workers."""
    found = {name: [json.loads((case / f"{name}-{rank}").read_text()) for rank in (0, 1)] for name in GPUS}
    assert found == {name: [[f"cuda:{number}"] * 2 for number in numbers] for name, numbers in GPUS.items()}


@slow
@only(argvalues=["inside"])
def test_a_worker_keeps_the_process_group_of_ray_and_its_environment(case: Path) -> None:
    for rank in (0, 1):
        found = json.loads((case / f"inside{rank}.json").read_text())
        assert found["kept"]
        assert found["steps"] == [8, 8]
        assert found["slurm"] == "7"  # inherited, and not read
        assert "2, started by RayTrain" in found["plan"]
        assert found["callbacks"].count("RayTrainReportCallback") == 1
        assert found["refused"].startswith("devices=3, but Ray Train runs ")


@slow
@only(argvalues=["inside"])
def test_the_checkpoints_of_both_fits_and_of_both_strategies_are_reported(case: Path) -> None:
    returned = found_in(case)
    steps = [metrics["step"] for _, metrics in returned["reported"]]
    assert steps == [3, 6, 8, 3, 6, 8]
    for path, metrics in returned["reported"]:
        names = os.listdir(path)
        note = json.loads(Path(path, "drivetrain.json").read_text())
        assert metrics.keys() == {"loss", "epoch", "step"}
        assert note["checkpoint"] in names
        assert any(name.endswith(".rank1") for name in names)


@slow
@pytest.mark.daemon
@only(argvalues=["elastic"])
def test_an_elastic_run_goes_on_with_the_workers_that_are_there(case: Path) -> None:
    events = events_of(case)
    starts = [index for index, each in enumerate(events) if each["event"] == "start" and each["rank"] == 0]
    assert [events[index]["world_size"] for index in starts][-3:] == [3, 2, 3]  # a node is lost, and comes back
    begun = [events[index]["step"] for index in starts]
    assert 0 < begun[-2] < begun[-1]
    for index, end in zip(starts[-3:-1], starts[-2:], strict=True):
        ran = steps_of(events[index:end], 0)
        assert ran == list(range(events[index]["step"] + 1, ran[-1] + 1))
        assert events[end]["step"] <= ran[-1]  # at the newest checkpoint, and not after the last step
    assert steps_of(events[starts[-1] :], 0) == list(range(begun[-1] + 1, 161))
    found = facts_of(case)
    places = [(facts["node_rank"], facts["local_rank"]) for facts in found]  # two workers on one node, one on the other
    assert places in ([(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0), (1, 1)])
    assert [facts["step"] for facts in found] == [160, 160, 160]
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
    assert found_in(case)["metrics"]["step"] == 160


@slow
@only(argvalues=["tune"])
def test_ray_tune_runs_ray_train_in_its_trials(case: Path, alone: Callable[..., list[float]]) -> None:
    found = found_in(case)
    assert found["errors"] == []
    assert (found["steps"], found["best"]) == ([4, 12], 3)
    assert Path(found["checkpoint"]).is_relative_to(case / "epochs3" / "storage")
    [facts] = facts_of(case / "epochs3")
    assert (facts["environment"], facts["world_size"]) == ("RayTrainEnvironment", 1)
    assert facts["weights"] == pytest.approx(alone(), rel=1e-12)


# ---- machines that share only Ray's storage --------------------------------------------------------------------------


@slow
def test_machines_need_no_shared_folder_but_the_storage_of_ray(
    network: Any, variables: dict[str, str], tmp_path: Path, wait_for: Callable[..., Any], new_job: Callable[[], Any]
) -> None:
    """Both nodes write under the same path, where each has mounted a folder of its own."""
    for package in ("ray", "pandas", "pyarrow"):
        pytest.importorskip(package)
    own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    (disk := tmp_path / "disk").mkdir()
    mounted = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    with network(2) as nodes:
        disks = [tmp_path / node.name for node in nodes]
        for node, private in zip(nodes, disks, strict=True):
            private.mkdir()
            place = ["--head", "--port=6379", "--include-dashboard=false"] if node is nodes[0] else []
            place = place or [f"--address={nodes[0].address}:6379"]
            options = ["--num-cpus=1", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats", "--block"]
            start = [RAY, "start", *place, *options, f"--node-ip-address={node.address}"]
            log = tmp_path / f"{node.name}.log"
            node.start(*mounted, private, disk, *start, output=log, **own)
            wait_for(f"Ray on {node.name}", lambda log=log: "Ray runtime started" in log.read_text(), 120)
        told = {"RAY_ADDRESS": f"{nodes[0].address}:6379", "DISK": str(disk), "DISKS": ":".join(map(str, disks))}
        nodes[0].expect(sys.executable, FITS, tmp_path, "disks", seconds=RUN_S, **told, **own)
    assert list(disk.iterdir()) == []  # outside of the two nodes
    found = facts_of(*disks)
    assert [facts["host"] for facts in found] in (["n1", "n2"], ["n2", "n1"])
    undisturbed = new_job()
    run(dict(os.environ), *undisturbed.command("--devices", 2, "--dropout", 0.5)[1:])
    assert [facts["weights"] for facts in found] == [facts["weights"] for facts in undisturbed.facts()]
    for path, metrics in found_in(tmp_path / "disks")["reported"]:
        name = f"epoch={metrics['epoch']}-step={metrics['step']}.ckpt"
        assert sorted(re.sub("[0-9a-f]{8}", "*", each) for each in os.listdir(path)) == [
            "drivetrain.json", name, f"{name}.*.rank1",
        ]  # fmt: skip


# ---- a program for Lightning -----------------------------------------------------------------------------------------


@slow
def test_a_program_for_lightning_and_ray_train_runs_unchanged(variables: dict[str, str], tmp_path: Path) -> None:
    for package in ("ray", "pandas", "pyarrow"):
        pytest.importorskip(package)
    run(variables, "-m", "drivetrain.compat", LIGHTNING, tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert (found["class"], found["step"]) == ("drivetrain", 12)
        assert found["callbacks"].count("RayTrainReportCallback") == 1
    assert (tmp_path / "steps1").read_text().split() == [str(step) for step in (1, 2, 3, 4, 5, 6, *range(5, 13))]
    reported = json.loads((tmp_path / "result.json").read_text())
    assert [metrics["step"] for metrics in reported] == [4, 8, 12]
    assert all(metrics.keys() == {"loss", "epoch", "step"} for metrics in reported)
