"""Rewrites renamed members and arguments in a program for an earlier Lightning, and reports other changes."""

from __future__ import annotations

import ast
import importlib
from typing import Any

from drivetrain.base.introspect import taken
from drivetrain.compat.missing import TODAY
from drivetrain.legacy.migrate.bindings import Bindings
from drivetrain.legacy.migrate.flags import TrainerCall
from drivetrain.legacy.migrate.hyperparameters import report_hyperparameters
from drivetrain.legacy.migrate.names import Today
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.flags import FLAGS, PRESENT

RENAMED = {
    ("fit", "train_dataloader"): "train_dataloaders",
    ("validate", "val_dataloaders"): "dataloaders",
    ("test", "test_dataloaders"): "dataloaders",
    ("log", "sync_dist_op"): "reduce_fx",
    ("log_dict", "sync_dist_op"): "reduce_fx",
}
"""The current name of each renamed argument, by method and old name."""

_OF_CLASSES = {
    ("ModelCheckpoint", "every_n_val_epochs"): "every_n_epochs",
    ("ModelCheckpoint", "period"): "every_n_epochs",
}
"""The current name of each renamed constructor argument, by class and old name."""

GONE = TODAY["members"]
"""For each former member of Lightning's Trainer, what to write today."""

_OF_STEPS = {
    "optimizer_idx": "write self.automatic_optimization = False, and step the optimizers of self.optimizers() in "
    "training_step",
    "hiddens": "loop over the parts of the batch, with manual optimization",
}
"""For each argument that steps no longer get, what to write instead."""

_STEPS = ("training_step", "validation_step", "test_step")


def rewrite_calls(bindings: Bindings) -> None:
    """Rewrite the calls and the classes of a program."""
    source = bindings.source
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            _rewrite_call(bindings, node)
        elif isinstance(node, ast.Attribute):
            _report_attribute(bindings, node)
        elif isinstance(node, ast.ClassDef):
            if bindings.is_a(node, "LightningModule"):
                _report_module(bindings, node)
                report_hyperparameters(bindings, node)
            elif bindings.is_a(node, "LightningDataModule"):
                _report_data(bindings, node)
            elif bindings.is_a(node, "Callback"):
                _report_hooks(bindings, node, hooks.OF_CALLBACKS)


# ---- calls -----------------------------------------------------------------------------------------------------------


def _rewrite_call(bindings: Bindings, node: ast.Call) -> None:
    today = bindings.makes(node.func)
    if bindings.source.is_in_f_string(node):
        return
    if today is not None and today.name == "Trainer":
        bindings.callbacks += TrainerCall(bindings, node).run()
    elif today is not None and today.home.startswith("drivetrain"):
        _rewrite_object(bindings, node, today)
    elif isinstance(node.func, ast.Attribute) and bindings.bound:
        for keyword in node.keywords:
            _rename(bindings, node.func.attr, keyword, RENAMED.get((node.func.attr, keyword.arg or "")))
        if node.func.attr == "manual_backward" and len(node.args) > 1:
            bindings.source.left(node, "manual_backward(loss, optimizer): leave the optimizer out")


def _rename(bindings: Bindings, called: str, keyword: ast.keyword, new: str | None) -> None:
    if new is not None and keyword.arg is not None:
        start = bindings.source.span(keyword)[0]
        bindings.source.replace(start, start + len(keyword.arg), new)
        bindings.source.changed(keyword, f"{called}({keyword.arg}=...)", f"{called}({new}=...)")


def _rewrite_object(bindings: Bindings, node: ast.Call, today: Today) -> None:
    """Rewrite the arguments of a call other than ``Trainer(...)``; report arguments that drivetrain does not accept in
    this call.
    """
    given: dict[Any, ast.keyword] = {keyword.arg: keyword for keyword in node.keywords}
    accepted = _accepted(today, given)
    for keyword in node.keywords:
        new = _OF_CLASSES.get((today.name, keyword.arg or ""))
        _rename(bindings, today.name, keyword, new)
        if new is None and keyword.arg is not None and keyword.arg not in accepted:
            bindings.source.left(keyword, f"{today.name} has no argument {keyword.arg}: see help({today.name})")
    if today.name == "EarlyStopping" and not node.args and not given.keys() & {"monitor", None}:
        bindings.source.left(node, 'EarlyStopping(...): write monitor="...", which was "early_stop_on" by default')
    for keyword in (each for each in node.keywords if each.arg == "trainer_defaults"):
        for key in keyword.value.keys if isinstance(keyword.value, ast.Dict) else []:
            if isinstance(key, ast.Constant) and key.value in FLAGS.keys() - PRESENT:
                bindings.source.left(key, f'trainer_defaults={{"{key.value}": ...}}: see docs/legacy.md')
    if today.name == "LightningCLI" and bindings.is_of_version_1:
        bindings.source.differs(node, "LightningCLI has subcommands: write fit before the options of the command line")


def _accepted(today: Today, given: dict[Any, ast.keyword]) -> dict[Any, Any]:
    """Return those of the ``given`` arguments that ``today`` accepts. If the signature of ``today`` is unknown, return
    all arguments.
    """
    try:
        return taken(getattr(importlib.import_module(today.home), today.name), given)
    except (AttributeError, TypeError, ValueError):
        return given


def _report_attribute(bindings: Bindings, node: ast.Attribute) -> None:
    """Report a member that only the Trainer of an earlier generation has."""
    owner = node.value
    last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    today = bindings.meaning(owner)
    is_class = today is not None and today.name in ("Trainer", "LightningDataModule")
    if node.attr in GONE and bindings.bound and (last == "trainer" or is_class):
        bindings.source.left(node, f"{bindings.source.text_of(node)}: write {GONE[node.attr]}")


# ---- classes ---------------------------------------------------------------------------------------------------------


def _report_module(bindings: Bindings, node: ast.ClassDef) -> None:
    source = bindings.source
    _report_hooks(bindings, node, hooks.OF_MODULES)
    for method in _methods(node):
        if method.name in (f"{step}_end" for step in _STEPS):
            instead = method.name.removesuffix("_end")
            source.left(
                method, f'{method.name} is only called under strategy="dp" and "ddp2": do its work in {instead}'
            )
        if method.name in _STEPS:
            _report_step(bindings, method)
        for statement in ast.walk(method):
            if isinstance(statement, ast.Assign):
                _rewrite_hparams(bindings, statement)
            elif isinstance(statement, (ast.Return, ast.Call)) and method.name in (*_STEPS, *hooks.GONE):
                _report_dictionary(bindings, statement)


def _report_data(bindings: Bindings, node: ast.ClassDef) -> None:
    name = "transfer_batch_to_device"
    _report_hooks(bindings, node, {name: hooks.OF_MODULES[name]})
    for inner in ast.walk(node):
        given = isinstance(inner, ast.Call) and (inner.args or inner.keywords)
        if isinstance(inner, ast.Call) and given and bindings.source.text_of(inner.func) == "super().__init__":
            bindings.source.left(inner, "LightningDataModule takes no arguments: keep them as attributes")


def _report_step(bindings: Bindings, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    taken = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
    for name in filter(_OF_STEPS.get, taken):
        bindings.source.left(method, f"training_step(..., {name}): {_OF_STEPS[name]}")
    needed = [each.arg for each in method.args.args[: len(method.args.args) - len(method.args.defaults)]]
    if method.name != "training_step" and len(needed) > 3 and needed[3] != "dataloader_idx":
        bindings.source.left(
            method, f"{method.name}(..., {needed[3]}): the index of the loader is called dataloader_idx: write "
            f"def {method.name}(self, batch, batch_idx, dataloader_idx=0)",
        )  # fmt: skip
    for inner in ast.walk(method):
        called = bindings.source.text_of(inner.func).rpartition(".")[2] if isinstance(inner, ast.Call) else ""
        if called in ("TrainResult", "EvalResult"):
            bindings.source.left(
                inner, f"{called}(...) is not logged any more: write self.log(name, value), and return the loss"
            )


def _report_dictionary(bindings: Bindings, node: ast.Return | ast.Call) -> None:
    """Report a step that returns or passes a dictionary with the key "log" or "progress_bar"."""
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Dict):
            continue
        values = [key.value for key in inner.keys if isinstance(key, ast.Constant)]
        if keys := [key for key in ("log", "progress_bar") if key in values]:
            bindings.source.left(
                inner, f"{' and '.join(map(repr, keys))} in a dictionary is not logged any more: write "
                "self.log(name, value, prog_bar=True)",
            )  # fmt: skip


def _rewrite_hparams(bindings: Bindings, node: ast.Assign) -> None:
    """Rewrite ``self.hparams = value`` as ``self.save_hyperparameters(value)``."""
    target = node.targets[0]
    if len(node.targets) > 1 or not isinstance(target, ast.Attribute) or target.attr != "hparams":
        return
    if not isinstance(target.value, ast.Name) or target.value.id != "self":
        return
    source = bindings.source
    (start, end), target_end = source.span(node), source.span(target)[1]
    value = source.text.index("=", target_end) + 1
    value += len(source.text[value:end]) - len(source.text[value:end].lstrip(" \t"))
    source.replace(start, end, "self.save_hyperparameters(", (value, end), ")")
    source.changed(node, source.text_of(node), f"self.save_hyperparameters({source.text[value:end]})")


def _report_hooks(bindings: Bindings, node: ast.ClassDef, table: dict[str, tuple[str, str]]) -> None:
    """Report hooks that are no longer called, and hooks with the parameters of an earlier generation."""
    for method in _methods(node):
        if method.name in hooks.GONE:
            bindings.source.left(method, f"{method.name} is not called any more: write {hooks.GONE[method.name]}")
        if method.name not in table:
            continue
        today, then = (text.split() for text in table[method.name])
        takes = [argument.arg for argument in (*method.args.posonlyargs, *method.args.args)][1:]
        if len(takes) - len(method.args.defaults) <= len(today) <= len(takes) or method.args.vararg is not None:
            continue
        if len(takes) <= len(then):
            further = ["dataloader_idx=0"] if then == [*today, "dataloader_idx"] and "train" not in method.name else []
            was, now = (f"{method.name}({', '.join(['self', *names])})" for names in (takes, [*today, *further]))
            bindings.source.left(method, f"{was}: write {now}")


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
