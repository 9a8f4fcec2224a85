"""SLURM: tasks that ``srun`` has started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, MutableMapping

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import DEFAULT_ADDRESS, DEFAULT_PORT, ClusterEnvironment
from drivetrain.errors import ConfigurationError

_INTERACTIVE = ("bash", "interactive")  # what srun --pty bash and salloc call their jobs
_PATIENCE_S = 60
_PORTS = range(15_000, 25_000)
_BETWEEN_STEPS = 6_181  # about 0.618 of the range: its first multiples are far from each other and from 0


class SLURMEnvironment(ClusterEnvironment):
    """One task per process: ``srun python train.py`` with ``--ntasks-per-node`` equal to ``devices``.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win over what is read from the job. In an interactive job (named "bash" or
    "interactive") the program is taken to be started by hand.

    Args:
        auto_requeue: whether the job is put into the queue again when SLURM announces its end.
        requeue_signal: by which signal SLURM announces it; ``None``: SIGUSR1.
        environ: the variables; ``None``: those of this process.
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
        """Whether this is a task of a job. Warns where ``srun`` is at hand but not used, or used in vain.

        What Open MPI's ``mpirun`` starts inside a job is no task: it has the variables of a task that it is not.
        """
        if "OMPI_COMM_WORLD_RANK" in environ:
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

    # ---- where the processes meet -----------------------------------------------------------------------------------

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or the first node of this step, else of the job."""
        if "MASTER_ADDR" in self.environ:
            return self.environ["MASTER_ADDR"]
        for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
            if nodes := self.environ.get(name):
                return self.resolve_root_node_address(nodes)
        return DEFAULT_ADDRESS

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first node of a list as SLURM writes it, by the name under which the others reach it."""
        return first_node(nodes)

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or one that every task knows from the job's number.

        15000 and the number's last four digits; the later steps of a job get others, so that they can run side by side.
        """
        job = self.job_id()
        if "MASTER_PORT" in self.environ or job is None:
            return self.number("MASTER_PORT", DEFAULT_PORT)
        step = self.environ.get("SLURM_STEP_ID", "0")
        shift = int(step) * _BETWEEN_STEPS if step.isdigit() else 0
        return _PORTS[(job % 10_000 + shift) % len(_PORTS)]

    # ---- who is who -------------------------------------------------------------------------------------------------

    def world_size(self) -> int:
        return self.number("SLURM_NTASKS")

    def global_rank(self) -> int:
        return self.number("SLURM_PROCID")

    def local_rank(self) -> int:
        return self.number("SLURM_LOCALID")

    def node_rank(self) -> int:
        return self.number("SLURM_NODEID")

    # ---- the job, for whoever puts it into the queue again ----------------------------------------------------------

    def job_name(self) -> str | None:
        """What the job is called."""
        return self.environ.get("SLURM_JOB_NAME")

    def job_id(self) -> int | None:
        """The job's number; of an array, this element's own. ``None`` in an interactive job."""
        if self.job_name() in _INTERACTIVE or "SLURM_JOB_ID" not in self.environ:
            return None
        return self.number("SLURM_JOB_ID")

    def requeue_id(self) -> str | None:
        """What ``scontrol requeue`` wants: the job's number, or ``<array>_<index>`` for the element of an array."""
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
        """How often the job has been put into the queue again."""
        return self.number("SLURM_RESTART_COUNT", 0)

    # ---- what the user asked for ------------------------------------------------------------------------------------

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the tasks with ``devices`` and ``num_nodes``.

        Raises:
            ConfigurationError: they differ, the number of tasks per node is not given, or ``srun`` was not used.
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
                f"SLURM_NTASKS={tasks}, but this process was not started by srun, and the others of the {tasks} would "
                "be waited for. Start it with srun python ..., or unset SLURM_NTASKS to run outside of SLURM's tasks."
            )


def _in_a_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` has started this process; the second name is the older one."""
    return "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ


def first_node(nodes: str) -> str:
    """The first name in SLURM's short form of a list: ``"gpu[07-12,20],cpu1"`` begins with ``"gpu07"``."""
    first = re.split(r"[\s,](?![^\[]*\])", nodes.strip())[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
