"""Which cures apply to a fit, and what a trial changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import GradientAccumulationScheduler
from drivetrain.trials import NAMES
from drivetrain.trials.cures import Cure, changed, cures_of


class Pairs(Dataset):  # type: ignore[type-arg]
    """Samples of a user's own data set: equal each time, or with noise."""

    def __init__(self, noise: float = 0.0, count: int = 8) -> None:
        self.noise, self.count = noise, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(index)) + self.noise * torch.rand(4), index


class Named(Pairs):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index)), "name": "a" if self.noise else index}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 4))


class Net(LightningModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (list, tuple)) else batch
        return self.layers(x).sum()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


class Look(Callback):
    def __init__(self, data: Any, batches: int) -> None:
        self.data, self.batches, self.found = data, batches, list[Cure]()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = cures_of(trainer, self.data, self.batches)


@pytest.fixture
def cures(tmp_path: Path) -> Callable[..., dict[str, Cure]]:
    """``cures(data)``: those of a fit with this training data."""

    def look(data: Any, model: Any = None, batches: int = 4, callbacks: Any = (), **arguments: Any) -> dict[str, Cure]:
        seen = Look(data, batches)
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[*callbacks, seen], **arguments,
        )  # fmt: skip
        trainer.fit(model or Net(), data)
        return {each.name: each for each in seen.found}

    return look


def test_each_cure_is_named_once_with_what_to_write_or_why_it_is_not_tried(cures: Any) -> None:
    found = cures(DataLoader(Pairs(), batch_size=2))
    assert [*dict.fromkeys(name.partition("=")[0] for name in found)] == list(NAMES)
    assert all(bool(each.write) is not bool(each.why_not) for each in found.values())
    assert {name for name in found if found[name].write} == {
        "num_workers=1", "num_workers=2", "num_workers=4", "tensors", "compile", "optimizer_kernels",
    }  # fmt: skip
    assert found["num_workers=2"].write == "DataLoader(..., num_workers=2)"
    assert "cpu" in found["pin_memory"].why_not


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([torch.ones(2, 4)], "a list"),
        (DataLoader(Stream(), batch_size=2), "iterable-style"),
    ],
)
def test_only_a_loader_over_a_map_style_dataset_is_changed(data: Any, reason: str, cures: Any) -> None:
    found = cures(data)
    assert all(reason in found[name].why_not for name in NAMES[:5])
    assert found["compile"].write


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2), "as a whole already"),
        (DataLoader(Pairs(noise=1.0), batch_size=2), "different each time"),
        (DataLoader(Named(noise=1.0), batch_size=2), "not tensors"),
        (DataLoader(Pairs(), batch_size=2, collate_fn=torch.utils.data.default_convert), "collate_fn"),
        (DataLoader(Pairs(), batch_sampler=[[0, 1], [2, 3]]), "not torch's own"),
    ],
)
def test_why_the_data_set_is_not_held_as_tensors(loader: Any, reason: str, cures: Any) -> None:
    model = Net()
    model.training_step = lambda batch, batch_idx: model.layers(torch.ones(2, 4)).sum()  # type: ignore[method-assign]
    assert reason in cures(loader, model)["tensors"].why_not


@pytest.mark.parametrize(("batches", "is_tried"), [(4, False), (5, True)])
def test_persistent_workers_are_tried_if_a_trial_goes_beyond_an_epoch(batches: int, is_tried: bool, cures: Any) -> None:
    loader = DataLoader(Pairs(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    found = cures(loader, batches=batches)["persistent_workers"]
    assert bool(found.write) is is_tried
    assert ("4 batches" in found.why_not) is not is_tried


def test_a_larger_batch_is_tried_only_in_place_of_accumulation(cures: Any) -> None:
    def of(**arguments: Any) -> dict[str, Cure]:
        found = cures(DataLoader(Pairs(), batch_size=2), **arguments)
        return {name: each for name, each in found.items() if name.startswith("batch_size")}

    assert {name: each.factor for name, each in of(accumulate_grad_batches=4).items()} == {
        "batch_size=4": 2, "batch_size=8": 4,
    }  # fmt: skip
    assert of(accumulate_grad_batches=3)["batch_size=6"].write.endswith("Trainer(accumulate_grad_batches=1)")
    assert "another training" in of()["batch_size"].why_not
    assert "a callback" in of(callbacks=[GradientAccumulationScheduler({0: 2})])["batch_size"].why_not


def test_kernels_and_compilation_are_tried_where_they_change_something(cures: Any) -> None:
    loader = DataLoader(Pairs(), batch_size=2)
    many = Net(blocks=6)  # enough parameters for foreach
    assert 'optimizer_kernels="equal"' in cures(loader, many, optimizer_kernels=None)["optimizer_kernels"].write
    assert 'optimizer_kernels="fastest"' in cures(loader, many)["optimizer_kernels"].write
    assert "fused is in use" in cures(loader, many, optimizer_kernels="fastest")["optimizer_kernels"].why_not
    assert "there is none" in cures(loader, Net(torch.optim.SGD))["optimizer_kernels"].why_not
    assert "no repeated layers" in cures(loader, Net(blocks=1))["compile"].why_not


# ---- in a trial ------------------------------------------------------------------------------------------------------


def batches_of(loader: Any) -> list[Any]:
    return [[each.tolist() for each in batch] for batch in loader]


def test_a_loader_with_other_workers_yields_the_same_batches() -> None:
    loader = DataLoader(Pairs(), batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=60)
    without = changed(loader, dataclasses.asdict(Cure("", loader={"num_workers": 0, "timeout": 0})), 4)
    assert without.num_workers == 0
    assert loader.num_workers == 1
    assert batches_of(without) == batches_of(loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_larger_batch_has_the_samples_of_several(shuffle: bool) -> None:
    generator = torch.Generator()
    loader = DataLoader(Pairs(count=10), batch_size=2, shuffle=shuffle, generator=generator, drop_last=True)
    larger = changed(loader, dataclasses.asdict(Cure("", factor=2)), 4)
    generator.manual_seed(1)
    small = [index for _, indices in loader for index in indices.tolist()]
    generator.manual_seed(1)
    assert [indices.tolist() for _, indices in larger] == [small[:4], small[4:8]]


@pytest.mark.parametrize("dataset", [Pairs(), Named()])
def test_a_held_data_set_yields_the_same_batches(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=3)
    held = changed(loader, dataclasses.asdict(Cure("", holds=True)), 100)
    assert type(held.dataset) is not type(dataset)
    for one, other in zip(loader, held, strict=True):
        rows, others = (each.values() if isinstance(each, dict) else each for each in (one, other))
        assert [each.tolist() for each in rows] == [each.tolist() for each in others]
    assert len(changed(loader, dataclasses.asdict(Cure("", holds=True)), 2).dataset) == 6  # what a trial needs
