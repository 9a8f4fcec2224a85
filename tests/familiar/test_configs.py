"""Configurations of OmegaConf, and of Hydra, as hyperparameters and as arguments of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ReadonlyConfigError
from torch import nn

from drivetrain import LightningModule, Trainer
from drivetrain.checkpoints import plain
from drivetrain.loggers import CSVLogger


def make() -> DictConfig:
    config: DictConfig = OmegaConf.create({
        "name": "x", "optim": {"lr": 0.1, "as": "${name}"}, "sizes": [1, 2], "later": "???", "none": None,
    })  # fmt: skip
    return config


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Arguments(Net):
    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Whole(Net):
    def __init__(self, config: Any, unused: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters(config)


def test_arguments_stay_what_they_are_through_a_checkpoint(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    config = make()
    trainer = make_trainer()
    trainer.fit(Arguments(config, config.sizes), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)  # plain data

    hparams = Arguments.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert (type(hparams.config), type(hparams.sizes)) == (DictConfig, ListConfig)
    assert hparams.config == config
    assert hparams.config.optim["as"] == "x"
    hparams.config.name = "y"
    assert hparams.config.optim["as"] == "y"  # still an interpolation
    assert OmegaConf.is_missing(hparams.config, "later")
    assert hparams.sizes == [1, 2]


def test_hyperparameters_may_be_a_configuration(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    model = Whole(make())
    assert isinstance(model.hparams, DictConfig)
    assert model.hparams.optim.lr == 0.1
    trainer = make_trainer()
    trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)

    loaded = Whole.load_from_checkpoint(tmp_path / "a.ckpt", name="z")
    assert isinstance(loaded.hparams, DictConfig)
    assert loaded.hparams.optim["as"] == "z"  # what was passed wins
    assert loaded.hparams.sizes == [1, 2]


def test_ignored_keys_are_left_out_of_a_copy() -> None:
    class Ignores(Net):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config, ignore="optim")

    config = make()
    assert "optim" not in Ignores(config).hparams
    assert "optim" in config


@pytest.mark.parametrize("flag", ["struct", "readonly", None])
def test_a_closed_configuration_stays_closed(flag: str | None) -> None:
    config = make()
    if flag is not None:
        OmegaConf.set_struct(config, flag == "struct")
        OmegaConf.set_readonly(config, flag == "readonly")
    back = plain.decode(plain.encode({"a": config}, ""), "")["a"]
    assert isinstance(back, DictConfig)
    if flag == "struct":
        with pytest.raises(ConfigAttributeError):
            _ = back.misspelt
    elif flag == "readonly":
        with pytest.raises(ReadonlyConfigError):
            back.name = "y"
    else:
        back.new = 1


def test_a_part_whose_interpolation_leads_nowhere_is_kept() -> None:
    config = OmegaConf.create({"a": {"b": "${gone}"}, "c": 1})
    back = plain.decode(plain.encode(config.a, "hparams"), "hparams")
    assert OmegaConf.to_container(back) == {"b": "${gone}"}


def test_without_the_package_the_plain_data_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    encoded = plain.encode({"a": make()}, "")
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert plain.decode(encoded, "")["a"]["optim"] == {"lr": 0.1, "as": "${name}"}


def test_loggers_take_them(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(logger=logger).fit(Whole(make()), loader)
    written = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert "lr: 0.1" in written
    assert "omegaconf" not in written


def test_loggers_take_one_that_is_an_argument_and_lacks_a_value(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(logger=logger).fit(Arguments(make(), sizes=[1]), loader)
    written = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert 'later: "???"' in written
    assert "as: x" in written


def test_arguments_of_the_trainer_come_from_a_file(tmp_path: Path, loader: Any) -> None:
    (tmp_path / "train.yaml").write_text(
        "trainer:\n  accelerator: cpu\n  max_epochs: 1\n  limit_train_batches: 1\n  logger: false\n"
        "  max_time: {minutes: 5}\n  callbacks: []\n  enable_checkpointing: false\n  enable_progress_bar: false\n"
        "  enable_model_summary: false\nmodel:\n  sizes: [1]\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("train")
    trainer = Trainer(**config.trainer, default_root_dir=tmp_path)
    trainer.fit(Arguments(config.model, config.model.sizes), loader)
    assert trainer.global_step == 1
    assert trainer.settings.max_time == {"minutes": 5}
    assert trainer.settings.callbacks == []
