"""The life of a process in an actor of Ray. Imported only where Ray is used.

What travels is pickled by Ray's cloudpickle, which takes along what no module holds: classes of the program's own file
or of a notebook.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
import torch
from ray import cloudpickle

from drivetrain.accelerators.accelerator import HOST
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import _child
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.ray import Seat, hides_devices

_NO_DEVICE = (HOST.type, "meta")


@dataclass(frozen=True)
class Ended:
    """How a process ended that should not have."""

    failure: _child.Failure
    exit_code: int


class RayActor:
    """One process of the job."""

    def seat(self) -> Seat:
        """Where it is."""
        context = ray.get_runtime_context()
        assigned = {",".join(ids) for ids in context.get_accelerator_ids().values() if ids}
        devices = {name: ids for name, ids in os.environ.items() if hides_devices(name) and ids in assigned}
        return Seat(context.get_node_id(), ray.util.get_node_ip_address(), free_port(), os.getpid(), devices)
