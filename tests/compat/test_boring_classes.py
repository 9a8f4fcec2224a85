"""The demonstration classes train, as the test suites that use them expect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.compat.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDataset,
    RandomDictDataset,
    RandomIterableDataset,
    RandomIterableDatasetWithLen,
)


def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=2,
        limit_test_batches=2,
        limit_predict_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:The learning-rate schedulers that")  # the one by hand does not step its own
@pytest.mark.parametrize("model", [BoringModel, ManualOptimBoringModel])
def test_a_model_with_its_own_loaders_comes_nearer_to_one(model: type[BoringModel]) -> None:
    torch.manual_seed(1)
    net = model()
    batch = torch.randn(64, 32)
    before = net.step(batch).item()
    run = trainer()
    run.fit(net, DataLoader(RandomDataset(32, 256), batch_size=64))
    run.test(net, verbose=False)
    assert run.global_step == 4
    assert net.step(batch).item() < before
    assert len(run.predict(net) or []) == 2


def test_a_data_module_has_a_part_for_each_stage() -> None:
    data = BoringDataModule()
    run = trainer()
    run.fit(BoringModel(), datamodule=data)
    run.test(BoringModel(), datamodule=data, verbose=False)
    run.predict(BoringModel(), datamodule=data)
    rows = {name: set(getattr(data, f"random_{name}").indices) for name in ("train", "val", "test", "predict")}
    assert all(len(indices) == 64 for indices in rows.values())
    assert len(set.union(*rows.values())) == 256  # no sample is in two parts


def test_a_model_with_arguments() -> None:
    model = DemoModel(out_dim=3, learning_rate=0.5)
    assert model(torch.ones(2, 32)).shape == (2, 3)
    assert model.configure_optimizers().defaults["lr"] == 0.5
    trainer().fit(DemoModel(), DataLoader(RandomDataset(32, 8)))


@pytest.mark.parametrize(
    ("dataset", "length"),
    [
        (RandomDataset(3, 5), 5),
        (RandomDictDataset(3, 5), 5),
        (RandomIterableDataset(3, 5), None),
        (RandomIterableDatasetWithLen(3, 5), 5),
    ],
)
def test_random_data(dataset: Any, length: int | None) -> None:
    assert (len(dataset) if hasattr(dataset, "__len__") else None) == length
    batch = next(iter(DataLoader(dataset, batch_size=5)))
    if isinstance(batch, dict):
        assert torch.allclose(batch["b"], batch["a"] + 2)
        batch = batch["a"]
    assert batch.shape == (5, 3)


@pytest.mark.parametrize("data", [BoringDataModuleNoLen, IterableBoringDataModule])
def test_data_modules_without_a_length_train_and_predict(data: Any) -> None:
    module = data()
    module.setup("fit")
    loaders = module.train_dataloader()
    last = loaders[-1] if isinstance(loaders, list) else loaders
    with pytest.raises(TypeError):
        len(last)
    assert len(list(last)) == 512
    model = BoringModel()
    if data is BoringDataModuleNoLen:
        trainer().fit(model, data())
    assert trainer().predict(model, data())


def test_the_convolutional_network_answers_with_probabilities() -> None:
    answer = Net()(torch.rand(2, 1, 28, 28))
    assert answer.shape == (2, 10)
    assert torch.allclose(answer.exp().sum(1), torch.ones(2))
