"""The note on an out-of-memory error: what took the memory, by kind, and what to change. The errors are injected."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")

MIB = 2**20


class Net(LightningModule):
    """One MiB of parameters; runs out of memory in the hook of this name, after its first call."""

    def __init__(self, where: str, error: Exception | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)
        self.where, self.calls = where, 0
        self.error = torch.OutOfMemoryError("CUDA out of memory.") if error is None else error

    def fail(self, where: str, after: int = 1) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls > after:
                raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        return self.layer(batch[0]).mean()

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("on_before_optimizer_step", after=0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("predict_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def loader() -> DataLoader[Any]:
    return DataLoader([(torch.ones(512), torch.ones(1)) for _ in range(1024)], batch_size=256)  # type: ignore[arg-type]


def memory_notes(error: Any) -> list[str]:
    return [note for note in error.value.__notes__ if note.startswith("Out of memory on ")]


def test_the_note_says_what_took_the_memory_by_kind(loader: DataLoader[Any], make_trainer: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        make_trainer(limit_val_batches=0).fit(Net("training_step"), loader)
    [note] = memory_notes(error)
    batch = (256 * 512 + 256) * 4 / 2**30
    assert "parameters and buffers 0.00098 GiB, gradients 0.00098 GiB, optimizer state 0.002 GiB" in note
    assert f"the batch {batch:.2g} GiB, activations and the rest are not counted on this device" in note
    assert "use a smaller batch_size and accumulate_grad_batches=2" in note
    assert 'precision="bf16-mixed"' in note
    assert 'strategy="fsdp"' in note
    assert "In Net.training_step, batch 1 of epoch 0 (counted from 0), on rank 0" in error.value.__notes__[-1]


@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("used", [64 * MIB, 2 * MIB], ids=["activations", "model"])
def test_what_the_device_counts_is_named_and_the_largest_comes_first(
    where: str, used: int, loader: DataLoader[Any], make_trainer: Any, monkeypatch: Any
) -> None:
    trainer = make_trainer(limit_val_batches=0, accumulate_grad_batches=2)
    monkeypatch.setattr(trainer.accelerator, "memory_allocated", lambda device: used, raising=False)
    monkeypatch.setattr(trainer.accelerator, "total_memory", lambda device: 128 * MIB, raising=False)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.fit(Net(where), loader)
    [note] = memory_notes(error)
    assert "of 0.12 GiB in use)" in note
    assert "accumulate_grad_batches=4" in note
    assert "activations and the rest 0.00 GiB" in note or used > 2 * MIB
    first = note.partition("Change one of these: ")[2]
    model_is_large = used == 2 * MIB
    assert first.startswith('write strategy="fsdp"') == (model_is_large or where == "on_before_optimizer_step")
    assert ("Adam keeps about" in note) == (where == "on_before_optimizer_step")


@pytest.mark.parametrize(("where", "call"), [("validation_step", "validate"), ("predict_step", "predict")])
def test_in_an_evaluation_the_batch_of_its_loader_is_meant(
    where: str, call: str, loader: DataLoader[Any], make_trainer: Any
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        getattr(make_trainer(limit_val_batches=1.0), call)(Net(where), loader)
    [note] = memory_notes(error)
    assert "use a smaller batch_size in the loader of this stage" in note
    assert "accumulate" not in note


def test_the_cpus_allocator_counts_too(loader: DataLoader[Any], make_trainer: Any) -> None:
    text = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    with pytest.raises(RuntimeError) as error:
        make_trainer(limit_val_batches=0).fit(Net("training_step", RuntimeError(text)), loader)
    assert len(memory_notes(error)) == 1


def test_another_error_has_no_such_note(loader: DataLoader[Any], make_trainer: Any) -> None:
    """Negative control."""
    with pytest.raises(RuntimeError) as error:
        make_trainer(limit_val_batches=0).fit(Net("training_step", RuntimeError("shapes")), loader)
    assert memory_notes(error) == []
