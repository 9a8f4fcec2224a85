"""Find the reasons why a training step cannot run with the Trainer's ``split_on_oom=True``, ``cuda_graphs=...`` or
``replay_every=n``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base import torch_private
from drivetrain.base.introspect import defined_by_user, overrides, takes_iterator
from drivetrain.base.torch_private import AFTER_STEP, BEFORE_STEP, has_hooks, hooks_of, hooks_on_accumulation
from drivetrain.errors import ConfigurationError
from drivetrain.loops.run import Run
from drivetrain.settings import Settings
from drivetrain.strategies.step import Step as StepVerbs
from drivetrain.strategies.step import steps_itself
from drivetrain.strategies.step_parts import HOOKS_IN_A_STEP
from drivetrain.strategies.strategy import Strategy

_VERBS = (
    "training_step", "pre_backward", "backward", "post_backward", "optimizer_step", "zero_grad", "bind_step",
    "block_backward_sync",
)  # fmt: skip


def check(module: Any, settings: Settings, strategy: Strategy) -> None:
    """Check before a run that the training step works with split_on_oom, cuda_graphs and replay_every, if these are
    set.

    Raises:
        ConfigurationError: the step does not work with one of these arguments. The message gives
            the reason and the cure.
    """
    if settings.split_on_oom and (why := _why_not_split(module, settings, strategy)):
        raise ConfigurationError(f"Trainer(split_on_oom=True) {why} Leave split_on_oom out.")
    if settings.replay_every and (why := why_not_replayed(module, settings, strategy)):
        raise ConfigurationError(f"Trainer(replay_every={settings.replay_every}) {why} Leave replay_every out.")
    if settings.cuda_graphs is True and (why := why_not_recorded(module, settings, strategy)):
        raise ConfigurationError(no_graphs(why))


def no_graphs(why: str) -> str:
    """Return the error message for ``cuda_graphs=True`` when steps cannot be recorded."""
    return f'Trainer(cuda_graphs=True) cannot record the training step: {why}. Write cuda_graphs="auto" or False.'


# ---- split_on_oom ----------------------------------------------------------------------------------------------------


def _why_not_split(module: Any, settings: Settings, strategy: Strategy) -> str:
    name, kind = type(module).__name__, type(strategy).__name__
    refused = strategy.facts.refuses.get("split_on_oom")
    own = _own_verbs(strategy)
    reasons = (
        (
            not module.automatic_optimization,
            f"runs batches again, and {name} optimizes manually: its training_step would step twice.",
        ),
        (defined_by_user(module, "optimizer_step"), f"steps the optimizer itself, and {name} has an optimizer_step."),
        (takes_iterator(module.training_step), f"splits batches, and {name}.training_step fetches them itself."),
        (not strategy.facts.local_passes, f"does not work with {kind}. It works with one device, DDP and FSDP."),
        (bool(own), f"replaces the step of the strategy, and {kind} has a {own[0] if own else ''} of its own."),
        (
            settings.sync_batchnorm or strategy.layer_sync is not None,
            "lets ranks run batches again by themselves, and batch norm over all processes would wait for the others.",
        ),
        (refused is not None, str(refused)),
    )
    return next((text for holds, text in reasons if holds), "")


def _own_verbs(strategy: Strategy) -> list[str]:
    return [verb for verb in _VERBS if defined_by_user(strategy, verb)]


# ---- replay_every ----------------------------------------------------------------------------------------------------


def why_not_replayed(module: Any, settings: Settings, strategy: Strategy) -> str:
    """Return the end of a sentence: why the steps of ``module`` cannot be replayed; "" if the steps can be replayed."""
    name, kind = type(module).__name__, type(strategy).__name__
    refused = strategy.facts.refuses.get("replay_every")
    owns = overrides(strategy, "bind_step", StepVerbs) or steps_itself(strategy)
    reasons = (
        (
            not module.automatic_optimization,
            f"computes batches again, and {name} optimizes manually: its training_step would step twice.",
        ),
        (
            defined_by_user(module, "optimizer_step"),
            f"computes batches again before the optimizer's step, and {name}.optimizer_step computes the last one.",
        ),
        (
            takes_iterator(module.training_step),
            f"computes batches again, and {name}.training_step fetches its own.",
        ),
        (owns, f"computes batches again before the optimizer's step, and {kind} or its precision makes the step."),
        (strategy.facts.drives_all_devices, f"does not work with {kind}, which splits batches over devices."),
        (settings.split_on_oom, "computes batches again as they were, and split_on_oom=True may have split them."),
        (bool(settings.cuda_graphs), "computes batches again before the optimizer's step, which cuda_graphs records."),
        (refused is not None, str(refused)),
    )
    return next((text for holds, text in reasons if holds), "")


# ---- cuda_graphs -----------------------------------------------------------------------------------------------------


def why_not_recorded(module: Any, settings: Settings, strategy: Strategy) -> str:
    """Return why steps of ``module`` cannot be recorded; "" if no reason is known before the run."""
    name, kind, accelerator = type(module).__name__, type(strategy).__name__, strategy.accelerator
    own, refused = _own_verbs(strategy), strategy.facts.refuses.get("cuda_graphs")
    several = strategy.facts.is_distributed or strategy.facts.drives_all_devices
    reasons = (
        (
            accelerator is None or not overrides(accelerator, "graph_recorder", Accelerator),
            f"the accelerator {'none' if accelerator is None else accelerator.name!r} has no graphs",
        ),
        (several, f"{kind} trains on several devices"),
        (bool(own), f"{kind} has a {own[0] if own else ''} of its own"),
        (refused is not None, str(refused)),
        (not module.automatic_optimization, f"{name} optimizes manually"),
        (takes_iterator(module.training_step), f"{name}.training_step fetches its batches itself"),
        (strategy.precision_plugin.scales_loss, "its scaled loss makes the host wait for the device in each step"),
        (settings.split_on_oom, "split_on_oom=True runs it in parts"),
        (settings.detect_anomaly, "detect_anomaly=True looks at each gradient"),
        (settings.profiler is not None, "a profiler measures its parts, and a replayed step has none"),
    )
    return next((text for holds, text in reasons if holds), "")


def why_not_now(run: Run) -> str:
    """Return why the steps of the epoch that begins now cannot be recorded; "" if no reason is known."""
    for hook in sorted(HOOKS_IN_A_STEP):
        if owner := run.hooks.overridden(hook):
            return f"{owner} overrides {hook}, which runs inside of it"
    if run.limits.accumulate > 1 or run.window.batches_done:
        return f"accumulate_grad_batches={run.limits.accumulate} makes one optimizer step of several batches"
    optimizers = run.engine.strategy.optimizers
    if len(optimizers) != 1:
        return f"configure_optimizers returned {len(optimizers)} optimizers"
    return next(iter(_hooks_of_torch(run.module, optimizers[0])), "") or _why_not_stepped(optimizers[0])


def _why_not_stepped(optimizer: Optimizer) -> str:
    """Return why the optimizer cannot read its learning rate and step count from the device; "" if the optimizer can do
    so.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is no optimizer of torch's"
    if kind is not SGD and not all("capturable" in group for group in optimizer.param_groups):
        return f"{kind.__name__} has no capturable=True"
    return ""


def _hooks_of_torch(module: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yield descriptions of the hooks of torch that user code has registered, and that would run inside the step."""
    if getattr(optimizer, BEFORE_STEP) or getattr(optimizer, AFTER_STEP):
        yield f"{type(optimizer).__name__} has a hook around its step"
    if torch_private.before_all_steps or torch_private.after_all_steps:
        yield "there is a hook around the steps of all optimizers"
    if torch_private.has_global_hook():
        yield "there is a hook around the passes of all modules"
    for name, each in module.named_modules():
        if has_hooks(each):
            yield f"the module {name or type(each).__name__!r} has a hook around its forward or backward pass"
    for name, parameter in module.named_parameters():
        if hooks_of(parameter) or hooks_on_accumulation(parameter):
            yield f"the parameter {name!r} has a hook on its gradient"
    if torch.is_anomaly_enabled():
        yield "torch.autograd's anomaly mode looks at each gradient"
