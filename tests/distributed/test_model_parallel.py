"""``ModelParallelStrategy``: tensor parallelism and FSDP on one mesh train as one process does."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import near, on_two_dimensions, token_data, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.base.tree import map_leaves
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import ModelParallelStrategy
from drivetrain.strategies.sharded_state import is_dtensor


class Block(nn.Module):
    """Its hidden width is split in two; each half is one that two ranks do not divide."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(x))))


class Net(LightningModule):
    """``before``, ``head`` and ``scale`` are in no plan: every tensor-parallel rank has them."""

    def __init__(self, weighted: bool | str = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.weighted = weighted
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        self.seen.append(x)
        if self.weighted:
            each = F.mse_loss(self(x), y, reduction="none").squeeze(1)
            weight = tokens.sum() if self.weighted == "tensor" else int(tokens.sum())
            return WeightedLoss((each * tokens).sum() / tokens.sum(), weight)
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Planned(Net):
    tp_plan: ClassVar = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}


class SplitsItself(Net):
    """With torch's own functions, as programs for Lightning do."""

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh is None or is_dtensor(self.blocks[0].first.weight):
            return
        mesh = self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def trainer(strategy: Any = "auto", ranks: int = 1, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "strategy": strategy, "devices": ranks,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


# ---- the numbers of one process --------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "accumulated and clipped by norm": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "weighted by numbers": {"weighted": "number", "accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    "uneven and weighted by tensors": {"count": 43, "weighted": "tensor", "accumulate_grad_batches": 3},
}


def fitted(
    kind: type[Net], options: Any, sizes: tuple[int, int], weighted: bool | str = False, count: int = 48,
    **arguments: Any,
) -> Any:  # fmt: skip
    """Weights, optimizer state and what a fit has logged, whole on every rank."""
    module, (replicas, parts) = kind(weighted), sizes
    strategy: Any = "auto" if options is None else ModelParallelStrategy(replicas, parts, **options)
    ours = trainer(strategy, replicas * parts, **arguments)
    batch = 8 // replicas
    ours.fit(
        module,
        DataLoader(token_data(count), batch_size=batch, shuffle=True),
        DataLoader(token_data(12), batch_size=batch),
    )
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]),
        "steps": ours.global_step,
        "loss": float(ours.callback_metrics["loss"]),
    }


def of_cases(kind: type[Net], options: Any, sizes: tuple[int, int], cases: list[str]) -> dict[str, Any]:
    return {case: fitted(kind, options, sizes, **CASES[case]) for case in cases}


@functools.cache
def alone() -> dict[str, Any]:
    return of_cases(Net, None, (1, 1), list(CASES))


LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
EVERY = list(CASES)
SOME = EVERY if LONG else [EVERY[0], EVERY[-1]]
WINDOW = {"gradient_exchange": "window"}
SIZES = {
    "tensor 2": (Planned, (1, 2), {}, EVERY if LONG else EVERY[1:3]),
    "tensor 2, by configure_model": (SplitsItself, (1, 2), {}, SOME[-1:]),
    **({"data 2": (Planned, (2, 1), {}, EVERY)} if LONG else {}),
    "data 2 and tensor 2": (Planned, (2, 2), {}, SOME),
    "data 2 and tensor 2, by configure_model, exchanged once a window": (SplitsItself, (2, 2), WINDOW, SOME[:1]),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "cases"),
    [pytest.param(*each, marks=on_two_dimensions if min(each[1]) > 1 else (), id=name) for name, each in SIZES.items()],
)
def test_the_numbers_are_those_of_one_process(pool: Any, kind: Any, sizes: Any, options: Any, cases: list[str]) -> None:
    for rank in pool.run(of_cases, kind, options, sizes, cases, world_size=sizes[0] * sizes[1], group=False):
        for case, found in rank.items():
            expected = alone()[case]
            for part in ("weights", "optimizer", "loss", "steps"):
                near(found[part], expected[part], f"{case}: {part}: {{}}".format)


def test_the_cases_differ() -> None:
    """The control: each of the cases gives weights of its own."""
    heads = [found["weights"]["head.weight"] for found in alone().values()]
    assert not any(torch.allclose(one, other, rtol=1e-6) for one, other in itertools.pairwise(heads))


# ---- batches and random numbers --------------------------------------------------------------------------------------


def seen() -> Any:
    """What each rank has seen, and who its data group is."""
    strategy = ModelParallelStrategy(2, 2)
    module, ours = Planned(), trainer(strategy, 4, max_epochs=1, limit_val_batches=0)
    ours.fit(module, DataLoader(token_data(), batch_size=4, shuffle=True))
    return torch.stack(module.seen), list(strategy.data.ranks), ours.distributed_sampler_kwargs


@on_two_dimensions
def test_pairs_of_one_data_rank_see_the_same_batches(pool: Any) -> None:
    (first, *_), (second, *_), (third, *_), (fourth, *_) = results = pool.run(seen, world_size=4, group=False)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
    assert [ranks for _, ranks, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["rank"] for *_, each in results] == [0, 0, 1, 1]
    assert {each["num_replicas"] for *_, each in results} == {2}


def drops(seed: int | None) -> Any:
    """A fit with dropout; with a seed, each rank has seeded itself differently."""
    ranks = 1 if seed is None else 2
    strategy: Any = "auto" if seed is None else ModelParallelStrategy()
    module = (Net if seed is None else Planned)(dropout=0.5)
    torch.manual_seed(5 if seed is None else seed * int(os.environ["RANK"]) + 5)
    trainer(strategy, ranks, limit_val_batches=0).fit(module, DataLoader(token_data(), batch_size=8, shuffle=True))
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}, torch.get_rng_state()


def test_dropout_between_split_layers_is_the_same_on_all_of_their_ranks(pool: Any) -> None:
    """And that of one process: ranks that are seeded differently draw the numbers of the first."""
    expected, state = drops(None)
    for weights, its in pool.run(drops, 100, group=False):
        near(weights, expected)
        assert torch.equal(its, state)


class Overflows(Planned):
    """Once, one element of a gradient is infinite, in the part of the second tensor-parallel rank."""

    spoilt = False

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and not self.spoilt:
            self.spoilt = True
            if self.global_rank == 1:
                gradient: Any = self.blocks[0].first.weight.grad  # type: ignore[union-attr]
                gradient.to_local()[0, 0] = float("inf")


def skips(sizes: tuple[int, int]) -> Any:
    module = Overflows()
    ours = trainer(
        ModelParallelStrategy(*sizes), sizes[0] * sizes[1], precision="16-mixed", limit_val_batches=0, max_epochs=1
    )
    ours.fit(module, DataLoader(token_data(), batch_size=4))
    finite = all(torch.isfinite(whole(value)).all() for value in module.state_dict().values())
    return ours.global_step, finite, ours.strategy.precision_plugin.state_dict()["scale"]


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=on_two_dimensions)])
def test_a_gradient_that_overflows_in_the_part_of_one_rank_skips_the_step_on_all(pool: Any, sizes: Any) -> None:
    world_size = sizes[0] * sizes[1]
    results = pool.run(skips, sizes, group=False, world_size=world_size)
    assert results == [results[0]] * world_size
    steps, finite, scale = results[0]
    assert steps < 48 // (4 * sizes[0])
    assert finite
    assert scale < 2**16


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def continued(sizes: tuple[int, int], resume: Path | None, saves: Path | None = None, folder: bool = False) -> Any:
    """Weights and optimizer state after two epochs, of which a checkpoint may have the first."""
    module, (replicas, parts) = Planned(), sizes
    strategy: Any = "auto"
    if sizes != (1, 1):
        strategy = ModelParallelStrategy(replicas, parts, save_distributed_checkpoint=folder)
    ours = trainer(strategy, replicas * parts, max_epochs=1 if saves else 2, limit_val_batches=0)
    ours.fit(module, DataLoader(token_data(), batch_size=8 // replicas), ckpt_path=resume)
    if saves:
        ours.save_checkpoint(saves)
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]),
    }


@on_two_dimensions
def test_checkpoints_are_resumed_on_meshes_of_other_sizes_and_on_one_process(pool: Any, tmp_path: Path) -> None:
    expected = continued((1, 1), None)
    alone, file, folder = tmp_path / "alone.ckpt", tmp_path / "file.ckpt", tmp_path / "folder.ckpt"
    continued((1, 1), None, alone)
    pool.run(continued, (1, 2), alone, file, False, group=False, world_size=2)  # already trained: it only saves
    pool.run(continued, (2, 2), None, folder, True, group=False, world_size=4)
    assert file.is_file()
    assert folder.is_dir()
    assert set(torch.load(file, weights_only=True)["state_dict"]) == set(expected["weights"])
    for path in (file, folder):
        near(continued((1, 1), path), expected)
    for rank in pool.run(continued, (2, 2), file, group=False, world_size=4):
        near(rank, expected)
    for rank in pool.run(continued, (1, 2), folder, group=False, world_size=2):
        near(rank, expected)


# ---- plans -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(self.norm(x)).unflatten(-1, (-1, 4))  # of two, each rank has one
        return x + self.down(torch.relu(self.head_norm(heads)).flatten(-2))


class Base(nn.Module):
    """Declares its plan as the base models of Hugging Face do."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        plan["layers.*.head_norm"] = "replicated_with_grad_allreduce"
        self.config = types.SimpleNamespace(base_model_tp_plan=plan)
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Causal(nn.Module):
    """With a head whose weight is that of the embedding."""

    base_model_prefix = "model"
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_rep", "model.embed": "embedding_rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.model = Base()
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.model.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x))  # type: ignore[no-any-return]


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Causal()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def speaks(strategy: Any, sizes: tuple[int, int], **arguments: Any) -> Any:
    module = Language()
    if strategy != "auto":
        strategy = ModelParallelStrategy(*sizes, **strategy)
    ours = trainer(strategy, sizes[0] * sizes[1], gradient_clip_val=0.1, **arguments)
    words = torch.randint(10, (16, 6), generator=torch.Generator().manual_seed(2))
    ours.fit(module, DataLoader(TensorDataset(words), batch_size=4 // sizes[0]))
    split = {name for name, each in module.named_parameters() if is_dtensor(each)}
    tied = module.net.lm_head.weight is module.net.model.embed.weight
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}, split, tied


def told() -> Any:
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        found = speaks({}, (1, 2))
    return *found, written.getvalue()


def test_a_model_with_the_tp_plan_of_hugging_face_needs_no_configure_model(pool: Any) -> None:
    expected, *_ = speaks("auto", (1, 1))
    first, second = pool.run(told, group=False)
    for weights, split, tied, _ in (first, second):
        near(weights, expected)
        assert tied
        layers = {f"net.model.layers.{number}.{name}" for number in (0, 1) for name in ("up.weight", "down.weight")}
        assert layers | {"net.model.embed.weight"} <= split
        assert "net.model.layers.0.norm.weight" not in split
    assert "splits over 2 processes: 1 layer colwise_rep (net.lm_head)" in first[3]
    assert "2 layers rowwise (net.model.layers.*.down)" in first[3]
    assert "splits" not in second[3]


def test_gradients_of_layers_that_compute_on_parts_of_a_sequence_are_complete_before_they_are_clipped(
    pool: Any,
) -> None:
    expected, *_ = speaks("auto", (1, 1))
    for weights, split, _ in pool.run(sequences, group=False):
        near(weights, expected)
        assert "net.model.layers.0.norm.weight" in split


def sequences() -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    along = Shard(1)
    plan = {
        "net.lm_head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        "net.model.embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "net.model.layers.*.norm": SequenceParallel(),
        "net.model.layers.*.head_norm": "replicated_with_grad_allreduce",
        "net.model.layers.*.up": ColwiseParallel(input_layouts=along),
        "net.model.layers.*.down": RowwiseParallel(output_layouts=along),
        "net.model.layers.*": PrepareModuleInput(
            input_layouts=along, desired_input_layouts=along, use_local_output=True
        ),
    }
    return speaks({"tp_plan": plan}, (1, 2))


# ---- the order, and errors -------------------------------------------------------------------------------------------


def steps_in_order() -> Any:
    """In which order a block is split, computes its activations again, is compiled and sharded; and the weights."""
    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor.parallel as tensor_parallel

    order: list[str] = []

    def recorded(original: Any) -> Any:
        def call(what: Any, *args: Any, **kwargs: Any) -> Any:
            again = getattr(getattr(what, "func", None), "__name__", "")  # the forward pass is a partial of checkpoint
            name = " of ".join(filter(None, (original.__name__, again)))
            if name not in order:
                order.append(name)
            return original(what, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's compiler looks at it
        for module, name in ((tensor_parallel, "parallelize_module"), (torch, "compile"), (fsdp, "fully_shard")):
            patch.setattr(module, name, recorded(getattr(module, name)))
        strategy = ModelParallelStrategy(
            2, 2, activation_checkpointing_policy={Block}, compile={"backend": "eager"}
        )  # fmt: skip
        net = Planned()
        trainer(strategy, 4, max_epochs=1, limit_val_batches=0).fit(net, DataLoader(token_data(16), batch_size=4))
    return order, {name: whole(value).detach().clone() for name, value in net.state_dict().items()}


class FromMeta(Planned):
    """Makes its blocks in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        torch.manual_seed(6)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block(0.0) for _ in range(2))


def made(sizes: tuple[int, int]) -> Any:
    ranks, module = sizes[0] * sizes[1], FromMeta()
    strategy: Any = "auto" if ranks == 1 else ModelParallelStrategy(*sizes, init_on_meta=True)
    ours = trainer(strategy, ranks, max_epochs=1, limit_val_batches=0)
    ours.fit(module, DataLoader(token_data(), batch_size=8 // sizes[0]))
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=on_two_dimensions)])
def test_layers_made_on_the_meta_device_are_split_before_they_have_memory(pool: Any, sizes: Any) -> None:
    expected = made((1, 1))
    for weights in pool.run(made, sizes, group=False, world_size=sizes[0] * sizes[1]):
        near(weights, expected)


@on_two_dimensions
def test_a_block_is_split_then_checkpointed_then_compiled_then_sharded(pool: Any) -> None:
    module = Net()
    trainer(max_epochs=1, limit_val_batches=0).fit(module, DataLoader(token_data(16), batch_size=8))
    for order, weights in pool.run(steps_in_order, group=False, world_size=4):
        assert order == ["parallelize_module", "compile of checkpoint", "fully_shard"]
        near(weights, dict(module.state_dict()))


def strategy_of(world: int, *sizes: Any, nodes: int = 1) -> ModelParallelStrategy:
    strategy = ModelParallelStrategy(*sizes)
    strategy.world_size, strategy.num_nodes = world, nodes
    return strategy


def test_sizes_that_are_left_out_follow_from_the_number_of_processes() -> None:
    assert strategy_of(4).sizes == (1, 4)
    assert strategy_of(8, nodes=2).sizes == (2, 4)
    assert strategy_of(6, 3).sizes == (3, 2)
    assert strategy_of(6, "auto", 3).sizes == (2, 3)
    assert strategy_of(1).sizes == (1, 1)


def test_sizes_that_do_not_multiply_to_the_number_of_processes_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"data_parallel_size=2, tensor_parallel_size=3\) does not fit the 4 "):
        _ = strategy_of(4, 2, 3).sizes
    for sizes in ((3, "auto"), ("auto", 3), ("auto", 8)):
        with pytest.raises(ConfigurationError, match="Write sizes whose product is 4"):
            _ = strategy_of(4, *sizes).sizes
    for wrong in (0, -1, 2.0, "all", True):
        with pytest.raises(ConfigurationError, match="tensor_parallel_size=.* is no size"):
            ModelParallelStrategy(tensor_parallel_size=wrong)


PLANS: dict[str, Any] = {
    "has no plan": None,
    "style": {"blocks.*.first": "colwize"},
    "layer": {"block.*.first": "colwise"},
    "torch cannot": {"blocks.*": "colwise"},
    "tied": {"head": "colwise"},
    "uneven": {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"},
}
UNEVEN_WIDTH = 5


def widened(module: Net) -> Net:
    """Give the first block a hidden width that two ranks do not divide."""
    module.blocks[0].first, module.blocks[0].second = nn.Linear(4, UNEVEN_WIDTH), nn.Linear(UNEVEN_WIDTH, 4)
    return module


def errors_of_plans() -> list[str]:
    found = []
    for name, plan in PLANS.items():
        module = Net()
        if name == "tied":
            module.before = nn.Linear(4, 1)
            module.before.weight = module.head.weight
        if name == "uneven":
            widened(module)
        with pytest.raises(ConfigurationError) as caught:
            trainer(ModelParallelStrategy(tp_plan=plan), 2, limit_val_batches=0).fit(
                module, DataLoader(token_data(16), batch_size=4)
            )
        found.append(str(caught.value))
    module = SplitsItself()
    with pytest.raises(ConfigurationError) as caught:
        trainer(ModelParallelStrategy(tp_plan=Planned.tp_plan), 2, limit_val_batches=0).fit(
            module, DataLoader(token_data(16), batch_size=4)
        )
    return [*found, str(caught.value)]


class StepsLists(Planned):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **self.options)


def errors_of_optimizers() -> list[str]:
    found = []
    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")  # torch 2.9, before its error
    for option in ("foreach", "fused"):
        with pytest.raises(ConfigurationError) as caught:
            trainer(ModelParallelStrategy(1, 2), 2, limit_val_batches=0).fit(
                StepsLists(**{option: True}), DataLoader(token_data(16), batch_size=4)
            )
        found.append(str(caught.value))
    trainer(ModelParallelStrategy(1, 2), 2, limit_val_batches=0).fit(
        StepsLists(), DataLoader(token_data(16), batch_size=4)
    )
    return found


def test_an_optimizer_that_steps_lists_cannot_mix_split_parameters_with_others(pool: Any) -> None:
    for found in pool.run(errors_of_optimizers, group=False):
        assert all("Leave foreach and fused out of the optimizer's arguments" in message for message in found)


def uneven(ranks: int) -> dict[str, Tensor]:
    """The weights after training with the styles that the error for uneven widths names."""
    module = widened(Net())
    plan = {"blocks.*.first": "colwise_rep", "blocks.*.second": "rowwise_rep"}
    split = (ModelParallelStrategy(1, 2, tp_plan=plan), 2) if ranks == 2 else ()
    trainer(*split, limit_val_batches=0).fit(module, DataLoader(token_data(16), batch_size=4))
    return {name: whole(value) for name, value in module.state_dict().items()}


def test_layers_of_uneven_width_train_with_the_styles_that_the_error_names(pool: Any) -> None:
    expected = uneven(1)
    for found in pool.run(uneven, 2, group=False):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_plans_that_split_nothing_or_cannot_be_followed_are_errors(pool: Any) -> None:
    for nothing, style, layer, cannot, tied, uneven, two in pool.run(errors_of_plans, group=False):
        assert "splits the layers of Net over 2 processes, but Net has no plan" in nothing
        assert "tp_plan=" in nothing
        assert "the style 'colwize', which is unknown. Did you mean 'colwise'?" in style
        assert "The tp_plan names 'block.*.first', and Net has no such layer." in layer
        assert "blocks.*.first" in layer.partition("no such layer")[2]
        assert "The tp_plan splits blocks.0 (Block) 'colwise', and torch cannot" in cannot
        assert "before.weight and head.weight are one parameter" in tied
        assert 'blocks.0.second "rowwise", and 2 processes do not divide its 5 inputs' in uneven
        assert 'write "rowwise_rep", and "colwise_rep"' in uneven
        assert "SplitsItself has split layers itself" in two
