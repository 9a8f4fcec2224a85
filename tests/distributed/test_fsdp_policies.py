"""FSDP's policies: wrapping, mixed precision, activation checkpointing, offload, hybrid meshes, the meta device."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import near, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.errors import ConfigurationError, UnknownArgumentError
from drivetrain.strategies import FSDPStrategy
from drivetrain.strategies.sharded_state import is_dtensor


def data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


class Block(nn.Module):
    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        self.seen.add(self.first.weight.dtype)
        return x + self.second(torch.tanh(self.first(x)))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.before(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Later(Net):
    """Makes its layers in configure_model, and ties two of them."""

    def __init__(self, by_hand: bool = False) -> None:
        LightningModule.__init__(self)
        self.by_hand = by_hand
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(1)
            if self.by_hand:
                with torch.device("meta"):
                    self.make()
            else:
                self.make()

    def make(self) -> None:
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.before.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.before(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(self.norm(x)).mean(1, keepdim=True), batch[1])


class Unready(LightningModule):
    """One of its layers cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = None

    def configure_model(self) -> None:
        self.blocks = nn.Sequential(Scale(), Scale(), nn.Linear(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def trainer(ranks: int, strategy: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 1, "precision": "64-true", "devices": ranks, "strategy": strategy,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def fitted(ranks: int, kind: type[LightningModule], options: dict[str, Any] | None, **arguments: Any) -> Any:
    """The module's whole weights after a fit, the module, and its Trainer; with ``None`` one process trains it."""
    strategy = "single_device" if options is None else FSDPStrategy(**options)
    module, ours = kind(), trainer(ranks, strategy, **arguments)
    ours.fit(module, DataLoader(data(), batch_size=8 // ranks))
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}, module, ours


@functools.cache
def alone(kind: type[LightningModule] = Net) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = fitted(1, kind, None)[0]
    return weights


# ---- what may be sharded how -----------------------------------------------------------------------------------------


def large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return nonwrapped_numel >= 30


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def policy_of_torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    return ModuleWrapPolicy({Block})


def blocks_by_policy() -> list[Any]:
    found = []
    for policy in (Block, {"Block"}, is_block, policy_of_torch(), {Block, nn.Linear}, large):
        weights, module, _ = fitted(2, Net, {"auto_wrap_policy": policy})
        kinds = [name for name, each in module.named_modules() if type(each).__name__.startswith("FSDP")]
        found.append((kinds, weights))
    return found


def test_a_policy_is_classes_names_or_a_function(pool: Any) -> None:
    outermost = ["", "blocks.0", "blocks.1", "blocks.2"]
    for found in pool.run(blocks_by_policy, group=False):
        for _, weights in found:
            near(weights, alone())
        by_class, by_name, by_function, of_torch, nested, by_size = (kinds for kinds, _ in found)
        assert by_class == by_name == by_function == of_torch == outermost
        assert "blocks.1.second" in nested
        assert "head" in nested
        assert "blocks.0.first" in by_size  # 40 elements
        assert "head" not in by_size


def in_each_way() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"}, "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
        "offload": {"cpu_offload": True}, "again": {"activation_checkpointing_policy": {Block}},
        "offload, once a window": {"cpu_offload": True, "gradient_exchange": "window"},
    }  # fmt: skip
    for way, options in ways.items():
        Block.calls = 0
        weights, _, _ = fitted(2, Net, options)
        found[way] = weights, Block.calls
    return found


def test_each_way_of_sharding_gives_the_numbers_of_one_process(pool: Any) -> None:
    """Also with offload to host memory, and with activations that are computed again in backward."""
    expected = alone()
    for rank in pool.run(in_each_way, group=False):
        for way, (weights, _) in rank.items():
            says = f"{way}: {{}}".format
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9, msg=says)
            assert weights.keys() == expected.keys()
        assert rank["SHARD_GRAD_OP"][1] == 9  # three batches, three blocks
        assert rank["again"][1] == 18


def hybrid() -> Any:
    found = []
    for exchange in ("batch", "window"):
        weights, module, ours = fitted(
            4, Net, {"device_mesh": (2, 2), "sharding_strategy": "hybrid", "gradient_exchange": exchange},
            accumulate_grad_batches=2, gradient_clip_val=0.05,
        )  # fmt: skip
        found.append((weights, tuple(module.head.weight.to_local().shape), ours.strategy.device_mesh.mesh_dim_names))
    return found


def test_a_hybrid_mesh_of_four_ranks_gives_the_numbers_of_one_process(pool: Any) -> None:
    expected = fitted(1, Net, None, accumulate_grad_batches=2, gradient_clip_val=0.05)[0]
    for rank, found in enumerate(pool.run(hybrid, world_size=4, group=False)):
        for weights, shape, names in found:
            near(weights, expected)
            assert shape == ((1, 4), (0, 4))[rank % 2]  # one row, over two shards
            assert names == ("replicate", "shard")


def mixed() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    weights, module, _ = fitted(2, Net, {"mixed_precision": policy}, precision="32-true")
    return weights, module.blocks[0].seen, {each.dtype for each in module.parameters()}


def test_a_mixed_precision_policy_computes_in_its_type_and_keeps_parameters_in_theirs(pool: Any) -> None:
    for weights, seen, kept in pool.run(mixed, group=False):
        assert seen == {torch.bfloat16}
        assert kept == {torch.float32}
        for name, value in weights.items():
            torch.testing.assert_close(value, alone()[name].float(), rtol=0.1, atol=0.05)


# ---- the meta device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [({"init_on_meta": True}, False), ({}, True), ({"init_on_meta": True, "cpu_offload": True}, False)],
    ids=["asked for", "by configure_model", "with offload"],
)
def test_layers_made_on_the_meta_device_get_the_values_of_one_process(
    pool: Any, options: dict[str, Any], by_hand: bool
) -> None:
    first, second = pool.run(first_values, options, by_hand, group=False)
    plain, ours = Later(), trainer(1, "single_device", max_steps=0)
    ours.fit(plain, DataLoader(data(), batch_size=8))
    for found in (first, second):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)


def first_values(options: dict[str, Any], by_hand: bool) -> Any:
    module, ours = Later(by_hand), trainer(2, FSDPStrategy(**options), max_steps=0)
    ours.fit(module, DataLoader(data(), batch_size=4))
    assert module.head.weight is module.before.weight
    assert all(is_dtensor(parameter) for parameter in module.parameters())
    return {name: whole(value) for name, value in module.state_dict().items()}


def unready() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fitted(2, Unready, {"init_on_meta": True})
    return str(caught.value)


def test_layers_that_cannot_initialise_themselves_are_named(pool: Any) -> None:
    for message in pool.run(unready, group=False):
        assert "blocks.0 (Scale), blocks.1 (Scale)" in message
        assert "Linear" not in message
        assert "reset_parameters()" in message


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_strategy": "FULL"}, "sharding_strategy='FULL'.*FULL_SHARD"),
        ({"gradient_exchange": "never"}, "gradient_exchange='never'.*batch, window"),
        ({"state_dict_type": "local"}, "state_dict_type='local'.*full"),
        ({"device_mesh": (2, 2, 2)}, r"device_mesh=\(2, 2, 2\)\) is no mesh. Write \(replicas, shards\)"),
        ({"mixed_precision": "bf16"}, "mixed_precision.*MixedPrecisionPolicy"),
        (
            {"activation_checkpointing": {Block}, "activation_checkpointing_policy": {Block}},
            "Write activation_checkpointing_policy alone",
        ),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FSDPStrategy(**arguments)


def test_an_unknown_argument_is_an_error_and_one_of_the_first_fsdp_a_warning() -> None:
    with pytest.raises(UnknownArgumentError, match="no argument auto_wrap=.* Did you mean 'auto_wrap_policy'"):
        FSDPStrategy(auto_wrap={Block})
    with pytest.warns(UserWarning, match="ignores use_orig_params: parameters are always the module's own. Leave it"):
        FSDPStrategy(use_orig_params=True)


def wrong_meshes() -> list[str]:
    found = []
    for options in ({"sharding_strategy": "HYBRID_SHARD"}, {"device_mesh": (3, 1)}):
        with pytest.raises(ConfigurationError) as caught:
            fitted(2, Net, options)
        found.append(str(caught.value))
    return found


def test_a_mesh_that_does_not_fit_the_processes_is_an_error(pool: Any) -> None:
    for alone_here, wrong in pool.run(wrong_meshes, group=False):
        assert "there is one machine. Pass device_mesh=(replicas, shards)" in alone_here
        assert "is a mesh of 3 processes, and there are 2" in wrong


def test_a_device_without_a_module_in_torch_is_an_error() -> None:
    strategy = FSDPStrategy(parallel_devices=[torch.device("maia", 0)])
    with pytest.raises(ConfigurationError, match=r"type 'maia', and torch has no module torch.maia"):
        strategy.setup_module(nn.Linear(2, 2))
