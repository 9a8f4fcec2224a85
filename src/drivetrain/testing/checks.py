"""Run conformance kits. A kit is the list of checks for one kind of part, such as strategies or loggers.

A check is a function whose argument is a :class:`Part`. The first paragraph of the check's docstring says what must be
true of the part. If the part violates this rule, the check raises an exception. A check that does not apply to the part
raises :class:`Skipped`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from drivetrain.base.registry import load
from drivetrain.cli import class_files
from drivetrain.errors import ConfigurationError, did_you_mean, shown

REGISTRIES = {
    "accelerator": "drivetrain.accelerators.accelerator:AcceleratorRegistry",
    "strategy": "drivetrain.strategies.strategy:StrategyRegistry",
    "launcher": "drivetrain.launchers.launcher:LauncherRegistry",
    "cluster": "drivetrain.clusters.environment:ClusterRegistry",
    "logger": "drivetrain.loggers.logger:LoggerRegistry",
    "store": "drivetrain.checkpoints.io:CheckpointRegistry",
    "precision": "drivetrain.precision.precision:PrecisionRegistry",
    "loader": "",
}
"""For each kind of part, the registry with the names of parts. Loaders have no registry."""


_RAISED = re.compile(r"^([a-zA-Z_][\w.]*(?:Error|Exception|Exit|Failed|Interrupt)\b)", re.MULTILINE)


class Skipped(Exception):
    """A check does not apply to the part."""


class CannotTryError(ConfigurationError):
    """The part cannot be found, created or used on this machine."""


class Outcome(NamedTuple):
    """The result of one check.

    Attributes:
        name: the name of the check.
        sentence: what must be true.
        result: "ok", "fails" or "skipped".
        seen: what the check has found instead, or why it was skipped.
        seconds: the duration of the check.
    """

    name: str
    sentence: str
    result: str
    seen: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that the checks of a kit examine.

    Attributes:
        kind: one of :data:`REGISTRIES`.
        path: a registered name, ``"package.module:Class"`` or ``"file.py:Class"``. Instead of the class, the path can
            name a function that creates the part.
        arguments: keyword arguments of the class.
        settings: settings of the kit.
        factory: the class or function, if the caller has passed an object. ``None`` if the caller has passed only
            ``path``.
        folder: an empty folder for one check.
        memory: results that later checks of the run can use.
    """

    kind: str
    path: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factory: Callable[..., Any] | None = None
    folder: Path = Path()
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        place, _, name = self.path.rpartition(":")
        if place.endswith(".py"):  # make the path absolute, because each check runs in another folder
            object.__setattr__(self, "path", f"{os.path.abspath(place)}:{name}")

    @functools.cached_property
    def found(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The class of the part, and the arguments that its registration adds.

        Raises:
            CannotTryError: the class does not exist or cannot be imported.
        """
        return _found(self.kind, self.path) if self.factory is None else (self.factory, {})

    def for_other_process(self) -> Part:
        """Return a copy of this part that another process can unpickle."""
        return dataclasses.replace(self, factory=None, memory={})

    def make(self, **more: Any) -> Any:
        """Return a new object of the part's class.

        Args:
            more: arguments that the kit adds. An argument is left out if the class has no such argument, or if the user
                has set the argument.
        """
        cls, registered = self.found
        given = {**registered, **self.arguments}
        return cls(**{**{name: more[name] for name in more if name in _parameters(cls)}, **given})


Check: TypeAlias = Callable[[Part], None]


def _parameters(cls: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def _found(kind: str, path: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    try:
        if ":" in path:
            return class_files.object_at(path), {}
        if not REGISTRIES[kind]:
            raise ConfigurationError(f"A {kind} has no registered name. Write package.module:Class or file.py:Class.")
        entry = load(REGISTRIES[kind]).entry(path)
    except Exception as error:
        text = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
        raise CannotTryError(f"The {kind} {path!r} cannot be imported: {text}") from error
    return entry.cls, dict(entry.init_params)


def path_of(part: Any) -> str:
    """Return the path by which another process can import the class or function ``part``."""
    module = part.__module__
    return f"{sys.modules[module].__file__ if module == '__main__' else module}:{part.__qualname__}"


# ---- running ---------------------------------------------------------------------------------------------------------


def run_checks(part: Part, only: str | None = None) -> Iterator[Outcome]:
    """Run the checks for a kind of part, each in a new folder, and yield their results.

    Args:
        part: the part.
        only: the name of the check to run. By default, all checks run.

    Raises:
        CannotTryError: the kind or the check is unknown, or the part cannot be found, created or used on this machine.
    """
    if part.kind not in REGISTRIES:
        raise CannotTryError(f"There is no kit for {part.kind!r}. {did_you_mean(part.kind, REGISTRIES)}")
    kit: Any = importlib.import_module(f"drivetrain.testing.kits.{part.kind}")
    if unknown := set(part.settings) - set(kit.SETTINGS):
        raise CannotTryError(f"The kit has no setting {min(unknown)!r}. {did_you_mean(min(unknown), kit.SETTINGS)}")
    # The working directory must exist until all checks are done, because processes that a check starts may outlive the
    # check.
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True))
        try:
            with sandbox(Path(folder, "try_it")) as own:
                kit.try_it(dataclasses.replace(part, folder=own))
                found = kit.checks(part, stack) if hasattr(kit, "checks") else _checks_of(kit)
                checks: dict[str, Check] = {check.__name__.removeprefix("test_"): check for check in found}
        except CannotTryError:
            raise
        except Exception as error:
            raise CannotTryError(f"The {part.kind} {part.path!r} cannot be used here: {_seen(error)}") from error
        if only is not None and only not in checks:
            raise CannotTryError(f"The kit has no check {only!r}. {did_you_mean(only, checks)}")
        for name, check in checks.items():
            if only not in (None, name):
                continue
            with sandbox(Path(folder, name)) as own:
                outcome = _run(name, check, dataclasses.replace(part, folder=own))
            yield outcome


def _checks_of(kit: Any) -> list[Check]:
    """Return the checks of a kit: all public functions of the kit's file whose only parameter is ``part``, except
    ``try_it``.
    """
    own = [each for each in vars(kit).values() if inspect.isfunction(each) and each.__module__ == kit.__name__]
    own = [each for each in own if each is not kit.try_it and not each.__name__.startswith("_")]
    return [each for each in own if list(inspect.signature(each).parameters) == ["part"]]


def _run(name: str, check: Check, part: Part) -> Outcome:
    begin, result, seen = time.monotonic(), "ok", ""
    try:
        check(part)
    except KeyboardInterrupt:
        raise
    except Skipped as why:
        result, seen = "skipped", str(why)
    except ModuleNotFoundError as error:
        raise CannotTryError(f"The {part.kind} {part.path!r} cannot be used here: {error}") from error
    except BaseException as error:  # a part can also raise SystemExit
        result, seen = "fails", _seen(error)
    return Outcome(name, _sentence(check), result, seen, time.monotonic() - begin)


def check_part(
    kind: str, part: Any, arguments: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """Check that a user's part, such as a strategy or a logger, keeps the contract of its kind.

    Args:
        kind: "accelerator", "strategy", "launcher", "cluster", "logger", "store", "precision" or "loader".
        part: a registered name, a class or function at the top level of a module, or its path:
            ``"package.module:Class"`` or ``"file.py:Class"``.
        arguments: keyword arguments with which the class or function is called.
        settings: settings of the kit, such as ``{"devices": 2}`` for a strategy.

    Returns:
        The results, if no check fails.

    Raises:
        AssertionError: a check fails. The message lists what the checks have found and what must be true.
        CannotTryError: the part cannot be found, created or used on this machine.
    """
    path, factory = (part, None) if isinstance(part, str) else (path_of(part), part)
    outcomes = list(run_checks(Part(kind, path, arguments or {}, settings or {}, factory)))
    failed = [f"{each.name}: {each.seen}\n    expected: {each.sentence}" for each in outcomes if each.result == "fails"]
    if failed:
        raise AssertionError("\n".join([f"The {kind} {path} fails {len(failed)} checks:", *failed]))
    return outcomes


def _sentence(check: Callable[..., Any]) -> str:
    text = " ".join((inspect.getdoc(check) or "").split("\n\n")[0].split())
    return text.replace("``", "")


def _seen(error: BaseException) -> str:
    """Return the text of an error. If the text alone is not enough, add the line that has raised the error."""
    text = str(error)
    if failed := re.match(r"---- rank (\d+) ----\n(.*?)(?=\n---- rank|\Z)", text, re.DOTALL):
        # the rank's exception, without the traceback
        text = f"rank {failed[1]}: {''.join(_RAISED.split(failed[2])[-2:])}"
    text = " ".join(text.split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError):
        return text or (frames[-1].line if frames else "") or "an AssertionError"
    if isinstance(error, ModuleNotFoundError):
        return text
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


@contextmanager
def sandbox(folder: Path) -> Iterator[Path]:
    """Context in which a new folder is the working directory. At the end the context restores the environment variables
    and torch's modes.
    """
    import torch

    dtype, grad, autocast = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    before, environ, disabled = os.getcwd(), dict(os.environ), logging.root.manager.disable
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        logging.disable(logging.WARNING)
        try:
            yield folder
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            torch.set_autocast_enabled("cpu", autocast)
            logging.disable(disabled)
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environ)


# ---- for checks ------------------------------------------------------------------------------------------------------


def same(found: Any, expected: Any, what: str) -> None:
    """Raise an AssertionError with both values if the values differ."""
    assert found == expected, f"{what}: {found!r}, and {expected!r} is right"


def is_true(condition: Any, seen: str) -> None:
    """If ``condition`` is false, raise an AssertionError with the text ``seen``, which says what was found instead."""
    assert condition, seen


@contextmanager
def raises(error: type[BaseException], what: str) -> Iterator[None]:
    """Context that raises an AssertionError if its body does not raise ``error``. ``what`` names the body in the
    message.
    """
    try:
        yield
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{what} raises {type(other).__name__}: {shown(str(other))}") from other
    raise AssertionError(f"{what} raises nothing, and {error.__name__} is right")
