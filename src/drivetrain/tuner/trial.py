"""Run a few trial steps inside a run, and then restore the state before the trial."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.advice.losses import Patience
from drivetrain.base.registry import load
from drivetrain.base.seed import isolate_rng
from drivetrain.base.torch_private import STEPPED, own_buffers
from drivetrain.base.tree import leaves
from drivetrain.callback import Callback, Checkpoint, connect_module
from drivetrain.data.kept import generators_among, is_one_shot, objects_kept, parts_of, workers_kept
from drivetrain.errors import ConfigurationError
from drivetrain.logbook.logbook import Logbook
from drivetrain.loops.evaluate import Predictions
from drivetrain.loops.metrics import copied_states, set_states
from drivetrain.loops.progress import Progress
from drivetrain.loops.run import KeptStates, Run, RunOptimizers, Stopping, ValidationClock
from drivetrain.module.hooks import HookTable
from drivetrain.module.module import LightningModule
from drivetrain.strategies.sharded_state import local_shard
from drivetrain.trainer.life import join_book

_PLAIN = (bool, int, float, str, bytes, type(None), list, dict, set, tuple)


@contextmanager
def trial(trainer: Any, callbacks: Sequence[Callback], **limits: Any) -> Iterator[Run]:
    """Return a context that yields a second Run of the module, for a loop. The end of the context restores the state
    before the trial: weights, buffers, gradients, optimizers, schedulers, the loss scale, random states, metric
    objects, plain attributes of the module, the datamodule, loaders with their samplers and data sets, counters and
    logged values. Other effects of hooks and steps, such as written files, stay. During the trial, the Trainer has
    separate counters, its callbacks are ``callbacks``, and its logger writes nothing.

    Args:
        trainer: a Trainer in a run, while a hook runs outside of a step.
        callbacks: the callbacks of the trial.
        limits: fields of :class:`Limits` to change during the trial.
    """
    run, module = trainer.current_run, trainer.lightning_module
    strategy = trainer.strategy
    with ExitStack() as kept:
        kept.enter_context(isolate_rng())
        kept.enter_context(_module_kept(module, trainer.datamodule))
        kept.enter_context(_optimizers_kept(strategy))
        kept.enter_context(_trainer_kept(trainer))
        kept.enter_context(objects_kept(generators_among([*module.modules(), trainer.datamodule])))
        own = _second_run(trainer, run, callbacks, limits)
        own.loaders.found = functools.partial(_keep_loaders, kept)
        try:
            yield own
        finally:
            own.unbind()
            own.loaders.close()
            own.let_go()


def _second_run(trainer: Any, run: Run, callbacks: Sequence[Callback], limits: dict[str, Any]) -> Run:
    module, strategy, fn = run.module, trainer.strategy, trainer.progress.fn
    progress, book = Progress(), Logbook(torch.float64 if trainer.accelerator.supports_float64 else torch.float32)
    progress.begin_run(fn)
    book.start_run()
    join_book(book, strategy)
    own = trainer.__dict__
    own.update(
        limits=dataclasses.replace(trainer.limits, **limits), progress=progress, logbook=book,
        _loggers=[load("drivetrain.loggers:DummyLogger")()] if trainer.loggers else [],
        _callbacks=list(callbacks), predictions=Predictions(keeps=False),
    )  # fmt: skip
    module.trainer = trainer
    connect_module(callbacks, module)
    hooks = HookTable(trainer, module, trainer.callbacks, strategy, (LightningModule, Callback, Checkpoint), book)
    own["_hooks"] = hooks
    second = own["_run_parts"] = dataclasses.replace(
        run, hooks=hooks, book=book, progress=progress, limits=trainer.limits, log=None, batches=None,
        transfer=hooks.bind_transfer(trainer.datamodule, trainer.engine.input_conversion()),
        loaders=run.loaders.again(trainer.limits.batches, hooks.call_on, lambda: progress.current_epoch),
        window=type(run.window)(run.window.keeps_divisor), restart=None, restored=False,
        optimizers=RunOptimizers(), kept=KeptStates(), clock=ValidationClock(), stopping=Stopping(), stop=None,
        uneven=None, stale=False, splitter=None, graphs=None,
        # BatchSizeFinder must see out-of-memory errors
        settings=dataclasses.replace(run.settings, split_on_oom=False, cuda_graphs=False),
    )  # fmt: skip
    hooks.observers.append(Patience(second))
    second.window.gather, second.window.rescale = run.window.gather, run.window.rescale
    if run.optimizers.made:
        second.wrap_optimizers()
    return second


def _keep_loaders(kept: ExitStack, made: Any) -> None:
    """Save the state of the trial's loaders, and restore the state at the end of the trial.

    Raises:
        ConfigurationError: a loader's state cannot be saved.
    """
    loaders = [loader for _, loader in leaves(made)]
    for part in (part for loader in loaders for part in parts_of(loader)):
        if is_one_shot(part):
            raise ConfigurationError(
                f"A finder tries some steps before the fit, and the {type(part).__name__} that is the loader can be "
                "iterated only once: the fit would miss the batches of the trial. Pass an object that can be iterated "
                "again, such as a DataLoader or a list, or leave the finder out."
            )
    kept.enter_context(workers_kept(loaders))
    kept.enter_context(objects_kept(loaders))


# ---- restored state --------------------------------------------------------------------------------------------------

OF_RUN = (
    "limits", "progress", "logbook", "_loggers", "_callbacks", "predictions", "_hooks", "_run_parts", "datamodule",
    "ckpt_path", "_optimizers_made", "ranks_of_job",
)  # fmt: skip
"""The attributes of a Trainer that a trial replaces."""


@contextmanager
def _trainer_kept(trainer: Any) -> Iterator[None]:
    own, strategy, module = trainer.__dict__, trainer.strategy, trainer.lightning_module
    before = {name: own[name] for name in OF_RUN if name in own}
    driver = dict(vars(strategy.driver))
    try:
        yield
    finally:
        own.update(before)
        vars(strategy.driver).clear()
        vars(strategy.driver).update(driver)
        module.trainer = trainer


@contextmanager
def _module_kept(module: torch.nn.Module, datamodule: Any) -> Iterator[None]:
    buffers = [(each, dict(own_buffers(each))) for each in module.modules()]
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    parameters = [(each, each.grad, each.requires_grad) for each in module.parameters()]
    modes = [(each, each.training) for each in module.modules()]
    # layers are not copied: a copied list of layers contains the original layers
    own = [*module.modules(), *tensors]
    owners = [*module.modules(), *([] if datamodule is None else [datamodule])]
    attributes = [(each, _plain_attributes(each, own)) for each in owners]
    metrics = copied_states(module)
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        with _values_kept(tensors):
            yield
    finally:
        for each, named in buffers:
            own_buffers(each).clear()
            own_buffers(each).update(named)
        for parameter, grad, requires_grad in parameters:
            parameter.grad, parameter.requires_grad = grad, requires_grad
        for each, training in modes:
            each.training = training
        for each, plain in attributes:
            for name in [name for name, value in each.__dict__.items() if _is_plain(name, value) and name not in plain]:
                del each.__dict__[name]
            each.__dict__.update(plain)
        set_states(module, metrics)


def _is_plain(name: str, value: Any) -> bool:
    return not name.startswith("_") and type(value) in _PLAIN


def _plain_attributes(module: Any, own: list[Any]) -> dict[str, Any]:
    """Return the module's attributes that are numbers, strings or containers, and replace the attributes by copies.
    Attributes that cannot be copied are left out.

    Args:
        module: the module with the attributes.
        own: objects that a copied container shares with the original.
    """
    found = {}
    for name, value in list(module.__dict__.items()):
        if _is_plain(name, value):
            try:
                module.__dict__[name] = copy.deepcopy(value, {id(each): each for each in own})
            except Exception:
                continue
            found[name] = value
    return found


@contextmanager
def _optimizers_kept(strategy: Any) -> Iterator[None]:
    """Return a context that restores the states and options of the optimizers at its end. In the trial, no scheduler
    steps. A module with manual optimization steps the schedulers itself, so the module gets copies of the schedulers
    that do nothing.
    """
    optimizers, schedulers = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    states = [{key: _copied(value) for key, value in each.state.items()} for each in optimizers]
    tensors = [value for _, value in leaves([list(state.values()) for state in states]) if isinstance(value, Tensor)]
    groups = [[copy.copy(group) for group in each.param_groups] for each in optimizers]
    called = [vars(each).get(STEPPED) for each in optimizers]
    precision, module = strategy.precision_plugin, strategy.lightning_module
    kept = copy.deepcopy(precision.state_dict(module, optimizers))
    by_hand = [] if module.automatic_optimization else schedulers
    strategy.lr_scheduler_configs = [dataclasses.replace(each, scheduler=_idle(each.scheduler)) for each in by_hand]
    try:
        with _values_kept(tensors):
            yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers
        for optimizer, state, own, stepped in zip(optimizers, states, groups, called, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, own, strict=True):
                group.clear()
                group.update(before)
            if stepped is None:
                vars(optimizer).pop(STEPPED, None)
        if kept:
            precision.load_state_dict(kept, module, optimizers)


def _idle(scheduler: Any) -> Any:
    idle = copy.copy(scheduler)
    idle.step = lambda *_, **__: None
    return idle


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy an optimizer's state of one parameter, but keep the tensors themselves."""
    return {name: value if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


@contextmanager
def _values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Return a context that restores this rank's values of ``tensors`` at its end. Copies of the values are in host
    memory.
    """
    values = [local_shard(each.data).to("cpu", copy=True) for each in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                local_shard(tensor.data).copy_(value)
