"""``PipelineStrategy``: stages on several ranks train as one process does."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import Saves, near, token_data
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import PipelineStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x + self.shift)))  # type: ignore[no-any-return]


class Net(LightningModule):
    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.weighted = weighted
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, y: Tensor, tokens: Tensor) -> Any:
        if not self.weighted:
            return F.mse_loss(output, y)
        each = F.mse_loss(output, y, reduction="none").squeeze(1)
        return WeightedLoss((each * tokens).sum() / tokens.sum(), int(tokens.sum()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        return self.loss(self(x), y, tokens)

    def configure_pipeline(self, num_stages: int) -> Any:
        layers = [self.before, *self.blocks, self.head]
        sizes = [len(layers) // num_stages + (number < len(layers) % num_stages) for number in range(num_stages)]
        ends = list(itertools.accumulate(sizes))
        return [nn.Sequential(*layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)], self.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Sometimes(nn.Linear):
    """Its bias has a gradient in some batches only."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(x, self.weight, self.bias if self.used else self.bias.detach())


class FrozenNet(Net):
    """A frozen weight in the last stage, and a first stage that is frozen, but for one bias later on."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__(weighted)
        self.before = Sometimes(4, 4)
        nn.ModuleList([self.before, *self.blocks[:2]]).requires_grad_(False)
        last: Any = self.blocks[3]
        last.first.weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        assert self.before.bias is not None
        self.before.bias.requires_grad_(self.current_epoch == 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.used = batch_idx % 3 == 1

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        groups = [{"params": parameters[0::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.02)


def trainer(strategy: Any = "auto", ranks: int = 1, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "strategy": strategy, "devices": ranks,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def whole(ours: Trainer) -> dict[str, Any]:
    """Weights and optimizer state of all stages, on rank 0."""
    strategy = ours.strategy
    return {
        "weights": {name: each.clone() for name, each in strategy.lightning_module_state_dict().items()},
        "optimizer": strategy.optimizer_state(ours.optimizers[0]).get("state"),
    }


# ---- the numbers of one process --------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped by norm": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "clipped by value, uneven": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "count": 43},
    "frozen, clipped by norm": {"kind": FrozenNet, "gradient_clip_val": 0.05},
    "frozen, clipped by value": {"kind": FrozenNet, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "weighted": {"weighted": True, "accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "count": 44},
}


def fitted(
    options: Any, ranks: int, data_ranks: int = 1, weighted: bool = False, count: int = 48, kind: Any = Net, **more: Any
) -> Any:
    module = kind(weighted)
    ours = trainer("auto" if options is None else PipelineStrategy(**options), ranks, **more)
    batch = 8 // data_ranks
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ours.fit(
            module,
            DataLoader(token_data(count), batch_size=batch, shuffle=True),
            DataLoader(token_data(12), batch_size=batch),
        )
    parameters = [each for each in module.parameters() if not each.is_meta]
    return {
        **whole(ours), "steps": ours.global_step, "loss": float(ours.callback_metrics["loss"]),
        "losses": torch.stack(module.losses), "held": sum(each.numel() for each in parameters),
        "not trained": "no gradient has reached" in said.getvalue(),
    }  # fmt: skip


def of_cases(options: Any, ranks: int, data_ranks: int, cases: list[str]) -> dict[str, Any]:
    return {case: fitted(options, ranks, data_ranks, **CASES[case]) for case in cases}


@functools.cache
def alone() -> dict[str, Any]:
    return of_cases(None, 1, 1, list(CASES))


LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
EVERY = list(CASES)
KINDS: dict[str, tuple[dict[str, Any], int, int, list[str]]] = {
    "gpipe": ({"schedule": "gpipe"}, 2, 1, EVERY if LONG else EVERY[:1]),
    "1f1b": ({"schedule": "1f1b"}, 2, 1, EVERY if LONG else EVERY[1:3]),
    "interleaved": ({"schedule": "interleaved_1f1b"}, 2, 1, EVERY if LONG else EVERY[-1:]),
    "two pipelines": ({"num_microbatches": 2, "pipeline_parallel_size": 2}, 4, 2, EVERY if LONG else EVERY[2:]),
}


@pytest.mark.parametrize(("options", "ranks", "data_ranks", "cases"), list(KINDS.values()), ids=list(KINDS))
def test_the_numbers_are_those_of_one_process(
    pool: Any, options: Any, ranks: int, data_ranks: int, cases: list[str]
) -> None:
    results = pool.run(of_cases, options, ranks, data_ranks, cases, world_size=ranks, group=False)
    for case in cases:
        expected = alone()[case]
        for part in ("weights", "optimizer"):
            near(results[0][case][part], expected[part], f"{case}: {part}: {{}}".format)
        for rank in results:
            near(rank[case]["loss"], expected["loss"])
            assert rank[case]["steps"] == expected["steps"]
            assert rank[case]["not trained"] == expected["not trained"] is False
            if data_ranks == 1:
                near(rank[case]["losses"], expected["losses"], f"{case}: losses: {{}}".format)
        assert sum(rank[case]["held"] for rank in results) == data_ranks * expected["held"]


def test_the_cases_differ() -> None:
    """The control: each of the cases gives weights of its own."""
    heads = [found["weights"]["head.weight"] for found in alone().values()]
    assert not any(torch.allclose(one, other, rtol=1e-6) for one, other in itertools.pairwise(heads))


# ---- evaluation and state --------------------------------------------------------------------------------------------


def resumed(ranks: int, path: Path | None, saves: Path | None = None, at: int = 0, **arguments: Any) -> Any:
    module, strategy = Net(), "auto" if ranks == 1 else PipelineStrategy("interleaved_1f1b")
    ours = trainer(
        strategy, ranks, limit_val_batches=0, callbacks=[Saves(saves, at)] if at and saves else [], **arguments
    )
    ours.fit(module, DataLoader(token_data(), batch_size=8, shuffle=bool(at)), ckpt_path=path)
    if saves and not at:
        ours.save_checkpoint(saves)
    return whole(ours)


def exactly(folder: Path) -> list[tuple[Any, Any]]:
    """An uninterrupted run and one that is resumed: from the middle of an epoch, and inside a window."""
    found = []
    for at, accumulate in ((9, 1), (9, 4)):
        torch.manual_seed(3)
        file = folder / f"{accumulate}.ckpt"
        expected = resumed(2, None, file, at, accumulate_grad_batches=accumulate)
        found.append((resumed(2, file, None, at, accumulate_grad_batches=accumulate), expected))
    return found


def test_a_run_is_resumed_exactly(pool: Any, tmp_path: Path) -> None:
    for one, other in pool.run(exactly, tmp_path, group=False)[0]:
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_checkpoints_are_those_of_one_process_and_are_resumed_from_each_other(pool: Any, tmp_path: Path) -> None:
    expected = resumed(1, None)
    alone, pipeline = tmp_path / "alone.ckpt", tmp_path / "pipeline.ckpt"
    first = resumed(1, None, alone, max_epochs=1)
    near(pool.run(resumed, 2, alone, group=False)[0], expected)
    pool.run(one_epoch, pipeline, group=False)
    near(resumed(1, pipeline), expected)
    saved = torch.load(pipeline, weights_only=True)
    assert saved["state_dict"].keys() == first["weights"].keys()
    near(dict(saved["state_dict"]), first["weights"])
    plain = Net()
    plain.load_state_dict(saved["state_dict"])


def one_epoch(path: Path) -> None:
    resumed(2, None, path, max_epochs=1)


def evaluated(ranks: int) -> Any:
    """What a fit, a test, a validation and a prediction of one module give, and a second fit."""
    module = Net()
    ours = trainer("auto" if ranks == 1 else PipelineStrategy(), ranks)
    loaders = [DataLoader(token_data(count), batch_size=8) for count in (48, 19)]
    ours.fit(module, *loaders)
    values = [ours.test(module, loaders[1], verbose=False)[0]["loss"]]
    values.append(ours.validate(module, loaders[1], verbose=False)[0]["loss"])
    predicted: Any = ours.predict(module, loaders[1])
    ours = trainer("auto" if ranks == 1 else PipelineStrategy("gpipe"), ranks, max_epochs=1, limit_val_batches=0)
    ours.fit(module, loaders[0])
    return values, predicted and torch.cat(predicted), whole(ours)["weights"]


def test_it_evaluates_and_trains_again(pool: Any) -> None:
    values, predicted, weights = evaluated(1)
    (first, its, after), (second, nothing, _) = pool.run(evaluated, 2, group=False)
    for found in (first, second):
        assert found == pytest.approx(values, rel=1e-9)
    near(its, predicted)
    near(after, weights)
    assert nothing == []


def test_it_computes_in_bfloat16(pool: Any) -> None:
    module = Net()
    trainer(precision="bf16-mixed", limit_val_batches=0).fit(module, DataLoader(token_data(), batch_size=8))
    found = pool.run(in_half, group=False)[0]
    assert {each.dtype for each in found.values()} == {torch.float32}
    torch.testing.assert_close(found, dict(module.state_dict()), rtol=0.05, atol=0.05)


def in_half() -> Any:
    ours = trainer(PipelineStrategy(), 2, precision="bf16-mixed", limit_val_batches=0)
    ours.fit(Net(), DataLoader(token_data(), batch_size=8))
    return whole(ours)["weights"]


class Hooked(Net):
    """Notes the hooks inside a step that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any) -> None:
        self.called.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, *limits)


def hooked() -> Any:
    from drivetrain.strategies.pipeline_stages import Schedule

    sizes: list[int] = []
    train = Schedule.train

    def counted(self: Any, inputs: Any, target: Any) -> Any:
        sizes.append(len(inputs[0]))
        return train(self, inputs, target)

    module = Hooked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "train", counted)
        ours = trainer(PipelineStrategy(), 2, max_epochs=1, limit_val_batches=0, gradient_clip_val=0.05)
        ours.fit(module, DataLoader(token_data(19), batch_size=8))
    return sizes, module.called


def test_each_batch_is_one_step_of_the_schedule_and_calls_the_hooks_that_it_honours(pool: Any) -> None:
    for sizes, called in pool.run(hooked, group=False):
        assert sizes == [8, 8, 3]
        each = ["on_before_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping"]
        assert called == 3 * each


def validated(ranks: int) -> Any:
    module, ours = Net(), trainer("auto" if ranks == 1 else PipelineStrategy(), ranks)
    return ours.validate(module, DataLoader(token_data(19), batch_size=8), verbose=False)[0]["loss"]


def test_it_validates_a_module_that_it_has_not_trained(pool: Any) -> None:
    assert pool.run(validated, 2, group=False) == pytest.approx(2 * [validated(1)], rel=1e-9)


# ---- what is refused -------------------------------------------------------------------------------------------------


class NoHook(Net):
    configure_pipeline = None  # type: ignore[assignment]


class WrongNumber(Net):
    def configure_pipeline(self, num_stages: int) -> Any:
        return [nn.Sequential(self.before, *self.blocks, self.head)], self.loss


class WrongResult(Net):
    def configure_pipeline(self, num_stages: int) -> Any:
        return super().configure_pipeline(num_stages)[0]


class LeavesOut(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class TiesStages(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].first.weight = self.blocks[0].first.weight  # type: ignore[union-attr]


class Foreign(Net):
    def configure_pipeline(self, num_stages: int) -> Any:
        stages, loss = super().configure_pipeline(num_stages)
        return [stages[0], nn.Sequential(stages[1], nn.Linear(1, 1))], loss


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class BackwardHook(Net):
    def on_after_backward(self) -> None:
        pass


class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


class Closure(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class CallsALayer(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head(self.before(batch[0]))


REFUSED: dict[type[Net], str] = {
    NoHook: "NoHook has no method configure_pipeline, which PipelineStrategy calls for the stages",
    WrongNumber: "WrongNumber.configure_pipeline returned 1 stage, and 2 are needed: 2 processes with 1 each",
    WrongResult: "WrongResult.configure_pipeline returned a list: [Sequential(",
    LeavesOut: "LeavesOut.configure_pipeline leaves scale in no stage",
    TiesStages: "puts blocks.0.first.weight, blocks.3.first.weight into several stages",
    Foreign: "Stage 1 of Foreign.configure_pipeline has parameters that are not in Foreign",
    Manual: "Manual optimizes manually, and PipelineStrategy runs the backward passes of all stages itself",
    BackwardHook: "PipelineStrategy owns its training step and does not call on_after_backward, which BackwardHook",
    OwnBackward: "does not call backward, which OwnBackward overrides",
    OwnStep: "does not call optimizer_step, which OwnStep overrides",
    Closure: "PipelineStrategy steps one optimizer that evaluates no closure, and configure_optimizers returned LBFGS",
    CallsALayer: "Call self(x) in validation_step, test_step and predict_step",
}


def refusals() -> dict[str, str]:
    found = {}
    for kind in REFUSED:
        with pytest.raises(ConfigurationError) as caught:
            trainer(PipelineStrategy(), 2).fit(
                kind(), DataLoader(token_data(), batch_size=8), DataLoader(token_data(16), batch_size=8)
            )
        found[kind.__name__] = str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        trainer(PipelineStrategy(), 2, precision="16-mixed", limit_val_batches=0).fit(
            Net(), DataLoader(token_data(), batch_size=8)
        )
    found["scaled"] = str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        trainer(PipelineStrategy(), 2, limit_val_batches=0).fit(
            Net(),
            DataLoader([{"x": torch.ones(4)}] * 8, batch_size=4),  # type: ignore[list-item]
        )
    return {**found, "batch": str(caught.value)}


def test_hooks_and_modules_that_it_cannot_honour_are_refused(pool: Any) -> None:
    for rank in pool.run(refusals, group=False):
        for kind, text in REFUSED.items():
            assert text in rank[kind.__name__]
        assert 'Write precision="bf16-mixed"' in rank["scaled"]
        assert "Return (input, target) from the dataset" in rank["batch"]


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"schedule='1f2b'\) is unknown. Did you mean '1f1b'"):
        PipelineStrategy("1f2b")  # type: ignore[arg-type]
    for wrong in (0, 2.0, True):
        with pytest.raises(ConfigurationError, match="num_microbatches is an int of at least 1"):
            PipelineStrategy(num_microbatches=wrong)  # type: ignore[arg-type]
    for schedule, stages in (("interleaved_1f1b", 1), ("gpipe", 2)):
        with pytest.raises(ConfigurationError, match="do not go together"):
            PipelineStrategy(schedule, stages_per_rank=stages)  # type: ignore[arg-type]
    for size, text in ((3, "does not divide the 4 processes"), (1, "with 4 processes splits no model")):
        strategy = PipelineStrategy(pipeline_parallel_size=size)
        strategy.world_size = 4
        with pytest.raises(ConfigurationError, match=text):
            _ = strategy.size


def example(ranks: int) -> Any:
    path = Path(__file__).parents[2] / "examples" / "pipeline.py"
    return runpy.run_path(str(path))["main"](ranks, epochs=1)


def test_the_example_trains_as_with_one_process(pool: Any) -> None:
    expected = example(1)
    for found in pool.run(example, 2, group=False):
        assert found == pytest.approx(expected, rel=1e-4)
