"""Ranks of tasks that ``srun`` has started in SLURM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, MutableMapping

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import DEFAULT_ADDRESS, DEFAULT_PORT, ClusterEnvironment, reading
from drivetrain.errors import ConfigurationError

_INTERACTIVE = ("bash", "interactive")  # the job names of ``srun --pty bash`` and of salloc
_PATIENCE_S = 60
_PORTS = range(15_000, 25_000)
# The difference between the ports of two consecutive steps. It is 0.618 of the range, so that the first steps have very
# different ports.
_BETWEEN_STEPS = 6_181


class SLURMEnvironment(ClusterEnvironment):
    """Reads the ranks of SLURM's tasks. Start ``srun python train.py`` with ``--ntasks-per-node`` equal to ``devices``.

    ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence over the address and port that are computed from the job. A job
    with the name "bash" or "interactive" is interactive. A program in such a job counts as started by hand.

    Args:
        auto_requeue: whether to requeue the job when SLURM announces its end.
        requeue_signal: the signal with which SLURM announces the end, by default SIGUSR1.
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 400
    evidence = "SLURM has set SLURM_NTASKS, and the job is not interactive"

    def __init__(
        self,
        auto_requeue: bool = True,
        requeue_signal: signal.Signals | None = None,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        super().__init__(environ)
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal or getattr(signal, "SIGUSR1", None)

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether this process is a task of SLURM. Warns if the user seems to have forgotten ``srun``, or if ``srun``
        has no effect.

        A process that Open MPI's ``mpirun`` starts inside a job is not a task, although it inherits the variables of a
        task. A program that SkyPilot starts through SLURM, once on each machine, is not a task either.
        """
        if "OMPI_COMM_WORLD_RANK" in environ or _is_of_skypilot(environ):
            return False
        tasks, interactive = environ.get("SLURM_NTASKS"), environ.get("SLURM_JOB_NAME") in _INTERACTIVE
        by_hand = not _in_a_step(environ) and "LOCAL_RANK" not in environ
        if by_hand and shutil.which("srun", path=environ.get("PATH")):
            rank_zero_warn(
                "This machine has SLURM's srun, but the program was started without it and so runs as one task. If "
                "that is not what you want, start it with: srun python ..."
            )
        if interactive and _in_a_step(environ) and tasks not in (None, "1") and "SLURM_PTY_PORT" not in environ:
            rank_zero_warn(
                f"srun has started {tasks} tasks, but in a job called {environ['SLURM_JOB_NAME']!r}, which is taken "
                "for a shell: each runs on its own. Give the job another name: salloc --job-name=train"
            )
        return tasks is not None and not interactive

    # ---- rendezvous -------------------------------------------------------------------------------------------------

    def _address_of_cluster(self) -> str:
        """Return the first node of this step. If the step's nodes are not known, return the first node of the job."""
        for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
            if nodes := self.environ.get(name):
                return self.resolve_root_node_address(nodes)
        return DEFAULT_ADDRESS

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first name in a list that SLURM has shortened. For ``"gpu[07-12,20],cpu1"``, return
        ``"gpu07"``.
        """
        first = re.split(r"[\s,](?![^\[]*\])", nodes.strip())[0]
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)

    def _port_of_cluster(self) -> int:
        """Return a port that every task computes from the job's id.

        The port is 15000 plus the last four digits of the id. Later steps of the job get other ports, so that several
        steps can run at the same time.
        """
        if (job := self.job_id()) is None:
            return DEFAULT_PORT
        step = self.environ.get("SLURM_STEP_ID", "0")
        shift = int(step) * _BETWEEN_STEPS if step.isdigit() else 0
        return _PORTS[(job % 10_000 + shift) % len(_PORTS)]

    # ---- ranks ------------------------------------------------------------------------------------------------------

    world_size = reading("SLURM_NTASKS", ClusterEnvironment.world_size)
    global_rank = reading("SLURM_PROCID", ClusterEnvironment.global_rank)
    local_rank = reading("SLURM_LOCALID", ClusterEnvironment.local_rank)
    node_rank = reading("SLURM_NODEID", ClusterEnvironment.node_rank)

    # ---- the job, for requeueing ------------------------------------------------------------------------------------

    def job_name(self) -> str | None:
        """The job's name."""
        return self.environ.get("SLURM_JOB_NAME")

    def job_id(self) -> int | None:
        """The job's id, or in a job array the id of this element. ``None`` in an interactive job."""
        if self.job_name() in _INTERACTIVE or "SLURM_JOB_ID" not in self.environ:
            return None
        return self.number("SLURM_JOB_ID")

    def requeue_id(self) -> str | None:
        """The id for ``scontrol requeue``. For an element of a job array, it is ``<array>_<index>``, otherwise the
        job's id.
        """
        array, index = self.environ.get("SLURM_ARRAY_JOB_ID"), self.environ.get("SLURM_ARRAY_TASK_ID")
        if array is not None and index is not None:
            return f"{array}_{index}"
        job = self.job_id()
        return None if job is None else str(job)

    def requeue(self) -> str | None:
        job = self.requeue_id()
        if job is None:
            return "the job has no number."
        try:
            done = subprocess.run(
                ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"scontrol requeue {job}: {error}."
        return (
            f"scontrol requeue {job} ended with {done.returncode}: {done.stderr.strip()}" if done.returncode else None
        )

    def restart_count(self) -> int:
        """The number of times that the job was requeued."""
        return self.number("SLURM_RESTART_COUNT", 0)

    # ---- the user's settings ----------------------------------------------------------------------------------------

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare SLURM's tasks with ``devices`` and ``num_nodes``.

        Raises:
            ConfigurationError: the settings do not fit the tasks, the number of tasks per node is not set, or the
                program was started without ``srun``.
        """
        tasks = self.world_size()
        if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in self.environ:
            raise ConfigurationError(
                f"SLURM_NTASKS={tasks}, but SLURM_NTASKS_PER_NODE is not set, so SLURM may give nodes different "
                f"numbers of tasks. Write #SBATCH --ntasks-per-node={num_devices} in place of --ntasks."
            )
        for name, value, argument in (
            ("SLURM_NTASKS_PER_NODE", num_devices, "devices"),
            ("SLURM_NNODES", num_nodes, "num_nodes"),
        ):
            if name in self.environ and self.number(name) != value:
                raise ConfigurationError(
                    f"{name}={self.environ[name]}, but {argument}={value}. Write {argument}={self.environ[name]}, or "
                    "change the job's options."
                )
        super().validate_settings(num_devices, num_nodes)
        if tasks > 1 and not _in_a_step(self.environ):
            raise ConfigurationError(
                f"SLURM_NTASKS={tasks}, but this process was not started by srun, so it would wait for the "
                f"{tasks - 1} others, which srun has not started either. Start it with srun python ..., or unset "
                "SLURM_NTASKS to run outside of SLURM's tasks."
            )


def _in_a_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` has started this process. Older versions of SLURM set SLURM_STEPID instead of SLURM_STEP_ID."""
    return "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ


def _is_of_skypilot(environ: Mapping[str, str]) -> bool:
    """Whether SkyPilot has started the tasks of this step, one on each machine. False if an ``srun`` in SkyPilot's task
    has started the tasks.
    """
    machines = len(environ.get("SKYPILOT_NODE_IPS", "").split())
    sky = (str(machines), environ.get("SKYPILOT_NODE_RANK"))
    return machines > 0 and sky == (environ.get("SLURM_NTASKS"), environ.get("SLURM_PROCID"))
