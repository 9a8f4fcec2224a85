"""Engine as programs written for Fabric expect it."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Engine, LightningModule, compat
from drivetrain.compat.collectives import SingleDeviceCollective, TorchCollective
from drivetrain.compat.fabric_loggers import FabricCSVLogger as CSVLogger
from drivetrain.compat.fabric_loggers import FabricTensorBoardLogger as TensorBoardLogger
from drivetrain.compat.samplers import DistributedSamplerWrapper
from drivetrain.compat.wrapped import _unwrap_objects
from drivetrain.errors import CheckpointError, ConfigurationError, UnloggableError
from drivetrain.loggers import DummyLogger


def of_one() -> Engine:
    return Engine(accelerator="cpu", devices=1)


class Takes:
    """Hooks with fewer and more arguments than a call gives."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)

    def on_batch(self, **given: Any) -> None:
        self.seen.append(given)

    def on_end(self) -> None:
        self.seen.append("end")


def test_a_hook_gets_the_keywords_that_it_takes() -> None:
    callback = Takes()
    engine = Engine(accelerator="cpu", devices=1, callbacks=[callback])
    engine.call("on_epoch", epoch=3, model=object(), loss=1.0)
    engine.call("on_batch", epoch=3, loss=1.0)
    engine.call("on_end", epoch=3)
    engine.call("on_epoch", 4)
    engine.call("on_nothing", epoch=3)
    assert callback.seen == [3, {"epoch": 3, "loss": 1.0}, "end", 4]


# ---- load(weights_only=) ---------------------------------------------------------------------------------------------


class OfOwn:
    """No plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfOwn)


def test_load_reads_objects_only_when_told_that_weights_only_is_false(tmp_path: Path) -> None:
    engine, path = of_one(), tmp_path / "state.ckpt"
    module = nn.Linear(2, 1)
    torch.save({"module": module.state_dict(), "other": OfOwn()}, path)
    fresh = nn.Linear(2, 1)
    for refused in (None, True):
        with pytest.raises(CheckpointError):
            engine.load(path, {"module": fresh}, weights_only=refused)
    assert engine.load(path, {"module": fresh}, weights_only=False) == {"other": OfOwn()}
    assert torch.equal(fresh.weight, module.weight)


def test_load_raw_takes_weights_only(tmp_path: Path) -> None:
    class Marked(OrderedDict[str, Any]):
        """A dictionary that the restricted reader does not know."""

    globals()["Marked"] = Marked
    Marked.__qualname__ = "Marked"
    engine, path, module = of_one(), tmp_path / "raw.pt", nn.Linear(2, 1)
    torch.save(Marked(module.state_dict()), path)
    fresh = nn.Linear(2, 1)
    with pytest.raises(CheckpointError):
        engine.load_raw(path, fresh, weights_only=True)
    engine.load_raw(path, fresh, strict=True, weights_only=False)
    assert torch.equal(fresh.weight, module.weight)


# ---- loggers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("name", ["runs", ""])
def test_loggers_of_fabric_take_root_dir(tmp_path: Path, cls: Any, name: str) -> None:
    logger = cls(root_dir=tmp_path / "logs", name=name)
    engine = Engine(accelerator="cpu", devices=1, loggers=logger)
    engine.log("loss", torch.tensor(1.0), step=0)
    logger.save()
    logger.finalize("success")
    assert (logger.root_dir, logger.name, logger.version) == (str(tmp_path / "logs"), name, 0)
    assert Path(logger.log_dir) == tmp_path / "logs" / name / "version_0"
    assert list(Path(logger.log_dir).iterdir())
    assert cls(root_dir=tmp_path / "logs", name=name).version == 1
    engine.teardown()


def test_positional_arguments_of_fabrics_tensorboard_logger_have_its_order(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "runs", 3, False, "train", "sub")
    assert Path(logger.log_dir) == tmp_path / "runs" / "version_3" / "sub"
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    assert [path.name for path in tmp_path.rglob("hparams.yaml")] == []


def test_fabrics_tensorboard_logger_records_a_graph(tmp_path: Path) -> None:
    for options in ({}, {"log_graph": True}):
        logger = TensorBoardLogger(tmp_path, **options)
        with mock.patch.object(logger.experiment, "add_graph") as add_graph:
            Engine(accelerator="cpu", devices=1, loggers=logger).logger.log_graph(nn.Linear(2, 1), torch.ones(1, 2))
        add_graph.assert_called_once()


# ---- a LightningModule -----------------------------------------------------------------------------------------------


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        self.log_dict({"a": 1.0})
        return loss


class Lines(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append(dict(metrics))


def set_up(**arguments: Any) -> tuple[Engine, Net, Any, Any]:
    engine = Engine(accelerator="cpu", devices=1, **arguments)
    module = Net()
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    return engine, module, model, optimizer


class LogsValue(LightningModule):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.layer = value, nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.value)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("value", [torch.ones(2), [1, 2], (1.0, torch.tensor(2.0)), torch.ones(0), np.ones(2)])
def test_log_refuses_several_values_under_one_name_as_the_trainer_does(value: Any, make_trainer: Any) -> None:
    logger = Lines()
    engine = Engine(accelerator="cpu", devices=1, loggers=logger)
    with pytest.raises(UnloggableError, match=r"Engine.log\('loss', ...\) got .*Log one number per name") as caught:
        engine.log_dict({"other": 1.0, "loss": value})
    assert isinstance(caught.value, ValueError)
    assert logger.lines == []
    with pytest.raises(UnloggableError, match=r"self.log\('loss', ...\) got "):
        make_trainer().fit(LogsValue(value), DataLoader(torch.ones(2, 2)))


@pytest.mark.parametrize("value", [torch.full((1,), 1.5), np.array([1.5]), np.array(1.5), np.float32(1.5)])
def test_log_takes_an_array_of_one_number_as_the_trainer_does(value: Any, make_trainer: Any) -> None:
    logger = Lines()
    Engine(accelerator="cpu", devices=1, loggers=logger).log("loss", value)
    trainer = make_trainer()
    trainer.fit(LogsValue(value), DataLoader(torch.ones(2, 2)))
    assert logger.lines == [{"loss": trainer.callback_metrics["loss"].item()}] == [{"loss": 1.5}]
    assert type(logger.lines[0]["loss"]) is float


def test_log_passes_what_is_no_number_to_the_loggers() -> None:
    logger = Lines()
    Engine(accelerator="cpu", devices=1, loggers=logger).log("note", "text")  # a logger may write it
    assert logger.lines == [{"note": "text"}]


@pytest.mark.parametrize("given", [3, [None], True, object(), CSVLogger])
def test_what_is_no_logger_is_refused_when_the_engine_is_built(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Engine\(loggers=...\) got .* Pass a drivetrain.loggers.Logger"):
        Engine(accelerator="cpu", devices=1, loggers=given)
    with pytest.raises(KeyError, match="There is no logger called 'cvs'"):
        Engine(accelerator="cpu", devices=1, loggers="cvs")


def test_the_logger_of_an_engine_without_one_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="has no logger"):
        _ = Engine(accelerator="cpu", devices=1).logger


def test_the_csv_logger_of_fabric_writes_hyperparameters(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.5, "widths": [1, 2]})
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == {"lr": 0.5, "widths": [1, 2]}


def test_a_module_logs_to_the_loggers_of_the_engine() -> None:
    logger = Lines()
    _, module, model, _ = set_up(loggers=logger)
    loss = model.training_step(torch.ones(1, 2), 0)
    assert logger.lines == [{"loss": loss.item()}, {"a": 1.0}]
    assert module.logger is logger
    assert module.loggers == [logger]


@pytest.mark.parametrize(("algorithm", "gradient"), [(None, 3 / 5), ("norm", 3 / 5), ("value", 1.0)])
def test_clip_gradients_of_a_module_goes_to_the_engine(algorithm: str | None, gradient: float) -> None:
    engine, module, model, optimizer = set_up()
    engine.backward(_loss(model))
    module.clip_gradients(optimizer, None)
    assert module.layer.weight.grad is not None
    assert module.layer.weight.grad.tolist() == [[3.0, 4.0]]
    module.clip_gradients(optimizer, 1.0, algorithm)
    assert module.layer.weight.grad[0, 0].item() == pytest.approx(gradient)


def _loss(model: Any) -> Tensor:
    loss: Tensor = model.training_step(torch.tensor([[3.0, 4.0]]), 0)
    return loss


def test_gradients_are_unscaled_before_a_module_clips_them() -> None:
    engine, module, model, optimizer = set_up(precision="bf16-mixed")
    engine.backward(_loss(model))
    module.clip_gradients(optimizer, gradient_clip_val=1.0)
    assert module.layer.weight.grad is not None
    assert module.layer.weight.grad.norm().item() == pytest.approx(1.0)


def test_all_gather_and_ranks_of_a_module_are_those_of_the_engine() -> None:
    engine, module, _, _ = set_up()
    value = torch.ones(2)
    assert torch.equal(module.all_gather({"x": value})["x"], engine.all_gather(value))
    assert (module.global_rank, module.local_rank) == (0, 0)


def test_trainer_of_a_module_has_what_the_engine_has() -> None:
    engine, module, _, optimizer = set_up(loggers=Lines())
    trainer: Any = module.trainer
    assert (trainer.world_size, trainer.is_global_zero, trainer.strategy) == (1, True, engine.strategy)
    assert trainer.loggers == engine.loggers
    assert getattr(trainer, "datamodule", "none") == "none"
    with pytest.raises(AttributeError, match="runs in an Engine, not in a Trainer, and an Engine has no 'max_epochs'"):
        print(trainer.max_epochs)
    module.toggle_optimizer(optimizer)  # it asks the strategy for all optimizers
    module.untoggle_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        print(Net().trainer)


def test_call_reaches_the_hooks_of_a_module_that_is_set_up() -> None:
    class Hooked(Net):
        def on_train_epoch_start(self) -> None:
            seen.append("epoch")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    seen: list[Any] = []
    engine, module = of_one(), Hooked()
    engine.call("on_train_epoch_start")
    model = engine.setup(module)
    engine.call("on_train_epoch_start")
    engine.call("on_train_batch_end", None, None, 3)
    engine.call("on_validation_model_eval")
    assert seen == ["epoch", 3]
    assert not model.training
    assert engine.callbacks == [module]


# ---- launch and run --------------------------------------------------------------------------------------------------


def test_launch_calls_functions_with_the_engine_and_their_arguments() -> None:
    def main(engine: Engine, *numbers: int, factor: int = 1) -> tuple[int, int]:
        return engine.world_size, factor * sum(numbers)

    engine = of_one()
    assert engine.launch(main, 1, 2, factor=3) == (1, 9)
    assert engine.launch(lambda engine: engine.global_rank) == 0
    assert engine.launch() is None
    with pytest.raises(ConfigurationError, match="called with the engine as its first argument"):
        engine.launch(lambda: None)


class Program(Engine):
    def __init__(self, factor: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.factor = factor

    def run(self, number: int, more: int = 0) -> tuple[bool, int]:
        return self._launched, self.factor * (number + more)


class Derived(Program):
    def run(self, *args: Any, **kwargs: Any) -> tuple[bool, int]:
        launched, number = super().run(*args, **kwargs)
        return launched, number + 1


def test_a_subclass_holds_the_program_in_run() -> None:
    assert Program(2, accelerator="cpu", devices=1).run(3, more=4) == (True, 14)
    assert Derived(2, accelerator="cpu", devices=1).run(3) == (True, 7)


def test_seed_everything_of_an_engine_takes_verbose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert of_one().seed_everything(3, workers=False, verbose=False) == 3
    assert "Seed set" not in caplog.text
    of_one().seed_everything(4)
    assert "Seed set to 4" in caplog.text


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_a_collective_of_one_process_exchanges_nothing() -> None:
    collective, one, two = SingleDeviceCollective().setup(), torch.ones(1), torch.full((1,), 2.0)
    assert (collective.rank, collective.world_size, collective.is_initialized()) == (0, 1, True)
    for same in (collective.broadcast(one, 0), collective.all_reduce(one, "sum"), collective.reduce(one, 0, "sum")):
        assert same is one
    assert collective.all_gather([two], one) == collective.gather(one, [two]) == [one]
    assert collective.scatter(one, [two]) is collective.reduce_scatter(one, [two], "sum") is two
    assert collective.all_to_all([one], [two]) == [two]
    with pytest.raises(RuntimeError, match=r"no group yet. Call SingleDeviceCollective.create_group\(\) first"):
        print(collective.group)
    collective.create_group()
    with pytest.raises(RuntimeError, match="has a group already"):
        collective.create_group()
    collective.teardown()


# ---- samplers --------------------------------------------------------------------------------------------------------


class Reversed:
    """A sampler of a user's; it counts its epochs."""

    epoch = -1

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Any:
        return iter(range(6, -1, -1))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_distributed_sampler_wrapper_shares_out_what_any_sampler_draws() -> None:
    own = Reversed()
    parts = [DistributedSamplerWrapper(own, num_replicas=2, rank=rank, shuffle=False) for rank in (0, 1)]
    assert [list(part) for part in parts] == [[6, 4, 2, 0], [5, 3, 1, 6]]
    parts[0].set_epoch(3)
    assert own.epoch == 3
    loader = DataLoader(list(range(7)), batch_size=2, sampler=parts[1])
    assert [batch.tolist() for batch in of_one().setup_dataloaders(loader)] == [[5, 3], [1, 6]]
    with pytest.raises(ConfigurationError, match="without a length"):
        DistributedSamplerWrapper(iter([1]), num_replicas=2, rank=0)


def test_wrapped_objects_are_taken_out_of_a_tree() -> None:
    _, module, model, optimizer = set_up()
    found = _unwrap_objects({"all": [model, optimizer, 3]})
    assert found["all"][0] is module
    assert found["all"][1] is optimizer.optimizer
    loader = DataLoader([1])
    assert _unwrap_objects(of_one().setup_dataloaders(loader)) is loader


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "served"),
    [
        ("fabric.plugins.collectives", "TorchCollective", TorchCollective),
        ("fabric.plugins.collectives.torch_collective", "TorchCollective", TorchCollective),
        ("fabric.plugins.collectives", "SingleDeviceCollective", SingleDeviceCollective),
        ("fabric.plugins.collectives.single_device", "SingleDeviceCollective", SingleDeviceCollective),
        ("fabric.utilities.distributed", "DistributedSamplerWrapper", DistributedSamplerWrapper),
        ("fabric.loggers", "CSVLogger", CSVLogger),
        ("fabric.loggers.tensorboard", "TensorBoardLogger", TensorBoardLogger),
    ],
)
def test_names_of_fabric_are_served_under_its_paths(path: str, name: str, served: Any) -> None:
    compat.install()
    try:
        assert getattr(importlib.import_module(f"lightning.{path}"), name) is served
    finally:
        compat.uninstall()
