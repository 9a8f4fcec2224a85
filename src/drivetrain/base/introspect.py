"""Inspect classes and functions of users, and describe arguments for ``help()``."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

from drivetrain.base.supplied import supplied
from drivetrain.errors import ConfigurationError

T = TypeVar("T")

# Names with at least this difflib ratio count as similar. For example, "on_train_epoch_ends" has the ratio 0.97 to a
# hook, and "best_step" only 0.89 to "test_step".
_ALIKE = 0.9


def is_own_class(cls: type) -> bool:
    """Return whether drivetrain itself defines ``cls``. The result is False for a user's subclass."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def check_part(cls: type) -> None:
    """Call :func:`check_overrides` if ``cls`` is a user's class."""
    if not is_own_class(cls):
        check_overrides(cls)


@supplied
def check_overrides(cls: type) -> None:
    """Check that drivetrain calls all overrides in a user's class. Warn about a name that is similar to a member of the
    base class.

    Raises:
        ConfigurationError: the class overrides a member that is never called.
    """


def check_base_init(obj: object) -> None:
    """Check that a user's ``__init__`` has called the ``__init__`` of drivetrain's base class.

    Raises:
        ConfigurationError: the user's code contains no call of ``__init__``, and ``obj`` lacks the attributes that
            ``__init__`` sets.
    """
    users: Any = None
    for cls in type(obj).__mro__:
        init: Any = inspect.unwrap(vars(cls).get("__init__", object.__init__))
        if init is object.__init__:
            continue
        if is_own_class(cls):
            if users is not None and not {*init.__code__.co_names} & {*vars(obj)}:
                raise ConfigurationError(
                    f"{users.__qualname__} has not called the __init__ of its base class, {cls.__name__}. Begin it "
                    "with super().__init__(), which takes that class's arguments."
                )
            return
        if users is None and (not inspect.isfunction(init) or any("init" in each for each in init.__code__.co_names)):
            return  # the user's code mentions "__init__" or, in a dataclass, "__post_init__"
        users = users or init


def overrides(obj: object, name: str, base: type) -> bool:
    """Return whether ``obj`` or its class overrides the member ``name`` of ``base``."""
    method = getattr(obj, name, None)
    if method is None:
        return False
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def defined_by_user(obj: object, name: str) -> bool:
    """Return whether ``obj`` itself or a user's class of ``obj`` defines ``name``."""
    owner = next((cls for cls in type(obj).__mro__ if name in vars(cls)), object)
    return name in vars(obj) or not (owner is object or is_own_class(owner))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of ``fn`` as a caller sees the function. torch's ``register_fsdp_forward_method`` wraps a
    bound method in another one. ``inspect.signature`` would remove one parameter too many from the wrapper.
    """
    while inspect.ismethod(fn) and inspect.ismethod(wrapped := getattr(fn, "__wrapped__", None)):
        fn = wrapped
    return inspect.signature(fn)


def positional_arity(fn: Callable[..., Any]) -> int:
    """Return the number of positional arguments of ``fn``; 1000 if ``fn`` has ``*args``."""
    kinds = [parameter.kind for parameter in signature_of(fn).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 1_000
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def taken(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments in ``given`` that ``fn`` accepts."""
    parameters = signature_of(fn).parameters.values() if given else ()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(given)
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return {name: value for name, value in given.items() if name in names}


def takes(method: Any, arguments: int) -> bool:
    """Return whether ``method`` can be called with this number of positional arguments."""
    if not callable(method):
        return False
    try:
        signature_of(method).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin function without a signature
        return True
    return True


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Return whether a step has the parameter ``dataloader_iter``. A step with this parameter fetches its batches
    itself.
    """
    return "dataloader_iter" in signature_of(step).parameters


def missing_arguments(fn: Callable[..., Any], contract: Callable[..., Any]) -> str | None:
    """If ``fn`` cannot be called like ``contract``, return the correct parameters as text. Otherwise, return ``None``.

    The parameters' names do not matter. ``fn`` may lack ``dataloader_idx`` if ``contract`` has a default for it.

    Args:
        fn: a bound method, or a function that replaces a bound method.
        contract: the method that ``fn`` overrides, as a function with the parameter ``self``.
    """
    try:
        signature = signature_of(fn)
    except (ValueError, TypeError):
        return None  # some builtins have no signature
    self, *named = [p for p in inspect.signature(contract).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p for p in named if p.name != "dataloader_idx" or p.default is p.empty]
    for given in (needed, named):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return None
    return ", ".join(parameter.name for parameter in (self, *named))


def missing_methods(cls: type) -> list[str]:
    """Return the abstract methods that ``cls`` lacks, sorted. The function also works in ``__init_subclass__``, before
    ``cls`` is complete.
    """
    abstract = {name for base in cls.__mro__ for name in getattr(base, "__abstractmethods__", ())}
    return sorted(name for name in abstract if getattr(getattr(cls, name, None), "__isabstractmethod__", False))


def near_misses(
    cls: type, base: type, hooks: Iterable[str], alike: float = _ALIKE, values: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield ``(method, hook)`` for each method of ``cls`` whose name is similar to a hook's name. Skip methods of
    ``base``.

    A hook's name with one more word, such as ``training_step_end``, does not count as similar. ``alike`` is the minimum
    similarity, as a ratio of difflib. ``values``: whether to include attributes of the class that are not methods.
    """
    known = sorted(hooks)
    own = {
        name
        for owner in cls.__mro__
        if not issubclass(base, owner)
        for name, value in vars(owner).items()
        if (values or inspect.isfunction(value)) and not name.startswith("_") and not hasattr(base, name)
    }
    for name in sorted(own):
        close = difflib.get_close_matches(name, known, n=1, cutoff=alike)
        if close and not name.startswith(f"{close[0]}_"):
            yield name, close[0]


_SYNONYMS = {
    "begin": "start", "finish": "end", "finished": "end", "ended": "end", "started": "start", "val": "validation",
    "valid": "validation", "validate": "validation", "eval": "validation", "training": "train", "loader": "dataloader",
}  # fmt: skip


def uncalled_hooks(
    cls: type, base: type, hooks: Iterable[str], names: re.Pattern[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield ``(method, hook)`` for each method of ``cls`` that is named like a hook, but is no hook. ``hook`` is the
    hook that the user probably meant, or ``None``. Skip methods that other code in their file mentions. Skip decorated
    methods, because the decorator may register the method. Skip methods of another package's class. If the source is
    not available, also skip methods with ``hook=None``.

    Args:
        cls: the user's class.
        base: the class of drivetrain that ``cls`` extends.
        hooks: the names of the hooks.
        names: a pattern for the names of hooks.
    """
    known = {_in_plain_words(hook): hook for hook in sorted(hooks)}
    package = cls.__module__.partition(".")[0]
    for name in sorted({name for owner in cls.__mro__ if not issubclass(base, owner) for name in vars(owner)}):
        owners = [owner for owner in cls.__mro__ if name in vars(owner)]
        method = vars(owners[0])[name]
        if not names.fullmatch(name) or not inspect.isfunction(method) or hasattr(base, name):
            continue
        file = method.__code__.co_filename
        if any(owner.__module__.partition(".")[0] != package for owner in owners) or _is_installed(file):
            continue
        close = difflib.get_close_matches(_in_plain_words(name), known, n=1, cutoff=0.85)
        near = known[close[0]] if close else None
        try:
            lines = inspect.getsourcelines(inspect.getmodule(method) or method)[0]
            decorated = inspect.getsource(method).lstrip().startswith("@")
        except (OSError, TypeError):
            lines, decorated = [], near is None
        mentioned = any(re.search(rf"(?<!def )\b{name}\b", line) for line in lines)
        if not (decorated or mentioned):
            yield name, near


def _in_plain_words(name: str) -> str:
    """Return ``name`` in the words that hooks use: ``on_val_epoch_begin`` becomes ``on_validation_epoch_start``."""
    when, _, rest = name.partition("_")
    if when in ("before", "after"):
        name = f"on_{rest}_{'start' if when == 'before' else 'end'}"
    name = re.sub("^on_(epoch|batch)_", r"on_train_\1_", name)
    return "_".join(_SYNONYMS.get(word, word) for word in name.split("_"))


def _is_installed(file: str) -> bool:
    return any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))


def shown_type(annotation: Any) -> str:
    """Return an argument's type as text. ``PrecisionName`` becomes ``int | str``, and ``StrategyName`` becomes ``str``.
    ``Plugin`` becomes the union of its classes.
    """
    text = str(annotation).replace("PrecisionName", "int | str").replace("StrategyName", "str")
    return text.replace("Plugin", "Precision | CheckpointIO | ClusterEnvironment | LayerSync | str")


def describe_arguments(cls: type[T], docs: Mapping[str, str]) -> type[T]:
    """Describe the arguments of ``__init__`` in the docstring of ``cls``, for ``help()``. ``docs`` has a text for each
    argument. Return ``cls``. An argument that the docstring already describes is skipped.
    """
    before, raises, after = (cls.__doc__ or "").partition("\n    Raises:\n")
    before, _, own = before.partition("\n    Args:\n")
    entries = [
        textwrap.fill(
            f"{name} ({shown_type(parameter.annotation)}, default {parameter.default!r}): {docs[name]}.",
            width=120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False,
        )
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name in docs and f"\n        {name}: " not in f"\n{own}"
    ]  # fmt: skip
    cls.__doc__ = "\n".join([before, "    Args:", *entries, own + raises + after])
    return cls


def reads(path: str, doc: str | None = None, writable: bool = False) -> Any:
    """Return a property that reads the attribute at ``path``, such as "trainer.progress.batch_idx"."""
    *owners, name = path.split(".")

    def write(this: Any, value: Any) -> None:
        setattr(attrgetter(".".join(owners))(this) if owners else this, name, value)

    return property(attrgetter(path), write if writable else None, doc=doc)


def calls(path: str) -> Any:
    """Return a method that passes its arguments to ``self.<path>``. ``path`` may contain dots."""
    find = attrgetter(path)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    method.__name__ = method.__qualname__ = path.rpartition(".")[2]  # the name in tracebacks
    return method


@contextmanager
def temporarily(entries: MutableMapping[str, Any], /, **changes: Any) -> Iterator[None]:
    """Return a context in which the dictionary ``entries`` has the values in ``changes``. Its end restores the earlier
    values.

    ``entries`` can be ``os.environ``, or ``vars(obj)`` to change attributes without calling the setters of properties.
    """
    before = {name: entries[name] for name in changes if name in entries}
    entries.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - before.keys():
            entries.pop(name, None)
        entries.update(before)
