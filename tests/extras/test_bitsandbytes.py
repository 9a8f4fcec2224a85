"""BitsandbytesPrecision with the real bitsandbytes on the CPU: what is packed, trained, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.precision import BitsandbytesPrecision
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.model_parallel import ModelParallelStrategy
from drivetrain.testing.strategy_conformance import StrategyConformance, needs_every_rank

PACKED = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")


class Net(LightningModule):
    """A frozen body in the field's sense, and adapters beside it."""

    def __init__(self, seed: int = 0, norm: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(16, 32), nn.LayerNorm(32) if norm else nn.Identity(), nn.ReLU(), nn.Linear(32, 16)
            )
            self.head = nn.Linear(16, 1)
            self.adapter = nn.Parameter(torch.randn(16, 16) / 4)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x) + x @ self.adapter)
        return found

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x).float(), y)
        self.losses.append(loss.detach())
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(size: int = 16) -> DataLoader[Any]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size)


def trainer(precision: Any, **options: Any) -> Trainer:
    given = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    return Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
           "enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 0, **given, **options}
    )  # fmt: skip


def fit(precision: Any, net: Net | None = None, ckpt_path: Any = None, **options: Any) -> tuple[Net, Trainer]:
    made, net = trainer(precision, **options), net or Net()
    made.fit(net, loader(), loader(), ckpt_path=ckpt_path)
    return net, made


@pytest.mark.parametrize("mode", PACKED)
def test_weights_are_packed_and_frozen_and_the_rest_is_trained(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Biases and adapters keep 32 bits and learn; layers in ignore_modules stay as they are."""
    with caplog.at_level("INFO"):
        net, made = fit(BitsandbytesPrecision(mode, ignore_modules={"head"}))
    assert made.precision == f"bitsandbytes-{mode}"
    assert "packs 2 linear layers" in caplog.text
    assert "body.0, body.3; their weights are frozen. 7 parameters of the module can be trained." in caplog.text
    before, packed = Net(), {"body.0.weight", "body.3.weight"}
    for (name, found), old in zip(net.named_parameters(), before.parameters(), strict=True):
        assert found.requires_grad is (name not in packed)
        if name in packed:
            assert found.dtype is (torch.int8 if mode == "int8" else torch.uint8)
        else:
            assert found.dtype == torch.float32
            assert (found != old).any()
    assert torch.stack(net.losses)[-1] < 0.5 * net.losses[0]
    assert type(net.head) is nn.Linear


@pytest.mark.parametrize(("mode", "near"), [(mode, 0.02 if mode == "int8" else 0.25) for mode in PACKED])
def test_the_layers_compute_nearly_what_the_plain_ones_do(mode: str, near: float) -> None:
    engine, plain = Engine(accelerator="cpu", plugins=BitsandbytesPrecision(mode)), Net()
    x = next(iter(loader()))[0]
    with torch.no_grad():
        expected, found = plain.body(x), engine.setup_module(Net().body)(x)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() / expected.norm() < near


@pytest.mark.parametrize("mode", PACKED)
def test_a_plain_checkpoint_is_packed_when_it_is_loaded(mode: str, tmp_path: Path) -> None:
    """By validate, and by fit in the precision; the numbers are those of weights that were there from the start."""
    plain, made = fit("32-true", max_epochs=1)
    made.save_checkpoint(tmp_path / "plain.ckpt")
    losses = []
    for net, path in ((Net(seed=5), tmp_path / "plain.ckpt"), (plain, None)):
        net.losses.clear()
        trainer(BitsandbytesPrecision(mode), limit_val_batches=2).validate(net, loader(), ckpt_path=path, verbose=False)
        losses.append(torch.stack(net.losses))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


@pytest.mark.parametrize("mode", [*PACKED, "int8-training"])
def test_a_run_resumes_exactly_from_packed_weights(mode: str, tmp_path: Path) -> None:
    _, made = fit(BitsandbytesPrecision(mode), max_epochs=1)
    made.save_checkpoint(tmp_path / "packed.ckpt")
    state = torch.load(tmp_path / "packed.ckpt", weights_only=True)["state_dict"]
    integers = torch.int8 if mode == "int8" else torch.float32 if mode == "int8-training" else torch.uint8
    assert state["body.0.weight"].dtype == integers
    uninterrupted, _ = fit(BitsandbytesPrecision(mode))
    resumed, _ = fit(BitsandbytesPrecision(mode), Net(seed=5), tmp_path / "packed.ckpt")
    torch.testing.assert_close(torch.stack(resumed.losses), torch.stack(uninterrupted.losses)[4:], rtol=0, atol=0)
    torch.testing.assert_close(dict(resumed.state_dict()), dict(uninterrupted.state_dict()), rtol=0, atol=0)


def test_int8_training_trains_all_weights() -> None:
    net, _ = fit(BitsandbytesPrecision("int8-training"))
    for found, old in zip(net.parameters(), Net().parameters(), strict=True):
        assert found.requires_grad
        assert found.dtype == torch.float32
        assert (found != old).any()


def test_int8_training_validates_while_it_trains() -> None:
    """Evaluation packs the weights of that moment, and computes what training would."""
    net = Net()
    made = trainer(BitsandbytesPrecision("int8-training"), max_epochs=1, limit_val_batches=1)
    made.fit(net, loader(), loader(64))
    assert net.losses[-1] < 0.8 * net.losses[0]
    model = Engine(accelerator="cpu", plugins=BitsandbytesPrecision("int8-training")).setup_module(Net())
    x = next(iter(loader()))[0]
    trained, evaluated = model.train()(x), model.eval()(x)
    torch.testing.assert_close(evaluated, trained, rtol=0, atol=0)
    evaluated.sum().backward()  # as of a frozen batch norm's model
    assert model.body[0].weight.grad is not None


@pytest.mark.parametrize("rows", [1, 5])
def test_int8_evaluates_what_it_trains_on_every_cpu(rows: int) -> None:
    """By unpacked weights, because torch multiplies 8-bit integers wrongly on some CPUs."""
    model = Engine(accelerator="cpu", plugins=BitsandbytesPrecision("int8")).setup_module(Net())
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        trained, evaluated = model.train().body(x), model.eval().body(x)
    torch.testing.assert_close(evaluated, trained, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [*PACKED, "int8-training"])
def test_inputs_have_any_number_of_dimensions(mode: str) -> None:
    """Forward and backward, as the plain layers have it."""
    plain = nn.Sequential(nn.Linear(16, 32))
    nn.init.eye_(plain[0].weight)
    model = Engine(accelerator="cpu", plugins=BitsandbytesPrecision(mode)).setup_module(copy.deepcopy(plain))
    for shape in ((16,), (4, 16), (2, 3, 16), (2, 3, 4, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        results = []
        for layers in (plain, model):
            layers.zero_grad()
            inputs = x.clone().requires_grad_()
            output = layers(inputs)
            output.square().sum().backward()
            gradients = [each.grad for each in layers.parameters()]
            results.append([output, inputs.grad, gradients[-1], *(gradients if mode == "int8-training" else [])])
        torch.testing.assert_close(results[1], results[0], rtol=0.1, atol=0.1)


def test_an_optimizer_of_bitsandbytes_trains_and_resumes(tmp_path: Path) -> None:
    import bitsandbytes as bnb

    class With8BitStates(Net):
        def configure_optimizers(self) -> Any:
            return bnb.optim.Adam8bit(self.parameters(), lr=0.01, min_8bit_size=1)

    _, made = fit("32-true", With8BitStates(), max_epochs=1)
    made.save_checkpoint(tmp_path / "states.ckpt")
    uninterrupted, _ = fit("32-true", With8BitStates())
    resumed, _ = fit("32-true", With8BitStates(5), tmp_path / "states.ckpt")
    torch.testing.assert_close(dict(resumed.state_dict()), dict(uninterrupted.state_dict()), rtol=0, atol=0)


def test_what_cannot_be_packed_says_so() -> None:
    with pytest.raises(ConfigurationError, match="there is no such mode. Did you mean 'nf4-dq'"):
        BitsandbytesPrecision("nf4dq")
    with pytest.raises(ConfigurationError, match=r"Write \{'head'\}"):
        BitsandbytesPrecision(ignore_modules="head")
    with pytest.raises(ConfigurationError, match="ReLU has none that it can pack"):
        Engine(accelerator="cpu", plugins=BitsandbytesPrecision()).setup_module(nn.ReLU())


def test_layers_of_bitsandbytes_in_the_model_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    import bitsandbytes as bnb

    model = nn.Sequential(bnb.nn.Linear4bit(16, 16), nn.Linear(16, 16))
    with caplog.at_level("INFO"):
        Engine(accelerator="cpu", plugins=BitsandbytesPrecision()).setup_module(model)
    assert "Sequential has 1 layer of bitsandbytes itself, so BitsandbytesPrecision packs no others." in caplog.text
    assert type(model[1]) is nn.Linear


def test_a_weight_of_another_shape_is_an_error() -> None:
    layer = Engine(accelerator="cpu", plugins=BitsandbytesPrecision()).setup_module(nn.Sequential(nn.Linear(16, 32)))
    with pytest.raises(RuntimeError, match=r"0.weight in the checkpoint is a .* of shape \(3, 3\), but the layer"):
        layer.load_state_dict({"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(32)})


class TestTwoProcesses(StrategyConformance):
    devices = 2
    precision = "32-true"

    @staticmethod
    def strategy() -> Any:
        return DDPStrategy()

    @needs_every_rank
    def test_ddp_packs_the_weights_of_rank_0_and_fsdp_says_that_it_cannot_shard_them(self, folder: Path) -> None:
        rank = self.trainer().global_rank
        for mode in ("nf4-dq", "int8"):
            net = Net(seed=rank)
            made = self.trainer(precision=None, plugins=BitsandbytesPrecision(mode))
            made.fit(net, loader(8))
            states = made.strategy.world.gather_objects(
                {name: each.tolist() for name, each in net.state_dict().items()}
            )
            assert states[0] == states[1]
            with pytest.raises(ConfigurationError, match="packs weights into integers, .* cannot shard"):
                self.trainer(FSDPStrategy(), precision=None, plugins=BitsandbytesPrecision(mode)).fit(Net(), loader(8))

    @needs_every_rank
    def test_a_layer_that_tensor_parallelism_splits_is_not_packed_for_training(self, folder: Path) -> None:
        """FSDP gathers weights before they are packed; a layer that is left out of either trains."""
        plan = {"body.0": "colwise", "body.3": "rowwise"}
        plan_of = {"split": plan, "ignored": plan, "sharded": {}}
        for name, tp_plan in plan_of.items():
            ignored = {"body.0", "body.3"} if name == "ignored" else None
            strategy = ModelParallelStrategy(1, 2, tp_plan=tp_plan) if tp_plan else FSDPStrategy()
            precision = BitsandbytesPrecision("int8-training", ignore_modules=ignored)
            made = self.trainer(strategy, precision=None, plugins=precision)
            net = Net(norm=False)
            if name == "split":
                with pytest.raises(ConfigurationError, match=r"\(32, 16\) that tensor parallelism .* ignore_modules"):
                    made.fit(net, loader(8))
            else:
                made.fit(net, loader(8))


for _inherited in [name for name in dir(StrategyConformance) if name.startswith("test_")]:
    setattr(TestTwoProcesses, _inherited, None)
