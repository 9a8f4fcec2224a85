"""Reports hyperparameters that are modules. Checkpoints do not contain these modules. Therefore
``load_from_checkpoint`` needs the modules as arguments.
"""

from __future__ import annotations

import ast
import re

from drivetrain.legacy.migrate.bindings import Bindings

_MODULE = re.compile(r"\bnn\.[A-Z]\w*|\b(?!\w*DataModule\b)\w*Module\b")
_NO_OBJECT = re.compile(r"\b[Tt]ype\[|\bCallable\b")


def report_hyperparameters(bindings: Bindings, node: ast.ClassDef) -> None:
    """Report calls of ``save_hyperparameters`` in ``__init__`` that save a module as a hyperparameter.

    An argument counts as a module in three cases: the annotation is a module class, the default is a module, or a call
    in this file passes a module.
    """
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is None:
        return
    found = _modules_among(bindings, node, init)
    for call in ast.walk(init):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "save_hyperparameters":
            for name in found:
                if _saves(call, name):
                    bindings.source.left(
                        call, f"save_hyperparameters keeps {name}, an nn.Module, and a checkpoint holds its weights "
                        f'alone: write save_hyperparameters(ignore=["{name}"]), and load_from_checkpoint(path, '
                        f"{name}=...)",
                    )  # fmt: skip


def _modules_among(bindings: Bindings, node: ast.ClassDef, init: ast.FunctionDef) -> list[str]:
    arguments = [*init.args.posonlyargs, *init.args.args][1:]
    defaults: list[ast.expr | None] = [*init.args.defaults]
    named = dict(zip([each.arg for each in arguments[::-1]], defaults[::-1], strict=False))
    named |= {each.arg: value for each, value in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)}
    passed = {each.arg: [named.get(each.arg)] for each in (*arguments, *init.args.kwonlyargs)}
    for call in ast.walk(bindings.source.tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == node.name:
            for argument, value in zip(arguments, call.args, strict=False):
                passed[argument.arg].append(value)
            for keyword in call.keywords:
                if keyword.arg in passed:
                    passed[keyword.arg].append(keyword.value)
    text_of = bindings.source.text_of
    found = []
    for each in (*arguments, *init.args.kwonlyargs):
        annotation = "" if each.annotation is None else text_of(each.annotation)
        made = [text_of(value.func) for value in passed[each.arg] if isinstance(value, ast.Call)]
        if (_MODULE.search(annotation) and not _NO_OBJECT.search(annotation)) or any(map(_MODULE.search, made)):
            found.append(each.arg)
    return found


def _saves(call: ast.Call, name: str) -> bool:
    values = [each.value if isinstance(each, ast.Constant) else None for each in call.args]
    ignored = [each for keyword in call.keywords if keyword.arg == "ignore" for each in ast.walk(keyword.value)]
    if any(isinstance(each, ast.Constant) and each.value == name for each in ignored):
        return False
    return name in values if values else True
