"""Compile modules in place instead of wrapping them, and remove the wrappers' prefix from parameter names.

``torch.compile(module)`` returns a wrapper: a module of another class that calls the original module. The names in the
wrapper's state dict have the prefix ``_orig_mod.``. In contrast, ``module.compile()`` compiles in place, and changes
neither the class nor the names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.base import torch_private

# A compiled call stores its context, the ``dynamo_ctx`` of torch.compile, in this attribute. A copied or unpickled
# module has neither the call nor the attribute.
_CONTEXT = "drivetrain_context"
_WRAPPER = f"{torch_private.WRAPPED}."
_IN_A_NAME = re.compile(rf"(?<![^.]){re.escape(_WRAPPER)}")


def original(module: Any) -> Any:
    """If ``module`` is a result of ``torch.compile``, return the original module. Return any other object unchanged."""
    while (found := torch_private.module_inside(module)) is not None:
        module = found
    return module


def compiled_in_place(module: Any) -> Any:
    """If ``module`` is a result of ``torch.compile``, compile the original module in place with the same arguments.
    Return the original module, or any other object unchanged. The result of ``torch.compile`` stays usable.
    """
    inner = original(module)
    if inner is not module:
        compile_in_place(inner, module.dynamo_ctx)
    return inner


def compile_in_place(module: nn.Module, context: Any) -> None:
    """Compile ``module`` in place. ``context`` is the attribute ``dynamo_ctx`` of a result of ``torch.compile``."""
    if context_of(module) is not context:
        _install(module, torch_private.compiled_by(context, module, torch_private.uncompiled_call(module)), context)


def compile_forward(module: nn.Module, context: Any) -> None:
    """Compile only the ``forward`` of ``module`` in place, with ``context``. The module's hooks stay uncompiled,
    because FSDP gathers and frees parameters in hooks. Layers of one class share the compiled code.
    """
    if context_of(module) is context:
        return
    compiled, attributes = torch_private.compiled_by(context, module, module.forward), module.__dict__
    inner = torch_private.uncompiled_call(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = attributes.get("forward")
        # set ``forward`` only during the call, because a copy of the module would otherwise run the original's layers
        attributes["forward"] = compiled
        try:
            return inner(*args, **kwargs)
        finally:
            if own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = own

    _install(module, call, context)


def _install(module: nn.Module, call: Any, context: Any) -> None:
    setattr(call, _CONTEXT, context)
    torch_private.set_compiled_call(module, call)


def leave_uncompiled(module: nn.Module) -> None:
    """Undo the in-place compilation of ``module``."""
    torch_private.set_compiled_call(module, None)


def context_of(module: nn.Module) -> Any:
    """Return the context that compiled ``module`` in place; ``None`` if this file has not compiled ``module``."""
    return getattr(module.__dict__.get(torch_private.COMPILED_CALL), _CONTEXT, None)


def compiled_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method ``name``, compiled if this file has compiled ``module`` in place.

    With ``fullgraph=True``, the method is not compiled, because each call of ``self.log`` would break the graph. A
    training step with manual optimization is not compiled, because torch.compile would bypass drivetrain's wrapper
    around the optimizer. This wrapper scales gradients, counts steps and calls hooks.
    """
    method: Callable[..., Any] = getattr(module, name)
    context = context_of(module)
    by_hand = name == "training_step" and not getattr(module, "automatic_optimization", True)
    if context is None or context.fullgraph or by_hand:
        return method
    return context(method)


# Members that torch.compile may trace: forward, steps, and values that do not change from step to step.
_TRACED = {
    "forward", "training_step", "validation_step", "test_step", "predict_step", "hparams", "hparams_initial", "device",
    "dtype", "automatic_optimization", "example_input_array",
}  # fmt: skip


@functools.cache
def keep_out_of_graphs(*classes: type) -> None:
    """Keep functions of drivetrain that a step calls, such as ``self.log``, out of torch.compile's graphs.

    Otherwise torch.compile would trace into the logbook and the loops, and would recompile the step whenever a counter
    changes. A call of such a function ends the step's graph, and another graph begins after the call.

    Args:
        classes: the classes whose members a step may call.
    """
    package = Path(__file__).parent.parent
    # the folders with nn.Modules that may be compiled; compat contains Lightning's demonstration models
    traced = ("module", "compat")
    folders = [folder for folder in sorted(package.iterdir()) if folder.is_dir() and folder.name not in traced]
    torch_private.leave_folders_uncompiled(folders)
    for owner in {base for cls in classes for base in cls.__mro__ if base.__module__.startswith("drivetrain.")}:
        for name, member in vars(owner).items():
            function: Any = member.fget if isinstance(member, property) else member
            if name not in _TRACED and not name.startswith("_") and hasattr(function, "__code__"):
                # also keeps functions that ``function`` calls uncompiled, such as a metric's update
                torch_private.leave_uncompiled(function)


# ---- names in state dicts --------------------------------------------------------------------------------------------


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state dict without the wrappers' prefixes, so that the state dict also fits the uncompiled
    module. The names in torch's metadata change, too. A state dict without prefixes is returned unchanged.
    """
    return _renamed(state, lambda name: _IN_A_NAME.sub("", name)) if _names_wrappers(state) else state


def own_names(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state`` with names that fit ``module``. Names have the prefix ``_orig_mod.`` only where ``module`` has a
    wrapper.
    """
    wrapped = [
        f"{name}." for name, _ in module.named_modules(remove_duplicate=False) if f".{name}.".endswith(f".{_WRAPPER}")
    ]  # outer wrappers come first
    if not (wrapped or _names_wrappers(state)):
        return state

    def own(name: str) -> str:
        name = _IN_A_NAME.sub("", name)
        for inside in wrapped:
            outside = inside.removesuffix(_WRAPPER)
            if name.startswith(outside):
                name = inside + name.removeprefix(outside)
        return name

    return _renamed(state, own)


def _names_wrappers(state: Mapping[str, Any]) -> bool:
    return any(isinstance(name, str) and _IN_A_NAME.search(name) for name in state)


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed: Any = type(state)() if isinstance(state, dict) else {}
    renamed.update((rename(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)  # the version of each module, by name
    if metadata is not None:
        renamed._metadata = {rename(f"{name}.")[:-1]: value for name, value in metadata.items()}
    return renamed
