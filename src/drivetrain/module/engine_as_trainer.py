"""The object ``self.trainer`` of a module that an Engine has set up."""

from __future__ import annotations

from typing import Any


class EngineAsTrainer:
    """The attributes of a Trainer that an Engine has too: ranks, device, strategy, loggers, callbacks.

    Args:
        engine: the Engine that has set up the module.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)  # the attributes are missing while this object is being copied
        try:
            return getattr(self._engine, name)
        except AttributeError:
            raise AttributeError(
                f"self.trainer.{name}: this module runs in an Engine, not in a Trainer, and an Engine has no {name!r}. "
                "Pass the value to the module yourself, or train it with Trainer.fit."
            ) from None
