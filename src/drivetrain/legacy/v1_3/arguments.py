"""Command-line options for a constructor's arguments, as in Lightning 1.3."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from typing import Any

from drivetrain.module.loading import literal


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the constructor arguments of ``cls`` that command-line options can set, with the arguments' defaults."""
    own: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        init = vars(each).get("__init__")
        if init is None or each is object or each.__module__.startswith(("torch.", "drivetrain.module")):
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        own |= {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(hasattr(each, "add_argparse_args") and each.__name__ == "Trainer" for each in cls.__mro__):
        own = dict(cls.flags_of_that_time)  # type: ignore[attr-defined]
    return {name: default for name, default in own.items() if default is not inspect.Parameter.empty}


def add_argparse_args(cls: type, parent_parser: ArgumentParser) -> ArgumentParser:
    """Return a parser with the options of ``parent_parser`` and an option for each constructor argument of ``cls``."""
    parser = ArgumentParser(parents=[parent_parser], add_help=False)
    known = {action.dest for action in parent_parser._actions}
    for name, default in defaults_of(cls).items():
        if name in known:
            continue
        switch: dict[str, Any] = {"nargs": "?", "const": True} if isinstance(default, bool) else {}
        parser.add_argument(f"--{name}", dest=name, default=default, type=_value, **switch)
    return parser


def from_argparse_args(cls: Any, args: Namespace | ArgumentParser, **kwargs: Any) -> Any:
    """Create an object of ``cls`` with the arguments in ``args`` and ``kwargs``; ``kwargs`` take precedence."""
    found = vars(args.parse_args() if isinstance(args, ArgumentParser) else args)
    own = inspect.signature(cls.__init__).parameters  # without the arguments of base classes
    return cls(**{**{name: found[name] for name in own if name in found}, **kwargs})


class FromCommandLine:
    """A class whose constructor arguments can come from a command line."""

    add_argparse_args: Any = classmethod(add_argparse_args)
    from_argparse_args: Any = classmethod(from_argparse_args)  # type: ignore[arg-type]  # "cls" may be a keyword


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "yes": True, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    return literal(text)
