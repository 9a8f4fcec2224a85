"""A loop of your own on the Engine: handwritten digits, with accumulation, clipping and exact resume.

Every line that differs from a loop in bare torch names `engine`. Stop it with Ctrl-C and start it again with
`--resume`; try `--precision bf16-mixed`, or `drivetrain run --precision=bf16-mixed examples/plain_loop.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Engine

ACCUMULATE = 2  # micro-batches of one optimizer step


def make_data() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # (N, 64); pixels are 0 to 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(test, batch_size=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-after", type=int, default=None, metavar="EPOCHS")
    arguments = parser.parse_args()

    engine = Engine(precision=arguments.precision)
    engine.launch()
    engine.seed_everything(0)
    train, test = engine.setup_dataloaders(*make_data())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    model, optimizer = engine.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs)

    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": train,
        "precision": engine.precision, "rng": engine.rng, "epoch": 0,
    }  # fmt: skip
    checkpoint = arguments.output / "plain_loop.ckpt"
    if arguments.resume:
        engine.load(checkpoint, state)
        engine.print(f"Going on with epoch {state['epoch']}")

    while state["epoch"] < arguments.epochs:
        model.train()
        for index, (images, labels) in enumerate(train, start=1):
            window_ends = index % ACCUMULATE == 0
            with engine.no_backward_sync(model, enabled=not window_ends):
                loss = F.cross_entropy(model(images), labels)
                engine.backward(loss / ACCUMULATE)
            if window_ends:
                engine.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        state["epoch"] += 1
        engine.save(checkpoint, state)
        engine.print(f"Epoch {state['epoch']}/{arguments.epochs}: loss={loss.item():.6f}")
        if state["epoch"] == arguments.stop_after:
            return

    model.eval()
    with torch.no_grad():
        counts = torch.zeros(2, device=engine.device)  # right, all
        for images, labels in test:
            right = model(images).argmax(1) == labels
            counts += torch.stack([right.sum(), torch.ones_like(right).sum()])
    right, seen = engine.all_reduce(counts, reduce_op="sum").tolist()
    accuracy = right / seen
    engine.print(f"Test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
