"""``strategy="fsdp"``: which blocks it makes, and that its numbers are those of one process."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import near, token_data, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Engine, LightningModule, Trainer, WeightedLoss
from drivetrain.base.tree import map_leaves
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import FSDPStrategy
from drivetrain.strategies.sharded_state import is_dtensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(LightningModule):
    """Blocks of a width that two and three ranks do not divide; ``scale`` is smaller than the number of ranks."""

    def __init__(self, weighted: bool | str = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.weighted = weighted
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        if self.weighted:
            each = F.mse_loss(self(x), y, reduction="none").squeeze(1)
            weight = tokens.sum() if self.weighted == "tensor" else int(tokens.sum())
            return WeightedLoss((each * tokens).sum() / tokens.sum(), weight)
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(ranks: int, strategy: Any = "fsdp", **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "limit_val_batches": 0,
    }  # fmt: skip
    if ranks > 1:
        quiet |= {"strategy": strategy, "devices": ranks}
    return Trainer(**{**quiet, **arguments})


def fitted(ranks: int, options: dict[str, Any], weighted: bool | str = False, count: int = 48, **arguments: Any) -> Any:
    """Weights, optimizer state and step count of a fit, whole on every rank; with ranks, each batch is its part."""
    module, batch = Net(weighted), 8 // ranks if 8 % ranks == 0 else 8
    ours = trainer(ranks, FSDPStrategy(**options), split_batches=8 % ranks != 0, limit_val_batches=1.0, **arguments)
    ours.fit(module, DataLoader(token_data(count), batch_size=batch), DataLoader(token_data(12), batch_size=batch))
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]),
        "steps": ours.global_step,
        "loss": float(ours.callback_metrics["loss"]),
    }


# ---- the numbers of one process --------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 4},
    "clipped by norm": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "weighted by numbers": {"weighted": "number", "accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "weighted by tensors": {"weighted": "tensor", "accumulate_grad_batches": 3},
    "uneven ends": {"count": 43, "accumulate_grad_batches": 2},
    "uneven and weighted": {"count": 43, "weighted": "number", "accumulate_grad_batches": 4},
}
EXCHANGES = ("batch", "window")
LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"


def of_cases(ranks: int, options: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    return {case: fitted(ranks, options, **CASES[case]) for case in cases}


@functools.cache
def alone() -> dict[str, Any]:
    return of_cases(1, {}, list(CASES))


# What is left out of "batch" the parity matrix has, in one run.
RUNS: list[tuple[int, str, list[str]]] = [
    (2, "batch", ["clipped by value", "weighted by tensors", "uneven ends"]),
    (2, "window", ["accumulated", "clipped by norm", "weighted by numbers", "uneven and weighted"]),
    (3, "window", ["uneven and weighted"]),
]
if LONG:
    RUNS = [(ranks, exchange, list(CASES)) for ranks in (2, 3) for exchange in EXCHANGES]


@pytest.mark.parametrize(
    ("ranks", "exchange", "cases"), RUNS, ids=lambda each: "" if isinstance(each, list) else str(each)
)
def test_the_numbers_are_those_of_one_process(pool: Any, ranks: int, exchange: str, cases: list[str]) -> None:
    """Also with gradients that are exchanged once a window, weighted losses and uneven ends."""
    for rank in pool.run(of_cases, ranks, {"gradient_exchange": exchange}, cases, world_size=ranks, group=False):
        assert list(rank) == cases
        for case, found in rank.items():
            expected = alone()[case]
            for part in ("weights", "optimizer", "loss"):
                says = f"{case}: {part}: {{}}".format
                torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-9, msg=says)
            assert found["steps"] == expected["steps"]


def test_the_cases_differ() -> None:
    """The control: each of the cases gives weights of its own."""
    scales = [found["weights"]["head.weight"] for found in alone().values()]
    assert not any(torch.allclose(one, other, rtol=1e-6) for one, other in itertools.pairwise(scales))


class DividesByOne(Net):
    """Shards its blocks, or all of itself, and lets gradients be sums."""

    shards_all = False

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.blocks[0], FSDPModule):
            return
        mesh = self.trainer.strategy.device_mesh
        for block in [*self.blocks, *([self] if self.shards_all else [])]:
            fully_shard(block, mesh=mesh)
            block.set_gradient_divide_factor(1.0)


def shards_itself(shards_all: bool) -> Any:
    module = DividesByOne()
    module.shards_all = shards_all
    ours = trainer(2, FSDPStrategy())
    ours.fit(module, DataLoader(token_data(), batch_size=4))
    kinds = [type(each).__name__ for each in module.modules() if type(each).__name__.startswith("FSDP")]
    return {name: whole(value) for name, value in module.state_dict().items()}, kinds


@pytest.mark.parametrize("shards_all", [False, True], ids=["blocks", "all"])
def test_a_configure_model_that_shards_itself_is_respected_and_gradients_are_means(pool: Any, shards_all: bool) -> None:
    module = Net()
    trainer(1).fit(module, DataLoader(token_data(), batch_size=8))
    for weights, kinds in pool.run(shards_itself, shards_all, group=False):
        near(weights, dict(module.state_dict()))
        assert kinds == ["FSDPDividesByOne", "FSDPBlock", "FSDPBlock", "FSDPBlock"]


def with_a_policy_too() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(2, FSDPStrategy(auto_wrap_policy={Block})).fit(DividesByOne(), DataLoader(token_data(), batch_size=4))
    return str(caught.value)


def test_a_policy_beside_a_configure_model_that_shards_is_an_error(pool: Any) -> None:
    for message in pool.run(with_a_policy_too, group=False):
        assert "DividesByOne has sharded layers itself" in message


# ---- clipping --------------------------------------------------------------------------------------------------------


def norms(norm_type: float, bad: float | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from drivetrain.strategies.sharded_gradients import clip_by_norm, clip_by_value

    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(shape, generator=generator).double() for shape in ((5, 3), (1,), (4, 2), (2, 2), (3,))]
    if bad is not None:
        wholes[0][4, 0] = bad  # on the last rank only
    flat, deep = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    places: list[Any] = [
        (flat, [Shard(0)]), (flat, [Shard(0)]), (flat, [Shard(1)]), (deep, [Replicate(), Shard(0)]), None,
    ]  # fmt: skip
    parameters = []
    for gradient, place in zip(wholes, places, strict=True):
        spread = gradient.clone() if place is None else distribute_tensor(gradient, *place)
        parameters.append(nn.Parameter(torch.zeros_like(spread)))
        parameters[-1].grad = spread
    plain = [nn.Parameter(torch.zeros_like(gradient)) for gradient in wholes]
    for parameter, gradient in zip(plain, wholes, strict=True):
        parameter.grad = gradient.clone()
    if bad is not None:
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_by_norm(parameters, 0.5, norm_type, error_if_nonfinite=True)
        return None
    found = clip_by_norm(parameters, 0.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type)
    near([found, *(whole(each.grad) for each in parameters)], [expected, *(each.grad for each in plain)])
    assert not is_dtensor(found)
    clip_by_value(parameters, 0.01)
    torch.nn.utils.clip_grad_value_(plain, 0.01)
    near([whole(each.grad) for each in parameters], [each.grad for each in plain])
    return float(found)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_lists_of_tensors_and_dtensors_of_several_meshes_clip_as_whole_tensors(pool: Any, norm_type: float) -> None:
    """Also a parameter that is smaller than the number of ranks."""
    first, second = pool.run(norms, norm_type)
    assert first == second


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(pool: Any, bad: float) -> None:
    pool.run(norms, 2.0, bad)


def clipped_by_engine() -> Any:
    engine = Engine(accelerator="cpu", strategy=FSDPStrategy(), devices=2, precision="64-true")
    engine.launch()
    torch.manual_seed(1)
    module = nn.Sequential(Block(5), Block(5))
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    found = []
    for bad in (1.0, float("nan")):
        x = torch.full((2, 5), 0.5 + engine.global_rank, dtype=torch.float64) * (bad if engine.global_rank else 1.0)
        optimizer.zero_grad()
        engine.backward(model(x).square().mean())
        if bad == 1.0:
            found.append(float(engine.clip_gradients(model, optimizer, max_norm=0.1)))
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="the gradients is nan"):
                engine.clip_gradients(model, optimizer, max_norm=0.1)
    return found[0], {name: whole(value) for name, value in module.state_dict().items()}


def test_an_engine_clips_by_the_norm_of_the_whole_gradient_and_stops_where_asked(pool: Any) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(Block(5), Block(5)).double()
    x = torch.tensor([0.5, 0.5, 1.5, 1.5], dtype=torch.float64)[:, None].expand(4, 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    optimizer.step()
    for found, weights in pool.run(clipped_by_engine, group=False):
        assert found == pytest.approx(norm, rel=1e-6)  # an Engine returns outputs in 32 bits
        torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-6, atol=1e-6)


class Overflows(Net):
    """In the second batch the loss of the last rank is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


def skips() -> Any:
    module, ours = Overflows(), trainer(2, FSDPStrategy(), precision="16-mixed", max_epochs=1)
    ours.fit(module, DataLoader(token_data(), batch_size=4))
    finite = all(torch.isfinite(whole(value)).all() for value in module.state_dict().values())
    return ours.global_step, finite, ours.strategy.precision_plugin.state_dict()["scale"]


def test_a_scaled_loss_that_overflows_on_one_rank_skips_the_step_on_all(pool: Any) -> None:
    first, second = pool.run(skips, group=False)
    assert first == second
    assert first[0] < 6
    assert first[1]


# ---- which blocks ----------------------------------------------------------------------------------------------------


class Lone(LightningModule):
    """Without repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tied(Lone):
    """The last of its blocks shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[2].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch[0])).square().mean()  # type: ignore[no-any-return]


class CallsAMethod(Lone):
    """Uses the weight of a block without calling the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.linear(batch[0], self.blocks[0].weight).square().mean()


def messages(kind: type[LightningModule], options: dict[str, Any]) -> dict[str, Any]:
    """What a fit with these options warns of, and the error that it raises; and what is tied after it."""
    module, ours = kind(), trainer(2, FSDPStrategy(**options), max_epochs=1)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            ours.fit(module, DataLoader(token_data(8), batch_size=4))
        except ConfigurationError as raised:
            error = str(raised)
    said = [str(each.message) for each in caught if "FSDP" in str(each.message)]
    tied = kind is Tied and module.head.weight is module.blocks[2].weight  # type: ignore[union-attr,index]
    weights = {name: whole(value) for name, value in module.state_dict().items()}
    return {"warnings": said, "error": error, "tied": tied, "weights": weights}


def test_a_model_without_repeated_layers_is_one_block_and_a_warning_says_what_that_costs(pool: Any) -> None:
    first, second = pool.run(messages, Lone, {}, group=False)
    assert "found no repeated layers in Lone, so the whole model is one block" in first["warnings"][0]
    assert "the memory of the complete model" in first["warnings"][0]
    assert "auto_wrap_policy={Block}" in first["warnings"][0]
    for found in (second, *pool.run(messages, Lone, {"auto_wrap_policy": {Lone}}, group=False)):
        assert found["warnings"] == []


def test_a_policy_that_matches_nothing_is_an_error(pool: Any) -> None:
    for policy in ({nn.Conv2d}, {"Block"}):
        for found in pool.run(messages, Lone, {"auto_wrap_policy": policy}, group=False):
            assert "auto_wrap_policy matches no layer of Lone" in found["error"]
            assert "Linear" in found["error"]


def test_tied_weights_stay_in_one_block(pool: Any) -> None:
    alone = Tied()
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    for found in pool.run(messages, Tied, {}, group=False):
        assert found["tied"]
        assert torch.equal(found["weights"]["head.weight"], found["weights"]["blocks.2.weight"])
        assert found["weights"].keys() == before.keys()
    [warning] = pool.run(messages, Tied, {}, group=False)[0]["warnings"]
    assert "blocks.2 (with head)" in warning


def test_a_parameter_that_is_used_without_calling_its_block_is_explained(pool: Any) -> None:
    for found in pool.run(messages, CallsAMethod, {}, group=False):
        assert "FSDP gathers the parameters of a block when the block is called" in found["error"]


def told() -> str:
    import contextlib
    import io

    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        trainer(2, FSDPStrategy(), max_epochs=1).fit(Net(), DataLoader(token_data(8), batch_size=4))
    return written.getvalue()


def test_a_line_says_what_is_sharded(pool: Any) -> None:
    first, second = pool.run(told, group=False)
    assert (
        "FSDPStrategy shards Net over 2 processes, in these blocks: 3 x Block (blocks.0 ... blocks.2), the rest of Net."
    ) in first
    assert "shards Net" not in second


# ---- after an exception ----------------------------------------------------------------------------------------------


class FailsOnce(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 1:
            self.fails = False
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def trained_again(exchange: str) -> Any:
    module, ours = FailsOnce(), trainer(2, FSDPStrategy(gradient_exchange=exchange), accumulate_grad_batches=4)
    with pytest.raises(ZeroDivisionError):
        ours.fit(module, DataLoader(token_data(), batch_size=4))
    ours = trainer(2, FSDPStrategy(gradient_exchange=exchange), accumulate_grad_batches=4)
    ours.fit(module, DataLoader(token_data(), batch_size=4))
    return {name: whole(value) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_module_trains_again_after_an_exception_and_old_gradients_are_gone(pool: Any, exchange: str) -> None:
    module = Net()
    trainer(1, accumulate_grad_batches=4).fit(module, DataLoader(token_data(), batch_size=8))
    for weights in pool.run(trained_again, exchange, group=False):
        near(weights, dict(module.state_dict()))
