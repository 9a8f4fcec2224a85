"""Group the ranks of a job by the sizes of their shards. A plan measures only one rank of each group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from drivetrain.forecast import torch_tools

MOST_CLASSES = 4
"""The maximum number of groups of which a plan measures a rank. The plan takes the groups with the largest shards."""


def rank_classes(module: nn.Module, ranks: int, owners: dict[str, int], pipeline: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks. A group is a tuple of rank numbers. The group with the largest shards is the first.

    In a pipeline, the first rank and the last rank are in separate groups even if their shards have the same size. The
    first rank keeps the activations of more micro-batches than the last.

    Args:
        module: the model after its set-up.
        ranks: the number of ranks.
        owners: for each parameter, the rank of a pipeline that has the parameter.
        pipeline: the number of ranks in a pipeline, or 1 if there is no pipeline.
    """
    shapes: list[list[Any]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    counted: dict[Any, list[Any]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = tuple(parameter.shape), getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
        counted.setdefault((*key, owners.get(name)), []).append(parameter.element_size())
    for (shape, placements, mesh, owner), items in counted.items():
        if mesh is not None:
            with torch_tools.real():
                dimensions, numbers = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
            places: Iterable[Any] = zip(numbers, itertools.product(*map(range, dimensions)), strict=True)
        else:
            dimensions, places = (), [(rank, ()) for rank in range(ranks) if owner in (None, rank % pipeline)]
        for rank, place in places:
            local = _local(shape, placements, dimensions, place)
            shapes[rank].append((local, len(items)))
            sizes[rank] += math.prod(local) * sum(items)
    found: dict[Any, list[int]] = {}
    for rank in range(ranks):
        ends = (rank % pipeline == 0, rank % pipeline == pipeline - 1) if pipeline > 1 else ()
        found.setdefault((ends, tuple(shapes[rank])), []).append(rank)
    return tuple(map(tuple, sorted(found.values(), key=lambda each: -sizes[each[0]])))


def _local(shape: Sequence[int], placements: Any, mesh: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a shard. torch divides a tensor into shards as ``torch.chunk`` does."""
    local = list(shape)
    for placement, parts, at in zip(placements, mesh, place, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            chunk = -(-local[dim] // parts)
            local[dim] = max(0, min(chunk, local[dim] - at * chunk))
    return tuple(local)
