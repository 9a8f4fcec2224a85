"""Writes docs/loggers.svg: the curves of a fit that is cut off and of the fit that resumes it, from their tables."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger

PICTURE = Path(__file__).parent / "loggers.svg"
WIDTH, HEIGHT, EDGE = 720, 300, 45


class Model(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)


def curves() -> list[list[tuple[int, float]]]:
    """Return the points of both fits."""
    seed_everything(1)
    x = torch.randn(1600, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True) + 0.5 * torch.randn(1600, 1))
    points = []
    with tempfile.TemporaryDirectory() as folder:
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=100, save_top_k=-1)
        for steps, path in ((250, None), (400, f"{folder}/step=200.ckpt")):
            logger = CSVLogger(folder)
            trainer = Trainer(
                accelerator="cpu", max_steps=steps, logger=logger, callbacks=[saves], log_every_n_steps=5,
                enable_progress_bar=False, enable_model_summary=False, deterministic=True,
            )  # fmt: skip
            trainer.fit(Model(), DataLoader(data, batch_size=16, shuffle=True), ckpt_path=path)
            with open(logger.metrics_file_path, encoding="utf-8") as file:
                points.append([(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]])
    return points


def picture(points: list[list[tuple[int, float]]]) -> str:
    """Return the curves, the second one over the first."""
    top = max(value for curve in points for _, value in curve)

    def place(step: int, value: float) -> str:
        x = EDGE + step / 400 * (WIDTH - 2 * EDGE)
        return f"{x:.1f},{HEIGHT - EDGE - value / top * (HEIGHT - 2 * EDGE):.1f}"

    styles = (
        ("#c98a3c", 5, "the first fit, cut off at step 250"),
        ("#4878a8", 1.8, "the fit resumed at step 200"),
    )
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for number, (curve, (color, width, label)) in enumerate(zip(points, styles, strict=True)):
        path = " ".join(place(*point) for point in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        parts.append(f'<text x="{WIDTH - 260}" y="{40 + 20 * number}" fill="{color}">{label}</text>')
    left, right, bottom = EDGE, WIDTH - EDGE, HEIGHT - EDGE
    parts.append(f'<path d="M{left} {EDGE}V{bottom}H{right}" fill="none" stroke="#444"/>')
    for step in range(0, 401, 100):
        x = place(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{bottom + 18}" fill="#444" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{HEIGHT - 8}" fill="#444" text-anchor="middle">step</text>')
    parts.append(f'<text x="{left - 6}" y="{EDGE + 4}" fill="#444" text-anchor="end">{top:.0f}</text>')
    parts.append(f'<text x="{left - 6}" y="{bottom}" fill="#444" text-anchor="end">0</text>')
    parts.append(f'<text x="{left}" y="{EDGE - 12}" fill="#444">loss</text>')
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
    return f'{head}font-size="13">\n{body}\n</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(picture(curves()), encoding="utf-8")
