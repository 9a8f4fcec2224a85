"""A search over hyper-parameters with Optuna: bad trials are pruned, and a search that was killed continues. A minute.

Needs optuna: `pip install optuna`. Start the program several times at once, and the processes share the study.
"""

import argparse
import logging
from pathlib import Path

import optuna
import torch
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Callback, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint


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


class Pruning(Callback):
    """Reports val_loss to the trial after each epoch, and ends the fit if Optuna prunes the trial."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trial.report(trainer.callback_metrics["val_loss"].item(), trainer.current_epoch)
        if self.trial.should_prune():
            trainer.should_stop = self.pruned = True


def objective(trial: optuna.Trial, output: Path) -> float:
    folder = trial.user_attrs.get("folder", f"{output}/trial_{trial.number}")  # a retried trial has that of the first
    trial.set_user_attr("folder", folder)
    seed_everything(0)
    x = torch.rand(1024, 2)
    train, val = random_split(TensorDataset(x, x.prod(1, keepdim=True)), [0.75, 0.25])
    model = Product(trial.suggest_int("width", 4, 64, log=True), trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    pruning, best = Pruning(trial), ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=5, callbacks=[pruning, best], **quiet)
    trainer.fit(model, DataLoader(train, 32, shuffle=True), DataLoader(val, 512), ckpt_path="last")
    if pruning.pruned:
        raise optuna.TrialPruned
    return best.best_model_score.item()


def main(output: Path, trials: int) -> None:
    logging.getLogger("drivetrain").setLevel(logging.WARNING)
    output.mkdir(parents=True, exist_ok=True)
    url, retry = f"sqlite:///{output}/study.db", RetryHeartbeatStaleTrialCallback()
    storage = RDBStorage(url, heartbeat_interval=10, heartbeat_stale_trial_callback=retry)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)  # the first three trials are not pruned
    study = optuna.create_study(storage=storage, pruner=pruner, study_name="product", load_if_exists=True)
    ended = optuna.study.MaxTrialsCallback(trials, (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED))
    study.optimize(lambda trial: objective(trial, output), callbacks=[ended])
    print(f"Best loss {study.best_value:.5f} with {study.best_params}, in {study.best_trial.user_attrs['folder']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output/search"))
    parser.add_argument("--trials", type=int, default=12)
    main(**vars(parser.parse_args()))
