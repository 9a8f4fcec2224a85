"""Kubeflow: every pod is a machine with one process."""

from __future__ import annotations

import pytest

from drivetrain.clusters import KubeflowEnvironment
from drivetrain.errors import ConfigurationError

POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "3"}


def test_a_pod() -> None:
    pod = KubeflowEnvironment(dict(POD))
    assert pod.creates_processes_externally
    assert (pod.main_address, pod.main_port, pod.world_size()) == ("job-master-0", 23456, 4)
    assert (pod.global_rank(), pod.local_rank(), pod.node_rank()) == (3, 0, 3)
    pod.validate_settings(1, 4)
    with pytest.raises(ConfigurationError, match="4 processes were started, but devices=4 and num_nodes=4 make 16"):
        pod.validate_settings(4, 4)


def test_never_detected() -> None:
    assert KubeflowEnvironment.detect_priority is None
    assert not KubeflowEnvironment.detect(POD)
