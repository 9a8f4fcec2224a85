"""Save and restore the states that loaders keep between passes: the user's generators, and persistent workers."""

from __future__ import annotations

import copy
import ctypes
import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.base.restoring import Form, WrongForm, check_generators, check_rng_state, expect, of_length, restoring
from drivetrain.base.seed import isolate_rng
from drivetrain.base.torch_private import keep_iterator, kept_iterator
from drivetrain.data.batched import start_pass
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.stateful import is_stateful


@contextmanager
def generators_kept(loaders: Iterable[Any]) -> Iterator[None]:
    """Context that restores at its end the generators that users have passed to ``loaders``."""
    generators = [each for loader in loaders for part in parts_of(loader) for each in generators_of(part)]
    states = generator_states(generators)
    try:
        yield
    finally:
        set_generator_states(generators, states)


@contextmanager
def workers_kept(loaders: Iterable[Any]) -> Iterator[None]:
    """Context in which ``loaders`` start new workers. At its end, the loaders get their persistent workers back."""
    parts = [part for loader in loaders for part in parts_of(loader)]
    kept = [(part, kept_iterator(part)) for part in parts if isinstance(part, DataLoader) and part.persistent_workers]
    for part, _ in kept:
        keep_iterator(part, None)
    try:
        yield
    finally:
        for part, iterator in kept:
            keep_iterator(part, iterator)


_LARGE = 1000  # if a container has more items, its items are restored, but not the contents of the items
_LARGEST = 100_000  # larger containers are not restored


@contextmanager
def objects_kept(roots: Iterable[Any]) -> Iterator[None]:
    """Context that restores at its end all objects reachable from ``roots``: attributes, containers, random generators.

    The context does not follow attributes of tensors, modules, and objects of drivetrain and of the standard library.
    An object is not restored if one of its attributes is an iterator that cannot be rewound, such as a running
    generator. If the object were restored, it would lack the items that were taken from the iterator.
    """
    seen: dict[int, Any] = {}
    waiting, back = list(roots), list[Callable[[], None]]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or each is None or isinstance(each, (str, bytes, int, float, Tensor, nn.Module, type)):
            continue
        seen[id(each)] = each
        restores, children = _kept(each)
        back += restores
        waiting += children
    try:
        yield
    finally:
        for restore in back:
            restore()


def restorer(roots: Iterable[Any]) -> Callable[[], None]:
    """Return a function that restores the random generators ``roots`` to their present states."""
    found = [restore for each in roots for restore in _kept(each)[0]]

    def restore_all() -> None:
        for restore in found:
            restore()

    return restore_all


def generators_among(owners: Iterable[Any]) -> list[Any]:
    """Return the random generators among the attributes of ``owners``."""
    values = [value for each in owners for value in getattr(each, "__dict__", {}).values()]
    kinds = (torch.Generator, random.Random)
    return [each for each in values if isinstance(each, kinds) or hasattr(type(each), "bit_generator")]


def _kept(value: Any) -> tuple[list[Callable[[], None]], list[Any]]:
    """Return a list of functions that restore ``value`` if all are called, and a list of the objects inside
    ``value``.
    """
    if isinstance(value, random.Random):
        return [functools.partial(value.setstate, value.getstate())], []
    source = getattr(value, "bit_generator", None)
    if source is not None and hasattr(source, "state"):  # a numpy generator
        return [functools.partial(setattr, source, "state", source.state)], []
    if callable(get := getattr(value, "get_state", None)) and callable(put := getattr(value, "set_state", None)):
        return [functools.partial(put, get())], []
    if isinstance(value, tuple):
        return [], list(value) if len(value) <= _LARGE else []
    restores, children = list[Callable[[], None]](), list[Any]()
    if (kind := next((each for each in _CONTAINERS if isinstance(value, each)), None)) is not None:
        items: Any = dict(kind.items(value)) if issubclass(kind, dict) else [*kind.__iter__(value)]
        restores += [functools.partial(_refill, kind, value, items)] if len(items) <= _LARGEST else []
        if len(items) <= _LARGE:
            children += items.values() if isinstance(items, dict) else items
    own, room = getattr(value, "__dict__", None), type(value).__module__
    if room.partition(".")[0] in _NOT_FOLLOWED and not room.startswith(("torch.utils.data", "drivetrain.data")):
        return restores, children
    if isinstance(own, dict):
        if any(is_one_shot(each) and getattr(each, "gi_frame", each) is not None for each in own.values()):
            return [], []
        restores.append(functools.partial(_refill, dict, own, dict(own)))
        children += own.values()
    elif own is None and is_stateful(value):
        restores.append(functools.partial(value.load_state_dict, copy.deepcopy(value.state_dict())))
    for slot in (each for part in type(value).__mro__ if "__slots__" in vars(part) for each in vars(part).values()):
        if isinstance(slot, MemberDescriptorType) and (held := getattr(value, slot.__name__, slot)) is not slot:
            restores.append(functools.partial(slot.__set__, value, held))
            children.append(held)
    return restores, children


_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_NOT_FOLLOWED = frozenset(
    {"torch", "drivetrain", *sys.stdlib_module_names} - {"__main__", "argparse", "collections", "types"}
)


def _refill(kind: Any, container: Any, items: Any) -> None:
    """Replace the items of ``container``. The function calls methods of ``kind``, because the container's class may
    override methods.
    """
    kind.clear(container)
    (kind.update if isinstance(items, dict) or kind is set else kind.extend)(container, items)


def loader_states(loaders: Iterable[Any]) -> list[dict[str, Any]]:
    """For each loader, return the states of the user's generators, and whether its persistent workers exist."""
    return [
        {
            "generators": [state for part in parts_of(loader) for state in generator_states(generators_of(part))],
            "workers": [kept_iterator(part) is not None for part in parts_of(loader)],
        }
        for loader in loaders
    ]


LOADER_STATES: Form = [{"generators": check_generators, "workers": [bool]}]
"""The types of a result of :func:`loader_states`."""


def set_loader_states(loaders: Iterable[Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Restore a result of :func:`loader_states` in new loaders. The global random generators do not change.

    This function starts persistent workers, because the checkpoint's run had already drawn their seed. If the workers
    started later, the resumed run would draw the seed again.

    Args:
        loaders: new loaders. A loader without a state is not changed.
        states: the states, of the form :data:`LOADER_STATES`.

    Raises:
        CheckpointError: a generator refuses its state.
    """
    for loader, state in zip(loaders, states, strict=False):
        for part, alive in zip(parts_of(loader), state["workers"], strict=False):
            if alive and isinstance(part, DataLoader) and part.persistent_workers and kept_iterator(part) is None:
                with isolate_rng():
                    start_pass(part)
        generators = [generator for part in parts_of(loader) for generator in generators_of(part)]
        with restoring("the validation loaders"):
            set_generator_states(generators, state["generators"])


def is_one_shot(loader: Any) -> bool:
    """Return whether ``loader`` is an iterator that cannot be rewound: a generator, or one of Python's iterators."""
    return isinstance(loader, Iterator) and not hasattr(loader, "__dict__") and not is_stateful(loader)


def parts_of(loader: Any) -> list[Any]:
    """Return the loaders inside a CombinedLoader. For any other loader, return a list with only this loader."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the user's generators from which a pass over ``loader`` draws."""
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def samplers_of(loader: Any) -> list[Any]:
    """Return the loader's sampler, its batch sampler, and the batch sampler's own sampler, without duplicates."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(each): each for each in found}.values())


def generator_states(generators: Iterable[torch.Generator]) -> list[Tensor]:
    """Return the state of each generator."""
    return [*map(torch.Generator.get_state, generators)]


def set_generator_states(generators: Iterable[torch.Generator], states: Iterable[Tensor], strict: bool = False) -> None:
    """Restore a result of :func:`generator_states`. With ``strict``, raise an error if the number of states differs."""
    for generator, state in zip(generators, states, strict=strict):
        generator.set_state(state)


def worker_state() -> tuple[Any, ...]:
    """Return the states of Python's and torch's generators, and of numpy's if numpy is imported. The form is cheap to
    compare and to send.
    """
    state = torch.get_rng_state()
    words = ctypes.string_at(state.data_ptr(), state.numel())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), words, None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), words, (name, keys.tobytes(), *rest)


def set_worker_state(state: Sequence[Any]) -> None:
    """Restore a result of :func:`worker_state`."""
    python, words, numbers = state
    random.setstate(python)
    torch.set_rng_state(torch.frombuffer(bytearray(words), dtype=torch.uint8).clone())
    if numbers is not None and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numbers
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def check_worker_state(state: Any, place: str) -> None:
    """Check that a checkpoint's entry has the form of a result of :func:`worker_state`.

    Raises:
        WrongForm: a part of the entry is missing or has a wrong type, or a generator rejects its state.
    """
    python, words, numpy = of_length(3, state, place)
    if not expect(words, bytes, f"{place}[1]"):
        raise WrongForm(f"{place}[1]", "is empty")
    states = {"python": python, "torch": torch.frombuffer(bytearray(words), dtype=torch.uint8)}
    if numpy is not None:
        name, keys, *rest = of_length(5, numpy, f"{place}[2]")
        if len(expect(keys, bytes, f"{place}[2][1]")) % 4:
            raise WrongForm(f"{place}[2][1]", f"has {len(keys)} bytes, which are no numbers of 32 bits")
        states["numpy"] = (name, list(memoryview(keys).cast("I")), *rest)
    check_rng_state(states, place)
