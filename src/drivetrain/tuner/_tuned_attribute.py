"""The attribute that a finder sets: of the module, its hyperparameters or the datamodule."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from drivetrain.errors import MissingAttributeError


def tuned_name(trainer: Any, module: Any, names: tuple[str, ...], owner: str, argument: str) -> str:
    """Return the first of ``names`` that the module, its hyperparameters or the datamodule have.

    Args:
        trainer: whose datamodule it is.
        module: of the run.
        names: what the user passed, or else the usual names.
        owner: the callback, for messages.
        argument: its argument for the name.

    Raises:
        ConfigurationError: there is none.
    """
    for name in names:
        if next(_holders(trainer, module, name), None) is not None:
            return name
    kind = type(module).__name__
    raise MissingAttributeError(
        f"{owner} sets {' or '.join(map(repr, names))}, and neither {kind}, nor its hparams, nor a datamodule has an "
        f"attribute of that name. Keep the value in self.{names[0]}, or write {owner}({argument}=...)."
    )


def tuned_value(trainer: Any, module: Any, name: str) -> Any:
    """Return its value."""
    holder = next(_holders(trainer, module, name))
    return holder[name] if isinstance(holder, MutableMapping) else getattr(holder, name)


def set_tuned(trainer: Any, module: Any, name: str, value: Any) -> None:
    """Set it wherever it is."""
    for holder in list(_holders(trainer, module, name)):
        if isinstance(holder, MutableMapping):
            holder[name] = value
        else:
            setattr(holder, name, value)


def _holders(trainer: Any, module: Any, name: str) -> Iterator[Any]:
    for owner in (module, getattr(trainer, "datamodule", None)):
        if owner is None:
            continue
        if hasattr(owner, name):
            yield owner
        hparams = getattr(owner, "hparams", None)
        if isinstance(hparams, MutableMapping) and name in hparams:
            yield hparams
