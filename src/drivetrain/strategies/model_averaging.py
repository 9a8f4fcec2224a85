"""Local SGD: each rank trains separately, and parameters are averaged periodically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from drivetrain.base.packages import averaging, local_sgd
from drivetrain.base.tree import parameters_of
from drivetrain.errors import ConfigurationError, described, is_count, shown

_STEPS, _ITERATIONS = "local_sgd_steps", "local_sgd_iterations"

_USE = (
    "DDPStrategy(ddp_comm_state=PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100), "
    "ddp_comm_hook=post_localSGD_hook, model_averaging_period=4)"
)


class ModelAveraging:
    """After every ``period`` local steps, averages the parameters of every optimizer over the ranks.

    In the first ``state.start_localSGD_iter`` steps, torch's hook averages gradients over all ranks. In later steps,
    the hook averages gradients only over ``state.subgroup``. Parameters are averaged for the first time after the first
    step with the subgroup.

    [Note: where the counters are stored] The step count of an optimizer is stored in the optimizer's first parameter
    group. torch's schedulers store the initial learning rate in the same place. Checkpoints and copies of the optimizer
    therefore contain the count.

    Args:
        period: the number of optimizer steps between two averages.
        state: the state of torch's hook for local SGD.
    """

    def __init__(self, period: int, state: Any) -> None:
        self.period = period
        self.state = state
        self._hooks: list[Any] = []
        self.trained: set[int] = set()  # the id() of each parameter that was trained at the last average or later

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on, average parameters after the steps of these optimizers. The hooks of an earlier call are
        removed.

        Raises:
            ConfigurationError: an optimizer itself exchanges parameters between ranks.
        """
        self.detach()
        for optimizer in optimizers:
            if hasattr(optimizer, "consolidate_state_dict") or hasattr(optimizer, "averager"):
                raise ConfigurationError(
                    f"DDPStrategy(model_averaging_period={self.period}) with a {type(optimizer).__name__}, which "
                    "exchanges parameters by itself after each step. Leave out model_averaging_period, or return "
                    "a plain optimizer from configure_optimizers."
                )
            optimizer.param_groups[0].setdefault(_STEPS, self.state.iter)  # a new optimizer does not repeat the warm-up
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._read_counts))
            self.trained.update(id(each) for each in parameters_of(optimizer) if each.requires_grad)

    def detach(self) -> None:
        """Stop averaging."""
        self.trained.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def make_subgroup(self, num_processes: int) -> None:
        """Create one subgroup per machine if the user has passed no subgroup. Every rank must call this method."""
        # torch's hook would create a subgroup, but only of all CUDA devices of a machine
        if self.state.subgroup is None and self.state.post_local_gradient_allreduce:
            self.state.subgroup, _ = dist.new_subgroups(num_processes)  # type: ignore[no-untyped-call]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        group = optimizer.param_groups[0]
        local = group[_STEPS] - self.state.start_localSGD_iter
        group[_STEPS], group[_ITERATIONS] = group[_STEPS] + 1, self.state.iter
        if local >= 0 and local % self.period == 0:
            self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        # Average all trained parameters, even those without a gradient, because every rank must exchange the same
        # parameters. Include parameters that were frozen since the last average, because these parameters also differ
        # between ranks.
        parameters = [each for each in parameters_of(optimizer) if each.requires_grad or id(each) in self.trained]
        self.trained.difference_update(map(id, parameters))
        self.trained.update(id(each) for each in parameters if each.requires_grad)
        if not parameters:
            return
        places = [parameter.data for parameter in parameters]
        averaging.average_parameters(iter(parameters), self.state.process_group)
        for parameter, place in zip(parameters, places, strict=True):
            place.copy_(parameter.data)
            parameter.data = place  # the parameter must not become a view of the exchanged buffer

    def _read_counts(self, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        group.setdefault(_STEPS, 0)  # if another strategy saved the checkpoint, the warm-up begins
        self.state.iter = group.get(_ITERATIONS, 0)


def model_averaging(period: Any, state: Any, hook: Any) -> ModelAveraging | None:
    """Return a :class:`ModelAveraging` for these arguments of DDPStrategy, or ``None`` if they do not ask for local
    SGD.

    Raises:
        ConfigurationError: the arguments do not fit together.
    """
    if period is not None and not is_count(period, lowest=1):
        raise ConfigurationError(
            f"DDPStrategy(model_averaging_period={shown(period)}): it is a number of optimizer steps, at least 1. "
            f"Write {_USE}."
        )
    local = state is not None and isinstance(state, local_sgd.PostLocalSGDState)  # local_sgd is slow to import
    if period is None and not local:
        return None
    if period is None:
        raise ConfigurationError(
            "DDPStrategy(ddp_comm_state=PostLocalSGDState(...)) without model_averaging_period: the ranks would drift "
            f"apart. Write {_USE}."
        )
    if not local or hook is None:
        found = "no ddp_comm_hook" if local else f"ddp_comm_state={described(state)}"
        raise ConfigurationError(
            f"DDPStrategy(model_averaging_period={period}) with {found}: gradients would be averaged in every step, "
            f"so parameters would never differ. Write {_USE}."
        )
    return ModelAveraging(period, state)
