"""Export a module to ONNX, TorchScript and TensorRT; run ``forward`` on example inputs, without lasting effects."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import nn

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import lightning_deprecation
from drivetrain.base.seed import isolate_rng
from drivetrain.base.torch_private import MODULES, own_modules
from drivetrain.base.tree import cloned, move
from drivetrain.errors import ConfigurationError, check_installed

with on_first_use:
    from drivetrain.logbook import parts as logbooks

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of ``forward``."""


class ExportMixin:
    """Gives a module its export methods, which run ``forward`` in evaluation mode and without gradients.

    An exported model has no Trainer: ``self.trainer`` is ``None`` in its ``forward``. An export does not change this
    module or the training mode of any submodule. The methods write a file first under another name, so that a failed
    export does not damage an existing file. The methods create missing folders.
    """

    example_input_array: Any = None
    """Example inputs of ``forward``: one argument, a tuple of positional arguments, or a mapping of named arguments."""

    def to_onnx(self, file_path: str | Path | IO[bytes] | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Return the model as ONNX.

        Args:
            file_path: the path of the file, or a file object open for writing, such as ``io.BytesIO()``. If
                ``file_path`` is a path, torch may write large weights into a second file in the same folder.
            input_sample: the inputs, in the form of :attr:`example_input_array`; ``None``: :attr:`example_input_array`.
            **kwargs: arguments of ``torch.onnx.export``, such as ``dynamic_shapes`` or ``opset_version``.

        Returns:
            torch's ``ONNXProgram``; ``None`` with ``dynamo=False``.

        Raises:
            ConfigurationError: there are no inputs, or a package is missing.
        """
        args, kwarg_inputs = _inputs(self, input_sample, "to_onnx", "input_sample")
        packages = ["onnx", "onnxscript"] if kwargs.get("dynamo", True) else ["onnx"]
        for package in packages:
            check_installed("to_onnx", package, install=" ".join(packages))
        if file_path is not None and not isinstance(file_path, (str, Path)):
            kwargs.setdefault("external_data", False)  # a file object cannot hold a second file
        with _exportable(self) as model, _target(file_path) as target:
            return torch.onnx.export(model, args, target, kwargs=kwarg_inputs or None, **kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the model as TorchScript. This method warns, because torch has deprecated TorchScript.

        Args:
            file_path: the path of the file.
            method: "script" compiles ``forward`` and the functions that it calls; "trace" records the operations of one
                call of ``forward``.
            example_inputs: the inputs for ``method="trace"``, in the form of :attr:`example_input_array`; ``None``:
                :attr:`example_input_array`.
            **kwargs: arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Returns:
            A ``ScriptModule`` that shares its weights with this module. A ``ScriptModule`` that is loaded from the file
            has separate weights.

        Raises:
            ConfigurationError: the method is unknown, or there are no inputs for ``method="trace"``.
        """
        lightning_deprecation("torch deprecates TorchScript. Write torch.export.export(...).")
        if method not in ("script", "trace"):
            raise ConfigurationError(f'to_torchscript(method={method!r}) is unknown. Write "script" or "trace".')
        traced: dict[str, Any] = {}
        if method == "trace":
            args, kwarg_inputs = _inputs(self, example_inputs, "to_torchscript", "example_inputs")
            traced = {"example_kwarg_inputs": kwarg_inputs} if kwarg_inputs else {"example_inputs": args}
        exporter: Any = torch.jit.script if method == "script" else torch.jit.trace
        with _exportable(self) as model, _replacing(file_path) as target:
            exported = exporter(model, **traced, **kwargs)
            if target is not None:
                torch.jit.save(exported, target)
        return exported

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the object that ``torch.jit.script(module)`` compiles: a copy of the module without its Trainer."""
        return detached(self)  # type: ignore[arg-type]  # self is a LightningModule

    def to_tensorrt(
        self,
        file_path: str | Path | None = None,
        input_sample: Any = None,
        ir: str = "default",
        output_format: str = "exported_program",
        retrace: bool = False,
        **compile_kwargs: Any,
    ) -> Any:
        """Return the model, compiled by TensorRT. The module must be on a device that TensorRT supports.

        Args:
            file_path: the path of the file.
            input_sample: the inputs, in the form of :attr:`example_input_array`; ``None``: :attr:`example_input_array`.
            ir: the form in which the model is captured: "default", "dynamo" or "ts".
            output_format: the file format: "exported_program" or "torchscript". With ``ir="ts"``, the format is always
                "torchscript".
            retrace: whether to export the compiled graph again before it is written to the file.
            **compile_kwargs: arguments of ``torch_tensorrt.compile``.

        Returns:
            The compiled model.

        Raises:
            ConfigurationError: there are no inputs, or the package ``torch_tensorrt`` is missing.
        """
        args, kwarg_inputs = _inputs(self, input_sample, "to_tensorrt", "input_sample")
        check_installed("to_tensorrt", "torch_tensorrt", install="torch-tensorrt")
        tensorrt: Any = importlib.import_module("torch_tensorrt")
        inputs: dict[str, Any] = {"inputs": list(args), **({"kwarg_inputs": kwarg_inputs} if kwarg_inputs else {})}
        with _exportable(self) as model, _replacing(file_path) as target:
            compiled = tensorrt.compile(model, ir=ir, **inputs, **compile_kwargs)
            if target is not None and isinstance(compiled, torch.jit.ScriptModule):
                torch.jit.save(compiled, target)
            elif target is not None:
                tensorrt.save(compiled, target, output_format=output_format, retrace=retrace, **inputs)
        return compiled


def _inputs(module: Any, sample: Any, method: str, argument: str) -> Arguments:
    """Return ``sample``, or the module's own example, on the module's device."""
    sample = module.example_input_array if sample is None else sample
    if sample is None:
        raise ConfigurationError(
            f"{type(module).__name__}.{method} needs inputs to run the model on, and example_input_array is None. "
            f"Set self.example_input_array in __init__, or pass {argument}=...."
        )
    return _arguments(move(sample, module.device))


def _arguments(sample: Any) -> Arguments:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if type(sample) is tuple else (sample,)), {}  # a named tuple is a single argument


@contextmanager
def _target(given: str | Path | IO[bytes] | None) -> Iterator[str | None]:
    """Yield the path to which the caller writes. If ``given`` is an open file, yield a temporary path, and at the end
    copy the written content into the open file. Otherwise yield the path of :func:`_replacing`.
    """
    if given is None or isinstance(given, (str, Path)):
        with _replacing(given) as path:
            yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "model.onnx")
        yield str(whole)
        if len(others := os.listdir(folder)) > 1:
            raise ConfigurationError(
                f"The weights are too large for one file: torch wrote {', '.join(sorted(others))}. Pass to_onnx a path."
            )
        given.write(whole.read_bytes())


@contextmanager
def _replacing(path: str | Path | None) -> Iterator[str | None]:
    """Yield a temporary path. At the end, move the file at this path to ``path``, and other files of the temporary
    folder to the folder of ``path``. After an exception, no file is moved.

    Raises:
        OSError: ``path`` is a folder, a pipe or a device.
    """
    if path is None:
        yield None
        return
    target = Path(path)
    files.check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        yield os.path.join(folder, target.name)
        # the file ``path`` is moved last, because it may refer to the other files
        for written in sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name):
            files.move(written, target.parent / written.name)


# ---- running forward without lasting effects -------------------------------------------------------------------------


@contextmanager
def undisturbed(module: nn.Module, draws: bool = False) -> Iterator[None]:
    """Context in which ``module`` is in evaluation mode, gradients are off, and logged values are discarded.

    At its end, also after an exception, the context restores the mode of every submodule and the state of every random
    generator.

    Args:
        module: the module to run.
        draws: do not restore the random generators' states.
    """
    parts = list(module.modules())
    modes = [part.training for part in parts]
    with nullcontext() if draws else isolate_rng(), torch.no_grad(), logbooks.without_logging(module):
        try:
            for part in parts:
                # not eval(), because it calls train(), and a user's train() may have further effects that cannot be
                # undone
                part.training = False
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode


@contextmanager
def example_pass(module: nn.Module, sample: Any = None, draws: bool = False) -> Iterator[Arguments | None]:
    """Context for running ``forward``, with the effects of :func:`undisturbed`. If the module has a Trainer, the
    context also enters the Trainer's precision.

    Args:
        module: the module to run; any ``nn.Module``.
        sample: the inputs, in the form of ``example_input_array``; ``None``: ``example_input_array``.
        draws: do not restore the random generators' states.

    Yields: A copy of the inputs on the module's device. If there are no inputs: ``None``; the module's modes then do
    not change.
    """
    # example_input_array may be a user's property that draws random numbers, so it is read inside undisturbed().
    if sample is None and inspect.getattr_static(module, "example_input_array", None) is None:
        yield None
        return
    trainer: Any = module.__dict__.get("_trainer")
    with undisturbed(module, draws), nullcontext() if trainer is None else trainer.engine.autocast():
        if sample is None:
            sample = module.example_input_array
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        if first is not None:
            sample = move(sample, first.device)
        if trainer is not None and (convert := trainer.engine.input_conversion()) is not None:
            sample = convert(sample)
        sample = cloned(sample)
        yield None if sample is None else _arguments(sample)


# ---- the copy of the module that is exported -------------------------------------------------------------------------


@contextmanager
def _exportable(module: Any) -> Iterator[nn.Module]:
    """Context that yields ``module`` without its Trainer, in evaluation mode."""
    with undisturbed(module):
        yield detached(module)


def detached(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with the same parameters and without its Trainer."""
    return _detached(module, {})


class _Unregistered:
    """A base class that replaces the user's ``__init_subclass__``, which could register the new class somewhere."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@functools.cache
def _detached_class(cls: type[Any]) -> tuple[type[Any], frozenset[str]]:
    """Return a subclass of ``cls`` that TorchScript can inspect, and the names of attributes that this package defines.

    TorchScript reads every attribute, so ``trainer`` must not raise. TorchScript also compiles every property that
    ``__jit_unused_properties__`` does not name.
    """
    ours = [base for base in cls.__mro__ if base.__module__.startswith("drivetrain.")]
    properties = [
        name
        for base in ours
        for name, value in vars(base).items()
        if isinstance(value, property) and inspect.getattr_static(cls, name) is value
    ]
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__jit_unused_properties__": [*properties, *getattr(cls, "__jit_unused_properties__", [])],
        "trainer": None,
        "__prepare_scriptable__": lambda module: module,
    }
    names = frozenset(name for base in ours for name in (*vars(base), *inspect.get_annotations(base)))
    made = types.new_class(cls.__name__, (_Unregistered, cls), exec_body=lambda namespace: namespace.update(body))
    return made, names


def _detached(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Return the copy that :func:`detached` describes. LightningModules inside ``module`` are copied, too.

    Args:
        module: the module to copy; it is not changed.
        made: the copies so far, by the id of the original. Through this dictionary, a shared submodule stays shared.
    """
    if id(module) in made:
        return made[id(module)]
    children = {name: None if child is None else _detached(child, made) for name, child in own_modules(module).items()}
    kind: Any = type(module)
    changed: dict[str, Any] = {MODULES: children}
    if isinstance(module, ExportMixin):
        kind, names = _detached_class(kind)
        ignored = [name for name in module.__dict__ if name in names]
        ignored += getattr(module, "__jit_ignored_attributes__", [])
        changed |= {"_trainer": None, "__jit_ignored_attributes__": ignored}
    elif all(child is own_modules(module)[name] for name, child in children.items()):
        return module
    twin: nn.Module = object.__new__(kind)
    twin.__dict__.update(module.__dict__, **changed)
    made[id(module)] = twin
    return twin
