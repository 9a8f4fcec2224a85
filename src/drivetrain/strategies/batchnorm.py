"""Batch norm whose statistics are those of the batches of all ranks together, on every device.

torch's own ``nn.SyncBatchNorm`` does this on some devices and refuses the others, the host among them. Here a layer of
the user's model gets another forward pass for the time of a run, and stays the object that it was: its parameters,
buffers, hooks, names and references are untouched.

Per layer and training step the ranks exchange ``2 C + 1`` numbers in the forward pass and ``2 C`` in the backward pass,
for C channels. Nothing is read from a device, so nothing waits for one.
"""

from __future__ import annotations

import functools
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import Registry
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.layer_sync import LayerSync
from drivetrain.strategies.peers import Peers, peers_of


class TorchSyncBatchNorm(LayerSync):
    """What ``Trainer(sync_batchnorm=True)`` uses: batch norm whose statistics are those of all ranks."""

    @classmethod
    def register_layer_syncs(cls, layer_sync_registry: Registry[LayerSync]) -> None:
        layer_sync_registry.register("sync_batchnorm", cls)

    def apply(self, model: nn.Module) -> nn.Module:
        """Return ``model``, its layers changed in place: see :func:`synchronised`."""
        return synchronised(model, self.group)

    def revert(self, model: nn.Module) -> nn.Module:
        """Return ``model``, its layers of the classes that they had."""
        return restored(model)

    def count_batches(self, model: nn.Module, counts: bool) -> None:
        count_batches(model, counts)


_OF_A_RUN = ("counts", "data_group")  # what a layer has only while it is synchronised

# ---- the functions ---------------------------------------------------------------------------------------------------


def synchronised(module: nn.Module, group: Any = None) -> nn.Module:
    """Let every batch norm in ``module`` take its training statistics from all ranks; undone by :func:`restored`.

    Layers are changed in place, also those of subclasses without a forward of their own. A ``nn.SyncBatchNorm``, which
    torch refuses on the host, keeps a process group of its own; other layers talk to the ranks of ``group``. Without a
    process group, in a group of one and in evaluation a layer does what it always did, which without running statistics
    means to evaluate by the rank's own batch. A copy of a layer, pickled or not, is of the class that it had before.

    Args:
        module: a model, or one layer. Every rank must run the same layers in the same order, forward and backward; a
            batch of no samples takes part like any other. Gradients cannot be differentiated again.
        group: the process group of the ranks that see different samples; ``None``: all processes.

    Returns:
        ``module`` itself.

    Raises:
        ConfigurationError: a lazy layer has not seen a batch yet, so its class is still going to change.
    """
    changing, overridden = [], []
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, _Synchronised) or _synchronises_itself(layer):
            continue
        cls = type(layer)
        if isinstance(layer, LazyModuleMixin):
            raise ConfigurationError(
                f"The layer {name!r} is a {cls.__name__} that has not seen a batch, and what it will be is not known "
                "yet. Call the model once on a batch before training, or write the number of channels."
            )
        if "forward" in vars(layer) or type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            overridden.append(f"{name!r} ({cls.__name__})")
        else:
            changing.append(layer)
    for layer in changing:  # all, or where one cannot be, none
        kind: type = type(layer)
        layer.__class__ = _synchronised_class(kind)
        vars(layer)["data_group"] = group
    if overridden:
        rank_zero_warn(
            f"sync_batchnorm=True leaves these layers alone, because their forward is not torch's: "
            f"{', '.join(overridden)}. Each rank normalizes by its own batch there. Where that is not meant, exchange "
            "the statistics in that forward, or use torch's layers."
        )
    return module


def restored(module: nn.Module) -> nn.Module:
    """``module`` itself, its layers of the classes that they had before :func:`synchronised`."""
    for layer in module.modules():
        if isinstance(layer, _Synchronised):
            for name in _OF_A_RUN:
                vars(layer).pop(name, None)
            layer.__class__ = layer.was  # type: ignore[assignment]
    return module


def count_batches(module: nn.Module, counts: bool) -> None:
    """Say whether the batches that come are to be seen in the statistics, or only take part in finding them."""
    for layer in module.modules():
        if isinstance(layer, _Synchronised):
            layer.counts = counts


def _synchronises_itself(layer: _BatchNorm) -> bool:
    """Whether a layer may do anything: a subclass of torch's own."""
    return isinstance(layer, nn.SyncBatchNorm) and type(layer) is not nn.SyncBatchNorm


# ---- the layer -------------------------------------------------------------------------------------------------------


class _Synchronised(_BatchNorm):
    """What a layer is while its statistics are everybody's; always with the layer's own class, ``was``, below it."""

    was: type[_BatchNorm]
    counts: bool = True  # whether this rank's batch is one; see count_batches
    data_group: Any = None  # the process group of a layer that has none of its own

    def forward(self, input: Tensor) -> Tensor:
        group = getattr(self, "process_group", None) or self.data_group
        peers = peers_of(type(self).__name__, group, None) if self.training else None
        if peers is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            mean, var, count = _statistics(input if self.counts else input[:0], peers)
            if self.track_running_stats:
                self._track(mean, var, count)
        weight = torch.ones_like(mean) if self.weight is None else self.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if self.bias is None else self.bias.to(mean.dtype)
        given = (input, weight, bias, mean, var, count, self.eps, peers, self.counts)
        normalized = _Normalized.apply(*given)  # type: ignore[no-untyped-call]
        return cast(Tensor, normalized)

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of a batch; an empty one leaves them where they are."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        if self.momentum is not None:
            share = count.clamp(max=1) * self.momentum
        else:
            assert self.num_batches_tracked is not None
            share = count.clamp(max=1) / self.num_batches_tracked
        unbiased = var * (count / (count - 1).clamp(min=1))
        for running, current in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.to(current.dtype).lerp(current, share))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        state = {name: value for name, value in reduced[2].items() if name not in _OF_A_RUN}
        return (object.__new__, (self.was,), state, *reduced[3:])  # this class is in no module: nothing could load it


@functools.cache
def _synchronised_class(was: type) -> type:
    base = was
    members: dict[str, Any] = {"was": was, "__module__": __name__}
    if was is nn.SyncBatchNorm:  # DDP refuses what inherits from it
        base, members["_check_input_dim"] = _BatchNorm, nn.SyncBatchNorm._check_input_dim
    return type(f"Synchronised{was.__name__}", (_Synchronised, base), members)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def _statistics(input: Tensor, peers: Peers) -> tuple[Tensor, Tensor, Tensor]:
    """Of all ranks' inputs: mean and biased variance, (C), and how many values a channel has; 32 bits at least."""
    dims, channels = [0, *range(2, input.dim())], input.shape[1]
    count = input.numel() // max(channels, 1)
    wide = torch.promote_types(input.dtype, torch.float32)
    own = input.new_zeros(1 + 2 * channels, dtype=wide)
    if count:
        var, mean = torch.var_mean(input.to(wide), dims, correction=0)
        own = torch.cat([own.new_full((1,), count), mean, var])
    rows = peers.gather(own).to(input.device)
    counts, means, variances = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = counts.sum()
    if count < 2 and input.device.type == HOST.type and total == 1:  # elsewhere it would have to wait for the device
        raise ValueError(
            f"The {len(peers.ranks)} ranks together gave one value per channel (here, a batch of shape "
            f"{tuple(input.shape)}), whose variance is unknown. Give two at least, or call eval() on the layer."
        )
    some = total.clamp(min=1)
    mean = (counts * means).sum(0) / some
    var = (counts * (variances + (means - mean).square())).sum(0) / some  # no difference of large squares
    return mean, var, total


class _Normalized(torch.autograd.Function):
    """``input`` by given statistics; the gradient also goes through them, to the input of every rank."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, count: Tensor, eps: float,
        peers: Peers, counts: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight, mean, var, count)
        ctx.eps, ctx.peers, ctx.counts = eps, peers, counts
        return F.batch_norm(input, mean, var, weight, bias, eps=eps)  # one kernel; keeps type and memory format

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var, count = ctx.saved_tensors
        to_input, to_weight, to_bias = None, torch.zeros_like(mean), torch.zeros_like(mean)
        if input.numel():  # the kernel divides by it
            _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, input, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = ctx.peers.all_reduce(torch.cat([to_weight, to_bias]), dist.ReduceOp.SUM)
            scale = weight * (var + ctx.eps).rsqrt()
            seen = float(ctx.counts)  # the statistics do not depend on an input that is not in them
            slope, offset = (sums / -count.clamp(min=1)).view(2, -1) * scale * seen
            # What goes through the statistics is linear in the normalized input. It may nearly cancel what goes past
            # them, so the sum of both is not rounded to 16 bits before its end.
            wide = F.batch_norm(input.to(mean.dtype), mean, var, slope, offset, eps=ctx.eps)
            past = scale.view(-1, *[1] * (input.dim() - 2))
            to_input = wide.addcmul_(gradient.to(mean.dtype), past).to(input.dtype)
        return to_input, to_weight, to_bias, *[None] * 6
