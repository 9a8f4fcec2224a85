"""precision="float8" with the real torchao: layers, numbers, checkpoints, and the strategies of two CPU processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Float8Precision, Precision
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.model_parallel import ModelParallelStrategy
from drivetrain.testing.strategy_conformance import StrategyConformance, needs_every_rank


class Own(nn.Linear):
    """A layer with a forward pass of its own."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in "ab"))
            self.own, self.head = Own(16, 16), nn.Linear(16, 1)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.own(self.blocks(x)))
        return found

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x).float(), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def fit(precision: Any, net: Net | None = None, epochs: int = 2, **options: Any) -> tuple[Net, Trainer]:
    ckpt_path = options.pop("ckpt_path", None)
    given = {"plugins": precision} if isinstance(precision, Precision) else {"precision": precision}
    trainer = Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
           "enable_checkpointing": False, "max_epochs": epochs, **given, **options}
    )  # fmt: skip
    net = net or Net()
    trainer.fit(net, DataLoader(dataset(), batch_size=16), ckpt_path=ckpt_path)
    return net, trainer


def converted(net: nn.Module) -> set[str]:
    return {path for path, each in net.named_modules() if type(each).__name__ == "Float8Linear"}


BLOCKS = {"blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"}


def test_layers_whose_sizes_fit_compute_in_8_bits(caplog: pytest.LogCaptureFixture) -> None:
    """Not those with a size that is no multiple of 16, nor subclasses of Linear; the numbers are near those of 32."""
    with caplog.at_level("INFO"):
        net, trainer = fit("float8")
    assert trainer.precision == "float8"
    assert converted(net) == BLOCKS
    assert "Float8Precision computes 4 linear layers in 8 bits, and not head." in caplog.text
    plain, _ = fit("32-true")
    assert converted(plain) == set()
    assert torch.stack(net.losses)[-1] < 0.5 * net.losses[0]
    for found, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.2, atol=0.15)
        assert found.dtype == torch.float32
    assert any((a != b).any() for a, b in zip(net.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_filters_and_emulation(recipe: str) -> None:
    """What is emulated gives nearly the numbers of what is not."""
    losses = []
    for emulate in (True, False, None):
        own = Float8Precision(recipe, lambda layer, path: path != "blocks.0.0", emulate)
        net, _ = fit(own)
        assert converted(net) == BLOCKS - {"blocks.0.0"}
        assert net.get_submodule("blocks.1.0").config.emulate is bool(emulate)
        losses.append(torch.stack(net.losses))
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0.02)


def test_a_config_of_torchao_is_a_recipe() -> None:
    from torchao.float8 import Float8LinearConfig

    net, _ = fit(Float8Precision(Float8LinearConfig(round_scales_to_power_of_2=True), autocast=None))
    assert net.get_submodule("blocks.1.0").config.round_scales_to_power_of_2


def test_checkpoints_are_plain_and_exchanged_with_32_true(tmp_path: Path) -> None:
    """A run goes on from a file of either precision; the file has the names and types of 32-true."""
    files = {}
    for name in ("float8", "32-true"):
        _, trainer = fit(name, epochs=1)
        trainer.save_checkpoint(tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=True)["state_dict"]
    shapes = [{key: (value.dtype, value.shape) for key, value in state.items()} for state in files.values()]
    assert shapes[0] == shapes[1]
    whole = torch.stack(fit("float8")[0].losses)
    resumed, _ = fit("float8", ckpt_path=tmp_path / "float8")
    torch.testing.assert_close(torch.stack(resumed.losses), whole[4:], rtol=0, atol=0)
    for first, then in (("float8", "32-true"), ("32-true", "float8")):
        other, _ = fit(then, ckpt_path=tmp_path / first)
        torch.testing.assert_close(torch.stack(other.losses), whole[4:], rtol=0.2, atol=0.1)


def test_hooks_of_a_layer_stay_and_a_second_run_converts_nothing_again() -> None:
    net, calls = Net(), []
    layer = net.get_submodule("blocks.0.0")
    layer.register_forward_hook(lambda *_: calls.append(1))
    fit("float8", net, epochs=1)
    assert len(calls) == 4
    first = net.get_submodule("blocks.0.0")
    assert first is not layer
    fit("float8", net, epochs=1)
    assert net.get_submodule("blocks.0.0") is first


def test_a_model_without_a_layer_that_fits_is_warned_of() -> None:
    engine = Engine(accelerator="cpu", precision="float8")
    with pytest.warns(UserWarning, match="converts no layer of Linear, .* no size of .* is a multiple of 16"):
        engine.setup_module(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="it has no torch.nn.Linear layer with a weight of its own"):
        engine.setup_module(nn.ReLU())
    assert converted(engine.setup_module(nn.Sequential(nn.Linear(16, 16))).module) == {"0"}
    layer = nn.Linear(16, 16)
    alone = engine.setup_module(layer)
    assert (alone(torch.full((16, 16), 0.3)) != layer(torch.full((16, 16), 0.3))).any()


def test_what_contradicts_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="there is no such recipe. Did you mean 'rowwise'"):
        Float8Precision("rowise")
    with pytest.raises(ConfigurationError, match="leave fsdp_all_gather out"):
        Float8Precision("rowwise", fsdp_all_gather=True)


class TestTwoProcesses(StrategyConformance):
    devices = 2
    precision = "32-true"

    @staticmethod
    def strategy() -> Any:
        return DDPStrategy()

    @needs_every_rank
    def test_float8_trains_inside_deepspeeds_engine(self, folder: Path) -> None:
        """Each stage gives DDP's numbers."""
        pytest.importorskip("deepspeed")
        from drivetrain.strategies.deepspeed import DeepSpeedStrategy

        expected, _ = self.run(DDPStrategy(), Float8Precision())
        for stage in (1, 2, 3):
            net = Net()
            trainer = self.trainer(DeepSpeedStrategy(stage=stage), precision="float8")
            trainer.fit(net, DataLoader(dataset(), batch_size=8))
            torch.testing.assert_close(torch.stack(net.losses), expected, rtol=1e-3, atol=1e-3)

    def run(
        self,
        strategy: Any,
        precision: Any,
        save: Path | None = None,
        resume: Path | None = None,
        batch_size: int = 8,
    ) -> Any:
        net, float8 = Net(), isinstance(precision, Float8Precision)
        trainer = self.trainer(strategy, **{"precision": None, "plugins": precision} if float8 else {})
        trainer.fit(net, DataLoader(dataset(), batch_size=batch_size), ckpt_path=resume)
        assert converted(net) == (BLOCKS if float8 else set())
        if save is not None:
            trainer.save_checkpoint(save)
        weights = {name: whole(value) for name, value in net.state_dict().items()}
        return (torch.stack(net.losses) if net.losses else None), weights

    @needs_every_rank
    def test_float8_trains_under_every_strategy_that_may_shard_it(self, folder: Path) -> None:
        """DDP, FSDP and meshes give the same numbers, also where FSDP gathers weights in 8 bits; files are plain."""
        expected, weights = self.run(DDPStrategy(), Float8Precision())
        strategies: list[tuple[Any, bool]] = [
            (FSDPStrategy(), False), (FSDPStrategy(), True), (ModelParallelStrategy(tensor_parallel_size=1), True)
        ]  # fmt: skip
        for number, (strategy, gathers) in enumerate(strategies):
            path = folder / f"{number}.ckpt"
            losses, found = self.run(strategy, Float8Precision(fsdp_all_gather=gathers), save=path)
            torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
            for name, value in weights.items():
                torch.testing.assert_close(found[name], value, rtol=1e-2, atol=2e-3)
            _, resumed = self.run(FSDPStrategy(), "32-true", resume=path)  # it has ended: nothing is trained
            torch.testing.assert_close(resumed, found, rtol=0, atol=0)
        plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
        _, found = self.run(ModelParallelStrategy(1, 2, tp_plan=plan), Float8Precision(), batch_size=16)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0.1, atol=0.1)  # scales are those of other batches


def whole(tensor: Any) -> Tensor:
    """A complete plain tensor with the same values."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.tensor(full.detach().tolist())


for _inherited in [name for name in dir(StrategyConformance) if name.startswith("test_")]:
    setattr(TestTwoProcesses, _inherited, None)
