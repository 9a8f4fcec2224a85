"""Add a note to an exception, which says where in the run the exception was raised. Python prints notes below the
traceback.
"""

from __future__ import annotations

import inspect
import re
import traceback
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.base.ini import tables
from drivetrain.base.introspect import overrides
from drivetrain.base.memory import bytes_of, in_gib, is_out_of_memory
from drivetrain.base.rank_zero import log
from drivetrain.base.tree import leaves
from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import DrivetrainError, closest, did_you_mean, shown, text_of
from drivetrain.launchers.tracebacks import OURS, is_library
from drivetrain.loops.progress import Phase, Progress, RunningStage
from drivetrain.loops.run import Run
from drivetrain.module.trainable import TrainableModule


def note_place(error: BaseException, progress: Progress, rank: int, run: Run | None = None) -> None:
    """Add a note to ``error`` with the hook, the batch, the epoch and the rank in which it was raised.

    Errors of drivetrain get no note, because their text contains the cure. In Python 3.10, which has no notes, the text
    is logged.

    Args:
        error: any exception.
        progress, rank: the run's progress, and this process's rank.
        run: the run, whose module and loaders may be the cause; ``None`` before the run is set up.
    """
    if not isinstance(error, Exception) or isinstance(error, DrivetrainError):
        return
    scheduler = _scheduler_of(error)
    hook = _hook_of(error) or (f"{scheduler}.step" if scheduler else _PARTS.get(progress.phase, ""))
    place = _place(progress, fetching=not hook)
    if re.search(r"\d", place):
        place += " (counted from 0)"  # a progress bar counts epochs from 1
    note = f"{f'in {hook}, ' if hook else ''}{place}, on rank {rank}."
    cures = [_cure_of_backward(error, progress), _cure_of_schedule(error, scheduler), _cure_of_torch(error)]
    if run is not None:
        looks = (
            _cure_of_log,
            _cure_of_batch,
            _cure_of_arguments,
            _cure_of_no_gradient,
            _cure_of_half,
            _cure_of_double,
            memory_note,
        )
        cures += [look(error, run) for look in looks]
    for text in (*cures, note[0].upper() + note[1:]):
        if not text:
            continue
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            log.error("%s: %s", type(error).__name__, text)


_WRONG_LOG = re.compile(
    r"(?:LightningModule|Callback)\.(log|log_dict)\(\) (?:missing .*'value'|got an unexpected keyword argument '(\w+)')"
)


def _cure_of_log(error: Exception, run: Run) -> str:
    """Return the correct call of ``self.log`` if Python refused the arguments; "" for another error.

    The check is not in ``log`` itself, so that correct calls of ``log`` take no additional time.
    """
    found = _WRONG_LOG.match(text_of(error)) if isinstance(error, TypeError) else None
    if found is None:
        return ""
    method, keyword = found.groups()
    if keyword is None:
        return "self.log takes a name and a value. Write self.log_dict(...) for a dictionary of names and values."
    arguments = list(inspect.signature(getattr(run.module, method)).parameters)
    if closest(keyword, arguments) is None:
        return f"self.log takes a name and a value. Write self.log({keyword!r}, value)."
    return f"self.{method} has no argument {keyword!r}. {did_you_mean(keyword, arguments)}"


def _cure_of_backward(error: Exception, progress: Progress) -> str:
    """If the autograd graph was freed before the Trainer's backward pass, return the cure; "" for another error."""
    if progress.phase is not Phase.BACKWARD or "backward through the graph a second time" not in text_of(error):
        return ""
    return (
        "With automatic optimization the Trainer calls backward() on the loss that training_step returns: the step "
        "must not call it, and the loss must not depend on tensors of an earlier step. Detach these, or set "
        "self.automatic_optimization = False in __init__ and step by hand."
    )


def _cure_of_schedule(error: Exception, scheduler: str) -> str:
    """If a scheduler was stepped more often than its ``total_steps``, return the ``total_steps`` to pass; "" for
    another error.
    """
    if not scheduler or "Tried to step" not in text_of(error):
        return ""
    return (
        f'{scheduler} was made for fewer steps. With "interval": "step" it is stepped after every optimizer step, else '
        "after every epoch. In configure_optimizers, give it total_steps=self.trainer.estimated_stepping_batches and "
        '"interval": "step".'
    )


def _cure_of_batch(error: Exception, run: Run) -> str:
    """If a step has failed because its batch is a list or a dictionary, return why; "" for another error."""
    progress, name = run.progress, type(run.module).__name__
    if progress.loop_stage is RunningStage.PREDICTING and not overrides(run.module, "predict_step", TrainableModule):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        given = [frame.f_locals["args"] for frame in frames if frame.f_code is TrainableModule.predict_step.__code__]
        if given and isinstance(batch := given[0][0], (list, tuple, dict)):
            entry = shown(next(iter(batch), 0)) if isinstance(batch, dict) else "0"
            return (
                f"{name} has no predict_step, so predict calls forward with the whole batch, a {type(batch).__name__} "
                f"of {len(batch)}. Define it, for example: def predict_step(self, batch, batch_idx): return "
                f"self(batch[{entry}])."
            )
    loader = run.loaders.made_training
    if (
        progress.loop_stage is RunningStage.TRAINING
        and isinstance(loader, CombinedLoader)
        and isinstance(loader.iterables, (list, tuple))
        and isinstance(error, (TypeError, AttributeError, ValueError))
        and re.search(r"\b(list|tuple|unpack)\b", text_of(error))
    ):
        return (
            f"fit trains on a list of {len(loader.iterables)} loaders, so each batch is a list with a batch of each. "
            "If one of them is for validation, write trainer.fit(model, train_loader, val_loader)."
        )
    return ""


def _cure_of_arguments(error: Exception, run: Run) -> str:
    """If the second parameter of a step is not named like an index, return which arguments a step gets; "" for another
    error.
    """
    stage = run.progress.loop_stage
    if not isinstance(error, (TypeError, AttributeError)) or stage is None:
        return ""
    name, _ = _STAGES[stage]
    names = list(inspect.signature(getattr(run.module, name)).parameters)[:2]
    if len(names) < 2 or re.search(r"i$|id|nb|batch|step|args|iter|^_", names[1]):
        return ""
    first, second = names
    return (
        f"{name}({first}, {second}) gets the whole batch as {first!r} and its index as {second!r}. Write "
        f"def {name}(self, batch), and {first}, {second} = batch in it."
    )


def _cure_of_torch(error: Exception) -> str:
    """If a pattern in ``error_notes.ini`` matches this error of torch, return the cure; "" for another error."""
    found = (
        cure
        for pattern, cure in tables(__file__, "error_notes.ini")["cures"].items()
        if re.search(pattern, text_of(error))
    )
    return " ".join(next(found, "").split())


def _cure_of_no_gradient(error: Exception, run: Run) -> str:
    """If a loss in manual optimization requires no gradient, return the probable cause; "" for another error."""
    if run.module.automatic_optimization or "does not require grad and does not have a grad_fn" not in text_of(error):
        return ""
    toggles: Any = getattr(run.module, "_toggles", ())
    if not toggles:
        return (
            "The loss depends on no parameter that requires a gradient. toggle_model and toggle_optimizer switch off "
            "those of the other optimizers; detach(), torch.no_grad() and frozen layers do the same."
        )
    optimizers = run.engine.strategy.optimizers
    index = next((i for i, each in enumerate(optimizers) if each is toggles[-1].optimizer), 0)
    return (
        f"toggle_optimizer has switched off requires_grad of all parameters but those of optimizer {index} of "
        "self.optimizers(), and the loss depends on none of these. Toggle the optimizer whose parameters this loss "
        "trains, in the order in which configure_optimizers returns them."
    )


def _cure_of_half(error: Exception, run: Run) -> str:
    """If the gradient scaler got float16 parameters, return the cure; "" for another error."""
    if "Attempting to unscale FP16 gradients" not in text_of(error):
        return ""
    count = sum(parameter.dtype is torch.float16 for parameter in run.module.parameters())
    return (
        f'precision="16-mixed" needs parameters in float32, and {count} of {type(run.module).__name__} are in float16. '
        'Leave out model.half(), or write precision="16-true".'
    )


def _cure_of_double(error: Exception, run: Run) -> str:
    """If float64 data and float32 weights were combined, return the cure; "" for another error."""
    has_double = any(parameter.dtype is torch.float64 for parameter in run.module.parameters())
    if has_double or not re.match(r"(?is)(?=.*\b(double|float64)\b).*\b(float|float32)\b", text_of(error)):
        return ""
    return (
        "Arrays of NumPy and pandas are in float64, the weights in float32. Where the dataset is made, write "
        "torch.as_tensor(array, dtype=torch.float32)."
    )


def _scheduler_of(error: Exception) -> str:
    """Return the class of the scheduler whose step raised the error; "" if other code raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name in ("step", "get_lr")]
    return next((type(owner).__name__ for owner in owners if isinstance(owner, LRScheduler)), "")


def _hook_of(error: Exception) -> str:
    """Return the outermost function of user code that drivetrain called, according to the traceback; "" if there is
    none.
    """
    entered = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        entered = entered or path.startswith(OURS)
        if entered and not is_library(path):
            name, owner = frame.f_code.co_name, frame.f_locals.get("self")
            return name if owner is None else f"{type(owner).__name__}.{name}"
    return ""


def _place(progress: Progress, fetching: bool) -> str:
    """Return the phase as text, such as "batch 3 of epoch 0". ``fetching``: whether the loader was running if the phase
    is ``FETCH``.
    """
    phase, stage, epoch, batch = progress.phase, progress.loop_stage, progress.current_epoch, progress.batch_idx
    if stage is None:
        return f"while {progress.fn.value if progress.fn else 'the run'} was being set up"
    if stage is RunningStage.TRAINING:
        if phase is Phase.FETCH:
            return f"{_before_or_after(batch, fetching)} of epoch {epoch}"
        if Phase.BATCH_START <= phase <= Phase.VALIDATED:
            return f"batch {batch} of epoch {epoch}"
        return {
            Phase.TRAIN_START: "at the start of training",
            Phase.TRAIN_END: "at the end of training",
            Phase.EPOCH_START: f"at the start of epoch {epoch}",
            Phase.BETWEEN_EPOCHS: f"after epoch {epoch - 1}",
        }.get(phase, f"at the end of epoch {epoch}")
    (_, name), done = _STAGES[stage], progress.eval_batch_idx
    within = f" in epoch {epoch}" if progress.fn == "fit" and stage is RunningStage.VALIDATING else ""
    return {
        0: f"at the start of {name}{within}",
        1: f"{_before_or_after(done, fetching)} of {name}{within}",
        2: f"batch {done} of {name}{within}",
        3: f"at the end of {name}{within}",
    }[phase % 10]


def _before_or_after(batch: int, fetching: bool) -> str:
    if batch < 0:
        return "while fetching the first batch" if fetching else "before the first batch"
    return f"while fetching a batch after batch {batch}" if fetching else f"after batch {batch}"


_PARTS = {
    Phase.BACKWARD: "the backward pass",
    Phase.OPTIMIZER_STEP: "the optimizer step",
    Phase.LOG_FLUSH: "logging",
}
# for each stage: the module's method for a batch, and the stage's name in messages
_STAGES = {
    RunningStage.TRAINING: ("training_step", "training"),
    RunningStage.SANITY_CHECKING: ("validation_step", "the sanity check"),
    RunningStage.VALIDATING: ("validation_step", "the validation"),
    RunningStage.TESTING: ("test_step", "the test"),
    RunningStage.PREDICTING: ("predict_step", "the prediction"),
}


# ---- out of memory --------------------------------------------------------------------------------------------------


def memory_note(error: Exception, run: Run) -> str:
    """If the error is an out-of-memory error, return what the device's memory contains and what to change; "" for
    another error.
    """
    if not is_out_of_memory(error):
        return ""
    device = run.engine.strategy.root_device
    held = _held(error, run, device)
    parts = ", ".join(f"{kind} {in_gib(number)}" for kind, number in held.items())
    used, total = run.engine.accelerator.memory_allocated(device), run.engine.accelerator.total_memory(device)
    others = "are not counted on this device" if used is None else in_gib(max(0, used - sum(held.values())))
    limit = "" if used is None or total is None else f" ({in_gib(used)} of {in_gib(total)} in use)"
    return (
        f"Out of memory on {device}{limit}. It holds: {parts}, activations and the rest {others}. "
        f"{_cures(run, held, used)} [DT1047]"
    )


def _held(error: Exception, run: Run, device: torch.device) -> dict[str, int]:
    module, optimizers = run.module, run.engine.strategy.optimizers
    parameters: list[Tensor] = [*module.parameters(), *module.buffers()]
    gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
    of_parameters = [each for optimizer in optimizers for each in optimizer.state.values()]
    states, batch = (
        [each for _, each in leaves(tree) if isinstance(each, Tensor)] for tree in (of_parameters, _batch_of(error))
    )
    return {
        "parameters and buffers": bytes_of(parameters, device),
        "gradients": bytes_of(gradients, device),
        "optimizer state": bytes_of(states, device),
        "the batch": bytes_of(batch, device),
    }


def _batch_of(error: Exception) -> Any:
    """Return the current batch. The loops do not store the batch, so this function searches the loops' frames in the
    traceback.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [each for each in frames if each.f_globals.get("__name__", "").startswith("drivetrain.loops.")]
    found = [each.f_locals["batch"] for each in own if each.f_locals.get("batch") is not None]
    return found[-1] if found else None


def _cures(run: Run, held: dict[str, int], used: int | None) -> str:
    """Return changes that reduce the use of memory, the most effective first."""
    stage, strategy = run.progress.loop_stage, run.engine.strategy
    if stage is not RunningStage.TRAINING:
        predicts = stage is RunningStage.PREDICTING
        other = "return less from predict_step" if predicts else "keep no outputs from batch to batch"
        return f"Change one of these: use a smaller batch_size in the loader of this stage; {other}."
    cures = ["use a smaller batch_size"]
    if run.module.automatic_optimization:
        cures[0] += f" and accumulate_grad_batches={2 * run.limits.accumulate}, which keeps the samples of a step"
        if not run.settings.split_on_oom:
            cures.append("write Trainer(split_on_oom=True), which runs such batches in parts")
    if run.engine.precision.name.startswith("32"):
        cures.append('write precision="bf16-mixed"')
    kept = sum(number for kind, number in held.items() if kind != "the batch")
    model_is_large = run.progress.phase is Phase.OPTIMIZER_STEP or (used is not None and kept > used / 2)
    if not strategy.facts.calls_through_forward:  # calls_through_forward is True only for sharding strategies
        shard = 'write strategy="fsdp" on several devices, which shards parameters, gradients and optimizer state'
        cures.insert(0 if model_is_large else len(cures), shard)
    if run.progress.phase is Phase.OPTIMIZER_STEP and not held["optimizer state"]:
        size = held["parameters and buffers"]
        cures.append(f"use an optimizer with less state (Adam keeps about {in_gib(2 * size)} for this model, SGD none)")
    cures.append("compute activations again in the backward pass, with torch.utils.checkpoint")
    return f"Change one of these: {'; '.join(cures)}."
