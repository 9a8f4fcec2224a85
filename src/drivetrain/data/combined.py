"""Combine several loaders into one, and decide whether a user's list means several loaders or one list of batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from numbers import Integral, Number
from types import FunctionType, GeneratorType
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.base import torch_private
from drivetrain.base.introspect import reads
from drivetrain.base.tree import leaves, map_leaves
from drivetrain.data.batched import start_pass
from drivetrain.errors import CheckpointError, ConfigurationError, WrongTypeError, described, did_you_mean, whose

_INF = float("inf")
_END = object()  # the default of next(), because None may be a batch

Starts = Sequence[Callable[[], Iterator[Any]]]


class CombinedLoader:
    """Iterate a tree of loaders as one loader.

    A pass yields ``(batch, batch_idx, dataloader_idx)``. In every mode except "sequential", the batch is a tree with a
    batch in place of each loader. ``batch_idx`` counts these trees, and ``dataloader_idx`` is 0. In "sequential" mode,
    the batch is one loader's batch, and ``dataloader_idx`` is the index of this loader. ``batch_idx`` starts at 0 for
    each loader.

    When the first batch is requested, the loaders' iterators are created, in order. In "sequential" mode, an iterator
    is created only after the previous loader has ended and its workers have stopped. Batches are also fetched in order,
    so that random numbers are drawn in the same order in every run. If a pass is abandoned, its workers stop when the
    pass is freed.

    Args:
        iterables: a loader, or nested lists, tuples, named tuples, mappings and dataclasses of loaders. A list or tuple
            that contains only strings and numbers, at any depth, is one loader whose batches are its elements.
        mode: "min_size" ends with the first loader that ends. "max_size_cycle" ends when each loader has ended once.
            Until then, a loader that ends is started again. "max_size" ends when all loaders have ended. Loaders that
            have already ended yield ``None``. "sequential" iterates one loader after another.

    Raises:
        ConfigurationError: the mode is unknown, or a leaf of the tree is not iterable.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in _MODES:
            raise ConfigurationError(f"CombinedLoader has no mode {mode!r}. {did_you_mean(str(mode), _MODES)}")
        self._mode = mode
        self._limits: list[int | float] | None = None
        self._ended: list[bool] = []  # set for a resumed pass: see :meth:`resume_at`
        self._passes: WeakSet[Generator[tuple[Any, int, int], None, None]] = WeakSet()
        self._iterables = iterables
        # The tree never changes. Passes yield copies of the tree with other leaves.
        self._tree = torch_private.tree_map(
            lambda leaf: BatchList(leaf) if _holds_values(leaf) else leaf, iterables, is_leaf=_holds_values
        )
        self._flattened = _checked(_flatten(self._tree))

    iterables: Any = reads("_iterables", "The tree of loaders.")

    mode: str = reads("_mode", "The mode that combines the loaders.")

    @property
    def flattened(self) -> list[Any]:
        """The loaders in order. To replace the loaders from the next pass on, assign a list.

        Raises:
            ConfigurationError: the assigned list has a different length, or contains a loader that is not iterable.
        """
        return list(self._flattened)

    @flattened.setter
    def flattened(self, loaders: Sequence[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ConfigurationError(
                f"CombinedLoader.flattened was set to {len(loaders)} loaders, but its tree has places for "
                f"{len(self._flattened)}. Give one per place, or make a new CombinedLoader."
            )
        self._flattened = _checked(list(loaders))
        self._iterables = _fill(self._tree, self._flattened)

    @property
    def limits(self) -> list[int | float] | None:
        """The maximum number of batches of each loader, or ``None`` for no limits.

        Assign ``None``, one number for all loaders, or one number per loader. A number is an integer or ``inf``. A
        loader that reaches its limit counts as ended. A loader with the limit 0 is not started. A change takes effect
        at the next pass.

        Raises:
            ConfigurationError: the assigned list has another length than the list of loaders, or a limit is not a
                number of batches.
        """
        return None if self._limits is None else list(self._limits)

    @limits.setter
    def limits(self, limits: float | Sequence[float] | None) -> None:
        if limits is None:
            self._limits = None
            return
        given = list(limits) if isinstance(limits, Sequence) else [limits] * len(self._flattened)
        if len(given) != len(self._flattened):
            raise ConfigurationError(
                f"CombinedLoader.limits was set to {len(given)} numbers for {len(self._flattened)} loaders. "
                "Give one per loader, or one number for all."
            )
        for limit in given:
            if limit != _INF and not (isinstance(limit, Integral) and int(limit) >= 0):
                raise ConfigurationError(
                    f"CombinedLoader.limits holds {limit!r}, which is no number of batches. Write a whole number "
                    "from 0 on, or None or float('inf') for all."
                )
        self._limits = given

    @property
    def sampler(self) -> Any:
        """The tree with each loader's sampler in place of the loader, or ``None`` for a loader without a sampler."""
        return _fill(self._tree, [getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """The tree with each loader's batch sampler in place of the loader, or ``None`` for a loader without a batch
        sampler.
        """
        return _fill(self._tree, [getattr(loader, "batch_sampler", None) for loader in self._flattened])

    def __len__(self) -> int:
        """Number of batches of a pass, with the current limits.

        Raises:
            TypeError: a loader has no length. A limit does not replace the length, because the loader may end before
                its limit.
        """
        lengths: list[float] = []
        for index, (loader, limit) in enumerate(self._limited()):
            try:
                length = 0 if limit == 0 else len(loader)
            except (TypeError, NotImplementedError) as error:
                raise TypeError(
                    f"The length of CombinedLoader(mode={self._mode!r}) is unknown, because its loader {index}, a "
                    f"{type(loader).__name__}, has none. Give that one a __len__, or iterate without asking for it."
                ) from error
            lengths.append(min(length, limit))
        return int(_MODES[self._mode][0](lengths)) if lengths else 0

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        batches = self._one_by_one() if self._mode == "sequential" else self._side_by_side()
        self._passes.add(batches)  # a weak reference, because freeing a pass must stop its workers
        return batches

    def resume_at(self, ended: Sequence[bool]) -> None:
        """Let the next pass continue a saved pass. The caller has already set the loaders to their saved positions.

        Args:
            ended: for each loader, whether it has already ended once in the saved pass. Only "max_size_cycle" uses this
                argument.
        """
        self._ended = list(ended)

    def reset(self) -> None:
        """End the running passes, and stop all workers, including persistent workers."""
        for batches in list(self._passes):
            batches.close()
        for loader in self._flattened:
            if isinstance(loader, DataLoader):
                torch_private.keep_iterator(loader, None)

    def state_dict(self) -> list[Any]:
        """Return a list with the state of each loader, in order. The state of a loader without a ``state_dict`` is
        ``None``.

        The states contain the positions of the loaders. The states do not contain how often "max_size_cycle" has
        restarted a loader.
        """
        return [loader.state_dict() if _has(loader, "state_dict") else None for loader in self._flattened]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Load a result of :meth:`state_dict` into the loaders, and end all running passes.

        Raises:
            CheckpointError: the number of states differs, or a loader with a state has no ``load_state_dict``.
        """
        if len(states) != len(self._flattened):
            raise CheckpointError(
                f"The checkpoint holds the states of {len(states)} loaders, and this CombinedLoader has "
                f"{len(self._flattened)}. Resume with the loaders that it was saved with."
            )
        for index, (loader, state) in enumerate(zip(self._flattened, states, strict=True)):
            if state is not None and not _has(loader, "load_state_dict"):
                raise CheckpointError(
                    f"The checkpoint holds a state of loader {index}, and the {type(loader).__name__} there has no "
                    "load_state_dict. Resume with the loaders that it was saved with."
                )
        self.reset()
        for loader, state in zip(self._flattened, states, strict=True):
            if state is not None:
                loader.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # running passes are not pickled
        return {name: value for name, value in vars(self).items() if name != "_passes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _passes=WeakSet())

    def _limited(self) -> list[tuple[Any, int | float]]:
        return list(zip(self._flattened, self._limits or [_INF] * len(self._flattened), strict=True))

    def _starts(self) -> Starts:
        return [partial(_start, loader, limit) for loader, limit in self._limited()]

    # The following methods keep no iterator in a local variable. The iterators are therefore freed when the for
    # statement ends, also after an exception.

    def _one_by_one(self) -> Generator[tuple[Any, int, int], None, None]:
        for dataloader_idx, start in enumerate(self._starts()):
            for batch_idx, batch in enumerate(start()):
                yield batch, batch_idx, dataloader_idx

    def _side_by_side(self) -> Generator[tuple[Any, int, int], None, None]:
        tree = self._tree
        ended, self._ended = self._ended or [False] * len(self._flattened), []
        for batch_idx, batches in enumerate(_MODES[self._mode][1](self._starts(), ended)):
            yield _fill(tree, batches), batch_idx, 0


def _max_size_cycle(starts: Starts, ended: Sequence[bool]) -> Iterator[Sequence[Any]]:
    """Yield the batches of each round. A round first fetches from the loaders that have not ended yet. If all of these
    loaders end, the pass is over, and no loader is restarted.
    """
    iterators = [start() for start in starts]
    unended = [index for index, once in enumerate(ended) if not once]
    try:
        while True:
            batches = [_END] * len(starts)
            for index in unended:
                batches[index] = next(iterators[index], _END)
                if batches[index] is _END:
                    iterators[index] = iter(())
            unended = [index for index in unended if batches[index] is not _END]
            if not unended:
                return
            for index, start in enumerate(starts):
                if batches[index] is _END:
                    batches[index] = next(iterators[index], _END)
                if batches[index] is _END:
                    iterators[index] = iter(())  # end the old workers before new workers start
                    iterators[index] = start()
                    batches[index] = next(iterators[index], _END)
                if batches[index] is _END:
                    raise ConfigurationError(
                        f'Loader {index} of CombinedLoader(mode="max_size_cycle") gave no batch when it was started '
                        "again: it is empty, limited to 0, or an iterator that can be used once. "
                        'Give a loader that can be started again, or write mode="max_size".'
                    )
            yield batches
    finally:
        iterators.clear()  # a traceback may keep this frame alive, and thereby the iterators and their workers


_MODES: dict[str, tuple[Callable[..., float], Callable[[Starts, Sequence[bool]], Iterable[Sequence[Any]]]]] = {
    "min_size": (min, lambda starts, ended: zip(*(start() for start in starts), strict=False)),
    "max_size_cycle": (max, _max_size_cycle),
    "max_size": (max, lambda starts, ended: zip_longest(*(start() for start in starts))),
    "sequential": (sum, lambda starts, ended: ()),  # CombinedLoader iterates the loaders itself
}
"""Two functions for each mode. The first computes the length of a pass from the loaders' lengths, and the second yields
the loaders' batches.
"""


def _start(loader: Any, limit: int | float) -> Iterator[Any]:
    """Return a new iterator of ``loader`` with at most ``limit`` batches. If ``limit`` is 0, do not start the
    loader.
    """
    if limit == 0:
        return iter(())
    source = without_restart(start_pass(loader))
    return source if limit == _INF else islice(source, int(limit))


def start_batches(loader: Any, pins: bool = False) -> Iterator[Any]:
    """Start a pass over any loader. The batches of a CombinedLoader are yielded without their indices."""
    source = without_restart(start_pass(loader, pins))
    return (each[0] for each in source) if isinstance(loader, CombinedLoader) else source


def without_restart(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the items of ``iterator``. The ``__iter__`` of the returned iterator starts no new pass.

    ``for``, ``zip`` and ``islice`` call an iterator's ``__iter__``. If a loader is its own iterator, this call would
    start another pass, with another order of samples.
    """
    if isinstance(iterator, (GeneratorType, torch_private.AnyPass)):
        return iterator
    is_python = isinstance(getattr(type(iterator), "__iter__", None), (FunctionType, type(None)))
    return _rest(iterator) if is_python else iterator


def _rest(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _flatten(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def _fill(tree: Any, values: Iterable[Any]) -> Any:
    """Return ``tree`` with its leaves replaced by ``values``, in order."""
    source = iter(values)
    return map_leaves(lambda _: next(source), tree)


def _holds_values(node: Any) -> bool:
    """Return whether ``node`` is a list or tuple with only strings and numbers, and no loader."""
    return (
        type(node) in (list, tuple) and len(node) > 0 and all(_is_value(each) or _holds_values(each) for each in node)
    )


def _is_value(leaf: Any) -> bool:
    # a tensor with one number counts as a number
    return isinstance(leaf, (str, bytes, Number)) or getattr(leaf, "ndim", None) == 0


def _checked(loaders: list[Any]) -> list[Any]:
    for index, loader in enumerate(loaders):
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise WrongTypeError(
                f"Leaf {index} of CombinedLoader's tree is {loader!r}, a {type(loader).__name__}, which cannot be "
                "iterated. Lists, tuples, mappings and dataclasses are the tree, and its leaves are loaders: "
                "write DataLoader(data) where the data was given."
            )
    return loaders


def _has(loader: Any, method: str) -> bool:
    return callable(getattr(loader, method, None))


# ---- the meaning of a list -------------------------------------------------------------------------------------------


class BatchList:
    """Marks a list of batches as one loader, because a plain list in a tree means several loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def check_iterable(loader: Any, start: str) -> None:
    """Check that ``loader`` is iterable and not a data set or a class. ``start`` begins the error message.

    Raises:
        ConfigurationError: the loader is not iterable, is a string, or is Lightning's CombinedLoader, which also yields
            indices.
    """
    if any(cls.__name__ == "CombinedLoader" and whose(cls) for cls in type(loader).__mro__):  # Lightning's
        raise WrongTypeError(f"{start} {described(loader)}. Write drivetrain.data.CombinedLoader(loaders, mode).")
    if hasattr(loader, "__iter__") and not isinstance(loader, (str, bytes, type)):
        return
    cure = "Give a DataLoader or another iterable."
    if isinstance(loader, type):
        cure = f"Write {loader.__name__}(...)."
    elif inspect.isroutine(loader):
        cure = "Call it, and give what it returns."
    elif hasattr(loader, "__getitem__") and not isinstance(loader, (str, bytes)):
        cure = "Wrap the dataset: DataLoader(dataset, batch_size=32)."
    raise WrongTypeError(f"{start} {described(loader)}, which cannot be iterated. {cure}")


def is_loader(element: Any) -> bool:
    """Return whether an element of a list is a loader: a DataLoader, or an iterable that cannot be a batch.

    Batches are lists, tuples, mappings, tensors, arrays, strings, numbers, and objects with a method ``to``.
    """
    if isinstance(element, (DataLoader, CombinedLoader)):
        return True
    if isinstance(element, (list, tuple, Mapping, Tensor, str, bytes, Number, type)):
        return False
    return hasattr(element, "__iter__") and not hasattr(element, "to") and not hasattr(element, "__array__")


def has_data_loader(given: Any) -> bool:
    """Return whether nested lists, tuples and mappings contain a DataLoader. If so, all leaves must be loaders."""
    return any(isinstance(leaf, (DataLoader, CombinedLoader)) for _, leaf in leaves(given))


def arranged(given: Any, start: str) -> Any:
    """Return a user's loaders as a tree with one loader at each leaf.

    A list or tuple means several loaders if each element is a loader (:func:`is_loader`). Otherwise the elements are
    batches, and the list or tuple becomes one :class:`BatchList`. A mapping always means several loaders, by name, and
    each of its values is arranged separately. Lists that contain a DataLoader can be nested, and all leaves must then
    be loaders. Any other object is one loader.

    Args:
        given: an argument of the Trainer's methods, or the result of a loader hook.
        start: the beginning of error messages, for example "train_dataloader gave".

    Raises:
        ConfigurationError: a loader is not iterable, or an element is not a loader.
    """
    if isinstance(given, Tensor) or hasattr(given, "__array__"):
        samples = "TensorDataset(x, y)" if start.startswith("trainer.fit") else "samples"
        # a table of pandas or Polars, which cannot be the dataset of a DataLoader
        if hasattr(given, "to_numpy"):
            samples = "TensorDataset(torch.tensor(table.to_numpy(), dtype=torch.float32))"
        raise ConfigurationError(
            f"{start} {described(given)}, which is no loader. For one batch, write [batch]; for samples, "
            f"DataLoader({samples}, batch_size=32)."
        )
    if not isinstance(given, (list, tuple, Mapping)):
        check_iterable(given, start)
        return given
    if isinstance(given, Mapping):
        tree: Any = copy.copy(given)
        for key, value in given.items():
            if isinstance(value, (Tensor, Number)) or hasattr(value, "__array__"):
                raise WrongTypeError(
                    f"{start} a {type(given).__name__} with {described(value)} at {key!r}. A {type(given).__name__} "
                    "holds a loader for each name. If it is one batch, put it into a list: [batch]."
                )
            tree[key] = arranged(value, f"{start}, at position {key},")
        return tree
    if has_data_loader(given):
        for path, leaf in leaves(given):
            _check_leaf(leaf, f"{start}, at position {path},")
        return given
    if all(map(is_loader, given)):
        return given
    for position, element in enumerate(given):
        if isinstance(element, (type, Dataset)) or inspect.isroutine(element):
            check_iterable(element, f"{start}, at position {position},")  # neither a batch nor a loader
    return BatchList(given)


def _check_leaf(leaf: Any, start: str) -> None:
    """Check a leaf of a tree that contains a DataLoader."""
    check_iterable(leaf, start)
    if not is_loader(leaf):
        raise ConfigurationError(
            f"{start} {described(leaf)}, beside a DataLoader. Then every element must be a loader. Wrap batches in "
            "one: DataLoader(batches, batch_size=None)."
        )
