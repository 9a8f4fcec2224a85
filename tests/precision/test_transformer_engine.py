"""TransformerEngine's precision, on a stand-in for the package: it never ran on the hardware that it is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.precision import TransformerEnginePrecision

ENTERED: list[Any] = []  # the recipes of the contexts that were entered


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    assert enabled
    ENTERED.append(recipe)
    yield


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
    assert enabled
    ENTERED.append(("old", fp8_recipe))
    yield


class Linear(nn.Linear):
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, device: Any = "cuda"
    ) -> None:
        super().__init__(in_features, out_features, bias, device, params_dtype)

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.dtype == torch.uint8


class LayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__(normalized_shape, eps)


class DelayedScaling(SimpleNamespace):
    """A recipe."""


for _layer in (Linear, LayerNorm):
    _layer.__module__ = "transformer_engine.pytorch.module"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the stand-in in place of the package; return its part for torch."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
             "transformer_engine.common.recipe")  # fmt: skip
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    te: Any = made["transformer_engine.pytorch"]
    te.Linear, te.LayerNorm, te.autocast, te.fp8_autocast = Linear, LayerNorm, autocast, fp8_autocast
    recipe: Any = made["transformer_engine.common.recipe"]
    recipe.DelayedScaling, recipe.Format = DelayedScaling, SimpleNamespace(HYBRID="hybrid")
    ENTERED.clear()
    return made["transformer_engine.pytorch"]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16, bias=False))
        self.head = nn.Linear(16, 1)
        self.types: set[Any] = set()

    def training_step(self, batch: Any) -> Tensor:
        found: Tensor = self.head(self.body(batch))
        self.types.add((batch.dtype, found.dtype, torch.get_default_dtype()))
        return found.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> Trainer:
    return Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
           "enable_checkpointing": False, "max_epochs": 1, **options}
    )  # fmt: skip


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(12, 16), batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "dtype"), [("transformer-engine", torch.bfloat16), ("transformer-engine-float16", torch.float16)]
)
def test_a_name_trains_with_layers_of_the_package(name: str, dtype: torch.dtype) -> None:
    """Those whose sizes fit; everything is in 16 bits, and each step is in the package's context."""
    net, before = Net(), Net()
    before.load_state_dict(net.state_dict())
    made = trainer(precision=name, max_steps=0)
    made.fit(net, loader())
    assert [type(each) for each in net.body] == [Linear, LayerNorm, Linear]
    assert type(net.head) is nn.Linear
    for key, value in before.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value.to(dtype), rtol=0, atol=0)
    trained = Net()
    trainer(precision=name).fit(trained, loader())
    assert trained.types == {(dtype, dtype, dtype)}
    assert ENTERED == [None] * 3
    assert torch.get_default_dtype() == torch.float32


def test_an_older_package_has_the_context_under_another_name(stand_in: ModuleType) -> None:
    del stand_in.autocast
    trainer(precision="transformer-engine").fit(Net(), loader())
    assert ENTERED == [("old", None)] * 3


def test_a_recipe_may_be_the_arguments_of_one() -> None:
    recipe = {"fp8_format": "HYBRID", "margin": 1}
    own = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)
    assert own.recipe == DelayedScaling(fp8_format="hybrid", margin=1)
    given = object()
    assert TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=given).recipe is given


def test_layers_of_the_package_in_the_model_are_left_alone_unless_asked() -> None:
    for asked, exchanged in ((None, False), (False, False), (True, True)):
        model = nn.Sequential(Linear(16, 16, device="cpu"), nn.Linear(16, 16))
        own = TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=asked)
        Engine(accelerator="cpu", plugins=own).setup_module(model)
        assert (type(model[1]) is Linear) is exchanged
        assert model[1].weight.dtype == torch.bfloat16


def test_a_plain_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Though the package's layers have a state that it does not know."""
    plain = Net()
    made = trainer(max_steps=0)
    made.fit(plain, loader())
    made.save_checkpoint(tmp_path / "plain.ckpt")
    net = Net()
    trainer(precision="transformer-engine", max_epochs=1, max_steps=0).fit(
        net, loader(), ckpt_path=tmp_path / "plain.ckpt"
    )
    assert "body.0._extra_state" in net.state_dict()
    torch.testing.assert_close(net.body[0].weight, plain.body[0].weight.bfloat16(), rtol=0, atol=0)


def test_another_type_for_weights_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="write torch.bfloat16 or torch.float16"):
        TransformerEnginePrecision(weights_dtype=torch.float32)
