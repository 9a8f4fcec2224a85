"""A precision that steps 32-bit copies of 16-bit weights, as docs/own_precision.md writes it, resumes bit-equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule
from drivetrain.errors import CheckpointError
from drivetrain.precision import Precision

DOCS = Path(__file__).parents[2] / "docs" / "own_precision.md"


def written_in_the_docs() -> type[Precision]:
    """Return the class of the page, as a reader would copy it."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(next(block for block in blocks if "class MasterWeights" in block), names)
    cls: type[Precision] = names["MasterWeights"]
    return cls


MasterWeights = written_in_the_docs()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def of_weights(precision: Any) -> dict[Any, torch.Tensor]:
    return {weight: master for known in precision.masters.values() for weight, master in known.items()}


def bits(precision: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    masters = {f"{names[weight]} in 32 bits": master for weight, master in of_weights(precision).items()}
    assert len(masters) == len(names)
    return {**masters, **{name: weight.detach() for weight, name in names.items()}}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_masters_learn_what_16_bits_round_away(make_trainer: Any) -> None:
    module, precision = Module(), MasterWeights()
    make_trainer(plugins=[precision]).fit(module, DataLoader(data(), batch_size=4))
    for name, value in bits(precision, module).items():
        assert value.dtype is (torch.float32 if name.endswith("bits") else torch.bfloat16)
    weight = module.net[0].weight
    master = of_weights(precision)[weight]
    assert torch.equal(master.bfloat16(), weight)
    assert not torch.equal(master, weight.float())


@pytest.mark.parametrize("steps", [3, 8])
def test_a_fit_resumes_bit_equal(steps: int, make_trainer: Any, tmp_path: Path) -> None:
    def fit(most: int, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        module, precision = Module(), MasterWeights()
        trainer = make_trainer(plugins=[precision], max_epochs=-1, max_steps=most)
        trainer.fit(module, DataLoader(data(), batch_size=4), **arguments)
        return trainer, bits(precision, module)

    _, expected = fit(13)
    first, _ = fit(steps)
    first.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["MasterWeights"]
    assert set(saved) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    _, found = fit(13, ckpt_path=tmp_path / "run.ckpt")
    assert_same(found, expected)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_loop_of_ones_own_resumes_bit_equal(several: bool, named: bool, tmp_path: Path) -> None:
    class Loop:
        def __init__(self) -> None:
            self.precision = MasterWeights()
            self.engine = Engine(accelerator="cpu", plugins=[self.precision])
            self.modules = [net() for _ in range(1 + several)]
            made = [self.engine.setup(each, torch.optim.AdamW(each.parameters(), lr=1e-3)) for each in self.modules]
            self.state: dict[str, Any] = {"precision": self.engine.precision} if named else {}
            for index, (model, optimizer) in enumerate(made):
                self.state.update({f"model{index}": model, f"optimizer{index}": optimizer})

        def train(self, first: int, last: int) -> None:
            x, y = data().tensors
            for index in range(first, last):
                for i in range(len(self.modules)):
                    model, optimizer = self.state[f"model{i}"], self.state[f"optimizer{i}"]
                    optimizer.zero_grad()
                    self.engine.backward((model(x[index : index + 4]) - y[index : index + 4]).square().mean())
                    optimizer.step()

        def bits(self) -> dict[str, torch.Tensor]:
            return bits(self.precision, nn.ModuleList(self.modules))

    complete, saved, resumed = Loop(), Loop(), Loop()
    complete.train(0, 9)
    saved.train(0, 4)
    saved.engine.save(tmp_path / "loop.ckpt", saved.state)
    resumed.train(6, 8)  # which the file overwrites
    rest = resumed.engine.load(tmp_path / "loop.ckpt", resumed.state)
    assert rest == {}
    resumed.train(4, 9)
    assert_same(resumed.bits(), complete.bits())


def test_an_engine_stores_the_scale_without_being_asked(tmp_path: Path) -> None:
    def loop() -> tuple[Engine, dict[str, Any]]:
        engine, model = Engine(accelerator="cpu", precision="16-mixed"), nn.Linear(2, 1)
        prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return engine, {"model": prepared, "optimizer": optimizer}

    engine, state = loop()
    engine.backward((state["model"](torch.ones(1, 2)) * float("inf")).sum())
    state["optimizer"].step()
    engine.save(tmp_path / "loop.ckpt", state)
    other, again = loop()
    assert other.load(tmp_path / "loop.ckpt", again) == {}
    assert other.precision.state_dict() == engine.precision.state_dict()
    assert other.precision.state_dict()["scale"] == 2.0**15
    engine.save(tmp_path / "weights.ckpt", {"model": state["model"]})
    assert set(torch.load(tmp_path / "weights.ckpt", weights_only=True)) == {"model"}


def test_the_signatures_of_the_field_still_work(make_trainer: Any, tmp_path: Path) -> None:
    class Own(Precision):
        kept = 1

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "kept": self.kept}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self.kept = state_dict["kept"]

    own = Own()
    own.kept = 5
    trainer = make_trainer(plugins=[own], max_epochs=1)
    trainer.fit(Module(), DataLoader(data(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = Own()
    make_trainer(plugins=[again], max_epochs=2).fit(
        Module(), DataLoader(data(), batch_size=4), ckpt_path=tmp_path / "run.ckpt"
    )
    assert again.kept == 5


def test_a_damaged_state_of_the_precision_leaves_everything_as_it_was(tmp_path: Path) -> None:
    engine, layer = Engine(accelerator="cpu", precision="16-mixed"), nn.Linear(2, 1)
    model, optimizer = engine.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "precision": engine.precision}
    engine.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    engine.save(tmp_path / "loop.ckpt", state)
    saved = torch.load(tmp_path / "loop.ckpt", weights_only=True)
    saved["precision"]["scale"] = float("nan")
    torch.save(saved, tmp_path / "damaged.ckpt")
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(CheckpointError, match="scale"):
        engine.load(tmp_path / "damaged.ckpt", state)
    assert layer.weight.tolist() == [[0.0, 0.0]]
