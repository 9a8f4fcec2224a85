"""Seed the random generators, and save and restore their states."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from drivetrain.base.packages import xla_model
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info
from drivetrain.base.restoring import check_rng_state, entry
from drivetrain.errors import CheckpointError, ConfigurationError

_MAX_SEED = 2**32 - 1  # numpy's limit, which is smaller than the limits of python and torch


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
    """Seed the generators of python, numpy (if loaded) and torch, on every device. Return the seed.

    Args:
        seed: 0 to 2**32 - 1. ``None``: the environment variable ``PL_GLOBAL_SEED``, or 0 without this variable.
        workers: also seed each DataLoader worker from the seed, the rank and the worker's id. Otherwise, workers with
            the same id have the same seed on all ranks.
        verbose: log the seed on rank 0.

    Raises:
        ConfigurationError: the seed is not an integer from 0 to 2**32 - 1.

    The function sets the variable ``PL_GLOBAL_SEED`` to the seed, for processes that this process starts.
    """
    if seed is None:
        seed = seed_from_environ() or 0
    if not isinstance(seed, Integral) or not 0 <= seed <= _MAX_SEED:
        raise ConfigurationError(f"A seed must lie in 0..{_MAX_SEED}, not {seed!r}. Choose one in that range.")
    seed = int(seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    if (xla := xla_generator()) is not None:  # torch.manual_seed does not seed torch_xla's generator
        xla.set_rng_state(seed)
    if verbose:
        rank_zero_info(f"Seed set to {seed}.")
    return seed


def seed_from_environ() -> int | None:
    """Return the seed in ``PL_GLOBAL_SEED``, which :func:`seed_everything` sets; ``None`` if the variable is not set.

    Raises:
        ConfigurationError: the variable is not an integer.
    """
    text = os.environ.get("PL_GLOBAL_SEED")
    if text is not None and not text.isdigit():
        raise ConfigurationError(
            f"The environment variable PL_GLOBAL_SEED must be an integer, not {text!r}. Unset it or write a number."
        )
    return None if text is None else int(text)


def worker_seed_init(worker_id: int, rank: int | None = None) -> None:
    """Seed the generators in a worker of a DataLoader; pass this function as ``worker_init_fn``. The seed depends on
    the loader's base seed, the rank and the worker's id. ``rank`` is the index of this process's shard of the data, and
    by default the global rank. All ranks draw the same base seed. On rank 0, torch's generator keeps the seed from the
    DataLoader. On other ranks, the function also seeds torch. Otherwise, all ranks would augment samples identically.
    """
    base = torch.initial_seed() - worker_id
    rank = rank_from_environ() if rank is None else rank
    words = [base & 0xFFFFFFFF, (base >> 32) & 0xFFFFFFFF, worker_id, rank]
    mixed = 0
    # one round of splitmix64 for each word, so that neighbouring ranks and workers get unrelated seeds
    for word in words:
        mixed = (mixed + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    random.seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed & _MAX_SEED)
    if rank != 0:
        torch.manual_seed(mixed)


def rng_state() -> dict[str, Any]:
    """Return the states of the generators of python, numpy (if loaded), torch and the device, as plain data."""
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    return _rng_state(random.getstate, torch.default_generator, numpy_state)()


def kept_rng_state() -> Callable[[], dict[str, Any]]:
    """Copy the memory of the generators, and return a function that converts the copy to the result of
    :func:`rng_state`. Copying is fast enough for every step. Converting is slow: the 625 numbers of python's state
    alone take a tenth of a small training step.
    """
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else _numpy_state(numpy)
    return _rng_state(_python_state(), torch.default_generator.clone_state(), numpy_state)


def _rng_state(
    python_state: Callable[[], Any], generator: torch.Generator, numpy_state: Any
) -> Callable[[], dict[str, Any]]:
    state: dict[str, Any] = {}
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        # reading the state would initialize an unused device
        if getattr(device, "is_initialized", lambda: True)():
            state["device"] = device.get_rng_state()
    if "torch_xla" in sys.modules and (xla := xla_generator()) is not None:
        state["xla_generator"] = int(xla.get_rng_state())

    def plain() -> dict[str, Any]:
        state.update(python=python_state(), torch=generator.get_state())
        if numpy_state is not None:
            name, keys, *rest = numpy_state
            state["numpy"] = (name, keys.tolist(), *rest)
        return state

    return plain


# ---- generators that are read in every step --------------------------------------------------------------------------

# The size of a Mersenne Twister's words in bytes. The position has 4 more bytes, before or after the words.
_WORDS = 624 * 4
_MARK = 32


class _Twister:
    """The memory of a Mersenne Twister generator. :meth:`copy` copies the memory only if it has changed.

    The memory has 624 words, and the position of the next word to draw. Each draw changes the position, and 624 draws
    change all words. So :meth:`copy` detects a change by comparing the position and seven words beside it.
    """

    def __init__(self, address: int, position_first: bool) -> None:
        self._memory = (ctypes.c_char * (_WORDS + 4)).from_address(address)
        self._near_position = (ctypes.c_char * _MARK).from_address(
            address if position_first else address + _WORDS + 4 - _MARK
        )
        self._mark = self._copy = b""

    def copy(self) -> bytes:
        if (mark := self._near_position.raw) != self._mark:
            self._mark, self._copy = mark, self._memory.raw
        return self._copy


def _python_state() -> Callable[[], Any]:
    """Copy python's state, and return a function that converts the copy to the result of ``random.getstate()``."""
    if (found := _python_twister()) is None:
        state = random.getstate()
        return lambda: state
    source, twister = found
    memory, second = twister.copy(), source.gauss_next
    return lambda: _python_state_in(memory, second)


def _python_state_in(memory: bytes, second: float | None) -> Any:
    position, *words = memoryview(memory).cast("I")
    return random.Random.VERSION, (*words, position), second


@functools.cache
def _python_twister() -> tuple[Any, _Twister] | None:
    """Return python's generator and the generator's memory; ``None`` if the memory is not laid out as in CPython."""
    source: Any = getattr(random, "_inst", None)
    offset = object.__basicsize__
    if type(source) is not random.Random or random.Random.__basicsize__ < offset + _WORDS + 4:
        return None
    twister = _Twister(id(source) + offset, position_first=True)
    state = _python_state_in(twister.copy(), source.gauss_next)  # type: ignore[attr-defined]  # not in the stubs
    return (source, twister) if state == source.getstate() else None


# numpy's generator, and the generator's memory
_numpy_twister: tuple[Any, _Twister] | None = None
# the memory and the result of the last call of _numpy_state()
_numpy_kept: tuple[bytes, Any] | None = None


def _numpy_state(numpy: Any) -> Any:
    """Return the result of ``numpy.random.get_state()``. If the program has drawn no number since the last call, return
    the same object. ``get_state()`` copies 624 words one by one, which takes longer than a small training step. Reading
    the words at the address that numpy publishes is fast. ``numpy.random.normal`` computes two numbers at a time, and
    numpy stores the second number outside the words. While numpy stores a second number, this function calls
    ``numpy.random.get_state()`` each time. If a program sets only the second number with ``numpy.random.set_state``,
    this function does not notice the change.
    """
    global _numpy_kept, _numpy_twister
    source = numpy.random.mtrand._rand._bit_generator
    if _numpy_twister is None or _numpy_twister[0] is not source:
        if type(source) is not numpy.random.MT19937:
            return numpy.random.get_state()
        _numpy_twister = source, _Twister(source.ctypes.state_address, position_first=False)
    memory = _numpy_twister[1].copy()
    if _numpy_kept is not None and _numpy_kept[0] is memory:
        return _numpy_kept[1]
    state = numpy.random.get_state()
    as_numpy_says = state[1].tobytes() + int(state[2]).to_bytes(4, sys.byteorder) == memory and not state[3]
    _numpy_kept = (memory, state) if as_numpy_says else None
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a result of :func:`rng_state`."""
    global _numpy_kept
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
        _numpy_kept = None
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["device"])
    if "xla_generator" in state and (xla := xla_generator()) is not None:
        xla.set_rng_state(state["xla_generator"])


def xla_generator() -> Any:
    """Return torch_xla's module with ``get_rng_state`` and ``set_rng_state``; ``None`` if the process uses no XLA
    device.
    """
    library = sys.modules.get("torch_xla")
    if library is None or not library._XLAC._xla_runtime_is_initialized():
        return None

    return xla_model


class Generators:
    """The random generators as an object with a ``state_dict``, for checkpoints like ``{"model": model, "rng":
    engine.rng}``.

    Args:
        gather: a function like ``all_gather``. It returns the list of the arguments that all processes have passed.
        rank: the rank of this process.
    """

    def __init__(self, gather: Callable[[Any], list[Any]] = lambda own: [own], rank: int = 0) -> None:
        self._gather = gather
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`rng_state` of every process. All processes must call this method."""
        return {"ranks": self._gather(rng_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that this process's rank has saved. The number of processes must not have changed.

        Raises:
            CheckpointError: the number of processes differs.
        """
        everyones, processes = entry(state, "ranks", (list, tuple)), len(self._gather(None))
        if len(everyones) != processes:
            raise CheckpointError(
                f"The random state was saved by {len(everyones)} processes, and there are {processes}. "
                "Run as many, or leave the random state out of what is loaded."
            )
        check_rng_state(everyones[self._rank], f"['ranks'][{self._rank}]")
        set_rng_state(everyones[self._rank])


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Return a context that restores the state of every random generator at its end."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
