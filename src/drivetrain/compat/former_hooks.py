"""Hooks of earlier Lightning versions that are no longer called, and the hooks that replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.base.introspect import defined_by_user, is_own_class, takes
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import lightning_deprecation
from drivetrain.errors import ConfigurationError, HookError, RunError

with on_first_use:
    from drivetrain.compat import missing

if TYPE_CHECKING:
    from drivetrain.module.module import LightningModule
    from drivetrain.strategies.strategy import Strategy

RENAMED = {
    "training_epoch_end": ("on_train_epoch_end", 1),
    "validation_epoch_end": ("on_validation_epoch_end", 1),
    "test_epoch_end": ("on_test_epoch_end", 1),
    "on_epoch_start": ("on_train_epoch_start", 0),
    "on_epoch_end": ("on_train_epoch_end", 0),
    "on_pretrain_routine_start": ("on_fit_start", 0),
    "on_pretrain_routine_end": ("on_fit_start", 0),
    "on_hpc_save": ("on_save_checkpoint", 1),
    "on_hpc_load": ("on_load_checkpoint", 1),
    "get_progress_bar_dict": ("log", 0),
    "configure_sharded_model": ("configure_model", 0),
    "tbptt_split_batch": ("training_step", 2),
}
"""For each hook that is no longer called: the replacement, and the hook's number of arguments."""

_STEP_END = ("training_step_end", "validation_step_end", "test_step_end")
"""Hooks with one argument, which only strategies that split batches call, such as "dp" (``facts.earlier.step_ends``).
With other strategies, their code belongs at the end of ``training_step`` and so on.
"""


def former_hooks(of_callbacks: bool) -> dict[str, str]:
    """Return the hooks that are no longer called, and what to write instead. Such a hook of a callback only causes a
    warning, because the callback may be written for several libraries.
    """
    if of_callbacks:
        return {name: instead for name, instead in missing.TODAY["hooks"].items() if name.startswith("on_")}
    return {name: instead for name, (instead, _) in RENAMED.items()}


def check_not_defined(module: LightningModule, strategy: Strategy) -> None:
    """Check that ``module`` defines no hook that is no longer called. Only a program for Lightning may define
    ``configure_sharded_model``.

    Raises:
        HookError: the module defines a hook that is no longer called.
        ConfigurationError: the module defines a hook such as ``training_step_end``, which this strategy does not call.
    """
    name = type(module).__name__
    for removed, (instead, arguments) in RENAMED.items():
        if removed in strategy.facts.earlier.hooks or not defined_by_user(module, removed):
            continue
        if removed == "configure_sharded_model" and _serves(module):
            continue
        # A method with other arguments is the user's own, and not this hook.
        if takes(getattr(module, removed, None), arguments):
            raise HookError(
                f"{name}.{removed} is never called: this hook no longer exists. Do its work in {instead}, and keep the "
                "steps' outputs on self if you need them. [DT1015]"
            )
    for hook in () if strategy.facts.earlier.step_ends else _STEP_END:
        if defined_by_user(module, hook) and takes(getattr(module, hook), 1):
            raise ConfigurationError(
                f"{name}.{hook} is never called by {type(strategy).__name__}, which does not split batches. Do its "
                f'work in {hook.removesuffix("_end")}, or write strategy="dp".'
            )


def _serves(module: Any) -> bool:
    """In a program written for Lightning, use ``configure_sharded_model`` as the module's ``configure_model``, and
    return True. In other programs, return False.
    """
    name = type(module).__name__
    served = lightning_deprecation(
        f"{name}.configure_sharded_model is the former name of the hook configure_model. Rename it."
    )
    if served and any("configure_model" in vars(cls) for cls in type(module).__mro__ if not is_own_class(cls)):
        raise RunError(f"{name} defines configure_sharded_model and configure_model. Keep configure_model alone.")
    if served:
        module.configure_model = module.configure_sharded_model
    return served
