"""Sequences split over ranks: the numbers are those of one process, and what cannot be split says so."""

from __future__ import annotations

import functools
import os
from collections import UserDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer, WeightedLoss
from drivetrain.base.tree import map_leaves
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import Group, ModelParallelStrategy, context_parallel
from drivetrain.strategies.sharded_state import is_dtensor

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
WORDS, LENGTH, HEADS, WIDTH = 11, 8, 4, 2


def data(count: int = 16) -> TensorDataset:
    """Tokens, targets, and which positions count: other numbers of them in each part of a sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (count, LENGTH + 1), generator=generator)
    counts = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH) < counts)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.heads = 1 if kind == "shared heads" else HEADS
        size = HEADS * WIDTH
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, self.heads * WIDTH)
        self.value, self.out = nn.Linear(size, self.heads * WIDTH), nn.Linear(size, size)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in (self.query, self.key, self.value))
        options: dict[str, Any] = {"is_causal": True}
        if self.kind == "shared heads":
            options["enable_gqa"] = True
        elif self.kind == "mask":  # each head sees another window
            places = torch.arange(LENGTH)
            far = (places[:, None] - places).abs()
            options = {"attn_mask": far <= torch.arange(1, HEADS + 1)[:, None, None]}
        found = context_parallel.attention(q, k, v, **options)
        return x + self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(LightningModule):
    sequence_dims: ClassVar[Any] = {0: 1, 1: 1, 2: 1}

    def __init__(self, kind: str = "causal", weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(WORDS, HEADS * WIDTH), nn.Embedding(LENGTH, HEADS * WIDTH)
        self.blocks = nn.ModuleList(Attention(kind) for _ in range(2))
        self.head = nn.Linear(HEADS * WIDTH, WORDS)
        self.weighted = weighted
        self.lengths: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens).clone()  # torch warns of views that a sharded module returns

    def logits(self, tokens: Tensor) -> Tensor:
        self.lengths.add(tokens.shape[1])
        x = self.words(tokens) + self.places(context_parallel.positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets, counts = batch
        each = F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        if not self.weighted:
            return each.mean()
        number = counts.sum()
        return WeightedLoss((each * counts.flatten()).sum() / number.clamp(min=1), number)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return context_parallel.gather(self.logits(batch[0]), 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Planned(Net):
    tp_plan: ClassVar = {"head": "colwise_rep"}


def trainer(strategy: Any = "auto", ranks: int = 1, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 1, "precision": "64-true", "strategy": strategy, "devices": ranks,
        "limit_val_batches": 2,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


CASES: dict[str, dict[str, Any]] = {
    "causal, accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "weighted by tokens": {"weighted": True, "accumulate_grad_batches": 3},
    "weighted by tokens, exchanged once a window": {"weighted": True, "accumulate_grad_batches": 3, "window": True},
    "heads of keys are shared": {"kind": "shared heads"},
    "a mask for each head": {"kind": "mask"},
    "uneven ends": {"count": 13, "weighted": True},
}


def whole(value: Any) -> Any:
    return value.full_tensor() if is_dtensor(value) else value


def fitted(
    sizes: tuple[int, int, int], kind: str = "causal", weighted: bool = False, window: bool = False, count: int = 16,
    **arguments: Any,
) -> Any:  # fmt: skip
    """Weights, optimizer state and what a fit has logged, whole on every rank."""
    replicas, parts, tensor = sizes
    module, ranks = (Planned if tensor > 1 else Net)(kind, weighted), replicas * parts * tensor
    exchange: Any = "window" if window else "batch"
    strategy: Any = "auto" if ranks == 1 else ModelParallelStrategy(
        replicas, tensor, context_parallel_size=parts, gradient_exchange=exchange
    )  # fmt: skip
    ours = trainer(strategy, ranks, **arguments)
    batch = 4 // replicas
    ours.fit(module, DataLoader(data(count), batch_size=batch, shuffle=True), DataLoader(data(6), batch_size=batch))
    assert module.lengths == {LENGTH // parts}
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]),
        "loss": float(ours.callback_metrics["loss"]),
    }


def of_cases(sizes: tuple[int, int, int], cases: list[str]) -> dict[str, Any]:
    return {case: fitted(sizes, **CASES[case]) for case in cases}


@functools.cache
def alone(case: str) -> dict[str, Any]:
    return fitted((1, 1, 1), **CASES[case])  # type: ignore[no-any-return]


SOME = list(CASES) if LONG else list(CASES)[2:4]
SIZES = [(1, 2, 1), *([(2, 2, 1), (1, 2, 2), (1, 4, 1)] if LONG else [])]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "data {}, context {}, tensor {}".format(*sizes))
def test_the_numbers_are_those_of_one_process(pool: Any, sizes: tuple[int, int, int]) -> None:
    """Weights, optimizer states and the logged loss, to 1e-9 in 64 bits."""
    ranks = sizes[0] * sizes[1] * sizes[2]
    for rank in pool.run(of_cases, sizes, SOME, world_size=ranks, group=False):
        for case, found in rank.items():
            for part, expected in alone(case).items():
                message = f"{case}: {part}: {{}}".format
                torch.testing.assert_close(found[part], expected, rtol=1e-9, atol=1e-9, msg=message)


def without_exchange(sizes: tuple[int, int, int]) -> Any:
    whole_attention = context_parallel.attention
    context_parallel.attention = F.scaled_dot_product_attention  # type: ignore[assignment]
    try:
        return fitted(sizes)["weights"]["words.weight"]
    finally:
        context_parallel.attention = whole_attention


def test_attention_to_one_part_gives_other_numbers(pool: Any) -> None:
    """The control: without the exchange, the comparison above fails."""
    expected = fitted((1, 1, 1))["weights"]["words.weight"]
    for found in pool.run(without_exchange, (1, 2, 1), group=False):
        assert not torch.allclose(found, expected, rtol=1e-3)


def strategy(**options: Any) -> Any:
    return ModelParallelStrategy(1, 1, context_parallel_size=2, **options)


def fails(text: str, module: Net, loader: Any = None, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=text):
        trainer(strategy(**options), 2, limit_val_batches=0).fit(module, loader or DataLoader(data(), batch_size=4))


def everything_else(folder: Path) -> list[Any]:
    """Checkpoints, predictions, ways to name fields, and errors; on two ranks."""

    class ThreeHeads(Net):
        def logits(self, tokens: Tensor) -> Tensor:
            heads = torch.zeros(len(tokens), 3, tokens.shape[1], 2)
            return context_parallel.attention(heads, heads, heads)

    class PartOfAMask(Net):
        def logits(self, tokens: Tensor) -> Tensor:
            heads, size = torch.zeros(len(tokens), 2, tokens.shape[1], 2), tokens.shape[1]
            return context_parallel.attention(heads, heads, heads, torch.ones(size, size, dtype=torch.bool))

    class Unnamed(Net):
        sequence_dims = None

    class Odd(Net):
        sequence_dims: ClassVar[Any] = {0: 0}

    odd = DataLoader(TensorDataset(torch.zeros(3, 3, dtype=torch.long)), batch_size=3)
    fails("3 heads cannot be divided among 2 processes", ThreeHeads())
    fails(r"a mask of shape \(4, 4\), and complete sequences have 8 positions", PartOfAMask())
    fails("the dimensions that are sequences are unknown. Write sequence_dims=", Unnamed())
    fails("names the field 7, and the batch has no such tensor. Known: 0, 1, 2", Net(), sequence_dims={7: 1})
    fails("no tensor of the batch, .* has this dimension", Net(), sequence_dims=5)
    fails(r"shape \(3, 3\) cannot be split into 2 parts along dimension 0. Pad", Odd(), odd)
    fails('"ring": torch has ring attention .* Write context_parallel_attention="ulysses"', Net(),
          context_parallel_attention="ring")  # fmt: skip
    found = []
    for dims in (1, lambda batch, part: [part(each, 1) for each in batch]):
        module = Unnamed()
        ours = trainer(strategy(sequence_dims=dims), 2, limit_val_batches=0)
        ours.fit(module, DataLoader(data(), batch_size=4))
        found.append(map_leaves(whole, dict(module.state_dict())))
    ours.save_checkpoint(folder / "parts")
    again = trainer(strategy(sequence_dims=1), 2)
    predictions = again.predict(Unnamed(), DataLoader(data(6), batch_size=3), ckpt_path=folder / "parts")
    assert not context_parallel._ENTERED
    return [*found, predictions, ours.distributed_sampler_kwargs, list(ours.strategy.data.ranks)]


def in_a_ring() -> None:
    """torch's ring attention on the host, past the check that refuses it there."""
    trainer(strategy(sequence_dims=1), 2, limit_val_batches=0, max_steps=1).fit(Net(), DataLoader(data(), batch_size=4))
    heads, plain = torch.zeros(1, 2, 4, 2), F.scaled_dot_product_attention
    with context_parallel._ring(torch.distributed.group.WORLD, 2, torch.device("cpu", 0)):
        assert F.scaled_dot_product_attention is not plain
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert F.scaled_dot_product_attention is plain


def test_torchs_ring_attention_has_no_rule_for_the_host(pool: Any) -> None:
    """Why the strategy refuses it there; elsewhere torch's function takes the place of plain attention in a run."""
    pool.run(in_a_ring, group=False)


class SavesInTheMiddle(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, output: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def resumed(folder: Path) -> None:
    path, weights = folder / "middle", []
    for callbacks, ckpt_path in (([SavesInTheMiddle(path)], None), ([], path)):
        module, ours = Net(weighted=True), trainer(strategy(), 2, callbacks=callbacks, limit_val_batches=0)
        ours.fit(module, DataLoader(data(), batch_size=4, shuffle=True), ckpt_path=ckpt_path)
        assert ours.global_step == 4
        weights.append(map_leaves(whole, dict(module.state_dict())))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_run_resumes_exactly_in_the_middle_of_an_epoch(pool: Any, tmp_path: Path) -> None:
    pool.run(resumed, tmp_path, group=False)


def test_what_is_split_is_named_saved_and_gathered(pool: Any, tmp_path: Path) -> None:
    """By one dimension or by a function; each rank predicts complete sequences from a checkpoint."""
    module = Net()
    ours = trainer(limit_val_batches=0)
    ours.fit(module, DataLoader(data(), batch_size=4))
    expected = ours.predict(module, DataLoader(data(6), batch_size=3))
    first, second = pool.run(everything_else, tmp_path, group=False)
    for one, other, predictions, sampler, ranks in (first, second):
        for weights in (one, other):
            torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-9, atol=1e-9)
        assert (sampler, ranks) == ({"num_replicas": 1, "rank": 0}, [0, 1])
        if predictions:  # of rank 0: those of each rank
            torch.testing.assert_close(predictions[::2], expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(predictions[1::2], expected, rtol=1e-9, atol=1e-9)
    assert first[2]
    assert not second[2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size=0"),
        ({"context_parallel_size": 2, "context_parallel_attention": "rings"}, "Did you mean 'ring'"),
        ({"sequence_dims": 1}, "Write both, or none"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ModelParallelStrategy(**options)


def test_without_a_run_that_splits_sequences_everything_is_plain() -> None:
    q = torch.randn(2, 4, 8, 2)
    torch.testing.assert_close(
        context_parallel.attention(q, q, q, is_causal=True), F.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    assert context_parallel.positions(3).tolist() == [0, 1, 2]
    assert context_parallel.gather(q, 2) is q
    assert context_parallel.part(q, 2) is q


def looped(parts: int) -> dict[str, Tensor]:
    """Two steps of a loop on an Engine, which names the parts itself."""
    engine = Engine(
        strategy=strategy() if parts > 1 else "auto", accelerator="cpu", devices=parts, precision="64-true"
    )  # fmt: skip
    engine.launch()
    module = Net()
    wrapped = engine.setup_module(module)
    optimizer = engine.setup_optimizers(module.configure_optimizers())
    for tokens, targets, _ in engine.setup_dataloaders(DataLoader(data(8), batch_size=4)):
        tokens, targets = (context_parallel.part(each, 1) for each in (tokens, targets))
        optimizer.zero_grad()
        engine.backward(F.cross_entropy(wrapped(tokens).flatten(0, 1), targets.flatten()))
        optimizer.step()
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}


def test_a_loop_on_an_engine_names_the_parts_itself(pool: Any) -> None:
    expected = looped(1)
    for found in pool.run(looped, 2, group=False):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_fields_are_named_in_every_kind_of_batch() -> None:
    """Dictionaries of any kind, tuples, lists and named tuples; what is not named stays complete."""
    Pair = namedtuple("Pair", ["x", "y"])
    x, y = torch.arange(8).view(1, 8), torch.arange(3)
    context_parallel._ENTERED.append(context_parallel.Context(Second()))
    try:
        first = context_parallel.part(x, 1)
        assert first.tolist() == [[4, 5, 6, 7]]
        given: list[tuple[Any, Any]] = [
            (defaultdict(list, x=x, y=y), {"x": 1}), (UserDict(x=x, y=y), {"x": 1}), ((x, y), {0: 1}),
            ([x, y], {0: -1}), (Pair(x, y), {"x": 1}),
        ]  # fmt: skip
        for batch, dims in given:
            found = context_parallel.split(batch, dims)
            assert type(found) is type(batch)
            one, other = found.values() if hasattr(found, "values") else found
            assert torch.equal(one, first)
            assert other is y
        with pytest.raises(ConfigurationError, match="the batch is a Tensor.* Pass a function"):
            context_parallel.split(x, {"x": 1})
        assert context_parallel.positions(4).tolist() == [4, 5, 6, 7]
    finally:
        context_parallel.leave_all()


class Second(Group):
    """The second of two ranks, which exchange nothing."""

    rank, ranks = 1, (0, 1)

    def gather_objects(self, obj: Any) -> list[Any]:
        raise NotImplementedError

    def new(self, ranks: Any) -> Group:
        raise NotImplementedError
