"""Where the wall time of a fit went, and why the fit was slow: what ``trainer.time_spent`` returns."""

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
        cause: one of :data:`CAUSES`: a slow data set, or ``collate_fn``; one rank with slower data, or a slower forward
            pass, than the others; more busy threads than CPU cores; code in the step that makes the host wait for the
            device; a device that waits for the host; checkpoints; validation; logging; growing memory.
        text: a sentence with the measured figures.
        advice: what to write.
    """

    cause: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text} {self.advice}"


@dataclass(frozen=True)
class TimeSpent:
    """Where the wall time of a fit went; ``print`` and notebooks show it as a table, verdict first.

    Attributes:
        seconds: the seconds of each part, in the order of :data:`PARTS`. "start": until the first batch, with the
            sanity check; "restart": the same time in a fit that resumes from a checkpoint; "fetch": waiting for a
            batch; "move": moving the batch to the device; "forward", "backward" and "optimizer": the parts of a
            training step, where "optimizer" includes the schedulers; "hooks": the other hooks of batches and epochs;
            "log": reading logged values and passing them to the loggers; "checkpoint": waiting for a checkpoint, in any
            phase; "validation".
        wall_s: the seconds from the set-up of the fit to the end of its last epoch. The seconds of the parts add up to
            this time.
        verdict: why the fit was slow; ``None``: no cause was found, or the fit was too short to tell.
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
