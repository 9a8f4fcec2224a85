"""Free the parameters that FSDP has kept gathered after a forward pass, if no backward pass follows.

torch frees these parameters in the backward pass. Some forward passes have no backward pass: a validation step, or a
training step that returns ``None``. After such a pass the module would still have the gathered copies instead of the
shards. A later forward pass would use these copies, although the optimizer may have changed the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.base import torch_private
from drivetrain.base.packages import fsdp


def keep_until_backward(root: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Let each forward pass of ``root`` gather parameters from the current shards, and not use older gathered copies.
    Free the gathered copies after a pass without gradients.

    Args:
        root: the model.
        kept: the modules that ``fully_shard`` does not reshard after forward; ``root`` may be among these modules.
    """
    groups = [group for module in kept for group in torch_private.fsdp_groups(module)]
    if groups:
        passes = _Passes(root, groups, torch_private.fsdp_groups(root))
        root.register_forward_pre_hook(passes.begin, prepend=True)
        # also called after a failed pass, because the step may catch the exception
        root.register_forward_hook(passes.end, always_call=True)
        root.zero_grad = passes.zero_grad  # type: ignore[method-assign]
    for module in kept:
        if module is not root:
            module.register_forward_hook(_drop_without_gradients)


class _Passes:
    """Counts the nested forward passes of a model, such as ``self(x)`` inside ``training_step``.

    At the end of an inner pass, torch sets the state of the model's own parameters to "idle". This class sets the state
    back to "forward" while an outer pass still runs.

    Args:
        root: the model.
        groups: the groups of parameters that are kept gathered.
        own: the groups with the parameters of ``root`` itself, outside of its blocks.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Any], own: Sequence[Any]) -> None:
        self._root_zero_grad = root.zero_grad
        self._groups, self._own = groups, own
        self._forward, self._idle = torch_private.TrainingState.FORWARD, torch_private.TrainingState.IDLE
        self._running = 0

    def begin(self, module: nn.Module, args: Any) -> None:
        if not self._running:
            for group in self._groups:
                # Free parameters that an earlier pass has left gathered. After a failed pass, the state is still
                # "forward". In any state except "forward" and "idle", a backward pass is running, which needs the
                # gathered parameters.
                if group.is_unsharded and getattr(group, torch_private.TRAINING_STATE) in (self._idle, self._forward):
                    group.reshard()
        self._running += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module's parameters and of all shards. Between forward and backward, the module
        contains gathered parameters. The module's own ``zero_grad`` would then not clear the gradients of the shards.
        """
        self._root_zero_grad(set_to_none)
        for shard in (each.sharded_param for group in self._groups for each in group.fsdp_params):
            if shard.grad is not None:
                shard.grad = None if set_to_none else torch.zeros_like(shard.grad)

    def end(self, module: Any, args: Any, output: Any) -> None:
        self._running = max(0, self._running - 1)  # not below 0: a hook may have failed before the pass was counted
        if self._running:
            for group in self._own:
                setattr(group, torch_private.TRAINING_STATE, self._forward)
        elif not torch.is_grad_enabled():
            module.reshard()


def _drop_without_gradients(module: Any, args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        module.reshard()


def groups_in(module: nn.Module) -> Iterator[Any]:
    """Yield torch's groups of sharded parameters; FSDP gathers the parameters of a group together."""
    for each in module.modules():
        if isinstance(each, fsdp.FSDPModule):
            yield from torch_private.fsdp_groups(each)


def parameters_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name in ``module`` of each sharded parameter, and torch's object for the parameter."""
    names = {each: f"{name}." if name else "" for name, each in module.named_modules()}
    for group in groups_in(module):
        for parameter in group.fsdp_params:
            info = torch_private.place_of(parameter)
            yield f"{names[info.module]}{info.param_name}", parameter


def forget_iteration(module: Any) -> None:
    """Reset the state of ``module`` after an unfinished pass, and drop the gradients of the pass."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    elif hasattr(module, torch_private.FSDP_STATE):
        torch_private.reset_passes(module, list(groups_in(module)))
    for _, parameter in parameters_in(module):
        parameter.unsharded_accumulated_grad = None
        if (gathered := torch_private.gathered_of(parameter)) is not None:
            gathered.grad = None
