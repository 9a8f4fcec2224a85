"""The classes of ``trainer.time_spent``: how a fit spent its wall time, and why the fit was slow."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.base import notebook

PARTS = (
    "start", "restart", "fetch", "move", "forward", "backward", "optimizer", "hooks", "log", "checkpoint", "validation",
)  # fmt: skip
"""The parts of a fit's wall time: see :class:`TimeSpent`."""

CAUSES = (
    "dataset", "collate", "rank_data", "rank_compute", "cores", "sync", "launch", "checkpoint", "validation", "log",
    "memory",
)  # fmt: skip
"""The causes that a :class:`Verdict` names."""


@dataclass(frozen=True)
class Verdict:
    """Why a fit was slow.

    Attributes:
        cause: one of :data:`CAUSES`. "dataset" or "collate": the data set or ``collate_fn`` is slow. "rank_data" or
            "rank_compute": one rank has slower data, or a slower forward pass, than the other ranks. "cores": more
            threads are busy than the machine has CPU cores. "sync": code in the step makes the host wait for the
            device. "launch": the device waits for the host. "checkpoint", "validation" or "log": this part takes long.
            "memory": the memory in use grows.
        text: a sentence about the cause, with the measured numbers.
        advice: a sentence about what to change.
    """

    cause: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text} {self.advice}"


@dataclass(frozen=True)
class TimeSpent:
    """How a fit spent its wall time; ``print`` and notebooks show this object as a table.

    Attributes:
        seconds: the seconds of each part, in the order of :data:`PARTS`. "start" is the time until the first batch,
            with the sanity check. In a fit that resumes from a checkpoint, this time is called "restart". "fetch" is
            the wait for a batch, and "move" the copy of the batch to the device. "forward", "backward" and "optimizer"
            are the parts of a training step; "optimizer" includes the schedulers. "hooks" is the time of the other
            hooks of batches and epochs. "log" is the time for reading logged values and passing them to the loggers.
            "checkpoint" is the wait for checkpoints, and "validation" the time of the validations.
        wall_s: the seconds from the set-up of the fit to the end of its last epoch; the sum of ``seconds``.
        verdict: why the fit was slow; ``None`` if no cause was found, or the fit was too short.
    """

    seconds: dict[str, float]
    wall_s: float
    verdict: Verdict | None = None

    def __str__(self) -> str:
        rows = [f"{name:<12}{took:>12} {share:>7}" for name, took, share in self._rows()]
        return "\n".join([*([str(self.verdict)] if self.verdict else []), *rows])

    def _repr_html_(self) -> str:
        return notebook.table([(self.verdict,)] if self.verdict else []) + notebook.table(self._rows())

    def _rows(self) -> list[tuple[str, str, str]]:
        whole = self.wall_s or 1
        return [(name, f"{value:.1f} s", f"{value / whole:.1%}") for name, value in self.seconds.items()]
