"""Parse the value of ``Trainer(compile=...)``: the layers to compile, and the arguments of ``torch.compile``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drivetrain.base import torch_private
from drivetrain.errors import ConfigurationError, described, did_you_mean, shown

_FORMS = (
    'Write compile=True for the whole model, compile="blocks" for its repeated layers, their classes or class names '
    '(compile="Block"), or a dictionary of torch.compile\'s arguments, in which "blocks" may be one of these.'
)


@dataclass(frozen=True)
class CompileOptions:
    """The parsed value of ``Trainer(compile=...)``.

    Attributes:
        blocks: the layers to compile: ``None`` for the complete model, "blocks" for the model's repeated layers, or a
            set of classes and names of classes.
        arguments: the arguments of ``torch.compile``.
    """

    blocks: str | frozenset[type[nn.Module] | str] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> Any:
        """The backend of ``torch.compile``: a name or a function."""
        return self.arguments.get("backend") or "inductor"

    @classmethod
    def of(cls, value: Any, owner: str = "Trainer") -> CompileOptions | None:
        """Return the options for ``value``; ``None`` if ``value`` turns compilation off.

        Raises:
            ConfigurationError: ``value`` has an unsupported form, or contains an argument that torch.compile rejects.
        """
        if value is None or value is False:
            return None
        if not isinstance(value, Mapping):
            return cls(_blocks_of(value, owner))
        arguments = dict(value)
        blocks = _blocks_of(arguments.pop("blocks", False), owner, inside=True)
        _check_arguments(arguments, owner)
        return cls(blocks, arguments)


def _blocks_of(value: Any, owner: str, inside: bool = False) -> str | frozenset[type[nn.Module] | str] | None:
    """Return the layers that ``value`` selects. ``inside``: whether ``value`` is the entry "blocks" of a dictionary,
    where True means "blocks".
    """
    where = f'{owner}(compile={{"blocks": {shown(value)}}})' if inside else f"{owner}(compile={shown(value)})"
    if isinstance(value, bool) or (inside and value is None):
        return "blocks" if inside and value else None
    if value == "blocks":
        return "blocks"
    named = [value] if isinstance(value, (str, type)) else value
    if not isinstance(named, Collection) or isinstance(named, Mapping) or not named:
        raise ConfigurationError(f"{where} is {described(value)}, which names no layers. {_FORMS}")
    for each in named:
        if isinstance(each, str):
            argument = "mode" if each in _modes() else "backend" if each in _backends() else None
            if argument is not None:
                raise ConfigurationError(
                    f"{where}: {each!r} is a {argument} of torch.compile, not a class of layers. "
                    f'Write compile={{"{argument}": "{each}"}}.'
                )
            if not each.isidentifier():
                raise ConfigurationError(f"{where}: {each!r} cannot be the name of a class. {_FORMS}")
        elif not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise ConfigurationError(f"{where} holds {described(each)}, which is no class of layers. {_FORMS}")
    return frozenset(named)


def _check_arguments(arguments: Mapping[str, Any], owner: str) -> None:
    known = {name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")}
    for name, value in arguments.items():
        where = f"{owner}(compile={{{name!r}: {shown(value)}}})"
        if name not in known:
            hint = "Leave compile out." if name == "disable" else did_you_mean(str(name), {*known, "blocks"})
            raise ConfigurationError(f"{where}: compile takes no {name!r}. {hint}")
        if name == "backend" and isinstance(value, str) and value not in (backends := _backends()):
            raise ConfigurationError(
                f"{where}: torch.compile has no backend {value!r}. {did_you_mean(value, backends)}"
            )
        if name == "backend" and not (value is None or isinstance(value, str) or callable(value)):
            raise ConfigurationError(f'{where}: a backend is a name or a function. Write "backend": "inductor".')
        if name == "mode" and value is not None and value not in (modes := _modes()):
            raise ConfigurationError(f"{where}: torch.compile has no mode {value!r}. {did_you_mean(str(value), modes)}")
        if name == "fullgraph" and not isinstance(value, bool):
            raise ConfigurationError(f'{where}: fullgraph is True or False. Write "fullgraph": True.')
        if name == "dynamic" and not (value is None or isinstance(value, bool)):
            raise ConfigurationError(f'{where}: dynamic is True, False or None. Write "dynamic": True.')
        if name == "options" and not (value is None or isinstance(value, Mapping)):
            raise ConfigurationError(f'{where}: options is a dictionary. Write "options": {{"max_autotune": True}}.')
    if arguments.get("mode") and arguments.get("options"):
        raise ConfigurationError(
            f"{owner}(compile={shown(dict(arguments))}): torch.compile takes a mode or options, not both. "
            "Leave one out."
        )


def _modes() -> list[str]:
    return list(torch_private.list_modes())


def _backends() -> list[str]:
    return [name for name in torch_private.list_backends(None) if "TESTING" not in name]
