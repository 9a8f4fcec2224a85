"""The sanity check: a few validation batches before training."""

from __future__ import annotations

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.seed import isolate_rng, rng_state
from drivetrain.base.spelling import warn_if_misspelt
from drivetrain.data.kept import is_one_shot, objects_kept, parts_of, workers_kept
from drivetrain.loops.evaluate import evaluate
from drivetrain.loops.loaders import EvalLoader
from drivetrain.loops.metrics import copied_states, set_states
from drivetrain.loops.progress import Phase, copied
from drivetrain.loops.resume import restore_validation_loaders
from drivetrain.loops.run import Run


def sanity_check(run: Run) -> None:
    """Run a few validation batches before training, so that errors in the validation appear early.

    A fit that resumes inside an epoch or a validation does not run the sanity check. Finally, the check restores
    metrics, progress and random states, and stops the worker processes of the loaders.
    """
    limits, progress, book = run.limits, run.progress, run.book
    if limits.sanity_batches == 0 or limits.val_batches == 0 or not run.loaders.defined("validate"):
        return
    over = progress.epochs_done >= limits.max_epochs or progress.global_step >= limits.max_steps
    if over or limits.train_batches == 0 or (progress.should_stop and run.may_stop()):
        return  # no training follows
    if run.restart is not None and progress.batches_done > 0 and not progress.epoch_ending:
        return  # the fit resumes inside an epoch or inside a validation
    progress.enter(Phase.SANITY_START)
    metrics = copied_states(run.module)
    eval_steps = copied(progress.eval_steps)
    run.kept.before_validation = {  # a checkpoint saved in the check contains these states
        "rng": rng_state(),
        "eval_steps": eval_steps,
        "metrics": metrics,
        "val_loaders": (run.restart or {}).get("val_loaders") or run.loaders.evaluation_states("validate"),
        "callback_metrics": {},
    }
    with isolate_rng():
        run.hooks.call_callbacks("on_sanity_check_start")
        restore_validation_loaders(run)
        loaders = [
            EvalLoader(source.loader, min(source.num_batches, limits.sanity_batches), source.ahead)
            for source in run.loaders.evaluation("validate")
        ]
        each = [source.loader for source in loaders]
        once = [part for loader in each for part in parts_of(loader) if is_one_shot(part)]
        if once:
            rank_zero_info(
                f"The sanity check is left out: it would take batches of the {type(once[0]).__name__}, which can be "
                "iterated only once."
            )
        else:
            with workers_kept(each), objects_kept(each):
                evaluate(run, "sanity_check", loaders)
        run.hooks.call_callbacks("on_sanity_check_end")
        for config in run.engine.strategy.lr_scheduler_configs if run.module.automatic_optimization else ():
            if config.reduce_on_plateau:
                scheduler = type(config.scheduler).__name__
                warn_if_misspelt(f'{scheduler} with "monitor": {config.monitor!r}', config.monitor, book.refresh())
    set_states(run.module, metrics)
    progress.restore_eval_steps(eval_steps)
    book.forget_results()
