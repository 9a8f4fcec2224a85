"""What becomes of an override of each member that environments have in the field; see :mod:`drivetrain.base.members`.

The names are those of Lightning 2.6's ``ClusterEnvironment`` and of its subclasses, private ones included that have a
say in addresses and ranks; and the three of the first generation.
"""

from __future__ import annotations

from drivetrain.base.members import Members

_ADDRESS, _PORT = "Override the property main_address.", "Override the property main_port."
_RANKS = "Override world_size(), global_rank(), local_rank() and node_rank()."

CALLED = frozenset(
    {
        "__init__", "creates_processes_externally", "main_address", "main_port", "detect", "world_size",
        "set_world_size", "global_rank", "set_global_rank", "local_rank", "node_rank", "validate_settings", "teardown",
        "creates_children", "master_address", "master_port",
        "job_id", "job_name", "resolve_root_node_address",
    }
)  # fmt: skip
"""Members whose override is called, or read; the last three by ``SLURMEnvironment``."""

REFUSED = {
    "_get_main_address": _ADDRESS, "_get_main_port": _PORT, "_get_node_rank": "Override node_rank().",
    "_read_hosts": _ADDRESS, "_init_comm_local": _RANKS, "_set_init_progress_group_env_vars": _ADDRESS,
}  # fmt: skip
"""Members whose override is an error, and what to write instead."""

HARMLESS = frozenset({"_validate_srun_used", "_validate_srun_variables"})
"""Members whose override is not called, and changes no number, state or rank."""

_NOTHING = (
    "So it would read what torchrun exports. Override world_size(), global_rank(), local_rank() and what else your "
    "cluster says in another way, or pass TorchElasticEnvironment()."
)

MEMBERS = Members("cluster environment", CALLED, REFUSED, HARMLESS, _NOTHING)
