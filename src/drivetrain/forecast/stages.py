"""Run one rank of a pipeline alone, for ``drivetrain plan``. Fake tensors replace the tensors that other ranks' stages
would send.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain.base.packages import pipelining
from drivetrain.forecast import torch_tools
from drivetrain.strategies import pipeline_stages
from drivetrain.strategies.pipeline import PipelineStrategy


@dataclass
class Pipeline:
    """The pipeline of this process.

    Attributes:
        size: the number of ranks, or 1 if there is no pipeline.
        owners: for each parameter, the rank of the pipeline that has the parameter.
        schedule: the numbers of ranks, of micro-batches in a batch, and of stages on a rank.
    """

    size: int = 1
    owners: dict[str, int] = field(default_factory=dict)
    schedule: tuple[int, int, int] | None = None


PIPELINE = Pipeline()
_STAGES: list[nn.Module] = []
"""Copies of all stages, because a rank drops the parameters of other ranks' stages."""
_SHAPES: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
"""For each stage, the inputs and the outputs of one micro-batch."""


def stand_in_for_stages(mode: Any) -> None:
    """Patch drivetrain and torch's pipelining in this process, so that one rank of a pipeline can run alone.

    Args:
        mode: the fake mode.
    """
    make, owned_by, own_stage = pipeline_stages.configured, pipeline_stages.owned_by, pipelining.PipelineStage
    schedules, schedule_for = cast("Any", pipeline_stages.Schedule), PipelineStrategy._schedule_for
    train = schedules.train

    def configured(*args: Any) -> Any:
        stages, loss = make(*args)
        with torch_tools.real():
            for each in stages:
                tensors = (*each.parameters(), *each.buffers())
                _STAGES.append(copy.deepcopy(each, {id(tensor): torch_tools.alike(mode, tensor) for tensor in tensors}))
        return stages, loss

    def owned(module: nn.Module, stages: Any, processes: int) -> dict[str, int]:
        PIPELINE.owners, PIPELINE.size = owned_by(module, stages, processes), processes
        return PIPELINE.owners

    def with_shapes(strategy: PipelineStrategy, inputs: tuple[Tensor, ...], trains: bool) -> Any:
        with torch_tools.real(), mode:
            _SHAPES[:] = _shapes(strategy, inputs, trains)
        schedule = schedule_for(strategy, inputs, trains)
        PIPELINE.schedule = strategy.size, schedule.count, strategy.stages_per_rank
        return schedule

    def stage(module: nn.Module, number: int, *args: Any, **options: Any) -> Any:
        given, returned = _SHAPES[number]
        return own_stage(module, number, *args, input_args=given, output_args=returned, **options)

    def trained(schedule: Any, *args: Any) -> Any:
        sums = train(schedule, *args)
        # replaces the loss and the loss's weight, which the last stage would send
        return torch.ones(2) if sums is None else sums

    cast("Any", pipeline_stages).configured, cast("Any", pipeline_stages).owned_by = configured, owned
    cast("Any", PipelineStrategy)._schedule_for = with_shapes
    cast("Any", pipeline_stages).pipelining = SimpleNamespace(
        **{name: getattr(pipelining, name) for name in ("ScheduleInterleaved1F1B", "Schedule1F1B", "ScheduleGPipe")},
        PipelineStage=stage,
    )
    schedules.train = trained
    torch_tools.stages_know_shapes(own_stage)


def _shapes(strategy: PipelineStrategy, inputs: tuple[Tensor, ...], trains: bool) -> list[Any]:
    """Pass a micro-batch through all stages. Return the inputs and outputs of each stage."""
    count = pipeline_stages.microbatches(len(inputs[0]), strategy.num_microbatches, strategy.size)
    values = tuple(each[: len(each) // count].detach() for each in inputs)
    found = []
    for stage, trained in zip(_STAGES, pipeline_stages.trained_stages(_STAGES), strict=True):
        with strategy.precision_plugin.forward_context() or nullcontext():
            returned = stage(*values)
        outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        needs = [trained and trains and each.is_floating_point() for each in outputs]
        outputs = tuple(each.detach().requires_grad_(need) for each, need in zip(outputs, needs, strict=True))
        found.append((values, outputs))
        values = outputs
    return found
