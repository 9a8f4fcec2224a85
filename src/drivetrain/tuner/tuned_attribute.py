"""Find and set the attribute with the learning rate or the batch size."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from drivetrain.errors import MissingAttributeError


def tuned_name(trainer: Any, module: Any, names: tuple[str, ...], owner: str, argument: str) -> str:
    """Return the first of ``names`` that is an attribute of the module, its hyperparameters or the datamodule.

    Args:
        trainer: the Trainer with the datamodule.
        module: the module of the run.
        names: the name that the user passed, or else the usual names.
        owner: the callback, for messages.
        argument: the callback's argument for the name.

    Raises:
        ConfigurationError: no object has one of these names.
    """
    for name in names:
        if next(holders(trainer, module, name), None) is not None:
            return name
    kind = type(module).__name__
    raise MissingAttributeError(
        f"{owner} sets {' or '.join(map(repr, names))}, and neither {kind}, nor its hparams, nor a datamodule has an "
        f"attribute of that name. Keep the value in self.{names[0]}, or write {owner}({argument}=...)."
    )


def set_tuned(trainer: Any, module: Any, name: str, value: Any) -> None:
    """Set the attribute ``name`` on every object that has this attribute."""
    for holder in list(holders(trainer, module, name)):
        if isinstance(holder, MutableMapping):
            holder[name] = value
        else:
            setattr(holder, name, value)


def holders(trainer: Any, module: Any, name: str) -> Iterator[Any]:
    """Yield each object that has the attribute ``name``, among the module, the datamodule and their hyperparameters."""
    for owner in (module, getattr(trainer, "datamodule", None)):
        for holder in (owner, getattr(owner, "hparams", None)):
            if name in holder if isinstance(holder, MutableMapping) else hasattr(holder, name):
                yield holder
