"""Energies and forces of molecules with NequIP, which is started as its command ``nequip-train`` starts it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from ase import Atoms
from ase.calculators.emt import EMT
from ase.io import write
from nequip.scripts import train as nequip_train
from omegaconf import OmegaConf
from outcome import report


def molecules(path: Path, seed: int, count: int = 24) -> None:
    """Shaken molecules of water and ethylene with energies and forces of an effective medium."""
    generator = np.random.default_rng(seed)
    water = Atoms("OH2", [(0, 0, 0.12), (0, 0.76, -0.48), (0, -0.76, -0.48)])
    carbon = Atoms("C2OH", [(0, 0, 0), (1.3, 0, 0), (-0.6, 1.0, 0), (1.9, -0.9, 0)])
    frames = []
    for index in range(count):
        atoms = (water, carbon)[index % 2].copy()
        atoms.positions += generator.normal(0, 0.05, atoms.positions.shape)
        atoms.calc = EMT()
        atoms.get_potential_energy(), atoms.get_forces()
        frames.append(atoms)
    write(path, frames, format="extxyz")


def configuration(folder: Path, seed: int, model: dict[str, Any], module: dict[str, Any]) -> dict[str, Any]:
    types, cutoff = ["O", "H", "C"], 3.0
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 4}
    errors = {"total_energy_mae": 1.0, "forces_mae": 1.0}
    return {
        "run": ["train", "val", "test"],
        "data": {
            "_target_": "nequip.data.datamodule.ASEDataModule",
            "seed": seed,
            "split_dataset": {"file_path": str(folder / "molecules.xyz"), "train": 14, "val": 5, "test": 5},
            "transforms": [
                {"_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper", "model_type_names": types},
                {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": cutoff},
            ],
            "train_dataloader": {**loader, "shuffle": True},
            "val_dataloader": loader,
            "test_dataloader": loader,
            "stats_manager": {"_target_": "nequip.data.CommonDataStatisticsManager", "type_names": types},
        },
        "trainer": {
            "_target_": "lightning.Trainer",
            "accelerator": "cpu",
            "max_epochs": 3,
            "enable_progress_bar": False,
            "log_every_n_steps": 1,
            "logger": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(folder), "name": "log"},
            "callbacks": [
                {
                    "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "dirpath": str(folder),
                    "filename": "best",
                    "monitor": "val0_epoch/weighted_sum",
                    "save_last": True,
                },
                {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor", "logging_interval": "epoch"},
            ],
        },
        "training_module": {
            "_target_": "nequip.train.NequIPLightningModule",
            "loss": {
                "_target_": "nequip.train.EnergyForceLoss",
                "per_atom_energy": True,
                "coeffs": {"total_energy": 1.0, "forces": 1.0},
            },
            "val_metrics": {"_target_": "nequip.train.EnergyForceMetrics", "coeffs": errors},
            "test_metrics": {"_target_": "nequip.train.EnergyForceMetrics", "coeffs": errors},
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
            "lr_scheduler": {
                "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "factor": 0.5},
                "monitor": "val0_epoch/weighted_sum",
                "interval": "epoch",
                "frequency": 1,
            },
            "model": {
                "_target_": "nequip.model.NequIPGNNModel",
                "seed": seed,
                "model_dtype": "float64",
                "type_names": types,
                "r_max": cutoff,
                "num_layers": 2,
                "l_max": 1,
                "num_features": 8,
                "radial_mlp_width": 16,
                "avg_num_neighbors": "${training_data_stats:num_neighbors_mean}",
                "per_type_energy_shifts": "${training_data_stats:per_atom_energy_mean}",
                "per_type_energy_scales": "${training_data_stats:forces_rms}",
                **model,
            },
            **module,
        },
    }


def trained(folder: Path, seed: int, model: dict[str, Any] | None = None, **module: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    molecules(folder / "molecules.xyz", seed)
    settings = configuration(folder, seed, model or {}, module)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    torch.manual_seed(seed)
    OmegaConf.clear_resolver("training_data_stats")  # the command has a process of its own
    sys.argv = ["nequip-train", "-cp", str(folder), "-cn", "settings", f"hydra.run.dir={folder / 'run'}"]
    nequip_train.main()
    with (folder / "log" / "version_0" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row[name]] for name in sorted(rows[0])}
    weights = {name: size(torch.load(folder / f"{name}.ckpt", weights_only=False)) for name in ("best", "last")}
    return {"logged": {name: values for name, values in logged.items() if "/" in name}, "weights": weights}


def size(checkpoint: dict[str, Any]) -> float:
    values = [value.double().norm() for value in checkpoint["state_dict"].values() if torch.is_tensor(value)]
    return float(sum(values))


def plain(folder: Path, seed: int) -> dict[str, Any]:
    return trained(folder, seed)


def averaged(folder: Path, seed: int) -> dict[str, Any]:
    """The average of the weights, which is swapped in for each evaluation."""
    return trained(folder, seed, {"parity": False}, _target_="nequip.train.EMALightningModule", ema_decay=0.9)


if __name__ == "__main__":
    report(plain=plain, averaged=averaged)
