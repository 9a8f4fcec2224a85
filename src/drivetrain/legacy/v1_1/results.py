"""Results of a step in Lightning 1.0 and 1.1: a loss, and values to log with their options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.legacy.deprecated import warn_deprecated

_GONE = ("tbptt_reduce_fx", "tbptt_pad_token", "sync_fn", "dataloader_idx")


class Result(dict[str, Any]):
    """A dictionary whose items are also attributes; items that :meth:`log` adds will be logged.

    Args:
        minimize: the loss; ``None`` outside of ``training_step``, and with manual optimization.
        early_stop_on, checkpoint_on: values to log under these names for callbacks only, not for loggers.
        hiddens: the hidden state after a part of a sequence, for the next part.
    """

    on_step, on_epoch = False, True

    def __init__(
        self, minimize: Tensor | None = None, early_stop_on: Tensor | None = None, checkpoint_on: Any = None,
        hiddens: Any = None,
    ) -> None:  # fmt: skip
        given = {"loss": minimize, "early_stop_on": early_stop_on, "checkpoint_on": checkpoint_on, "hiddens": hiddens}
        super().__init__({name: value for name, value in given.items() if value is not None})
        options: dict[str, dict[str, Any]] = {}
        for name in ("early_stop_on", "checkpoint_on"):
            if isinstance(given[name], Tensor):
                options[name] = {"logger": False, "on_step": False, "on_epoch": True}
        object.__setattr__(self, "_options", options)

    def __getattr__(self, name: str) -> Any:
        try:
            return self["loss" if name == "minimize" else name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}. It has {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self["loss" if name == "minimize" else name] = value

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Store ``value``. After the step, :meth:`logged_by` logs the stored values with the module's ``self.log``."""
        self[name] = value.detach() if isinstance(value, Tensor) else value
        order = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        given = {**dict(zip(order, args, strict=False)), **options}
        own = {"on_step": self.on_step, "on_epoch": self.on_epoch}
        self._options[name] = {**own, **{key: each for key, each in given.items() if key not in _GONE}}

    def log_dict(self, dictionary: dict[str, Any], *args: Any, **options: Any) -> None:
        """Call :meth:`log` for each item."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def logged_by(self, module: Any) -> dict[str, Any]:
        """Call ``module.log`` for each value that :meth:`log` has stored; return all items as a plain dictionary."""
        what = f"{type(module).__name__} returns {type(self).__name__} objects, which"
        warn_deprecated(what, "self.log(name, value), and return the loss", once_for=module)
        for name, options in self._options.items():
            module.log(name, self[name], **options)
        return dict(self)

    @classmethod
    def of_epoch(cls, outputs: Sequence[dict[str, Any]]) -> Result:
        """Combine the outputs of an epoch's steps: for each name, a tensor or a list with the values of all steps."""
        found = cls()
        for name in outputs[0] if outputs else ():
            values = [each[name] for each in outputs if name in each]
            tensors = all(isinstance(each, Tensor) for each in values)
            found[name] = torch.cat([each.reshape(-1, *each.shape[1:]) for each in values]) if tensors else values
        return found


class TrainResult(Result):
    """A result of ``training_step``; by default, values are logged for each step."""

    on_step, on_epoch = True, False


class EvalResult(Result):
    """A result of ``validation_step`` or ``test_step``; by default, values are logged for each epoch.

    Args:
        early_stop_on, checkpoint_on, hiddens: as for :class:`Result`.
    """

    def __init__(self, early_stop_on: Tensor | None = None, checkpoint_on: Any = None, hiddens: Any = None) -> None:
        super().__init__(None, early_stop_on, checkpoint_on, hiddens)
