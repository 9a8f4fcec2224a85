"""Ranks in a multi-node parallel job of AWS Batch, which runs one container on each node."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment
from drivetrain.clusters.environment import DEFAULT_ADDRESS, reading
from drivetrain.errors import ConfigurationError


class AWSBatchEnvironment(MachinesEnvironment):
    """Reads the environment variables that AWS Batch sets on each node of a multi-node parallel job.

    These are ``AWS_BATCH_JOB_NODE_INDEX``, ``AWS_BATCH_JOB_MAIN_NODE_INDEX``, ``AWS_BATCH_JOB_NUM_NODES`` and
    ``AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS``. AWS Batch does not set the address on the main node.

    Source: https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 70
    evidence = "AWS Batch has set AWS_BATCH_JOB_NUM_NODES"
    variables: ClassVar = (
        "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES",
    )  # fmt: skip

    def _address_of_cluster(self) -> str:
        """Return the main node's address. On the main node itself, return the loopback address, because AWS Batch does
        not set the variable there.
        """
        if address := self.environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"):
            return address
        if self.node_rank() == 0:
            return DEFAULT_ADDRESS
        raise ConfigurationError(
            f"AWS_BATCH_JOB_NODE_INDEX={self.environ['AWS_BATCH_JOB_NODE_INDEX']} is not the main node, but "
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS, where it meets the main node, is not set. Leave all "
            "variables as AWS Batch sets them, or set MASTER_ADDR."
        )

    num_nodes = reading("AWS_BATCH_JOB_NUM_NODES", MachinesEnvironment.num_nodes)

    def node_rank(self) -> int:
        """Return the index of this node, counted from the main node."""
        own, nodes = self.number("AWS_BATCH_JOB_NODE_INDEX"), self.num_nodes()
        counted = (own - self.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")) % nodes
        return counted if 0 <= own < nodes else own  # validate_settings() raises an error for an index out of range
