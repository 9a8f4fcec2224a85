"""Batch norm on several processes: the numbers of one process that has all their batches, and the user's own layers."""

from __future__ import annotations

import copy
import inspect
import io
import operator
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.batchnorm import TorchSyncBatchNorm

CHANNELS = 3
KINDS: dict[str, tuple[type[Any], tuple[int, ...]]] = {
    "N": (nn.BatchNorm1d, ()), "NL": (nn.BatchNorm1d, (5,)), "NHW": (nn.BatchNorm2d, (4, 2)),
    "NDHW": (nn.BatchNorm3d, (2, 3, 2)), "torch's": (nn.SyncBatchNorm, (4, 2)), "last": (nn.BatchNorm2d, (4, 2)),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "fixed": {"affine": False}, "cumulative": {"momentum": None}, "wide": {"eps": 0.1, "momentum": 0.3},
    "untracked": {"track_running_stats": False}, "nothing": {"affine": False, "track_running_stats": False},
    "weight only": {"bias": False}, "not tracked any more": {"tracks": False},
}  # fmt: skip
OLD = "bias" not in inspect.signature(nn.BatchNorm1d).parameters
"""Torch 2.9, whose DDP may also not copy the buffers of batch norm between two forward passes and a backward pass."""
if OLD:
    del OPTIONS["weight only"]


def synchronised(module: nn.Module) -> Any:
    return TorchSyncBatchNorm().apply(module)


def restored(module: nn.Module) -> Any:
    return TorchSyncBatchNorm().revert(module)


def samples(step: int, count: int, sizes: tuple[int, ...], kind: str = "") -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, CHANNELS, *sizes, generator=generator, dtype=torch.float64) * 2 + step
    return x.contiguous(memory_format=torch.channels_last) if kind == "last" else x


def layer(kind: type[Any], tracks: bool | None = None, **options: Any) -> nn.Module:
    made: nn.Module = kind(CHANNELS, dtype=torch.float64, **options)
    if tracks is not None:
        setattr(made, "track_running_stats", tracks)  # noqa: B010  # as some losses do for a moment
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.add_(torch.arange(1, CHANNELS + 1) / (number + 2))
    return made


def loss(output: Tensor) -> Tensor:
    """Of each sample; not linear, so that gradients through the statistics matter."""
    return (output.sin() * torch.linspace(-1, 2, output.shape[1:].numel()).view(output.shape[1:])).flatten(1).sum(1)


def numbers(module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Tensor]:
    """All that training leaves behind, by name; of inputs and outputs, a rank has its own samples."""
    found = {f"state {name}": tensor.detach().clone() for name, tensor in module.state_dict().items()}
    found |= {f"gradient {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"input {step}": x.grad for step, x in enumerate(inputs) if x.grad is not None}
    return found | {f"output {step}": x.detach() for step, x in enumerate(outputs)}


def alone(kind: str, options: dict[str, Any], count: int) -> dict[str, Tensor]:
    """One process that has every sample, with torch's layers."""
    cls, sizes = KINDS[kind]
    module = layer(nn.BatchNorm2d if cls is nn.SyncBatchNorm else cls, **options)
    inputs = [samples(step, count, sizes).requires_grad_() for step in range(3)]
    outputs = [module(x) for x in inputs]
    torch.stack([loss(output).mean() for output in outputs]).sum().backward()
    return numbers(module, inputs, outputs)


def bounds(shares: list[int]) -> tuple[int, int]:
    start = sum(shares[: dist.get_rank()])
    return start, start + shares[dist.get_rank()]


def shared(shares: list[int], synchronise: bool = True) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Every kind of layer with every option, in DDP; of its rank's samples, and with its rank's part of the loss."""
    found = {}
    start, end = bounds(shares)
    for kind, (cls, sizes) in KINDS.items():
        for name, options in OPTIONS.items():
            module = layer(cls, **options)
            module = synchronised(module) if synchronise else module
            inputs = [samples(step, sum(shares), sizes, kind)[start:end].requires_grad_() for step in range(3)]
            has_any, sync = list(module.parameters()), {"broadcast_buffers": False} if OLD else {}
            model = DistributedDataParallel(module, **sync) if has_any else module
            outputs = [model(x) for x in inputs]
            assert all(output.stride() == x.stride() for output, x in zip(outputs, inputs, strict=True))
            parts = [loss(output).sum() / sum(shares) * len(shares) for output in outputs]
            torch.stack(parts).sum().backward()
            for x in inputs:
                assert x.grad is not None
                x.grad /= len(shares)  # as DDP does with what it averages
            found[kind, name] = numbers(module, inputs, outputs)
    return found


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor], start: int, end: int) -> float:
    assert found.keys() == wanted.keys()
    errors = [0.0]
    for name, tensor in found.items():
        expected = wanted[name][start:end] if name.startswith(("input", "output")) else wanted[name]
        assert tensor.dtype is expected.dtype, name
        assert tensor.shape == expected.shape, name
        errors.append(float((tensor - expected).abs().max()) if tensor.numel() else 0.0)
    return max(errors)


@pytest.mark.parametrize("shares", [[6], [4, 3], [3, 1, 5], [0, 4], [5, 0, 1]], ids=str)
def test_the_numbers_are_those_of_one_process(pool: Any, shares: list[int]) -> None:
    wanted = {(kind, name): alone(kind, options, sum(shares)) for kind in KINDS for name, options in OPTIONS.items()}
    for rank, found in enumerate(pool.run(shared, shares, world_size=len(shares))):
        start = sum(shares[:rank])
        for case, values in found.items():
            assert largest_error(values, wanted[case], start, start + shares[rank]) < 1e-10, (rank, case)


def test_the_layers_as_they_were_give_other_numbers(pool: Any) -> None:
    unsynchronised = {kind: value for kind, value in KINDS.items() if kind != "torch's"}
    for rank, found in enumerate(pool.run(plain, [4, 3])):
        for kind in unsynchronised:
            wanted = alone(kind, {}, 7)
            assert largest_error(found[kind, "plain"], wanted, [0, 4][rank], [4, 7][rank]) > 0.01


def plain(shares: list[int]) -> Any:
    del KINDS["torch's"]  # which would raise
    try:
        return shared(shares, synchronise=False)
    finally:
        KINDS["torch's"] = (nn.SyncBatchNorm, (4, 2))


# ---- types -----------------------------------------------------------------------------------------------------------

REDUCED = [torch.bfloat16, torch.float16]


def reduced(dtype: torch.dtype, how: str) -> dict[str, Tensor]:
    """One step of values in ``dtype`` that are far from 0, in layers of 32 bits or of the same type."""
    x = far(dtype)[dist.get_rank() * 32 :][:32].requires_grad_()
    module = synchronised(nn.BatchNorm2d(4, momentum=1.0, dtype=dtype if how == "all" else None))
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        output = module(x)
    output.backward(upstream(dtype)[dist.get_rank() * 32 :][:32])
    return numbers(module, [x], [output])


def far(dtype: torch.dtype) -> Tensor:
    return (torch.randn(64, 4, 3, 3, generator=torch.Generator().manual_seed(1)) * 50 + 300).to(dtype)


def upstream(dtype: torch.dtype) -> Tensor:
    """A gradient of which most goes through the statistics, and cancels itself."""
    return (far(dtype) / 16 + torch.randn(64, 4, 3, 3, generator=torch.Generator().manual_seed(2))).to(dtype)


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("how", ["autocast", "mixed", "all"])
def test_statistics_of_16_bit_values_are_kept_in_32(pool: Any, dtype: torch.dtype, how: str) -> None:
    x = far(dtype).double().requires_grad_()  # its sums are beyond float16, and bfloat16 has 8 bits of them
    mean, var = x.detach().mean([0, 2, 3]), x.detach().var([0, 2, 3])
    normal = nn.functional.batch_norm(x, None, None, training=True)
    normal.backward(upstream(dtype).double())
    assert x.grad is not None
    exact = {"rtol": 1e-5, "atol": 0.0} if how != "all" else {"rtol": 0.01, "atol": 0.0}
    for rank, found in enumerate(pool.run(reduced, dtype, how)):
        assert found["output 0"].dtype is found["input 0"].dtype is dtype
        assert found["state running_mean"].dtype is (dtype if how == "all" else torch.float32)
        torch.testing.assert_close(found["state running_mean"].double(), mean, **exact)
        torch.testing.assert_close(found["state running_var"].double(), var, **exact)
        for name, wanted in (("output 0", normal.detach()), ("input 0", x.grad)):
            close = {"rtol": 0.02, "atol": 0.01 * float(wanted.abs().mean())}
            torch.testing.assert_close(found[name].double(), wanted[rank * 32 :][:32], **close)
        assert found["gradient weight"].dtype is found["gradient bias"].dtype is found["state running_mean"].dtype


def offset() -> Tensor:
    """The variance that the layer found, where it is seven orders of magnitude below the square of the mean."""
    module = synchronised(nn.BatchNorm1d(1, momentum=1.0))
    module(away()[dist.get_rank() :: 2])
    return module.state_dict()["running_var"]


def away() -> Tensor:
    return torch.randn(4096, 1, generator=torch.Generator().manual_seed(2)) * 3 + 1e4


def test_a_variance_far_from_0_keeps_its_digits(pool: Any) -> None:
    x = away()
    wanted = float(x.double().var())
    by_squares = (x.square().mean() - x.mean().square()) * 4096 / 4095
    assert abs(float(by_squares) - wanted) > 0.1  # what the usual two sums would have given
    for found in pool.run(offset):
        assert abs(float(found) - wanted) < 1e-4


def float32_steps() -> dict[str, Tensor]:
    module = synchronised(nn.BatchNorm1d(CHANNELS, momentum=None))
    for step in range(20):
        module(samples(step, 4 + dist.get_rank(), ()).float())
    return module.state_dict()


def test_running_statistics_stay_the_same_needs_every_rank(pool: Any) -> None:
    first, *others = pool.run(float32_steps, world_size=3)
    assert first["num_batches_tracked"] == 20
    for other in others:
        for name in first:
            assert torch.equal(first[name], other[name]), name  # to the last bit


# ---- what is exchanged -----------------------------------------------------------------------------------------------


@contextmanager
def exchanged() -> Iterator[list[int]]:
    """How many numbers each collective of the block has taken from this rank."""
    sent: list[int] = []
    originals = dist.all_gather, dist.all_reduce

    def all_gather(tensors: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return originals[0](tensors, tensor, *args, **kwargs)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return originals[1](tensor, *args, **kwargs)

    setattr(dist, "all_gather", all_gather)  # noqa: B010  # mypy knows the functions' types
    setattr(dist, "all_reduce", all_reduce)  # noqa: B010
    try:
        yield sent
    finally:
        dist.all_gather, dist.all_reduce = originals


def exchanges() -> dict[str, list[int]]:
    torch.manual_seed(dist.get_rank())
    module = synchronised(nn.BatchNorm1d(8))
    x = torch.randn(4, 8, requires_grad=True)
    found = {}
    with exchanged() as found["forward"]:
        output = module(x)
    with exchanged() as found["backward"]:
        output.square().sum().backward()
    with exchanged() as found["data"]:
        module(x.detach()).square().sum().backward()
    with exchanged() as found["without gradients"], torch.no_grad():
        module(x)
    with exchanged() as found["checkpoint"]:
        checkpoint(module, x, use_reentrant=False).square().sum().backward()
    with exchanged() as found["evaluation"]:
        module.eval()(x).sum().backward()
    with exchanged() as found["evaluation by the batch"]:
        synchronised(nn.BatchNorm1d(8, track_running_stats=False)).eval()(x)
    with exchanged() as found["restored"]:
        restored(module.train())(x).sum().backward()
    return found


def test_one_exchange_forward_and_one_backward(pool: Any) -> None:
    found = {"forward": [17], "backward": [16], "data": [17], "without gradients": [17], "checkpoint": [17, 17, 16]}
    nothing: dict[str, list[int]] = {"evaluation": [], "evaluation by the batch": [], "restored": []}
    assert pool.run(exchanges) == [found | nothing] * 2
    assert pool.run(exchanges, world_size=1) == [{name: [] for name in found | nothing}]


def as_torch(training: bool, options: dict[str, Any]) -> list[bool]:
    """Whether output, gradient and state are those of torch's layer to the last bit."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    mine, torchs = (nn.BatchNorm2d(4, **options).train(training) for _ in range(2))
    synchronised(mine)
    found = []
    for _ in range(2):
        x = torch.randn(3, 4, 2, 2)
        ours, its = x.clone().requires_grad_(), x.clone().requires_grad_()
        one, other = mine(ours), torchs(its)
        for output in (one, other):
            output.square().sum().backward()
        assert ours.grad is not None
        assert its.grad is not None
        found += [torch.equal(one, other), torch.equal(ours.grad, its.grad)]
    states = mine.state_dict(), torchs.state_dict()
    return [*found, states[0].keys() == states[1].keys(), *map(torch.equal, states[0].values(), states[1].values())]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_evaluation_and_a_process_alone_are_torchs(pool: Any, options: dict[str, Any]) -> None:
    assert all(as_torch(True, options))  # without a group
    for found in [*pool.run(as_torch, True, options, world_size=1), *pool.run(as_torch, False, options)]:
        assert len(found) >= 7
        assert all(found)


def misshapen() -> Any:
    with exchanged() as sent, pytest.raises(ValueError, match="expected 4D input") as error:
        synchronised(nn.BatchNorm2d(4))(torch.ones(2, 4))
    return sent, type(error.value)


def test_a_batch_of_the_wrong_shape_is_refused_before_anybody_waits(pool: Any) -> None:
    assert pool.run(misshapen) == [([], ValueError)] * 2


def in_own_groups() -> float:
    """The first two ranks share statistics, the third is alone in its group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    module = synchronised(nn.SyncBatchNorm(1, momentum=1.0, process_group=groups[dist.get_rank() // 2]))
    module(torch.tensor([[1.0], [3.0]]) * 10 ** dist.get_rank())
    return float(module.state_dict()["running_mean"])


def test_torchs_layer_keeps_its_process_group(pool: Any) -> None:
    assert pool.run(in_own_groups, world_size=3) == [11.0, 11.0, 200.0]


# ---- batches that are hardly any -------------------------------------------------------------------------------------


def tiny(shares: list[int]) -> Any:
    module = synchronised(nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        output = module(torch.ones(shares[dist.get_rank()], 2))
    except ValueError as error:
        return str(error), all(map(torch.equal, before.values(), module.state_dict().values()))
    return tuple(output.shape), torch.equal(before["running_var"], module.state_dict()["running_var"])


def test_one_value_per_channel_is_refused_where_all_ranks_have_no_more(pool: Any) -> None:
    for shares in ([1, 0], [0, 1]):
        for message, unchanged in pool.run(tiny, shares):
            assert "one value per channel" in message
            assert unchanged
    assert pool.run(tiny, [1, 1]) == [((1, 2), False)] * 2
    assert pool.run(tiny, [0, 0]) == [((0, 2), True)] * 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # torch's own
        synchronised(nn.BatchNorm1d(2))(torch.ones(1, 2))


# ---- the user's layers -----------------------------------------------------------------------------------------------


class Quiet(nn.BatchNorm2d):
    """A user's layer that adds something, but not to the forward pass."""

    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters())


class Rectified(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class TorchsOwn(nn.SyncBatchNorm):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.same = self.norm
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4))
        self.user = Quiet(4)
        self.torchs = nn.SyncBatchNorm(4)
        self.listed = [self.norm]


def classes(module: nn.Module) -> list[type]:
    return [type(layer) for layer in module.modules()]


def test_layers_stay_the_objects_that_they_were() -> None:
    model = Model()
    before, parameters, buffers = list(model.modules()), list(model.parameters()), list(model.buffers())
    names, kinds, calls = list(model.state_dict()), classes(model), []
    model.norm.register_forward_hook(lambda *_: calls.append("called"))
    changed = [layer for layer in before if isinstance(layer, nn.modules.batchnorm._BatchNorm)]

    assert synchronised(model) is model
    assert synchronised(model) is model  # twice is once
    during = list(model.modules())
    for layer in changed:
        assert type(layer).__name__.startswith("Synchronised")
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert isinstance(model.user, Quiet)
    assert not model.user.frozen()
    assert not isinstance(model.torchs, nn.SyncBatchNorm)  # DDP refuses those on the host
    assert "SynchronisedBatchNorm2d(4, eps=1e-05, momentum=0.1" in repr(model)
    assert model.norm is model.same is model.listed[0]
    model.norm(torch.randn(2, 4, 3, 3))
    assert calls == ["called"]
    with pytest.raises(ValueError, match="4D"):
        model.norm(torch.randn(2, 4))
    with pytest.raises(ValueError, match="2D"):
        model.torchs(torch.randn(4))

    assert restored(model) is model
    assert classes(model) == kinds
    for now in (during, list(model.modules())):
        assert all(map(operator.is_, now, before))
    assert all(map(operator.is_, model.parameters(), parameters))
    assert all(map(operator.is_, model.buffers(), buffers))
    assert list(model.state_dict()) == names


def test_a_layer_by_itself_is_changed_and_restored() -> None:
    norm = nn.BatchNorm3d(4)
    assert synchronised(norm) is norm
    assert type(norm) is not nn.BatchNorm3d
    assert type(restored(norm)) is nn.BatchNorm3d
    assert type(restored(norm)) is nn.BatchNorm3d  # also what was never changed


def pickled(layer: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(layer))
    return loaded


def saved(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
def test_a_copy_is_of_the_class_from_before(copied: Any) -> None:
    for kind in (nn.BatchNorm2d, nn.SyncBatchNorm, Quiet):
        norm = synchronised(kind(4))
        norm(torch.randn(2, 4, 3, 3))
        other = copied(norm)
        assert type(other) is kind
        assert type(norm) is not kind
        assert all(map(torch.equal, other.state_dict().values(), norm.state_dict().values()))
        assert other.num_batches_tracked == 1


def test_what_computes_by_itself_is_left_alone_and_named_once() -> None:
    bound = nn.BatchNorm2d(4)
    setattr(bound, "forward", lambda input: input)  # noqa: B010
    model = nn.ModuleDict({"act": Rectified(4), "bound": bound, "plain": nn.BatchNorm2d(4), "own": TorchsOwn(4)})
    with pytest.warns(UserWarning, match=r"'act' \(Rectified\), 'bound' \(BatchNorm2d\)\. .*torch's layers\.$") as seen:
        synchronised(model)
    assert len(seen) == 1
    assert classes(model)[1:] == [Rectified, nn.BatchNorm2d, type(synchronised(nn.BatchNorm2d(4))), TorchsOwn]


def test_a_lazy_layer_must_have_seen_a_batch() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d())
    with pytest.raises(ConfigurationError, match=r"'2' is a LazyBatchNorm2d .* Call the model once on a batch"):
        synchronised(model)
    assert type(model[0]) is nn.BatchNorm2d  # nothing has been changed then
    model(torch.randn(2, 3, 3, 3))
    synchronised(model)
    assert type(model[0]) is type(model[2]) is type(synchronised(nn.BatchNorm2d(4)))
