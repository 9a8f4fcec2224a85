"""Graphs with PyTorch Geometric: its data modules for Lightning, for many graphs and for the nodes of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from outcome import ended, metrics, norm, report
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset, LightningNodeData
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    """Two convolutions, and a class for each graph."""

    def __init__(self, convolution: type, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.first, self.second = convolution(4, 16), convolution(16, 16)
        self.head = torch.nn.Linear(16, 2)
        self.accuracy = torch.nn.ModuleDict({f"{name}_": MulticlassAccuracy(2) for name in ("train", "val", "test")})

    def forward(self, data: Any) -> Any:
        x = torch.nn.functional.dropout(self.first(data.x, data.edge_index).relu(), 0.2, self.training)
        x = self.second(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch) if self.whole else x)

    def shared(self, data: Any, name: str) -> Any:
        y, count = data.y, data.num_graphs
        scores = self(data)
        loss = torch.nn.functional.cross_entropy(scores, y)
        self.accuracy[f"{name}_"](scores, y)
        self.log(f"{name}_loss", loss, batch_size=count)
        self.log(f"{name}_accuracy", self.accuracy[f"{name}_"], on_epoch=True, batch_size=count)
        return loss

    def training_step(self, data: Any, batch_idx: int) -> Any:
        return self.shared(data, "train")

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.shared(data, "val")

    def test_step(self, data: Any, batch_idx: int) -> None:
        self.shared(data, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def graph(generator: torch.Generator, nodes: int, kind: int) -> Data:
    """A ring, in which graphs of kind 1 have chords."""
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    if kind:
        edges = torch.cat([edges, torch.stack([ring, ring.roll(nodes // 2)])], dim=1)
    x = torch.randn(nodes, 4, generator=generator) + kind * torch.tensor([0.3, 0.0, -0.3, 0.0])
    return Data(x, torch.cat([edges, edges.flip(0)], dim=1), y=torch.tensor([kind]))


def numbers(folder: Path, model: Classifier, data: Any) -> dict[str, Any]:
    best = ModelCheckpoint(folder, "best-{epoch}", "val_loss", save_last=True)
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_epochs=3, log_every_n_steps=2,
        enable_progress_bar=False, callbacks=best,
    )  # fmt: skip
    trainer.fit(model, data)
    fitted = metrics(trainer)
    (tested,) = trainer.test(ckpt_path="best", datamodule=data)
    return {
        "fitted": fitted,
        "tested": tested,
        "ended": ended(trainer),
        "best": [Path(best.best_model_path).name, float(best.best_model_score or 0)],
        "weights": norm(model),
    }


def graphs(folder: Path, seed: int) -> dict[str, Any]:
    """Many small graphs, shuffled, of which the last batch holds fewer."""
    generator = torch.Generator().manual_seed(seed)
    made = [graph(generator, 6 + index % 5, index % 2) for index in range(60)]
    pl.seed_everything(seed)
    data = LightningDataset(made[:38], made[38:50], made[50:], batch_size=8)
    return numbers(folder, Classifier(GCNConv, whole=True), data)


def nodes(folder: Path, seed: int) -> dict[str, Any]:
    """One graph as a whole in each batch; masks say which nodes are for what."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(2, (80,), generator=generator)
    large = graph(generator, 80, kind=1)
    large.x += kinds[:, None]
    large.y = kinds
    order = torch.randperm(80, generator=generator)
    for name, part in zip(("train_mask", "val_mask", "test_mask"), order.split([40, 20, 20]), strict=True):
        large[name] = torch.zeros(80, dtype=torch.bool).index_fill(0, part, True)
    pl.seed_everything(seed)
    return numbers(folder, Masked(SAGEConv, whole=False), LightningNodeData(large, loader="full"))


class Masked(Classifier):
    """A class for each node that the stage's mask has chosen."""

    def shared(self, data: Any, name: str) -> Any:
        mask = data[f"{name}_mask"]
        scores, y = self(data)[mask], data.y[mask]
        loss = torch.nn.functional.cross_entropy(scores, y)
        self.log_dict(
            {f"{name}_loss": loss, f"{name}_accuracy": self.accuracy[f"{name}_"](scores, y)}, batch_size=len(y)
        )
        return loss


if __name__ == "__main__":
    report(graphs=graphs, nodes=nodes)
