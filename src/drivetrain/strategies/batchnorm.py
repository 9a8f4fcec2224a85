"""Batch norm whose statistics are computed over the batches of all ranks, on any type of device.

torch's ``nn.SyncBatchNorm`` raises an error on some devices, such as the CPU. This module instead changes the class of
each batch norm in the user's model for the duration of a run. The layer remains the same object, so its parameters,
buffers, hooks and names do not change.

For a layer with C channels, the ranks exchange ``2 C + 1`` numbers in each forward pass and ``2 C`` numbers in each
backward pass of training. No value is read from an accelerator, so the host does not wait for the device.
"""

from __future__ import annotations

import functools
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.torch_private import BatchNorm, check_input, input_check_of_sync_batch_norm
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.layer_sync import LayerSync, LayerSyncRegistry
from drivetrain.strategies.peers import Peers, peers_of

_OF_A_RUN = ("counts", "data_group")  # attributes that a layer has only while it is synchronised


@LayerSyncRegistry.register("sync_batchnorm")
class TorchSyncBatchNorm(LayerSync):
    """The layer synchronisation of ``Trainer(sync_batchnorm=True)``: batch norm with statistics over all ranks.

    Layers are changed in place. A layer whose class overrides ``forward`` is not changed. An ``nn.SyncBatchNorm`` keeps
    its own process group. All other layers use the group in :attr:`group`. A layer is not synchronised in three cases:
    in evaluation, without a process group, and in a group with one process. In evaluation, a layer without running
    statistics uses the statistics of the rank's own batch. A copied or unpickled layer has its original class.

    Every rank, even a rank with an empty batch, must run the same layers in the same order, in the forward and in the
    backward pass. Double backward is not supported.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Let each batch norm in ``model`` compute its training statistics over all ranks. A layer whose class
        overrides ``forward`` is not changed.

        Raises:
            ConfigurationError: a lazy layer has not seen a batch yet, so its class will still change.
        """
        changing, overridden = [], []
        for name, layer in model.named_modules():
            cls = type(layer)
            # a subclass of torch's SyncBatchNorm may have its own exchange of statistics
            own_exchange = isinstance(layer, nn.SyncBatchNorm) and cls is not nn.SyncBatchNorm
            if not isinstance(layer, BatchNorm) or isinstance(layer, _Synchronised) or own_exchange:
                continue
            if isinstance(layer, LazyModuleMixin):
                raise ConfigurationError(
                    f"The layer {name!r} is a {cls.__name__} that has not seen a batch, so its final class is not "
                    "known yet. Call the model once on a batch before training, or write the number of channels."
                )
            if "forward" in vars(layer) or cls.forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
                overridden.append(f"{name!r} ({cls.__name__})")
            else:
                changing.append(layer)
        for layer in changing:  # only after all checks, so that an error leaves every layer unchanged
            kind: type = type(layer)
            layer.__class__ = _synchronised_class(kind)
            vars(layer)["data_group"] = self.group
        if overridden:
            rank_zero_warn(
                f"sync_batchnorm=True leaves these layers alone, because their forward is not torch's: "
                f"{', '.join(overridden)}. Each rank normalizes by its own batch there. Otherwise exchange the "
                "statistics in that forward, or use torch's layers."
            )
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give the layers of ``model`` their original classes again. Return ``model``."""
        for layer in model.modules():
            if isinstance(layer, _Synchronised):
                for name in _OF_A_RUN:
                    vars(layer).pop(name, None)
                layer.__class__ = layer.was  # type: ignore[assignment]
        return model

    def count_batches(self, model: nn.Module, counts: bool) -> None:
        """Set whether the statistics include this rank's next batches. With ``counts=False``, the rank still takes part
        in the exchange.
        """
        for layer in model.modules():
            if isinstance(layer, _Synchronised):
                layer.counts = counts


# ---- the layer -------------------------------------------------------------------------------------------------------


class _Synchronised(BatchNorm):
    """Base of the classes that synchronised layers have during a run. ``was`` is the original class of the layer."""

    was: type[BatchNorm]
    counts: bool = True  # whether the statistics include this rank's batch: see count_batches
    data_group: Any = None  # the process group of a layer that has no group of its own

    def forward(self, input: Tensor) -> Tensor:
        group = getattr(self, "process_group", None) or self.data_group
        peers = peers_of(type(self).__name__, group, None) if self.training else None
        if peers is None:
            return super().forward(input)
        check_input(self, input)
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
        """Move the running statistics towards the batch statistics. If the batches of all ranks are empty, nothing
        changes.
        """
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
        # store the original class, because pickle cannot import the current class, which was created at run time
        return (object.__new__, (self.was,), state, *reduced[3:])


@functools.cache
def _synchronised_class(was: type) -> type:
    base = was
    members: dict[str, Any] = {"was": was, "__module__": __name__}
    if was is nn.SyncBatchNorm:  # DDP rejects subclasses of SyncBatchNorm
        base, members = BatchNorm, members | input_check_of_sync_batch_norm()
    return type(f"Synchronised{was.__name__}", (_Synchronised, base), members)


# ---- the statistics --------------------------------------------------------------------------------------------------


def _statistics(input: Tensor, peers: Peers) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel over all ranks' inputs, in float32 or wider."""
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
    # only on the host: on an accelerator, reading ``total`` would wait for the device
    if count < 2 and input.device.type == HOST.type and total == 1:
        raise ValueError(
            f"The {len(peers.ranks)} ranks together gave one value per channel (here, a batch of shape "
            f"{tuple(input.shape)}), whose variance is unknown. Give two at least, or call eval() on the layer."
        )
    some = total.clamp(min=1)
    mean = (counts * means).sum(0) / some
    # mean(x^2) - mean^2 would lose precision, because it subtracts large numbers
    var = (counts * (variances + (means - mean).square())).sum(0) / some
    return mean, var, total


class _Normalized(torch.autograd.Function):
    """Normalizes ``input`` with given statistics. Gradients also flow through the statistics, to the inputs of all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, count: Tensor, eps: float,
        peers: Peers, counts: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight, mean, var, count)
        ctx.eps, ctx.peers, ctx.counts = eps, peers, counts
        return F.batch_norm(input, mean, var, weight, bias, eps=eps)  # one kernel, which keeps dtype and memory format

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var, count = ctx.saved_tensors
        to_input, to_weight, to_bias = None, torch.zeros_like(mean), torch.zeros_like(mean)
        if input.numel():  # the kernel divides by this number
            _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, input, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = ctx.peers.all_reduce(torch.cat([to_weight, to_bias]), dist.ReduceOp.SUM)
            scale = weight * (var + ctx.eps).rsqrt()
            seen = float(ctx.counts)  # 0 if the statistics do not include this input
            slope, offset = (sums / -count.clamp(min=1)).view(2, -1) * scale * seen
            # The gradient through the statistics is linear in the normalized input. It may nearly cancel the direct
            # gradient. The sum is therefore computed in float32 or wider, and rounded afterwards.
            wide = F.batch_norm(input.to(mean.dtype), mean, var, slope, offset, eps=ctx.eps)
            past = scale.view(-1, *[1] * (input.dim() - 2))
            to_input = wide.addcmul_(gradient.to(mean.dtype), past).to(input.dtype)
        return to_input, to_weight, to_bias, *[None] * 6
