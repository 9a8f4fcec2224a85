"""The phases of one run: connect the run's objects, set up, save, tear down, and clean up after an exception."""

from __future__ import annotations

import functools
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.advice.observers import observers_of
from drivetrain.advice.sampler import Sampler
from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.supplied import supplied
from drivetrain.callback import Callback, Checkpoint, connect_module
from drivetrain.launchers.signals import handled
from drivetrain.loops.evaluate import Stage, evaluate, predict
from drivetrain.loops.fit import fit
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn, TrainerStatus
from drivetrain.loops.restart import counted
from drivetrain.loops.run import KeptStates, Run
from drivetrain.loops.step import make_step
from drivetrain.module.hooks import DataHooks, HookTable
from drivetrain.module.module import LightningModule
from drivetrain.strategies import agreement, familiar, rank_files
from drivetrain.strategies.step import Step
from drivetrain.trainer import attach, checkpoint, comparison, compiling, profiling, rank_parts, resume_line, telling
from drivetrain.trainer.job import Job
from drivetrain.trainer.shown import watch
from drivetrain.trainer.votes import Vote, votes_of

if TYPE_CHECKING:
    from drivetrain.logbook.logbook import Logbook
    from drivetrain.strategies.strategy import Strategy
    from drivetrain.trainer.trainer import Trainer


_PLANS_SHOWN: set[str] = set()  # the logged plans; an equal plan is not logged again


@supplied
def begin_record(trainer: Trainer, resumed_from: str | None) -> None:
    """Begin the record of a fit in the folders of its loggers."""


@supplied
def end_record(trainer: Trainer, error: BaseException | None = None) -> None:
    """Complete the record of a fit. After an error, the record contains the error."""


def connect(trainer: Trainer, job: Job) -> Loaders:
    """Connect the Trainer, the model and the other objects of the job, in the order of docs/hooks.md. No process is
    started and no device is used yet.
    """
    progress, strategy, model, fn = trainer.progress, trainer.strategy, job.model, job.fn
    if job.compiled_by is not None or trainer.settings.compile:
        compiling.compile_whole(trainer, job)
    progress.begin_run(fn)
    trainer.ranks_of_job = []
    datamodule = trainer.datamodule = job.datamodule
    trainer._ckpt_path = job.ckpt_path
    trainer._run_parts, trainer._optimizers_made = None, False
    trainer.predictions.records = any(callback.needs_batch_indices for callback in trainer.callbacks)
    trainer.logbook.start_run()
    if fn is TrainerFn.FITTING or strategy.lightning_module is not model:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
    strategy.connect(model)
    familiar.read_overrides(strategy)
    model.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    trainer.callbacks = attach.with_module_callbacks(trainer.callbacks, model)
    connect_module(trainer.callbacks, model)
    bases = (LightningModule, Callback, Checkpoint)
    hooks = trainer._hooks = HookTable(trainer, model, trainer.callbacks, strategy, bases, trainer.logbook)
    loaders = Loaders(
        model, datamodule, job.passed, trainer.limits.batches, hooks.call_on, lambda: progress.current_epoch, strategy,
        trainer.settings,
    )  # fmt: skip
    if not job.checked:
        attach.check_loaders(model, loaders, fn, validates=trainer.limits.val_batches != 0)
    if fn is TrainerFn.FITTING:  # remove the decision "step" of an earlier fit
        decisions = tuple(each for each in trainer.plan.decisions if each.what != "step")
        trainer.engine.plan = replace(trainer.plan, decisions=decisions)
    if fn is TrainerFn.FITTING and not job.checked and (plan := str(trainer.plan)) not in _PLANS_SHOWN:
        _PLANS_SHOWN.add(plan)
        rank_zero_info(plan, trainer.plan._repr_html_())
    return loaders


def join_book(book: Logbook, strategy: Strategy) -> None:
    """Let the logbook ``book`` reduce logged values over the ranks through ``strategy``. If the user overrides
    ``strategy.reduce``, the logbook calls the override.
    """
    book.join(strategy.root_device, strategy.data, strategy.world, familiar.own_reduce(strategy))


def set_up(trainer: Trainer, job: Job, loaders: Loaders) -> Run:
    """Run all phases from the start of the processes until the loop begins, and return the run."""
    progress, strategy, hooks, stage = trainer.progress, trainer.strategy, trainer.hooks, job.fn
    model, datamodule, fn, began_s = job.model, job.datamodule, job.fn, time.monotonic()
    trainer.engine.launch()
    several, vote, agreed = strategy.world.size > 1, votes_of(trainer), agreement.Agreement()
    if several:
        agreed = comparison.compare_start(trainer, fn, loaders, job.ckpt_path is not None)
    for logger in trainer.loggers if agreed.loggers else ():
        logger.agree_on_run(strategy.broadcast)
    if trainer.settings.profiler is not None:
        profiling.begin(trainer, stage)
    join_book(trainer.logbook, strategy)
    if several:
        watch(trainer)
    loaded = _set_up_model(trainer, job, vote, agreed)
    run = trainer._run_parts = Run(
        engine=trainer.engine,
        module=model,
        hooks=hooks,
        book=trainer.logbook,
        progress=progress,
        limits=trainer.limits,
        settings=trainer.settings,
        transfer=hooks.bind_transfer(datamodule, trainer.engine.input_conversion()),
        loaders=loaders,
        log=trainer._log if trainer.loggers else None,
        validates_last=trainer.validates_last,
        kept=KeptStates(any(callback.saves_on_exception for callback in trainer.checkpoint_callbacks)),
    )
    if fn is TrainerFn.FITTING and not trainer.settings.barebones:
        trainer._sampler = Sampler(run, began_s, resumes=job.ckpt_path is not None)
        trainer._sampler.start()
    if run.kept.saves_on_exception and several:
        run.kept.token = strategy.broadcast(uuid.uuid4().hex)
    run.window.gather = strategy.data.all_gather if strategy.data.size > 1 else None
    if any(overrides(strategy, verb, Step) for verb in ("rescale_gradients", "open_gradients")):
        run.window.rescale = strategy.rescale_gradients
    if fn is TrainerFn.FITTING:
        _set_up_optimizers(trainer, run, vote)

    hooks.observers += observers_of(run, trainer.predictions)
    if fn is TrainerFn.FITTING:
        with vote("on_fit_start"):
            hooks.call("on_fit_start")
            attach.log_hyperparameters(trainer)
            if loaded is not None:
                checkpoint.restore_training(trainer, loaded)
        if loaded is not None:
            resume_line.tell(trainer, loaded, str(job.ckpt_path), counted(run.restart or {}))
        if trainer.loggers:
            begin_record(trainer, job.ckpt_path)
    else:
        with vote("logging the hyperparameters"):
            attach.log_hyperparameters(trainer)
        strategy.setup_precision_plugin()
        if loaded is not None:
            rank_zero_info(f"{fn.value.capitalize()} runs with the weights of {job.ckpt_path}.")
    model.zero_grad()
    return run


def _set_up_model(trainer: Trainer, job: Job, vote: Vote, agreed: agreement.Agreement) -> dict[str, Any] | None:
    """Call the hooks that create the data and the model, and set up the strategy.

    Args:
        trainer: the Trainer.
        job: the job of the run.
        vote: a function that returns a context for a phase of the set-up. At the end of the context, the ranks report
            failures to each other.
        agreed: the result of comparing the ranks: whether their loggers are equal, and whether hooks can change the
            model of any rank.

    Returns:
        The checkpoint of the job; ``None`` without a checkpoint.
    """
    strategy, hooks, stage = trainer.strategy, trainer.hooks, job.fn
    with vote("prepare_data"):
        for party in (job.datamodule, job.model):
            if party is not None and _prepares_data(trainer, party):
                hooks.call_on(party, "prepare_data")
    strategy.world.wait_for_first("prepare_data")
    with vote("setup"):
        if job.datamodule is not None:
            hooks.call_on(job.datamodule, "setup", stage)
        hooks.call_callbacks("setup", stage)
        hooks.call_method("setup", stage)
    with vote("configure_model"), trainer.engine.init_module(), trainer.engine.sharded_model():
        hooks.call_method("configure_model")
    if agreed.changes:
        comparison.compare_made(strategy, agreement.of_module(job.model))
    loaded = None
    if not strategy.facts.restores_after_setup:
        loaded = _restore(trainer, job, agreed.loggers, vote)
    with vote("the check of what is to be saved"):
        if job.fn is TrainerFn.FITTING and not trainer.settings.barebones:
            checkpoint.check_at_start(trainer)
    with vote("setting up the strategy"):
        strategy.setup(trainer)
        if trainer.settings.compile:
            compiling.compile_blocks(trainer)
    if strategy.facts.restores_after_setup:
        loaded = _restore(trainer, job, agreed.loggers, vote)
    return loaded


def _restore(trainer: Trainer, job: Job, same_loggers: bool, vote: Vote) -> dict[str, Any] | None:
    """If the job has a checkpoint, read the checkpoint, and restore the module, the datamodule and the callbacks."""
    fitting, path, loaded = job.fn is TrainerFn.FITTING, job.ckpt_path, None
    if path is not None:
        with vote("reading the checkpoint"):
            loaded = checkpoint.load(trainer, path, job.weights_only)
        checkpoint.load_own_part(trainer, loaded, path, job.weights_only)
    if trainer.loggers and fitting:
        telling.continue_runs(trainer, loaded, same_loggers)
    if loaded is not None:
        with vote("restoring the model"):
            checkpoint.restore_parts(trainer, loaded, fitting)
    return loaded


def _set_up_optimizers(trainer: Trainer, run: Run, vote: Vote) -> None:
    strategy = trainer.strategy
    with vote("configure_optimizers"):
        if not (strategy.optimizers or trainer._optimizers_made):  # the strategy's setup can create optimizers
            strategy.setup_optimizers(trainer)
    if not strategy.optimizers:
        rank_zero_warn(
            f"{type(trainer.lightning_module).__name__}.configure_optimizers returned no optimizer, so gradients are "
            "computed and nothing is updated. [DT1010]"
        )
    if strategy.world.size > 1:
        made = agreement.of_optimizers(strategy.optimizers, strategy.lr_scheduler_configs)
        comparison.compare_made(strategy, made)  # after the strategy's set-up, which may create optimizers
    strategy.setup_precision_plugin()
    trainer.engine.bind_optimizers(strategy.optimizers, strategy.lr_scheduler_configs)
    run.wrap_optimizers()
    make_step(run)  # this step is not used, but errors are raised here, before training begins


def _prepares_data(trainer: Trainer, party: DataHooks) -> bool:
    """Return whether this process runs the hook ``prepare_data`` of ``party``. Only one process of each node runs the
    hook. If ``prepare_data_per_node`` is False, only one process of the job runs the hook.
    """
    once_per_node = party.prepare_data_per_node or trainer.strategy.node_rank == 0
    return overrides(party, "prepare_data", DataHooks) and trainer.strategy.local_rank == 0 and once_per_node


def loop_of(trainer: Trainer, fn: TrainerFn, run: Run) -> Callable[[], Any]:
    """Return the loop of this run as a callable."""
    if fn is TrainerFn.FITTING:
        return functools.partial(fit, run)
    if fn is TrainerFn.PREDICTING:
        return functools.partial(predict, run, trainer.predictions)
    stage: Stage = "validate" if fn is TrainerFn.VALIDATING else "test"
    return functools.partial(evaluate, run, stage, run.loaders.evaluation(stage))


def save(trainer: Trainer, path: str | Path, weights_only: bool, storage_options: Any, allow_pickle: bool) -> None:
    """Write the state of the run to ``path``. The arguments are the arguments of ``Trainer.save_checkpoint``."""
    strategy = trainer.strategy
    with trainer.profiler.profile("save_checkpoint"), trainer.progress.storing():
        if strategy.world.store is not None:
            # This barrier raises if a rank does not call save(). Without the barrier, the other ranks would wait in the
            # collectives below, until torch's timeout.
            strategy.world.barrier("trainer.save_checkpoint")
        state = checkpoint.dump(trainer, weights_only, allow_pickle)
        # After a run, this call waits for the file. During a run, the end of the run waits for it.
        waits = trainer.progress.status is not TrainerStatus.RUNNING
        part = None if weights_only else rank_parts.own_part(state)
        rank_files.save(strategy, state, part, path, storage_options, waits=waits)
        strategy.barrier("save_checkpoint")
    if waits:
        strategy.checkpoint_io.teardown()  # during a run, ``teardown`` is called later, at the end of the run


def tear_down(trainer: Trainer, fn: TrainerFn) -> None:
    """Run the phases after the loop, in the order of docs/hooks.md."""
    _clean_up(trainer)
    trainer.engine.teardown()
    if fn is TrainerFn.FITTING:
        trainer.hooks.call("on_fit_end")
    if trainer.datamodule is not None:
        trainer.hooks.call_on(trainer.datamodule, "teardown", fn)
    trainer.hooks.call_callbacks("teardown", fn)
    trainer.hooks.call_method("teardown", fn)
    if fn is TrainerFn.FITTING and trainer.time_spent is not None and trainer.time_spent.verdict is not None:
        rank_zero_info(str(trainer.time_spent.verdict))
    trainer.strategy.checkpoint_io.wait()  # these hooks can save checkpoints
    profiling.end(trainer, fn)
    if trainer.loggers and trainer.is_global_zero:
        if fn is TrainerFn.FITTING:
            end_record(trainer)
        telling.tell(trainer, "finalize", "success")


def abort(trainer: Trainer, error: BaseException) -> None:
    """Call the exception hooks for ``error``, and free the run's resources."""
    trainer.progress.end_run(interrupted=True)
    # the processes that this one has launched have already called the hooks
    if not trainer.engine.launcher.is_external:
        if trainer.loggers:
            _attempt(end_record, trainer, error)
        return
    trainer.logbook.leave_batch()
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)):  # signals could stop the clean-up
        for callback in trainer.callbacks:
            if overrides(callback, "on_exception", Callback):
                _attempt(callback.on_exception, trainer, trainer.lightning_module, error)
        if trainer.datamodule is not None:
            _attempt(trainer.datamodule.on_exception, error)
        _attempt(trainer.strategy.on_exception, error)
        if trainer.loggers and trainer.progress.fn is TrainerFn.FITTING:
            _attempt(end_record, trainer, error)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            _attempt(logger.finalize, "failed")
        _attempt(profiling.end, trainer, trainer.progress.fn or "")
        _attempt(_clean_up, trainer)
        _attempt(trainer.engine.teardown)


def _clean_up(trainer: Trainer) -> None:
    if trainer._run_parts is not None:
        run = trainer._run_parts
        if trainer._sampler is not None:
            trainer._time_spent, trainer._sampler = trainer._sampler.stop(), None
        run.unbind()
        run.loaders.close()
        run.swap_optimizers()
        run.let_go()
        trainer.lightning_module.untoggle_optimizer(None)  # an exception can leave an optimizer toggled


def _attempt(fn: Callable[..., Any], *args: Any) -> None:
    """Call ``fn`` while another exception is handled. If ``fn`` raises, only warn. The clean-up must continue, and the
    handled exception must stay visible.
    """
    try:
        fn(*args)
    except BaseException as error:  # including sys.exit()
        rank_zero_warn(f"While cleaning up after an exception, {getattr(fn, '__qualname__', fn)} failed: {error!r}.")
