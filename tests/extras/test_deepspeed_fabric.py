"""``lightning.fabric.strategies.DeepSpeedStrategy`` in loops of one's own, on one and on two processes of the CPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import compat
from drivetrain.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own


@contextmanager
def served() -> Iterator[Any]:
    """The original's modules may be imported; yields Fabric's DeepSpeedStrategy."""
    compat.install()
    try:
        from lightning.fabric.strategies import DeepSpeedStrategy

        yield DeepSpeedStrategy
    finally:
        compat.uninstall()


@pytest.fixture(autouse=True)
def _environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Engine has no end, and DeepSpeed needs LOCAL_RANK as long as there is one: remove it after each test."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("LOCAL_RANK")


@pytest.fixture
def strategy() -> Iterator[Any]:
    with served() as found:
        yield found


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))


def engine_of(strategy: Any, devices: int = 1, **arguments: Any) -> Any:
    engine = drivetrain.Engine(accelerator="cpu", devices=devices, strategy=strategy, **arguments)
    engine.launch()
    return engine


def data() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def weights_of(engine: Any, model: Any) -> dict[str, torch.Tensor]:
    """Complete weights, on every rank."""
    own = getattr(engine.strategy, "get_module_state_dict", None)
    found: dict[str, torch.Tensor] = engine.broadcast(model.state_dict() if own is None else own(model.module))
    return {name: value.clone() for name, value in found.items()}


def program(
    strategy: Any, devices: int = 1, batch: int = 4, accumulates: int = 1, folder: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """A loop with a scheduler and clipping; with a folder, it is saved in the middle and goes on in another engine."""
    by_itself = arguments.pop("by_itself", False)
    clips = arguments.pop("clips", 0.5)
    engine = engine_of(strategy() if callable(strategy) else strategy, devices, **arguments)
    losses: list[float] = []

    def built() -> Any:
        with engine.init_module():
            module = net()
        plain = torch.optim.AdamW(module.parameters(), lr=0.05)
        model, optimizer = engine.setup(module, plain)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def epoch() -> None:
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % accumulates == 0
            with engine.no_backward_sync(model, enabled=not (last or by_itself)):
                loss = F.mse_loss(model(x).float(), y)
                engine.backward(loss / (1 if by_itself else accumulates), model=model)
            losses.append(engine.all_reduce(loss.detach()).item())
            if last and clips:
                engine.clip_gradients(model, optimizer, max_norm=clips)
            if last or by_itself:
                optimizer.step()
                optimizer.zero_grad()
            if last:
                scheduler.step()

    model, optimizer, scheduler = built()
    loader = engine.setup_dataloaders(DataLoader(data(), batch_size=batch))
    epoch()
    if folder is not None:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 1, "note": {"a": [1]}}
        engine.save(folder / "state", state)
        model, optimizer, scheduler = built()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
        rest = engine.load(folder / "state", state)
        assert (state["epoch"], rest["note"]) == (1, {"a": [1]})
    epoch()
    found = {"losses": losses, "weights": weights_of(engine, model), "lr": optimizer.param_groups[0]["lr"]}
    engine.teardown()
    return found


def near(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-4) -> None:
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name].float(), value.float(), rtol=tolerance, atol=tolerance)
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    assert found["lr"] == pytest.approx(expected["lr"])
    assert len(set(expected["losses"])) > 8  # the control: it has learnt something


STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2, "offload_optimizer": True},
    "3": {"stage": 3, "offload_parameters": True, "allgather_bucket_size": 1000},
}


def on_two_ranks(folder: Path) -> list[Any]:
    with served() as strategy, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's own
        found = []
        for name, arguments in STAGES.items():
            kwargs = {"devices": 2, "batch": 2, "accumulates": 2}
            found += [
                program(lambda arguments=arguments: strategy(**arguments), folder=folder / name, **kwargs),
                program(strategy(config=accumulating(arguments["stage"])), by_itself=True, **kwargs),
            ]
        return found


def accumulating(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def test_two_processes_train_as_one_on_all_samples(pool: Any, tmp_path: Path) -> None:
    """Also after a checkpoint, and where DeepSpeed's engine accumulates gradients itself."""
    expected = program("auto", batch=4, accumulates=2)
    one, other = pool.run(on_two_ranks, tmp_path, group=False)
    assert len(one) == 2 * len(STAGES)
    for found in (*one, *other):
        near(found, expected)
    assert one[0]["losses"] == other[0]["losses"]


@pytest.mark.parametrize("name", STAGES)
def test_one_process_trains_as_without_deepspeed(strategy: Any, name: str, tmp_path: Path) -> None:
    near(program(lambda: strategy(**STAGES[name]), folder=tmp_path), program("auto"))
    assert (tmp_path / "state" / "checkpoint" / "mp_rank_00_model_states.pt").is_file() or name == "3"
    assert (tmp_path / "state" / "zero_to_fp32.py").is_file()  # DeepSpeed's own tool reads the folder


def test_gradients_are_clipped_in_the_step(strategy: Any) -> None:
    near(program(strategy(stage=2), clips=1e-2), program("auto", clips=1e-2))
    engine = engine_of(strategy())
    model, optimizer = engine.setup(module := net(), torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="clips gradients by their norm"):
        engine.clip_gradients(model, optimizer, clip_val=1.0)
    engine.teardown()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_precisions(strategy: Any, stage: int) -> None:
    for precision, tolerance in (("bf16-mixed", 0.03), ("16-mixed", 0.03), ("bf16-true", 0.15)):
        found = program(strategy(stage=stage), precision=precision, clips=None)
        near(found, program("auto", precision=precision, clips=None), tolerance)


def test_a_scheduler_that_was_set_up_is_stepped_with_the_optimizer(strategy: Any) -> None:
    engine = engine_of(strategy(stage=2))
    module = net()
    plain = torch.optim.SGD(module.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.setup(
        module, plain, scheduler=torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    )
    rates = []
    for _ in range(3):
        engine.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        rates.append((scheduler.get_last_lr(), engine.strategy.model.basic_optimizer.param_groups[0]["lr"]))
    assert rates == [([0.5], 1.0), ([0.25], 0.5), ([0.125], 0.25)]  # the engine has stepped with the one before
    engine.teardown()


def test_two_models_are_told_apart_by_model(strategy: Any) -> None:
    engine = engine_of(strategy(stage=1))
    made = []
    for _ in range(2):
        module = net()
        made.append(engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)))
    (first, one), (second, _) = made
    before = {name: value.clone() for name, value in second.module.state_dict().items()}
    loss = first(torch.ones(1, 4)).sum()
    with pytest.raises(ConfigurationError, match=r"2 modules were set up .* Write fabric\.backward\(loss, model"):
        engine.backward(loss)
    engine.backward(loss, model=first)
    one.step()
    torch.testing.assert_close(dict(second.module.state_dict()), before, rtol=0, atol=0)
    assert not torch.equal(first.module[0].weight, second.module[0].weight)
    engine.teardown()


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_weights_are_read(strategy: Any, stage: int, tmp_path: Path) -> None:
    expected = {name: value + 1 for name, value in net().state_dict().items()}
    torch.save(expected, tmp_path / "raw.pt")
    engine = engine_of(strategy(stage=stage, load_full_weights=True))
    module = net()
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
    engine.load_raw(tmp_path / "raw.pt", model)
    torch.testing.assert_close(weights_of(engine, model), expected)
    assert engine.strategy._deepspeed_engine is engine.strategy.model is model._forward_module
    engine.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()  # from the copies that the engine steps
    torch.testing.assert_close(weights_of(engine, model), expected)
    engine.teardown()


def test_an_evaluation_needs_no_optimizer(strategy: Any) -> None:
    for stage in (2, 3):
        engine = engine_of(strategy(stage=stage))
        model = engine.setup_module(net())
        torch.testing.assert_close(model(torch.ones(1, 4)), net()(torch.ones(1, 4)))
        engine.teardown()


def test_the_names_stand_for_it_in_an_engine(strategy: Any) -> None:
    engine = engine_of("deepspeed_stage_3_offload")
    assert type(engine.strategy) is strategy
    assert (engine.strategy.stage, "offload_param" in engine.strategy.config["zero_optimization"]) == (3, True)
    engine.teardown()
    trainer = drivetrain.Trainer(accelerator="cpu", devices=1, strategy="deepspeed_stage_1", logger=False)
    assert type(trainer.strategy) is drivetrain.strategies.DeepSpeedStrategy
    with pytest.raises(ConfigurationError, match=r'Write Engine\(strategy="deepspeed_stage_2"\)'):
        engine_of(drivetrain.strategies.DeepSpeedStrategy()).setup(net())


def test_what_is_refused_says_what_to_write(strategy: Any, tmp_path: Path) -> None:
    engine = engine_of(strategy())
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"model, optimizer = fabric\.setup"):
        engine.setup_optimizers(optimizer)
    with pytest.raises(ConfigurationError, match="got 2 optimizers"):
        engine.setup(module, optimizer, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss several times"):
        engine.setup(module, torch.optim.LBFGS(module.parameters()))
    model, optimizer = engine.setup(module, optimizer)
    with pytest.raises(ConfigurationError, match="state with 0 modules"):
        engine.save(tmp_path / "x", {"epoch": 1})
    with pytest.raises(ConfigurationError, match="'global_steps', which DeepSpeed uses"):
        engine.save(tmp_path / "x", {"model": model, "global_steps": 1})
    with pytest.raises(ConfigurationError, match="without filter"):
        engine.save(tmp_path / "x", {"model": model}, filter={"model": lambda name, value: True})
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of DeepSpeed"):
        engine.load(tmp_path / "x", {"model": model})
    engine.teardown()


def test_arguments(strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategy(stage=3, offload_optimizer=True, offload_parameters=True, offload_params_device="nvme",
                    nvme_path="/x", reduce_bucket_size=7, logging_batch_size_per_gpu=5)  # fmt: skip
    zero = made.config["zero_optimization"]
    assert made.zero_stage_3
    assert (zero["reduce_bucket_size"], made.config["train_micro_batch_size_per_gpu"]) == (7, 5)
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert (zero["offload_param"]["device"], zero["offload_param"]["nvme_path"]) == ("nvme", "/x")
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    assert strategy(config=tmp_path / "own.json").stage == 1
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(tmp_path / "own.json"))
    assert strategy().stage == 1
    assert strategy(config={"zero_optimization": {"stage": 3}}).stage == 3
    monkeypatch.delenv("PL_DEEPSPEED_CONFIG_PATH")
    for wrong in ({"stage": 0}, {"zero_optimization": False}, {"config": {}}):
        with pytest.raises(ConfigurationError, match="Write stage=1, 2 or 3"):
            strategy(**wrong)
    assert (strategy().loss_scale, strategy(hysteresis=3).hysteresis) == (0, 3)
    assert isinstance(drivetrain.strategies.DeepSpeedStrategy(), strategy)
    with pytest.raises(ConfigurationError, match=r"Subclass lightning\.pytorch\.strategies\.DeepSpeedStrategy\."):
        drivetrain.Trainer(accelerator="cpu", devices=1, strategy=strategy())
