"""Checks that a user-defined precision fits the module and the callbacks. Imported only with such a precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.base.introspect import defined_by_user
from drivetrain.base.supplied import warn_of_uncalled
from drivetrain.errors import ConfigurationError
from drivetrain.loops.progress import TrainerFn
from drivetrain.precision.precision import Precision
from drivetrain.settings import Settings


def check_precision(precision: Precision, parties: Sequence[Any], fn: TrainerFn, settings: Settings) -> None:
    """Check a user's precision against the module and the callbacks of a run.

    Args:
        precision: the precision of the run.
        parties: the module, then the callbacks.
        fn: the Trainer's method that was called.
        settings: the Trainer's settings.

    Raises:
        ConfigurationError: the precision and the module both override ``backward``. Also raised if the module, a
            callback or gradient clipping would use gradients before the precision unscales the gradients.
    """
    name, module = type(precision).__name__, parties[0]
    warn_of_uncalled(type(precision), "Precision", "Trainer")
    if fn is not TrainerFn.FITTING:
        return
    if defined_by_user(module, "backward") and defined_by_user(precision, "backward"):
        raise ConfigurationError(
            f"{type(module).__name__} and {name} both override backward, and only the module's would be called. Do "
            f"what {name} does in its pre_backward and post_backward, or leave backward out of the module."
        )
    scales = defined_by_user(precision, "pre_backward") or defined_by_user(precision, "backward")
    unscales = precision.scales_loss or defined_by_user(precision, "unscale_gradients")
    if not scales or unscales or not defined_by_user(precision, "optimizer_step"):
        return
    users = [
        f"{type(party).__name__}.{hook}"
        for hook in ("on_before_optimizer_step", "configure_gradient_clipping")
        for party in parties
        if defined_by_user(party, hook)
    ]
    if settings.gradient_clip_val:
        users.insert(0, f"Trainer(gradient_clip_val={settings.gradient_clip_val})")
    if users:
        raise ConfigurationError(
            f"{name} overrides the backward pass and optimizer_step, and {users[0]} uses the gradients before "
            f"optimizer_step is called: gradients that {name} has scaled would be used as they are. Write "
            "scales_loss = True in the class, and unscale them in unscale_gradients(optimizer), which is called first; "
            "if it scales nothing, an unscale_gradients that does nothing is enough."
        )
