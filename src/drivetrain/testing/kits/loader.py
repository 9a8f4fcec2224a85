"""The checks for loaders of batches."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.callback import Callback
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.stateful import is_stateful
from drivetrain.module.module import LightningModule
from drivetrain.testing._regression import QUIET, Saves
from drivetrain.testing.checks import CannotTryError, Part, Skipped, is_true, same
from drivetrain.trainer.trainer import Trainer

SETTINGS: tuple[str, ...] = ()

_MOST = 64  # the checks compare at most this many batches of a pass
_OF_TORCH = {"dataset": list(range(22)), "batch_size": 4, "shuffle": True}


def _make(part: Part, seed: int = 0) -> Any:
    """Return a loader. By default, the dataset is 22 numbers, which the loader shuffles."""
    torch.manual_seed(seed)
    return part.make(**{} if "dataset" in part.arguments else _OF_TORCH)


def _plain(batch: Any) -> Any:
    """Return a batch as values that can be compared with ``==``."""
    if isinstance(batch, Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.tolist()
    if isinstance(batch, dict):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_plain(each) for each in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def _pass(loader: Any) -> list[Any]:
    return [_plain(each) for each in itertools.islice(loader, _MOST)]


def _needs_state(loader: Any) -> None:
    if not is_stateful(loader):
        raise Skipped("it has no state_dict and load_state_dict")
    if isinstance(loader, CombinedLoader):
        raise Skipped("its state_dict holds the states of its loaders; the Trainer resumes it in another way")


def try_it(part: Part) -> None:
    """Check that a loader can be created and yields enough batches."""
    if (count := len(_pass(_make(part)))) < 3:
        raise CannotTryError(f"It yields {count} batches, and the checks need at least 3. Give it more data.")


def every_pass_is_complete(part: Part) -> None:
    """A second pass yields as many batches as the first pass."""
    loader = _make(part)
    same(len(_pass(loader)), len(_pass(_make(part))), "batches of the first pass")
    same(len(_pass(loader)), len(_pass(_make(part))), "batches of the second pass")


def its_length_is_right(part: Part) -> None:
    """If a loader has a length, the length is the number of batches that a pass yields."""
    loader = _make(part)
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        raise Skipped("it has no length") from None
    same(length, sum(1 for _ in itertools.islice(loader, length + 1)), "len(loader)")


def a_pass_that_is_left_does_not_shorten_the_next(part: Part) -> None:
    """If a program ends a pass after the first batch, the next pass yields all batches."""
    loader = _make(part)
    if hasattr(loader, "__next__"):
        raise Skipped("it is its own iterator, which continues where it was left")
    for _ in loader:
        break
    same(len(_pass(loader)), len(_pass(_make(part))), "batches of the next pass")


def reading_the_state_changes_nothing(part: Part) -> None:
    """Calling state_dict after each batch does not change the batches of two passes."""
    _needs_state(_make(part))
    undisturbed, read = _make(part), None
    expected = [_pass(undisturbed), _pass(undisturbed)]
    read = _make(part)
    found: list[Any] = []
    for _ in range(2):
        batches = []
        for batch in itertools.islice(read, _MOST):
            batches.append(_plain(batch))
            read.state_dict()
        found.append(batches)
    same(found, expected, "batches of two passes")


def a_state_continues_its_pass(part: Part) -> None:
    """A new loader that loads a state, saved to a file after any batch, yields exactly the remaining batches of the
    pass.
    """
    _needs_state(_make(part))
    expected, store = _pass(_make(part)), TorchCheckpointIO()
    for count in sorted({1, len(expected) // 2, len(expected) - 1}):
        loader = _make(part)
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        store.save_checkpoint({"loader": loader.state_dict(), "random": rng_state()}, part.folder / "state")
        for _ in iterator:  # another batch after the save must not change the saved state
            break
        saved = store.load_checkpoint(part.folder / "state")
        other = _make(part, seed=1)
        set_rng_state(saved["random"])
        other.load_state_dict(saved["loader"])
        same(_pass(other), expected[count:], f"batches after a state of {count} batches")


def a_state_is_a_snapshot(part: Part) -> None:
    """A state that state_dict has returned does not change when the loader yields more batches. load_state_dict does
    not change its argument.
    """
    loader = _make(part)
    _needs_state(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    text = _text(state)
    next(iterator)
    same(_text(state), text, "the state after another batch")
    other = _make(part)
    other.load_state_dict(state)
    _pass(other)
    same(_text(state), text, "the state after load_state_dict")


def _text(state: Any) -> str:
    return repr(_plain(copy.deepcopy(state)))


def a_stopped_fit_sees_the_remaining_batches(part: Part) -> None:
    """A fit that resumes inside an epoch, at the end of an epoch, or in the next epoch trains on exactly the remaining
    batches.
    """
    length = len(_pass(_make(part)))
    for at in (1, length, length + 1):
        file = part.folder / f"{at}.ckpt"
        whole = _fit(_make(part), length, [Saves(file, at)])
        rest = _fit(_make(part, seed=1), length, [], file)
        is_true(len(whole) == 2 * length, f"two epochs have {len(whole)} batches, and a pass has {length}")
        same(rest, whole[at:], f"batches of the fit that is resumed after {at} of {2 * length} batches")


def _fit(loader: Any, batches: int, callbacks: list[Callback], ckpt_path: Path | None = None) -> list[Any]:
    """Return the batches of a fit over two epochs. Each epoch has at most ``batches`` batches."""
    module = _Reads()
    Trainer(accelerator="cpu", devices=1, max_epochs=2, limit_train_batches=batches, callbacks=callbacks, **QUIET).fit(
        module, loader, ckpt_path=ckpt_path
    )
    return module.seen


class _Reads(LightningModule):
    """A module that trains on any batch, and remembers the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(_plain(batch))
        return self.weight.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
