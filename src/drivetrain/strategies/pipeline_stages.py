"""The stages of a model in a pipeline: which rank holds each parameter, and the schedule of forward and backward
passes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base import torch_private
from drivetrain.base.packages import pipelining
from drivetrain.base.tree import map_leaves, parameters_of
from drivetrain.errors import ConfigurationError, described, number_of


def configured(module: nn.Module, num_stages: int, processes: int) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Return the result of the hook ``configure_pipeline``.

    Raises:
        ConfigurationError: the module does not define the hook, or the hook does not return ``num_stages`` modules and
            a loss function.
    """
    name, hook = type(module).__name__, getattr(module, HOOK, None)
    if hook is None:
        raise ConfigurationError(
            f"{name} has no method {HOOK}, which PipelineStrategy calls for the stages. Define "
            f"{HOOK}(self, num_stages) so that it returns a list of num_stages modules, made of the layers of "
            "self, and a loss function(output, target)."
        )
    result = hook(num_stages)
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (Sequence, nn.ModuleList))
    if not pair or not all(isinstance(each, nn.Module) for each in result[0]) or not callable(result[1]):
        raise ConfigurationError(
            f"{name}.{HOOK} returned {described(result)}. Return (stages, loss_function): a list of modules, and "
            "a function of the last stage's output and the target."
        )
    stages, loss = list(result[0]), result[1]
    if len(stages) != num_stages:
        raise ConfigurationError(
            f"{name}.{HOOK} returned {number_of(len(stages), 'stage')}, and {num_stages} "
            f"are needed: {processes} processes with {num_stages // processes} each. Return as many as num_stages."
        )
    return stages, loss


def owned_by(module: nn.Module, stage_list: Sequence[nn.Module], processes: int) -> dict[str, int]:
    """Return, by name, the owner of each parameter and buffer in a stage. The owner is the index, in the pipeline, of
    the rank that holds the tensor.

    Raises:
        ConfigurationError: a parameter is in several stages, in no stage, or not in the module.
    """
    stages: dict[int, set[int]] = {}
    for number, stage in enumerate(stage_list):
        for tensor in (*stage.parameters(), *stage.buffers()):
            stages.setdefault(id(tensor), set()).add(number)
    names, name = named(module), type(module).__name__
    trained = dict(module.named_parameters(remove_duplicate=False))
    outside = [each for each in trained if id(trained[each]) not in stages]
    if outside:
        raise ConfigurationError(
            f"{name}.{HOOK} leaves {', '.join(outside[:5])} in no stage, so no process would train it. Make it a "
            "part of a stage."
        )
    tied = [each for each in names if len(stages.get(id(names[each]), ())) > 1]
    if tied:
        raise ConfigurationError(
            f"{name}.{HOOK} puts {', '.join(tied[:5])} into several stages, which would train separate copies. "
            "Put the layers that share it into one stage."
        )
    known = {id(tensor) for tensor in names.values()}
    foreign = [number for number, stage in enumerate(stage_list) for each in stage.parameters()
               if id(each) not in known]  # fmt: skip
    if foreign:
        raise ConfigurationError(
            f"Stage {foreign[0]} of {name}.{HOOK} has parameters that are not in {name}, so the optimizer would not "
            "train them. Make stages of layers that are attributes of the module."
        )
    return {each: min(stages[id(names[each])]) % processes for each in names if id(names[each]) in stages}


def named(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers by name. A shared tensor has an entry for each of its names."""
    parameters = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def keep(module: nn.Module, owners: Mapping[str, int], index: int) -> None:
    """Move all parameters and buffers of other ranks to the meta device, which frees their memory. Names and shapes do
    not change.
    """
    made: dict[int, Tensor] = {}
    there = named(module)
    for name, owner in owners.items():
        if owner == index:
            continue
        path, _, own = name.rpartition(".")
        layer, tensor = module.get_submodule(path), there[name]
        empty = torch.empty_like(tensor, device="meta")
        if own in torch_private.own_parameters(layer):
            empty = nn.Parameter(empty, tensor.requires_grad)
        setattr(layer, own, made.setdefault(id(tensor), empty))


def trained_stages(stages: Sequence[nn.Module]) -> tuple[bool, ...]:
    """Return for each stage whether the stage or an earlier stage has a trained parameter. The result is the same on
    all ranks.
    """
    own = (any(each.requires_grad for each in stage.parameters()) for stage in stages)
    return tuple(itertools.accumulate(own, operator.or_))


def place_own(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the parameters and buffers that this rank holds to ``device``."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)
    return module


def load_own(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the optimizer states of the parameters that this rank holds."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    elsewhere = {number for number, each in zip(numbers, parameters_of(optimizer), strict=True) if each.is_meta}
    own = {number: each for number, each in state["state"].items() if number not in elsewhere}
    optimizer.load_state_dict({**state, "state": own})


# ---- schedules ------------------------------------------------------------------------------------------------------


HOOK = "configure_pipeline"
"""The name of the module's method that returns the module's stages and a loss function."""


class Schedule:
    """One of torch's schedules, for inputs of one shape.

    Args:
        name: "gpipe", "1f1b" or "interleaved_1f1b".
        own: the stages of this rank, by number.
        num_stages: the number of stages on all ranks.
        count: the number of micro-batches.
        loss: the user's loss function; ``None``: forward passes only.
        device: the device of this rank.
        group: the ranks of the pipeline; ``None``: all.
        context: a function that returns the context in which forward passes have the run's precision.
        trained: for each stage, whether gradients flow back into the stage; empty: forward passes only.
    """

    def __init__(
        self,
        name: str,
        own: Mapping[int, nn.Module],
        num_stages: int,
        count: int,
        loss: Callable[..., Any] | None,
        device: torch.device,
        group: Any,
        context: Callable[[], AbstractContextManager[Any] | None],
        trained: Sequence[bool] = (),
    ) -> None:
        self.count, self.has_first, self.has_last = count, 0 in own, num_stages - 1 in own
        self.user_loss, self.context, self.targets = loss, context, list[Any]()
        self.weights: list[float | Tensor] = []
        # form(loss, weight) returns a value of the type that the user's loss function returns. Set on the rank with the
        # last stage.
        self.form: Callable[[Tensor, Tensor], Any] = plain_loss
        trained = trained or [False] * num_stages
        stages: list[Any] = [
            pipelining.PipelineStage(_Stage(stage, context, trained[number]), number, num_stages, device, group=group)
            for number, stage in own.items()
        ]
        for each in stages:
            torch_private.connect_by_equal_messages(each)
        arguments: dict[str, Any] = {"loss_fn": None if loss is None else self._loss, "scale_grads": False}
        self.schedule: Any
        if name == "interleaved_1f1b":
            self.schedule = pipelining.ScheduleInterleaved1F1B(stages, count, **arguments)
        elif name == "1f1b" and loss is not None and count >= num_stages:
            self.schedule = pipelining.Schedule1F1B(stages[0], count, **arguments)
        else:  # with fewer micro-batches than stages, passes cannot alternate
            # torch 2.9 can run a schedule with fewer micro-batches than stages, but cannot create such a schedule. The
            # number of micro-batches is therefore set afterwards.
            self.schedule = pipelining.ScheduleGPipe(stages[0], max(count, num_stages), **arguments)
            torch_private.set_micro_batches(self.schedule, count)

    def train(self, inputs: tuple[Tensor, ...], target: Any) -> Tensor | None:
        """Run forward and backward passes.

        Returns:
            On the rank with the last stage, two values: the sum of loss times weight over the micro-batches, and the
                sum of the weights. For losses without weights, the mean loss and 1. On all other ranks, ``None``.
        """
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"losses": losses}
        if self.has_last:
            self.targets = [_part(target, number, self.count) for number in range(self.count)]
            self.weights, self.form = [], plain_loss
            arguments["target"] = torch.arange(self.count)  # torch splits only tensors: pass indices of the targets
        self.schedule.step(*(inputs if self.has_first else ()), **arguments)
        if not self.has_last:
            return None
        total = torch.stack([each.detach() for each in losses]).sum()
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        if self.form is plain_loss:
            return torch.stack([total, torch.ones_like(total)])
        counted = self.weights[-self.count :]  # torch may have called the loss function in a trial run
        weights = [torch.as_tensor(each, dtype=total.dtype, device=total.device) for each in counted]
        return torch.stack([total, torch.stack(weights).sum()])

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Any:
        """Run forward passes. Return the output on the rank with the last stage."""
        with torch.no_grad():
            return self.schedule.step(*(inputs if self.has_first else ()))

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """Return the number that one micro-batch adds to the loss of the batch. This is the mean loss of the
        micro-batch divided by the number of micro-batches; with weights, the product of loss and weight.
        """
        assert self.user_loss is not None
        target = self.targets[int(number[0])]
        with self.context() or nullcontext():
            value = self.user_loss(output, *target) if isinstance(target, tuple) else self.user_loss(output, target)
        if isinstance(value, Tensor):
            return value / self.count
        if not isinstance(value, tuple) or getattr(value, "_fields", ()) != ("loss", "weight"):
            raise ConfigurationError(
                f"The loss function of {HOOK} returned {described(value)}. Return a tensor, the mean over the samples, "
                "or a WeightedLoss."
            )
        loss, weight = value
        self.weights.append(weight)
        self.form = type(value)
        return loss * weight


def plain_loss(loss: Tensor, weight: Tensor) -> Tensor:
    """Return ``loss``. Used for a loss function that returns no weights."""
    return loss


class _Stage(nn.Module):
    """A stage whose forward pass runs in the context of the run's precision.

    The backward pass runs outside this context.

    Args:
        stage: the user's stage.
        context: as in :class:`Schedule`.
        trained: whether the next stage sends gradients back for each batch. If so, the output of this stage requires
            gradients, even if no trained parameter took part in the computation.
    """

    def __init__(
        self, stage: nn.Module, context: Callable[[], AbstractContextManager[Any] | None], trained: bool
    ) -> None:
        super().__init__()
        self.stage, self.context, self.trained = stage, context, trained

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context() or nullcontext():
            output = self.stage(*args, **kwargs)
        return map_leaves(_open_to_gradients, output) if self.trained and torch.is_grad_enabled() else output


def _open_to_gradients(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.detach().requires_grad_()


def microbatches(samples: int, wanted: int, ranks: int) -> int:
    """Return the number of equal parts into which a batch is split. This is the largest number up to ``wanted`` that
    divides ``samples`` and that torch's interleaved schedule accepts.
    """
    counts = range(1, min(wanted, max(samples, 1)) + 1)
    return max(count for count in counts if samples % count == 0 and count % max(1, count // ranks) == 0)


def split_batch(batch: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Return the inputs of the first stage, and the target for the loss function.

    The first element of a batch is the input, and the other elements are the target. Without other elements, the input
    is also the target.
    """
    first, rest = (batch[0], tuple(batch[1:])) if isinstance(batch, (tuple, list)) and batch else (batch, ())
    inputs = tuple(first) if isinstance(first, (tuple, list)) else (first,)
    if not inputs or not all(isinstance(each, Tensor) and each.ndim for each in inputs):
        raise ConfigurationError(
            f"PipelineStrategy got {described(batch)} as a batch. Return (input, target) from the dataset: the first "
            "stage gets the input, a tensor or a tuple of tensors, and the loss function the rest."
        )
    return inputs, rest if len(rest) > 1 else rest[0] if rest else first


def _part(target: Any, number: int, count: int) -> Any:
    """Return the part of each tensor in ``target`` for one micro-batch."""

    def part(leaf: Any) -> Any:
        return leaf.tensor_split(count)[number] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return map_leaves(part, target)
