"""Ranks in a training job of SageMaker, whose training toolkit runs the program once on each instance."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment, json_of
from drivetrain.errors import ConfigurationError


class SageMakerEnvironment(MachinesEnvironment):
    """Reads ``SM_HOSTS`` (a list in JSON), ``SM_CURRENT_HOST`` and ``SM_NUM_GPUS``.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 60
    evidence = "SageMaker has set SM_HOSTS"
    variables: ClassVar = ("SM_HOSTS", "SM_CURRENT_HOST")

    def _address_of_cluster(self) -> str:
        return self._hosts()[0]

    def num_nodes(self) -> int:
        return len(self._hosts())

    def reserved_devices(self) -> int | None:
        return self._reserved("SM_NUM_GPUS")

    def node_rank(self) -> int:
        """Return the index of this host in ``SM_HOSTS``.

        Raises:
            ConfigurationError: this host is not in ``SM_HOSTS``.
        """
        hosts, own = self._hosts(), self.environ["SM_CURRENT_HOST"]
        if own not in hosts:
            raise ConfigurationError(
                f"SM_CURRENT_HOST={own!r} is not one of SM_HOSTS, which are {', '.join(hosts)}. Leave both as "
                "SageMaker sets them, or unset them."
            )
        return hosts.index(own)

    def _hosts(self) -> list[str]:
        hosts = json_of(self.environ, "SM_HOSTS")
        return list(map(str, hosts)) if isinstance(hosts, list) else []
