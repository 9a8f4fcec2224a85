"""Published rows of memory: what torch's allocator had reserved in others' runs, and what a plan says of the same run.

``python memory_rows.py`` from the root of the repository plans all of them, and prints the table of RESULTS.md.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forecast.published import A100_TABLES, H100_TABLES, H200_TABLE

from drivetrain.forecast.allowance import GIB, WORKSPACE, needed

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A published row.

    Attributes:
        words: of ``llama_program.py``, or of ``llama_stage.py`` if they name a stage.
        ranks: of the program; of one stage in a pipeline.
        published: GiB; ``None``: the run did not fit in ``memory`` GiB.
    """

    name: str
    words: str
    ranks: int
    published: float | None
    source: str
    memory: float = 96

    @property
    def found(self) -> Any:
        """What the plan measured."""
        words = self.words.split()
        program = HERE / ("llama_stage.py" if len(words) > 6 else "llama_program.py")
        with tempfile.TemporaryDirectory() as folder:
            asked = {
                "devices": self.ranks, "per_node": 8, "rank": 0, "on_host": False, "memory": None, "tries": False,
                "result": f"{folder}/result",
            }  # fmt: skip
            env = {**os.environ, "DRIVETRAIN_PLAN": json.dumps(asked), "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-m", "drivetrain.forecast.child", str(program), *words]
            subprocess.run(command, env=env, capture_output=True, check=False)
            found = pickle.loads(Path(f"{folder}/result").read_bytes())
        assert "base" in found, found
        return found["base"]

    def line(self, found: Any) -> str:
        """Return the row of the table."""
        reserved = (found.peak.total + found.fragments + WORKSPACE) / GIB
        tensors = f"{found.peak.total / GIB:.1f}"
        if self.published is None:
            fits = "fits" if needed(found, self.ranks) <= self.memory * GIB else "does not fit"
            return f"| {self.name} | out of memory | {tensors} | {reserved:.1f} GiB | {fits} |"
        error = reserved / self.published - 1
        return f"| {self.name} | {self.published} GiB | {tensors} | {reserved:.1f} GiB | {error:+.1%} |"


def _rows() -> list[Row]:
    rows = []
    for ranks, published in ((8, (82.4, 77.0, 76.8)), (128, (67.0, 62.0, 61.8))):
        for name, words, size in zip(
            ("FSDP", "compiled", "float8"), ("1 eager", "1 blocks", "1 blocks"), published, strict=True
        ):
            rows.append(Row(f"8B, {ranks} H100: {name}", f"8B 2 8192 op {words}", ranks, size, H100_TABLES))
    rows.append(Row("8B, long, 8 H100: CP 1, 32768 tokens", "8B 1 32768 full 1 blocks", 8, 83.9, H100_TABLES))
    for name, size in (("TP 8", 71.9), ("async TP 8", 67.6)):
        rows.append(Row(f"70B, 256 H100: {name}", "70B 16 8192 full 8 blocks", 256, size, H100_TABLES))
    for name, place, size in (("1F1B", "first", 82.5), ("interleaved 1F1B", "interleaved", 72.7)):
        words = f"405B 32 8192 full 8 blocks {place}"
        rows.append(Row(f"405B, 512 H100: {name}", words, 64, size, H100_TABLES))
    for ranks, size in ((32, 47.96), (64, 46.97)):
        rows.append(Row(f"8B, H200: {ranks} H200", "8B 2 8192 op 1 loss", ranks, size, H200_TABLE))
    rows.append(Row("405B, 128 H100: FSDP alone", "405B 2 8192 full 1 eager", 128, None, A100_TABLES, memory=94))
    return rows


ROWS = _rows()
HEAD = "| run | published | tensors | plan | error |\n|---|---:|---:|---:|---:|"


if __name__ == "__main__":
    print(HEAD)
    planned: dict[tuple[str, int], Any] = {}
    for row in ROWS:
        if (key := (row.words, row.ranks)) not in planned:
            planned[key] = row.found
        print(row.line(planned[key]), flush=True)
