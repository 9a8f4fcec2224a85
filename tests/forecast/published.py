"""Published rows: how fast others trained a Llama, and what the forecast says of the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from tests.forecast.llama import (
    CODE_LLAMA_34B,
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    Run,
    passes,
    window,
)  # fmt: skip

from drivetrain.forecast.devices import device_of
from drivetrain.forecast.exchange import Forecast, forecast, in_pipeline

TORCHTITAN = "pytorch/torchtitan"
H100_TABLES = f"{TORCHTITAN}: benchmarks/llama3_h100_202412_torchtitan.md"
A100_TABLES = f"{TORCHTITAN}: docs/performance.md of 2024"
H200_TABLE = f"{TORCHTITAN}: benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
IBM_TABLE = "pytorch.org/blog/maximizing-training (2024), table 1; foundation-model-stack/fms-fsdp: README.md"
GRAND_TETON = "name=H100 80GB,memory=96GB,gbps=2400"
"""The H100 of torchtitan's tables: 96 GB of HBM2e at 2.4 TB/s. Its power was limited to 500 of 700 W, and the tables
say that its peak is not known; the forecast uses the peak of the H100 at 700 W."""


@dataclass(frozen=True)
class Row:
    """A published row.

    Attributes:
        table: rows of the same table are configurations of the same model on the same devices.
        speed: published tokens per second and device.
    """

    table: str
    name: str
    device: str
    run: Run
    speed: float
    source: str

    @property
    def told(self) -> Forecast:
        return told(self.run, self.device)

    @property
    def predicted(self) -> float:
        """Tokens per second and device."""
        return self.run.tokens / self.told.step

    @property
    def factor(self) -> float:
        """Published speed, as a part of the predicted one."""
        return self.speed / self.predicted


@cache
def told(run: Run, device: str) -> Forecast:
    one = forecast(window(run), device_of(device), 8)
    return in_pipeline(one, run.stages, run.micro_batches, run.stages_per_rank) if run.stages > 1 else one


def _h100() -> list[Row]:
    rows = []
    for ranks, speeds in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380))):
        plain = Run(LLAMA3_8B, 2, 8192, ranks, "op")
        kinds = {
            "FSDP": plain,
            "compiled": replace(plain, compiled=True),
            "float8": replace(plain, compiled=True, float8=True),
        }
        rows += [
            Row(f"8B, {ranks} H100", name, GRAND_TETON, run, speed, H100_TABLES)
            for (name, run), speed in zip(kinds.items(), speeds, strict=True)
        ]
    for context, length, speed in ((1, 32768, 3890), (2, 65536, 2540), (4, 131072, 1071), (8, 262144, 548)):
        run = Run(LLAMA3_8B, 1, length, 8, "full", True, True, context=context)
        rows.append(Row("8B, long, 8 H100", f"CP {context}, {length} tokens", GRAND_TETON, run, speed, H100_TABLES))
    for name, is_async, speed in (("TP 8", False, 829), ("async TP 8", True, 876)):
        run = Run(LLAMA3_70B, 16, 8192, 32, "full", True, True, 8, is_async)
        rows.append(Row("70B, 256 H100", name, GRAND_TETON, run, speed, H100_TABLES))
    for name, float8, is_async, speed in (
        ("TP 8", False, False, 109), ("TP 8, float8", True, False, 177), ("async TP 8, float8", True, True, 185),
    ):  # fmt: skip
        run = Run(LLAMA3_405B, 2, 8192, 16, "full", float8, float8, 8, is_async)
        rows.append(Row("405B, 128 H100", name, GRAND_TETON, run, speed, A100_TABLES))
    for name, per_rank, speed in (("1F1B", 1, 100), ("interleaved 1F1B", 2, 128)):
        run = Run(LLAMA3_405B, 32, 8192, 8, "full", True, True, 8, True, 1, 8, 8, per_rank)
        rows.append(Row("405B, 512 H100", name, GRAND_TETON, run, speed, H100_TABLES))
    for context, length, speed in ((1, 32768, 76), (2, 65536, 47), (4, 131072, 31), (8, 262144, 16)):
        run = Run(LLAMA3_405B, 8, length, 8, "full", True, True, 8, True, context, 8, 8)
        rows.append(Row("405B, long, 512 H100", f"CP {context}, {length} tokens", GRAND_TETON, run, speed, H100_TABLES))
    return rows


def _others() -> list[Row]:
    rows = []
    for machines, speed in ((4, 10938), (8, 10753)):
        run = Run(LLAMA3_8B, 2, 8192, machines * 8, "op", True, True)
        rows.append(Row("8B, H200", f"{machines * 8} H200", "H200 141GB", run, speed, H200_TABLE))
    for size, name, length, batch, checkpoints, speed in (
        (LLAMA3_8B, "Llama 3 8B", 8192, 1, "layer", 2904), (LLAMA3_8B, "Llama 3 8B", 8192, 1, "op", 2973),
        (LLAMA3_70B, "Llama 3 70B", 8192, 1, "full", 331), (LLAMA2_13B, "Llama 2 13B", 4096, 2, "none", 2162),
        (LLAMA2_13B, "Llama 2 13B", 4096, 2, "layer", 1914), (LLAMA2_13B, "Llama 2 13B", 4096, 2, "op", 1904),
        (LLAMA2_70B, "Llama 2 70B", 4096, 1, "op", 355), (LLAMA2_70B, "Llama 2 70B", 4096, 2, "full", 353),
    ):  # fmt: skip
        run = Run(size, batch, length, 64, checkpoints)
        rows.append(Row(f"{name}, 64 A100", f"checkpoints: {checkpoints}", "A100 80GB", run, speed, A100_TABLES))
    for device, ranks, link, speeds in (
        ("A100", 128, "50Gb/s", (3700, 1800, 700, 370)), ("H100", 96, "100Gb/s", (7500, 3800, 1550, 800)),
    ):  # fmt: skip
        runs = {
            "7B, HSDP": Run(LLAMA2_7B, 2, 4096, 8, "none", replicas=ranks // 8, reduced_bytes=2),
            "13B, half checkpointed": Run(LLAMA2_13B, 2, 4096, ranks, "layer", reduced_bytes=2),
            "34B, checkpointed": Run(CODE_LLAMA_34B, 2, 4096, ranks, "full", reduced_bytes=2),
            "70B, checkpointed": Run(LLAMA2_70B, 2, 4096, ranks, "full", reduced_bytes=2),
        }
        rows += [
            Row(f"Llama 2, {ranks} {device}", name, f"name={device} 80GB,between={link}", run, speed, IBM_TABLE)
            for (name, run), speed in zip(runs.items(), speeds, strict=True)
        ]
    return rows


ROWS = _h100() + _others()


@dataclass(frozen=True)
class Timed:
    """A forward and a backward pass of 4 blocks of Llama 3 8B, with embedding, head and loss, that was measured.

    Attributes:
        batch: samples of 8,192 tokens.
        seconds: of a pass, the mean of 10 after 4.
    """

    batch: int
    checkpoints: str
    compiled: bool
    seconds: float

    @property
    def told(self) -> Forecast:
        run = Run(replace(LLAMA3_8B, layers=4, vocab=32_000), self.batch, 8192, 1, self.checkpoints, self.compiled)
        return forecast(passes(run), device_of("H100 80GB"), 8)


TIMED = [
    Timed(1, "none", False, 0.1146), Timed(1, "full", False, 0.1420), Timed(1, "none", True, 0.1011),
    Timed(1, "full", True, 0.1289), Timed(2, "none", False, 0.2279), Timed(2, "full", False, 0.2802),
    Timed(2, "none", True, 0.1996), Timed(2, "full", True, 0.2554),
]  # fmt: skip
"""Measured for this table on one H100 80GB HBM3 with torch 2.11 and CUDA 13.0: the roofline without any exchange."""


def pairs_in_order(speeds: list[tuple[float, float]]) -> tuple[int, int]:
    """Return how many pairs of rows the forecast puts in the published order, and how many pairs there are.

    Args:
        speeds: published and predicted speed of each row.
    """
    pairs = [(one, other) for index, one in enumerate(speeds) for other in speeds[:index] if one[0] != other[0]]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs), len(pairs)


def table() -> str:
    """Return the rows as they are in benchmarks/RESULTS.md."""
    rows = ["| run | published, tokens/s and device | at best | published / at best |", "|---|---:|---:|---:|"]
    rows += [
        f"| {each.table}: {each.name} | {each.speed:,} | {each.predicted:,.0f} | {each.factor:.2f} |" for each in ROWS
    ]
    return "\n".join(rows)


def timed_table() -> str:
    """Return the measured passes as they are in benchmarks/RESULTS.md."""
    rows = ["| 4 blocks on one H100 | measured, ms | at best, ms | at best / measured |", "|---|---:|---:|---:|"]
    for each in TIMED:
        how = ("compiled" if each.compiled else "eager") + (", checkpointed" if each.checkpoints == "full" else "")
        best = each.told.step
        rows.append(
            f"| batch {each.batch}, {how} | {each.seconds * 1e3:.1f} | {best * 1e3:.1f} | {best / each.seconds:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(), timed_table(), sep="\n\n")
