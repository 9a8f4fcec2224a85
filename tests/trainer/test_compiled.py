"""``trainer.fit(torch.compile(model))``: in place, with the same numbers, and no trace of it in checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.base.compiled import context_of
from drivetrain.callbacks import ModelCheckpoint

# torch compares tensors that it carries from one graph to the next, and warns itself of reading their .grad
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recording:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


class Net(LightningModule):
    """Its steps use a layer, and not ``self(x)``; all of them log."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, self.hparams.width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": loss * 2, "one": 1.0})
        if self.current_epoch > 90 or self.global_step > 900:  # counters that change from step to step
            loss = loss * 0
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.manual_backward(loss)
        optimizer.step()


class Hooked(Net):
    """Overrides hooks inside the step and around it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm())


class ByLBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class PartCompiled(Net):
    def __init__(self, width: int = 8, compiles: bool = True) -> None:
        super().__init__(width)
        if compiles:
            self.net: Any = torch.compile(self.net, backend="eager")


@pytest.fixture
def make_trainer(make_trainer: Any) -> Any:
    """A Trainer that does not miss a validation loader."""
    return lambda **arguments: make_trainer(**{"limit_val_batches": 0, **arguments})


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class LogsRates(Net):
    """Reads its optimizer inside the step; the rate changes from step to step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("kind", [Net, ByHand, Hooked, ByLBFGS, LogsRates])
@pytest.mark.parametrize("arguments", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 1}], ids=["32", "16"])
def test_a_compiled_model_trains_in_place_to_the_same_weights(
    kind: type[Net], arguments: Any, loader: DataLoader[Any], make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, module, backend = kind(), kind(), Recording()
    expected = make_trainer(max_epochs=11, limit_val_batches=1.0, **arguments)
    expected.fit(plain, loader, loader)
    trainer = make_trainer(max_epochs=11, limit_val_batches=1.0, **arguments)
    trainer.fit(torch.compile(module, backend=backend), loader, loader)
    assert torch.equal(weights(module), weights(plain))
    assert trainer.callback_metrics == expected.callback_metrics
    assert trainer.lightning_module is trainer.model is module
    assert 1 <= len(backend.graphs) <= 25  # and not again in every step
    assert trainer.global_step == expected.global_step
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_steps_are_compiled_and_not_only_forward(loader: DataLoader[Any], make_trainer: Any) -> None:
    class OwnLayers(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the step calls the layers itself")

    backend = Recording()
    make_trainer().fit(torch.compile(OwnLayers(), backend=backend), loader)
    called = {node.target for graph in backend.graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert nn.functional.mse_loss in called


def test_without_torch_compile_nothing_is_compiled(loader: DataLoader[Any], make_trainer: Any) -> None:
    """Negative control of the test above."""
    module = Net()
    make_trainer().fit(module, loader, loader)
    assert context_of(module) is None
    assert module._compiled_call_impl is None


def test_every_entry_point_takes_a_compiled_model(loader: DataLoader[Any], make_trainer: Any) -> None:
    module = Net()
    expected = make_trainer(limit_val_batches=1.0).validate(module, loader, verbose=False)
    compiled, trainer = torch.compile(module, backend="eager"), make_trainer(limit_val_batches=1.0)
    assert trainer.validate(compiled, loader, verbose=False) == expected
    assert trainer.test(compiled, loader, verbose=False) == expected
    for found, (x, _) in zip(trainer.predict(compiled, loader), loader, strict=True):
        assert torch.equal(found, module(x))
    assert trainer.test(dataloaders=loader, verbose=False) == expected


def test_a_checkpoint_has_the_names_of_the_original(loader: DataLoader[Any], make_trainer: Any, tmp_path: Any) -> None:
    module, checkpoint = Net(width=6), ModelCheckpoint(dirpath=tmp_path, save_last=True)
    trainer = make_trainer(callbacks=checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(torch.compile(module, backend="eager"), loader)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    for path in (checkpoint.best_model_path, checkpoint.last_model_path, tmp_path / "own.ckpt"):
        assert list(torch.load(path)["state_dict"]) == list(module.state_dict()) == list(Net().state_dict())
        loaded = Net.load_from_checkpoint(path)
        assert torch.equal(weights(loaded), weights(module))
        assert loaded.hparams.width == 6
    resumed = Net(width=6)
    again = make_trainer(max_epochs=3, callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True)
    again.fit(torch.compile(resumed, backend="eager"), loader, ckpt_path=tmp_path / "own.ckpt")
    assert again.global_step == 12


def test_fits_follow_each_other_compiled_or_not(loader: DataLoader[Any], make_trainer: Any) -> None:
    module, plain = Net(), Net()
    compiled = torch.compile(module, backend="eager")
    for each in (compiled, compiled, module):
        make_trainer().fit(each, loader)
        make_trainer().fit(plain, loader)
        assert torch.equal(weights(module), weights(plain))


def test_what_is_compiled_in_place_can_be_copied_and_pickled(loader: DataLoader[Any], make_trainer: Any) -> None:
    module = Net()
    make_trainer().fit(torch.compile(module, backend="eager"), loader)
    x = torch.ones(1, 4)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert context_of(twin) is None
        with torch.no_grad():
            twin.net[0].weight.zero_()
            twin.net[0].bias.zero_()
        assert torch.equal(twin(x), twin.net[2].bias[None])  # its own layers, not the original's
        assert not torch.equal(module(x), twin(x))


def test_with_fullgraph_forward_is_compiled_and_steps_are_not(
    loader: DataLoader[Any], make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class CallsItself(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    backend = Recording()
    with caplog.at_level("INFO"):
        make_trainer().fit(torch.compile(CallsItself(), backend=backend, fullgraph=True), loader)
    assert len(backend.graphs) == 1
    assert "calls of CallsItself run compiled, and its steps as they are" in caplog.text


def test_a_step_that_steps_its_optimizers_itself_is_not_compiled_and_says_so(
    loader: DataLoader[Any], make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, backend = ByHand(), Recording()
    with caplog.at_level("INFO"):
        make_trainer().fit(torch.compile(module, backend=backend), loader)
    assert "calls of ByHand run compiled, and its training_step as it is" in caplog.text
    called = {node.target for graph in backend.graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert nn.functional.mse_loss not in called
    assert backend.graphs


def test_hyperparameters_and_the_device_may_be_read_inside_one_graph(
    loader: DataLoader[Any], make_trainer: Any
) -> None:
    class Reads(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.hparams.width + torch.ones(1, device=self.device)

    backend = Recording()
    make_trainer(limit_val_batches=1).validate(
        torch.compile(Reads(), backend=backend, fullgraph=True), loader, verbose=False
    )
    assert len(backend.graphs) == 1


def test_callbacks_get_the_original(loader: DataLoader[Any], make_trainer: Any) -> None:
    seen = []

    class Looks(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            seen.extend([pl_module, trainer.lightning_module, trainer.model])

    module = Net()
    make_trainer(callbacks=Looks()).fit(torch.compile(module, backend="eager"), loader)
    assert all(each is module for each in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_fits_with_and_without_a_compiled_submodule(
    saves: bool, loads: bool, loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    module, trainer, path = PartCompiled(compiles=saves), make_trainer(max_epochs=1), tmp_path / "part.ckpt"
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(path)
    state = torch.load(path)["state_dict"]
    assert list(state) == list(Net().state_dict())
    assert torch.equal(weights(PartCompiled.load_from_checkpoint(path, compiles=loads)), weights(module))
    other = PartCompiled(compiles=loads)
    other.load_state_dict(state)
    other.load_state_dict(module.state_dict())  # torch's names for it fit too
    assert torch.equal(weights(other), weights(module))
    resumed = PartCompiled(compiles=loads)
    make_trainer(max_epochs=2).fit(resumed, loader, ckpt_path=path)
    straight = PartCompiled(compiles=False)
    make_trainer(max_epochs=2).fit(straight, loader)
    assert torch.equal(weights(resumed), weights(straight))


def test_what_is_no_lightning_module_inside_is_named(loader: DataLoader[Any], make_trainer: Any) -> None:
    with pytest.raises(ValueError, match="needs a LightningModule, not a Linear"):
        make_trainer().fit(torch.compile(nn.Linear(1, 1), backend="eager"), loader)


def test_a_model_that_compiled_itself_trains_too(loader: DataLoader[Any], make_trainer: Any) -> None:
    module, plain, backend = Net(), Net(), Recording()
    module.compile(backend=backend)
    make_trainer(limit_val_batches=1.0).fit(module, loader, loader)
    make_trainer(limit_val_batches=1.0).fit(plain, loader, loader)
    assert torch.equal(weights(module), weights(plain))
    assert backend.graphs
