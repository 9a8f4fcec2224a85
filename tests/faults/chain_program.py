"""A fit of two ranks that ends as it is told: in a hook, or inside a save.

The argument is JSON: what is trained, and who saves. ``fault``: a hook, at which of its calls, on which rank, and what
happens there (``kill``, ``exception``; ``term``: SIGTERM to the launching process). ``save``: a rank, a part of the
name of a checkpoint, and at which of its operations on such files that rank is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import DDPStrategy, FSDPStrategy

OPTIONS = json.loads(sys.argv[1])
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


class Noisy(Dataset[Any]):
    """Samples with random numbers of the process that reads them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4.0) * index / 16 + torch.randn(4)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with open(f"batches-{self.global_rank}.jsonl", "a") as stream:
            stream.write(json.dumps([[self.current_epoch, batch_idx], batch.tolist()]) + "\n")
        overflows = OPTIONS["precision"] == "16-mixed" and batch_idx % 3 == 0  # such a step is skipped
        loss: torch.Tensor = self.layers(batch).square().mean() * (1e6 if overflows else 1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

    def on_train_end(self) -> None:
        """Write what the fit has come to."""
        optimizer = self.trainer.optimizers[0]
        values = {
            **dict(self.named_parameters()),
            **{f"{n} {k}": v for n, p in enumerate(optimizer.state.values()) for k, v in p.items()},
            "rng": torch.get_rng_state(),
            "precision": torch.tensor(list(map(float, self.trainer.precision_plugin.state_dict().values()))),
        }
        found = {name: digest(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        with open(f"end-{self.global_rank}.json", "w") as stream:
            json.dump({**found, "step": self.global_step}, stream)


def digest(value: torch.Tensor) -> str:
    value = getattr(value, "full_tensor", lambda: value)()
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


class Fault(Callback):
    def __init__(self, hook: str, count: int, rank: int, how: str) -> None:
        self.left, self.rank, self.how = count, rank, how
        setattr(self, hook, self.happens)

    def happens(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left or trainer.global_rank != self.rank:
            return
        os.write(1, b"the fault was injected\n")
        if self.how == "exception":
            raise ValueError("of this rank alone")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)


class KilledInside(Callback):
    """Kills a rank at one of its operations on the files of a checkpoint."""

    def __init__(self, rank: int, name: str, count: int) -> None:
        self.rank, self.name, self.left = rank, name, count

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank:
            sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: Any) -> None:
        if event not in CHANGES or (event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))):
            return
        if not any(isinstance(each, (str, os.PathLike)) and self.name in os.fspath(each) for each in arguments):
            return
        self.left -= 1
        if not self.left:
            os.write(1, b"the fault was injected\n")
            os.kill(os.getpid(), signal.SIGKILL)


def strategy() -> Any:
    options: dict[str, Any] = {} if "TORCHELASTIC_RUN_ID" in os.environ else {"start_method": "fork"}
    if OPTIONS["strategy"] == "fsdp":
        return FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded", **options)
    return DDPStrategy(**options)


if __name__ == "__main__":
    savers: list[Callback] = [ModelCheckpoint("saved", filename="{epoch}", save_top_k=-1, save_last=OPTIONS["last"])]
    if OPTIONS["on_exception"]:
        savers.append(OnExceptionCheckpoint("saved"))
    if OPTIONS.get("every_2"):
        savers.append(ModelCheckpoint("saved", filename="{step}", every_n_train_steps=2))
    if OPTIONS.get("fault"):
        savers.append(Fault(*OPTIONS["fault"]))
    if OPTIONS.get("save"):
        savers.append(KilledInside(*OPTIONS["save"]))
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), precision=OPTIONS["precision"], max_epochs=3,
        logger=CSVLogger("logs", name="", version="v", flush_logs_every_n_steps=1), log_every_n_steps=1,
        callbacks=savers, accumulate_grad_batches=OPTIONS["accumulate"], num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Model(), DataLoader(Noisy(), batch_size=2, shuffle=True), DataLoader(Noisy(), batch_size=4), ckpt_path="last"
    )
