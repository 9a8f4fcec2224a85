"""Implements ``Trainer(compile=...)`` and ``fit(torch.compile(model))``: compiles a complete model or its repeated
layers, or raises if compilation is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base import torch_private
from drivetrain.base.compile_options import CompileOptions
from drivetrain.base.compiled import compile_forward, compile_in_place, context_of, keep_out_of_graphs, leave_uncompiled
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError, shown
from drivetrain.loops.progress import TrainerFn
from drivetrain.module.optimizers import LightningOptimizer
from drivetrain.strategies import fsdp_blocks


@dataclass
class _Compiled:
    """The compiled modules of a model, with the options and torch's context for the compilation."""

    options: CompileOptions
    context: Any
    modules: list[nn.Module]


# A model stays compiled after a run.
_COMPILED: WeakKeyDictionary[nn.Module, _Compiled] = WeakKeyDictionary()


def check(trainer: Any, model: Any, compiled_by: Any) -> Any:
    """Check that this Trainer can compile ``model``. Return the context of ``torch.compile`` if the user has compiled
    the model, otherwise ``None``.

    Raises:
        ConfigurationError: the strategy or this machine cannot compile, or the model is already compiled.
    """
    own = _COMPILED.get(model)
    if own is not None and compiled_by is own.context:
        compiled_by = None  # the context comes from an earlier run, and each process creates its own
    asked = trainer.settings.compile
    options = CompileOptions.of(asked)
    if options is None:
        return compiled_by
    strategy = trainer.strategy
    if compiled_by is not None:
        raise ConfigurationError(
            f"Trainer(compile={shown(asked)}) compiles the model, and trainer.fit got one that torch.compile has "
            "compiled. Leave one of them out."
        )
    if why := strategy.facts.refuses.get("compile"):
        raise ConfigurationError(
            f"Trainer(compile={shown(asked)}) does not work with {type(strategy).__name__}: {why} Leave compile out."
        )
    _check_compiler(trainer.strategy.root_device, options, asked)
    return None


def _check_compiler(device: torch.device, options: CompileOptions, asked: Any) -> None:
    """Check that torch's backend "inductor" finds its compiler for the device.

    Raises:
        ConfigurationError: the backend does not find its compiler.
    """
    if options.backend != "inductor" or device != HOST:  # for other devices, torch's own error is enough
        return
    try:
        torch_private.cpp_compiler()
    except torch_private.InvalidCxxCompiler as error:
        cure = {**options.arguments, "backend": "aot_eager"}
        if options.blocks is not None:
            cure["blocks"] = options.blocks if isinstance(options.blocks, str) else sorted(map(str, options.blocks))
        raise ConfigurationError(
            f'Trainer(compile={shown(asked)}): torch.compile\'s backend "inductor" needs a C++ compiler, and found '
            f"none ({shown(str(error))}). Install g++ or name one in CXX, or write compile={cure}, which needs no "
            "compiler."
        ) from None


def compile_whole(trainer: Any, job: Any) -> None:
    """Compile the complete model in place, unless the settings select single layers. Called in each process, before
    set-up.
    """
    options, context, model = CompileOptions.of(trainer.settings.compile), job.compiled_by, job.model
    # The class is loaded by name, because an import would be circular.
    keep_out_of_graphs(load("drivetrain.module.module:LightningModule"), LightningOptimizer)
    if options is not None:
        _forget_others(model, options)
        if options.blocks is not None:
            return  # compile_blocks compiles layers later, because configure_model can still create them
        context = _context(model, options)
    compile_in_place(model, context)  # each process compiles its own copy of the model
    if context.fullgraph:
        rank_zero_info(
            f"torch.compile(fullgraph=True): calls of {type(model).__name__} run compiled, and its steps as they "
            "are, because a step that logs is never one graph."
        )
    elif job.fn is TrainerFn.FITTING and not model.automatic_optimization:
        rank_zero_info(
            f"torch.compile: calls of {type(model).__name__} run compiled, and its training_step as it is, because "
            "it steps its optimizers itself. To compile the layers that it uses, write self.net = "
            'torch.compile(self.net) in the constructor, or Trainer(compile="blocks").'
        )


def compile_blocks(trainer: Any) -> None:
    """Compile the layers that ``Trainer(compile=...)`` selects. The Trainer calls this function after the model's
    set-up.

    Raises:
        ConfigurationError: the settings select no layer.
    """
    options, model = CompileOptions.of(trainer.settings.compile), trainer.lightning_module
    if options is None or options.blocks is None:
        return
    if isinstance(options.blocks, str):
        found = fsdp_blocks.find_blocks(model)
    else:
        found = fsdp_blocks.outermost(fsdp_blocks.matching(model, options.blocks, "compile"))
    blocks = [each for each in found if each is not model]
    if not blocks:
        raise ConfigurationError(
            f"Trainer(compile={shown(trainer.settings.compile)}): {type(model).__name__} has no repeated layers. "
            "Name the classes of layers to compile, or write compile=True for the whole model."
        )
    context = _context(model, options)
    for block in blocks:
        if context_of(block) not in (None, context):
            raise ConfigurationError(
                f"Trainer(compile={shown(trainer.settings.compile)}) compiles "
                f"{fsdp_blocks.names_of(model)[block]}, which is compiled already. Leave one of them out."
            )
        compile_forward(block, context)
    _COMPILED[model].modules = blocks
    rank_zero_info(f"torch.compile: {fsdp_blocks.summary(model, blocks).rpartition(', the rest of')[0]} run compiled.")


def _context(model: nn.Module, options: CompileOptions) -> Any:
    """Return the context of ``torch.compile`` for ``model``. If an earlier run of ``model`` has created a context,
    return this context, which also keeps the compiled code.
    """
    known = _COMPILED.get(model)
    if known is None:
        wrapper: Any = torch.compile(nn.Identity(), **options.arguments)
        known = _COMPILED[model] = _Compiled(options, wrapper.dynamo_ctx, [model])
    return known.context


def _forget_others(model: nn.Module, options: CompileOptions) -> None:
    """If an earlier Trainer has compiled ``model`` with other options, undo the compilation."""
    known = _COMPILED.get(model)
    if known is not None and known.options != options:
        for module in known.modules:
            if context_of(module) is known.context:
                leave_uncompiled(module)
        del _COMPILED[model]
