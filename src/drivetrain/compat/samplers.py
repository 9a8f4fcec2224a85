"""Lightning's ``fabric.utilities.distributed`` and ``overrides.distributed``: samplers that distribute samples over the
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from drivetrain.base.torch_private import rebuild_buckets
from drivetrain.base.tree import leaves
from drivetrain.errors import ConfigurationError


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Distributes the indices of ``sampler`` over the ranks.

    ``sampler`` must yield the same indices on every rank. A random sampler needs the same seed on every rank.

    The Trainer and the Engine use a loader with this sampler as it is. With another sampler, they distribute the
    samples themselves, in the order that rank 0 draws.

    Args:
        sampler: the sampler to distribute; must have a length.
        args, kwargs: arguments of torch's ``DistributedSampler`` after its dataset, such as ``num_replicas`` and
            ``rank``. Pass ``shuffle=False``; otherwise this class shuffles the indices of ``sampler`` again.
    """

    dataset: Any  # the wrapped sampler, because DistributedSampler stores its first argument here

    def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(sampler, "__len__"):
            raise ConfigurationError(
                f"DistributedSamplerWrapper got a {type(sampler).__name__} without a length, so the ranks cannot agree "
                "where an epoch ends. Give it __len__."
            )
        super().__init__(sampler, *args, **kwargs)  # DistributedSampler reads only the sampler's length

    def __iter__(self) -> Iterator[Any]:
        order = list(self.dataset)
        return (order[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this sampler, and of the wrapped sampler if that has ``set_epoch``."""
        super().set_epoch(epoch)
        if callable(own := getattr(self.dataset, "set_epoch", None)):
            own(epoch)


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Distributes samples over the ranks without repeated samples; the last ranks can have one sample fewer.

    The Trainer distributes samples like this for evaluations. Do not train under DDP with this sampler: if one rank has
    more batches than another, DDP waits forever.

    Args:
        args, kwargs: arguments of torch's ``DistributedSampler``. ``seed`` has no effect: with ``shuffle``, the order
            depends only on the epoch.

    Raises:
        ConfigurationError: there are fewer samples than ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dataset: Any = self.dataset
        self.total_size = len(dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.seed = 0
        if self.total_size and not self.num_samples:
            raise ConfigurationError(
                f"UnrepeatedDistributedSampler has {self.total_size} samples for {self.num_replicas} ranks, so some "
                "ranks have none. Use fewer ranks."
            )


class UnrepeatedDistributedSamplerWrapper(DistributedSamplerWrapper, UnrepeatedDistributedSampler):
    """:class:`DistributedSamplerWrapper` without repeated samples.

    Args:
        sampler: the sampler to distribute; must have a length.
        args, kwargs: arguments of :class:`UnrepeatedDistributedSampler`, after its dataset.
    """


def prepare_for_backward(model: DistributedDataParallel, output: Any) -> None:
    """Make DDP average the gradients of the next backward pass, although its ``forward`` was not called.

    Args:
        model: the module in ``DistributedDataParallel``.
        output: the outputs of the forward pass, from which DDP finds the parameters that get a gradient.
    """
    averages = torch.is_grad_enabled() and model.require_backward_grad_sync
    model.require_forward_param_sync = averages
    if not averages:
        return
    searches = model.find_unused_parameters and not model.static_graph
    found = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)] if searches else []
    rebuild_buckets(model)
    model.reducer.prepare_for_backward(found)
