"""Models that torch.compile has compiled, on two processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer


class Recording:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(48, 4, generator=generator), torch.randn(48, 1, generator=generator)), batch_size=2
    )


def fitted(how: str) -> tuple[torch.Tensor, int, list[str]]:
    """The weights, how many graphs were compiled, and the names in a checkpoint."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch's own reading
    torch._dynamo.reset()
    module, backend = Net(), Recording()
    given: Any = module
    if how == "torch.compile(module)":
        given = torch.compile(module, backend=backend)
    elif how == "module.compile()":
        module.compile(backend=backend)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(given, loader())
    assert trainer.lightning_module is module
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return weights, backend.graphs, list(trainer.strategy.lightning_module_state_dict())


@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_ddp_trains_a_compiled_model_to_the_same_weights_and_compiles_it_once(pool: Any, how: str) -> None:
    expected, none, names = pool.run(fitted, "", group=False)[0]
    assert none == 0
    for weights, graphs, found in pool.run(fitted, how, group=False):
        assert torch.equal(weights, expected)
        assert 1 <= graphs <= 4  # DDP splits a graph where a bucket of gradients ends
        assert found == names


def through_an_engine(compiles: bool) -> tuple[torch.Tensor, int]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    net, backend = nn.Linear(4, 1), Recording()
    given: Any = torch.compile(net, backend=backend) if compiles else net
    engine = Engine(accelerator="cpu", devices=2, strategy="ddp")
    engine.launch()
    model, optimizer = engine.setup(given, torch.optim.SGD(given.parameters(), lr=0.1))
    for x, y in engine.setup_dataloaders(loader()):
        optimizer.zero_grad()
        engine.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model.module is net
    return net.weight.detach().clone(), backend.graphs


def test_an_engine_trains_a_compiled_model_to_the_same_weights(pool: Any) -> None:
    expected, _ = pool.run(through_an_engine, False, group=False)[0]
    for weight, graphs in pool.run(through_an_engine, True, group=False):
        assert torch.equal(weight, expected)
        assert graphs >= 1


# ---- Trainer(compile=...) --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).tanh()


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(4, 1))


def fitted_by_trainer(strategy: str, form: Any, folder: str) -> tuple[torch.Tensor, int, list[str]]:
    """The weights in a checkpoint after a fit that resumes once, how many graphs were compiled, and the names there."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch's own reading
    torch._dynamo.reset()
    backend = Recording()
    compiles = {} if form is None else {"compile": {**form, "backend": backend}}
    path = f"{folder}/{strategy}-{form}.ckpt"
    for epochs, resumes in ((1, None), (2, path)):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=2, **compiles,
        )  # fmt: skip
        trainer.fit(Blocks(), loader(), ckpt_path=resumes)
        trainer.save_checkpoint(path)
    state = torch.load(path)["state_dict"]
    return torch.cat([value.flatten() for value in state.values()]), backend.graphs, list(state)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_trainer_compiles_the_model_or_its_blocks(pool: Any, strategy: str, tmp_path: Any) -> None:
    expected, none, names = pool.run(fitted_by_trainer, strategy, None, str(tmp_path), group=False)[0]
    assert none == 0
    assert names == list(Blocks().state_dict())
    for form, most in (({}, 40), ({"blocks": True}, 2)):
        for weights, graphs, found in pool.run(fitted_by_trainer, strategy, form, str(tmp_path), group=False):
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
            assert 1 <= graphs <= most  # two fits, and not again in every step
            assert found == names
