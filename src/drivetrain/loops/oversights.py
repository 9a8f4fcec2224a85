"""What a training program most often forgets: the loss, train mode, samples. Looked for where it costs nothing."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import leaves
from drivetrain.errors import ConfigurationError, SignatureError
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.losses import loss_of
from drivetrain.module.optimizers import LRSchedulerConfig, parameters_of

PATIENCE = 100  # windows in a row without a step; a loss scale that begins too large skips fewer than 40
_HALF_OF_SMALLEST = 2.0**-25  # half of float16's smallest number: what is below rounds to 0


class LossWatch:
    """Counts the windows from a fit's first one on in which ``training_step`` has returned no loss.

    Args:
        run: one with automatic optimization.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._windows_before = run.progress.stepped_batches
        self._windows_without = 0
        self._step, self._in_a_row = -1, 0  # windows without a loss since this step

    def missed(self, output: Any) -> None:
        """A window has ended without an optimizer step; ``output``: what the step returned for its last batch.

        Raises:
            ConfigurationError: ``training_step`` cannot return a loss, or has not for ``max_steps`` windows, or does
                not any more.
        """
        if self._run.window.batches_with_gradients or loss_of(output)[0] is not None:
            return  # a batch of the window had a loss; what it gave was not stepped for another reason
        self._windows_without += 1
        self.count_missed()
        if self._windows_without < self._run.progress.stepped_batches - self._windows_before:
            return  # some window had a loss: this program skips batches
        module, windows = self._run.module, self._windows_without
        name = f"{type(module).__name__}.training_step"
        if windows == 1 and output is None and returns_nothing(module.training_step):
            raise ConfigurationError(
                f"{name} has no return statement that returns a value, so nothing can be trained. End it with "
                "`return loss`."
            )
        returned = "None" if output is None else "a WeightedLoss of weight 0"
        if windows >= self._run.limits.max_steps:
            raise ConfigurationError(
                f"{name} has returned {returned} for every batch since the fit began, {windows} times what would be an "
                f"optimizer step, so max_steps={self._run.limits.max_steps:.0f} is never reached. Return the loss; "
                f"{returned} skips a batch."
            )
        if windows == 1:
            rank_zero_warn(
                f"{name} has returned {returned} for every batch of the first optimizer step, so nothing was updated. "
                "If these batches are skipped on purpose, nothing is wrong; else return the loss"
                f"{'.' if output is None else ', with the number of samples or tokens as its weight.'}"
            )

    def count_missed(self) -> None:
        """Count a window without a loss, or an epoch that had no window.

        Raises:
            ConfigurationError: they have been so many in a row that ``max_steps``, which alone ends the fit, is not
                reached any more.
        """
        progress, limits = self._run.progress, self._run.limits
        self._in_a_row = self._in_a_row + 1 if progress.global_step == self._step else 1
        self._step = progress.global_step
        batches = progress.num_training_batches
        least = 10 * PATIENCE if batches == ENDLESS else max(PATIENCE, batches)
        if limits.max_epochs == ENDLESS > limits.max_steps and self._in_a_row >= least:
            raise ConfigurationError(
                f"The last {self._in_a_row} windows of batches had no loss, so global_step stays at {self._step}, and "
                f"max_steps={limits.max_steps:.0f}, which alone ends this fit, is never reached. Let "
                f"{type(self._run.module).__name__}.training_step return a loss whatever global_step is, or pass "
                "max_epochs."
            )


def watch_losses(run: Run) -> LossWatch | None:
    """A watch on the losses of this fit; ``None`` where a fit without losses is meant."""
    if run.module.automatic_optimization and run.engine.strategy.optimizers:
        return LossWatch(run)
    return None


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether the source of ``function`` has no ``return`` with a value; False if the source is not known."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False  # a lambda, or a class with a __call__
    return not any(
        isinstance(node, ast.Return) and not _is_none(node.value) for node in _own_nodes(definition)
    ) and not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(definition))


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(function):
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            nodes += _own_nodes(node)
    return nodes


def warn_of_eval_mode(run: Run) -> bool:
    """Warn if modules that are trained are in eval mode: their dropout is off and batch norm does not learn.

    Returns: whether there are any.
    """
    found = modules_in_eval_mode(run.module)
    if found:
        total = sum(1 for _ in run.module.modules())
        first = f"for example {found[0]!r}" if found[0] else "the model itself among them"
        rank_zero_warn(
            f"Modules in eval mode: {len(found)} of the {total} in {type(run.module).__name__} ({first}). They are "
            "trained like that: dropout is off, and batch norm keeps its statistics. If this is not meant, call "
            "model.train() before fit, and leave out calls of eval() in steps and hooks of training."
        )
    return bool(found)


def check_index_of_loader(run: Run, word: str) -> None:
    """Check that the hooks around each batch take ``dataloader_idx``, because there are several loaders.

    Args:
        run: whose module and callbacks are looked at.
        word: in the names of the hooks: "validation", "test" or "predict".

    Raises:
        ConfigurationError: one does not.
    """
    for hook in (f"on_{word}_batch_start", f"on_{word}_batch_end"):
        for owner, base in run.hooks.overriders(hook):
            signature = inspect.signature(getattr(owner, hook))
            wanted = list(inspect.signature(getattr(base, hook)).parameters)
            try:
                signature.bind(*wanted[1:])
            except TypeError:
                arguments = ", ".join((*wanted[:-1], "dataloader_idx=0"))
                raise SignatureError(
                    f"{type(owner).__name__}.{hook} must take dataloader_idx, because there are several loaders. "
                    f"Write def {hook}({arguments})."
                ) from None


def modules_in_eval_mode(module: nn.Module, name: str = "") -> list[str]:
    """Names of the modules in eval mode, without those that hold only frozen parameters, whose eval mode is meant."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return []
    found = [] if module.training else [name]
    for child, each in module.named_children():
        found += modules_in_eval_mode(each, f"{name}.{child}" if name else child)
    return found


def check_manual_steps(run: Run, steps_before: int) -> None:
    """Look at the end of an epoch whether a module that steps its optimizers itself has stepped any since the start.

    Args:
        run: the run.
        steps_before: ``global_step`` when the fit began.

    Raises:
        ConfigurationError: it has not, and only ``max_steps`` would end the run.
    """
    progress, limits = run.progress, run.limits
    if run.module.automatic_optimization or not run.engine.strategy.optimizers or run.steps_missed:
        return
    if progress.global_step > steps_before or progress.batch_idx < 0 or progress.resumed_batches >= 0:
        return
    if run.window.batches_with_gradients and progress.earlier_batches == 0:
        return  # it may accumulate over more than one epoch
    run.steps_missed = True
    message = (
        f"{type(run.module).__name__} optimizes by hand, and in this epoch it has stepped none of the optimizers that "
        "self.optimizers() returns, so global_step is the same as before. Call self.optimizers().step(), and not the "
        "step of another object."
    )
    if limits.max_steps != ENDLESS and limits.max_epochs == ENDLESS:
        raise ConfigurationError(f"{message} max_steps={limits.max_steps:.0f} would never be reached.")
    rank_zero_warn(message)


def warn_of_what_never_comes(run: Run, validates: bool) -> None:
    """Say which of a fit's limits its epochs are too few, or too short, for.

    Args:
        run: about to train.
        validates: whether there are a step and a loader for validation.
    """
    limits, epochs, batches = run.limits, run.limits.max_epochs, run.progress.num_training_batches
    if run.progress.epochs_done == 0 and validates and epochs != ENDLESS:
        every, interval = limits.check_val_every_n_epoch, limits.val_check_interval
        cause = ""
        if every is not None and every > epochs:
            cause = f"check_val_every_n_epoch={every} is more than max_epochs={epochs:.0f}"
        elif every is None and isinstance(interval, int) and interval > epochs * batches:
            cause = (
                f"val_check_interval={interval} is more than the {epochs * batches:.0f} batches of {epochs:.0f} epochs"
            )
        if cause:
            rank_zero_warn(f"This fit never validates: {cause}. Write a smaller number.")
    if run.module.automatic_optimization and epochs != ENDLESS and batches != ENDLESS:
        for config in run.engine.strategy.lr_scheduler_configs:
            _warn_of_schedule(config, epochs, min(epochs * math.ceil(batches / limits.accumulate), limits.max_steps))
    if run.module.automatic_optimization and batches and batches < limits.accumulate:
        rank_zero_info(
            f"An epoch has {batches:.0f} batches, fewer than accumulate_grad_batches={limits.accumulate}: each epoch "
            "makes one optimizer step."
        )


def _warn_of_schedule(config: LRSchedulerConfig, epochs: float, steps: float) -> None:
    """Warn of a scheduler that is made for the other interval, or that never steps in so many epochs and steps."""
    name, interval = type(config.scheduler).__name__, config.interval
    length = "total_steps" if hasattr(config.scheduler, "total_steps") else "T_max"
    total, due = getattr(config.scheduler, length, None), epochs if interval == "epoch" else steps
    if due < config.frequency and epochs > 1:  # one epoch is more often a trial
        rank_zero_warn(
            f'{name} never steps in this fit: "frequency": {config.frequency} is more than its {due:.0f} '
            f"{interval}s. Write a smaller number."
        )
    elif not isinstance(total, int):
        return
    elif interval == "epoch" and total > 2 * epochs and (length == "total_steps" or total >= steps):
        rank_zero_warn(
            f"{name}({length}={total}) steps once an epoch, {epochs:.0f} times in this fit, and does not come to its "
            'end. Add "interval": "step" to its dictionary.'
        )
    elif interval == "step" and length == "T_max" and total == epochs and steps > 2 * epochs > 2:
        rank_zero_warn(
            f"{name}(T_max={total}) steps {steps:.0f} times in this fit, so the learning rate falls and rises again "
            f"after each {total} steps. Write T_max=self.trainer.estimated_stepping_batches, or leave out "
            '"interval": "step". If the cycles are meant, nothing is wrong.'
        )


def warn_of_frozen_statistics(module: nn.Module) -> None:
    """Warn of batch norm layers whose parameters are frozen, and whose statistics still change in train mode."""
    norms = [
        name
        for name, each in module.named_modules()
        if isinstance(each, nn.modules.batchnorm._NormBase) and each.training and each.track_running_stats
        and each.affine and not any(weight.requires_grad for weight in each.parameters(recurse=False))
    ]  # fmt: skip
    if norms:
        rank_zero_warn(
            f"The parameters of {len(norms)} batch norm layers are frozen (the first is {norms[0]!r}), but these are "
            "in train mode: their running mean and variance follow your data, so what is frozen changes. Call eval() "
            "of the frozen part in on_train_epoch_start. If this is meant, nothing is wrong."
        )


def warn_of_swapped_loaders(run: Run) -> None:
    """Warn if the validation loader draws at random, and the training loader does not."""
    training = getattr(run.loaders.training(), "sampler", None)
    others = [getattr(each.loader, "sampler", None) for each in run.loaders.evaluation("validate")]
    if isinstance(training, SequentialSampler) and others and isinstance(others[0], RandomSampler):
        rank_zero_warn(
            "The validation loader shuffles, and the training loader does not. If they were swapped, write "
            "trainer.fit(model, train_loader, val_loader)."
        )


def compare_values(run: Run, group: str) -> None:
    """Warn if the ranks have logged different values of their own: loggers and callbacks see rank 0's only.

    All ranks must call it: it is one exchange, made at the first evaluation of a kind in a run.

    Args:
        run: of several ranks that see different samples.
        group: of the logbook, at the end of an epoch.
    """
    rows = run.book.epoch_values(group)
    own = {row.name: float(row.value) for row in rows if not row.entry.shared and row.entry.metric is None}
    everyones = run.engine.strategy.data.gather_objects(own)
    values = {name: [theirs[name] for theirs in everyones if name in theirs] for name in own}
    differing = [name for name, numbers in values.items() if max(numbers) > min(numbers)]
    if differing:
        first = differing[0]
        shown = ", ".join(f"{number:.4g}" for number in values[first][:8])
        rank_zero_warn(
            f"{', '.join(differing)}: logged without sync_dist, and the ranks, which see different samples, have "
            f"different values ({first}: {shown}). Loggers, checkpoints and early stopping see rank 0's alone. Write "
            f"self.log({first!r}, ..., sync_dist=True)."
        )


def warn_of_no_batch(loader: Any, word: str, num_batches: float) -> None:
    """Warn that an evaluation ``loader`` has given no batch, though it should have had some."""
    expected = "" if num_batches == ENDLESS else f", and {num_batches:.0f} were expected"
    rank_zero_warn(
        f"The {word} loader, a {type(loader).__name__}, gave no batch{expected}, so this pass has no results of it. An "
        "iterator or a generator is used up by its first pass: pass an object that can be iterated again and again."
    )


def warn_of_predictions(run: Run, outputs: list[list[Any]], loaders: Sequence[Any]) -> None:
    """Warn if predictions are all None, or if one of ``loaders`` brings them into a random order."""
    name, flat = type(run.module).__name__, [output for each in outputs for output in each]
    if flat and all(output is None for output in flat) and not any(run.hooks.overriders("on_predict_batch_end")):
        rank_zero_warn(
            f"{name}.predict_step returned None for every batch, so predict returns a list of None. End it with "
            "`return predictions`, or, if it writes them itself, call predict with return_predictions=False."
        )
    if any(isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders):
        rank_zero_warn(
            "A loader for predictions shuffles, so they come in a random order, and not in that of the dataset. Write "
            "shuffle=False."
        )


def warn_of_nan(names: Sequence[str], step: int) -> None:
    """Warn that these logged values are no numbers."""
    rank_zero_warn(
        f"{', '.join(names)}: logged as nan at step {step}. This is said once. If it is the loss, the weights are, or "
        "will be, nan too: Trainer(detect_anomaly=True) names the operation that gave the first nan."
    )


def check_parameters(run: Run) -> None:
    """Compare the module's parameters with those of the optimizers, and say which are in only one of them."""
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
            "self.parameters() in configure_optimizers."
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
    _warn_of_eps(optimizers)


def _warn_of_eps(optimizers: Sequence[Optimizer]) -> None:
    """Warn of an optimizer that divides by zero, because its eps rounds to zero in the float16 of its parameters."""
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
    """Warn of layers in a plain list or dictionary, which a module does not see."""
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
                    "or freeze them if they are not to be trained."
                )


def no_batches(loader: Any, purpose: str = "train") -> str:
    """The message about a loader, or several, without a batch; ``purpose``: what they are for, a verb."""
    loader = getattr(loader, "iterables", loader)
    if isinstance(loader, list) and len(loader) == 1:
        loader = loader[0]
    described, cures = list[str](), list[str]()
    for path, each in leaves(loader):
        text, cure = _without_batches(each)
        described.append(f"{path}: {text}" if path else text)
        cures += [] if cure in cures else [cure]
    return f"There is nothing to {purpose} on: {'; '.join(described)}. {' '.join(cures)}"


def _without_batches(loader: Any) -> tuple[str, str]:
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"the {name} has the length 0", "Pass a loader with at least one batch."
    dataset = f"the {type(loader.dataset).__name__}"
    try:
        samples = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return f"the {name} over {dataset} has the length 0", "Pass a dataset with samples."
    text = f"the {name} over {dataset} of {samples} samples, with batch_size={loader.batch_size} and "
    text += f"drop_last={loader.drop_last}, has no batch"
    if samples == 0:
        return text, "Pass a dataset with samples."
    if loader.drop_last:
        return text, "Write a smaller batch_size, or drop_last=False."
    return text, f"Its sampler, a {type(loader.sampler).__name__}, draws none: give it samples."
