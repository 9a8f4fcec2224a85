"""Warnings about modules in the wrong mode, and about parameters that are not trained, not moved or not saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.advice.watch import Watch
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import leaves, parameters_of
from drivetrain.loops.run import Run
from drivetrain.strategies.step import steps_itself

_HALF_OF_SMALLEST = 2.0**-25  # half of float16's smallest positive number: smaller values round to 0


class ModelWatch(Watch):
    """Checks the modes and the parameters of a run's module."""

    _left_out = 0

    def on_train_start(self) -> None:
        self._check_modes()
        check_parameters(self._run)
        self._left_out = len(self._names_left_out())

    def batches_ended(self) -> None:
        self._check_modes()

    def epoch_closed(self) -> None:
        if len(missing := self._names_left_out()) > self._left_out:
            self._left_out = len(missing)
            rank_zero_warn(
                f"Parameters that require a gradient have come since training began, {len(missing)} in all, and no "
                f"optimizer has them, so they are not trained: the first is {missing[0]!r}. Give them to one with "
                "optimizer.add_param_group({'params': ...}), or make layers in __init__ or configure_model."
            )

    def on_train_end(self) -> None:
        if "should_stop" in vars(self._run.module):
            rank_zero_warn("self.should_stop of a module has no effect. Write self.trainer.should_stop = True.")

    def _names_left_out(self) -> list[str]:
        """Return the names of parameters that require gradients and are in no optimizer."""
        optimizers, module = self._run.engine.strategy.optimizers, self._run.module
        stepped = {id(each) for optimizer in optimizers for each in parameters_of(optimizer)}
        named = module.named_parameters() if stepped else ()
        return [name for name, each in named if each.requires_grad and id(each) not in stepped]

    def _check_modes(self) -> None:
        """Warn once if trained modules are in eval mode."""
        module = self._run.module
        if (found := modules_in_eval_mode(module)) and self.first("modules in eval mode"):
            total = sum(1 for _ in module.modules())
            first = f"for example {found[0]!r}" if found[0] else "the model itself among them"
            rank_zero_warn(
                f"Modules in eval mode: {len(found)} of the {total} in {type(module).__name__} ({first}). They are "
                "trained like that: dropout is off, and batch norm keeps its statistics. If this is not meant, call "
                "model.train() before fit, and leave out calls of eval() in steps and hooks of training. [DT1013]"
            )

    def _check_mode_of(self, word: str) -> None:
        if self._run.module.training and self._run.hooks.bind_method(f"on_{word}_model_eval") is None:
            rank_zero_warn(
                f"The module was set to train mode during the {word}, so dropout was on, and batch norm took "
                f"its statistics from each batch. Leave out the call of train() in {word}_step and its hooks."
            )

    on_validation_end = partialmethod(_check_mode_of, "validation")
    on_test_end = partialmethod(_check_mode_of, "test")
    on_predict_end = partialmethod(_check_mode_of, "predict")


def modules_in_eval_mode(module: nn.Module, name: str = "") -> list[str]:
    """Return the names of modules in eval mode. A module whose parameters are all frozen is left out, because its eval
    mode is intended. A module without parameters, such as dropout, is included.
    """
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return []
    found = [] if module.training else [name]
    for child, each in module.named_children():
        found += modules_in_eval_mode(each, f"{name}.{child}" if name else child)
    return found


def check_parameters(run: Run) -> None:
    """Report trainable parameters that no optimizer has, and parameters of the optimizers that the module does not
    have.
    """
    module, optimizers = run.module, run.engine.strategy.optimizers
    if not optimizers:
        return
    name = type(module).__name__
    own = {id(parameter): parameter for parameter in module.parameters()}
    stepped = {id(each): each for optimizer in optimizers for each in parameters_of(optimizer)}
    trainable = [each for each in own.values() if each.requires_grad]
    left_out = [each for each in trainable if id(each) not in stepped]
    if trainable and len(left_out) == len(trainable) and (frozen := sum(key in own for key in stepped)):
        rank_zero_warn(
            f"The {frozen} parameters of {name} that the optimizers have are all frozen (requires_grad=False), so "
            "nothing of it is trained. Give the optimizers the parameters that are to be trained, or unfreeze these: "
            "parameter.requires_grad_(True)."
        )
    elif trainable and len(left_out) == len(trainable):
        rank_zero_warn(
            f"No optimizer has a parameter of {name}, so nothing of it is trained. Give the optimizers "
            "self.parameters() in configure_optimizers. [DT1011]"
        )
    elif left_out:
        rank_zero_info(
            f"{len(left_out)} of the {len(trainable)} parameters of {name} that require a gradient are in no "
            "optimizer, and are not trained."
        )
    everyones = [frozenset(id(each) for each in parameters_of(optimizer)) for optimizer in optimizers]
    if len(set(everyones)) < len(everyones):
        rank_zero_warn(
            f"Two optimizers of {name} have the same parameters, and each of them steps all of these. Give each its "
            "own part, such as self.generator.parameters()."
        )
    unsaved = [tuple(each.shape) for key, each in stepped.items() if key not in own]
    if unsaved:
        rank_zero_warn(
            f"The optimizers have {len(unsaved)} parameters that are in no module, the first of shape {unsaved[0]}. "
            "Checkpoints do not contain their values. Assign them to the module, for example self.scale = "
            "nn.Parameter(...), or save them in on_save_checkpoint."
        )
    _warn_of_hidden_layers(module)
    # a strategy with its own optimizer step may use float32 master weights
    if not steps_itself(run.engine.strategy):
        _warn_of_eps(optimizers)


def _warn_of_eps(optimizers: Sequence[Optimizer]) -> None:
    """Warn about an optimizer that can divide by zero, because its ``eps`` rounds to 0 in float16, the type of its
    parameters.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if (
                isinstance(eps, float)
                and 0 < eps < _HALF_OF_SMALLEST
                and type(optimizer).__module__.startswith("torch.optim")
                and any(parameter.dtype is torch.float16 for parameter in group["params"])
            ):
                name = type(optimizer).__name__
                rank_zero_warn(
                    f"{name}(eps={eps:g}): in float16, the type of its parameters, eps rounds to 0, so weights become "
                    f'nan where a gradient is 0. Write {name}(..., eps=1e-4), or precision="16-mixed".'
                )
                return


def _warn_of_hidden_layers(module: nn.Module) -> None:
    """Warn about layers in a plain list or dictionary, because a module does not register these layers."""
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            layers = [each for _, each in leaves(value) if isinstance(each, nn.Module)]
            known = set(module.modules())
            if any(layer not in known and any(p.requires_grad for p in layer.parameters()) for layer in layers):
                place = f"{path}.{attribute}" if path else attribute
                better = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                rank_zero_warn(
                    f"{type(module).__name__} has layers in the plain {type(value).__name__} {place!r}, where torch "
                    f"does not see them: they are not moved, saved, or among self.parameters(). Write {better}(...), "
                    "or freeze them if they are not to be trained. [DT1012]"
                )
