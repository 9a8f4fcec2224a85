"""Ranks in an indexed Job of Kubernetes, whose pods find each other through a headless service."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment
from drivetrain.clusters.environment import ClusterEnvironment, reading


class KubernetesEnvironment(MachinesEnvironment):
    """Reads ``JOB_COMPLETION_INDEX``, which Kubernetes sets, and two variables that the Job's manifest sets.

    ``DRIVETRAIN_JOB_NODES`` is the Job's number of ``completions``. ``MASTER_ADDR`` is the name of the first pod,
    ``<job>-0.<service>``. ``drivetrain recipe k8s`` prints a manifest that sets both.

    Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 40
    evidence = "Kubernetes has set JOB_COMPLETION_INDEX, and the manifest DRIVETRAIN_JOB_NODES"
    variables: ClassVar = ("JOB_COMPLETION_INDEX", "DRIVETRAIN_JOB_NODES", "MASTER_ADDR")
    common_variables: ClassVar = ("JOB_COMPLETION_INDEX", "MASTER_ADDR")

    num_nodes = reading("DRIVETRAIN_JOB_NODES", MachinesEnvironment.num_nodes)
    node_rank = reading("JOB_COMPLETION_INDEX", ClusterEnvironment.node_rank)
