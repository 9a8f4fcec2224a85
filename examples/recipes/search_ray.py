"""A search over hyper-parameters with Ray Tune: side by side, bad trials end early, killed ones resume. A minute.

Needs Ray: `pip install "ray[tune]"`. A search that was killed continues when the program starts again.
"""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Callback, LightningModule, Trainer, seed_everything

SPACE = {"width": tune.choice([4, 16, 64]), "lr": tune.loguniform(1e-4, 1e-1)}


class Product(LightningModule):
    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Report(Callback):
    """Reports val_loss and a checkpoint to Ray Tune after each epoch; Tune may end the trial there."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {"val_loss": trainer.callback_metrics["val_loss"].item(), "epoch": trainer.current_epoch}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/trial.ckpt")
            tune.report(values, checkpoint=tune.Checkpoint.from_directory(folder))


def train(config: dict[str, Any]) -> None:
    """Train one trial, from its newest checkpoint if it was killed."""
    logging.getLogger("drivetrain").setLevel(logging.WARNING)
    seed_everything(0)
    x = torch.rand(1024, 2)
    train, val = random_split(TensorDataset(x, x.prod(1, keepdim=True)), [0.75, 0.25])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=5, callbacks=Report(), enable_checkpointing=False, **quiet)
    saved = tune.get_checkpoint()
    path = saved and f"{saved.to_directory()}/trial.ckpt"
    trainer.fit(Product(**config), DataLoader(train, 32, shuffle=True), DataLoader(val, 512), ckpt_path=path)


def main(output: Path, trials: int) -> None:
    path, trainable = str(output.resolve() / "product"), tune.with_resources(train, {"cpu": 1})
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, trainable, resume_errored=True)
    else:
        scheduler = ASHAScheduler(max_t=5, grace_period=1, reduction_factor=2)
        search = tune.TuneConfig(metric="val_loss", mode="min", num_samples=trials, scheduler=scheduler)
        retry = tune.FailureConfig(max_failures=2)
        run = tune.RunConfig(name="product", storage_path=str(output.resolve()), failure_config=retry)
        tuner = tune.Tuner(trainable, param_space=SPACE, tune_config=search, run_config=run)
    best = tuner.fit().get_best_result()
    print(f"Best loss {best.metrics['val_loss']:.5f} with {best.config}, in {best.checkpoint.path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output/search"))
    parser.add_argument("--trials", type=int, default=8)
    main(**vars(parser.parse_args()))
