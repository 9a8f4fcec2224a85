"""torchrun: its variables, and torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.clusters import TorchElasticEnvironment
from drivetrain.errors import ConfigurationError

PROGRAM = """
import json, sys
from drivetrain.clusters import detect

found, why = detect()
found.validate_settings(2, 1)
ranks = [found.world_size(), found.global_rank(), found.local_rank(), found.node_rank(), found.main_port]
with open(f"{sys.argv[1]}/{found.global_rank()}.json", "w") as file:
    json.dump([type(found).__name__, *ranks], file)
"""


def test_detected_by_the_name_of_the_run() -> None:
    assert TorchElasticEnvironment.detect({"TORCHELASTIC_RUN_ID": "none"})
    assert not TorchElasticEnvironment.detect({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_devices_times_nodes_must_be_the_world_size() -> None:
    environment = TorchElasticEnvironment({"WORLD_SIZE": "4", "RANK": "0"})
    environment.validate_settings(2, 2)
    with pytest.raises(ConfigurationError, match="TorchElasticEnvironment says that 4 .* product 4"):
        environment.validate_settings(3, 1)


def test_s3_17_under_torchrun_with_its_options_in_variables_as_in_a_trainjob_of_kubeflow(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}
    done = subprocess.run([*torchrun, str(program), str(tmp_path)], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [fact[:-1] for fact in facts] == [["TorchElasticEnvironment", 2, rank, rank, 0] for rank in (0, 1)]
    assert facts[0][-1] == facts[1][-1] > 0
