"""Writes docs/profile.svg: two batches of a small training run, as PyTorchProfiler has recorded them.

Run it after changing the names of the actions. The times are those of the machine that it runs on.
"""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.profilers import PyTorchProfiler

PICTURE = Path(__file__).parent / "profile.svg"
WIDTH, ROW, LEFT, TOP = 1000, 24, 10, 40
COLORS = {"action": "#4878a8", "module": "#58a05a", "torch": "#c98a3c"}


class Model(LightningModule):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.act, self.head = nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.act(self.encoder(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def events() -> list[dict[str, Any]]:
    """Train, and return the events of the main thread."""
    data = TensorDataset(torch.randn(2048, 512), torch.randint(10, (2048,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, profiler=PyTorchProfiler(folder), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Model(), DataLoader(data, batch_size=256))
        found = json.loads(next(Path(folder).glob("*.json")).read_text(encoding="utf-8"))["traceEvents"]
    complete = [event for event in found if event.get("ph") == "X" and event.get("cat") in KINDS]
    main = next(event["tid"] for event in complete if event["name"] == "run_training_batch")
    return [event for event in complete if event["tid"] == main and not event["name"].startswith("ProfilerStep")]


KINDS = ("cpu_op", "user_annotation")


def kind_of(event: dict[str, Any]) -> str:
    """Return whether it is an action of the run, a layer, or an operation of torch."""
    if event["name"].startswith("[module]"):
        return "module"
    return "action" if event["cat"] == "user_annotation" and "#" not in event["name"] else "torch"


def picture(found: list[dict[str, Any]]) -> str:
    """Return the events of the first two batches as nested bars over time."""
    waits = sorted(event["ts"] for event in found if event["name"] == "train_dataloader_next")
    begin, end = waits[0], waits[2] if len(waits) > 2 else max(event["ts"] + event["dur"] for event in found)
    scale, bars, open_until = (WIDTH - 2 * LEFT) / (end - begin), [], list[float]()
    depth = 0
    for event in sorted(found, key=lambda each: (each["ts"], -each["dur"])):
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start < begin or stop > end:
            continue
        while open_until and open_until[-1] <= start:
            open_until.pop()
        open_until.append(stop)
        width = (stop - start) * scale
        if len(open_until) > 6 or width < 0.3:
            continue
        depth = max(depth, len(open_until))
        x, y = LEFT + (start - begin) * scale, TOP + (len(open_until) - 1) * ROW
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{COLORS[kind_of(event)]}"/>'
        )
        name = event["name"].removeprefix("[module] ")
        if (room := int(width / 6.2) - 1) > 3:
            text = name if len(name) <= room else name[: room - 1] + "…"
            bars.append(f'<text x="{x + 3:.1f}" y="{y + 15}" fill="white">{escape(text)}</text>')
    height = TOP + depth * ROW + 26
    legend = "".join(
        f'<rect x="{LEFT + 190 * index}" y="10" width="14" height="14" fill="{COLORS[kind]}"/>'
        f'<text x="{LEFT + 190 * index + 20}" y="21" fill="#444">{label}</text>'
        for index, (kind, label) in enumerate(
            {"action": "actions of the run", "module": "layers", "torch": "operations of torch"}.items()
        )
    )
    axis = f'<text x="{LEFT}" y="{height - 8}" fill="#444">0</text>' + (
        f'<text x="{WIDTH - LEFT}" y="{height - 8}" fill="#444" text-anchor="end">{(end - begin) / 1e3:.0f} ms</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([legend, *bars, axis])
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(events()), encoding="utf-8")
