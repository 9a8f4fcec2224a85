"""Wraps the hooks of programs for Lightning 1.3, because drivetrain passes other arguments to hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.base.introspect import positional_arity
from drivetrain.compat.missing import TODAY

OF_MODULES: dict[str, tuple[str, str]] = {
    "optimizer_step": (
        "epoch batch_idx optimizer optimizer_closure",
        "epoch batch_idx optimizer optimizer_idx optimizer_closure on_tpu using_native_amp using_lbfgs",
    ),
    "optimizer_zero_grad": ("epoch batch_idx optimizer", "epoch batch_idx optimizer optimizer_idx"),
    "backward": ("loss", "loss optimizer optimizer_idx"),
    "transfer_batch_to_device": ("batch device dataloader_idx", "batch device"),
    "on_train_batch_start": ("batch batch_idx", "batch batch_idx dataloader_idx"),
    "on_train_batch_end": ("outputs batch batch_idx", "outputs batch batch_idx dataloader_idx"),
    "on_train_epoch_end": ("", "outputs"),
    "on_predict_epoch_end": ("", "results"),
    "toggle_optimizer": ("optimizer", "optimizer optimizer_idx"),
    **{
        f"on_{stage}_batch_{moment}": (f"{first}batch batch_idx", f"{first}batch batch_idx dataloader_idx")
        for stage in ("validation", "test", "predict")
        for moment, first in (("start", ""), ("end", "outputs "))
    },
}
"""For each hook of a module: first the arguments that drivetrain passes, then the arguments that Lightning 1.3 passed.
"""

OF_CALLBACKS: dict[str, tuple[str, str]] = {
    name: (f"trainer pl_module {today}".strip(), f"trainer pl_module {then}".strip())
    for name, (today, then) in OF_MODULES.items()
    if name.startswith("on_")
}
"""For each hook of a callback: first drivetrain's arguments, then the arguments that Lightning 1.3 passed."""

GONE = TODAY["hooks"]
"""For each hook of modules and callbacks that drivetrain does not call, what to write instead."""

GONE_FROM_CALLBACKS = (
    *(name for name in GONE if name.startswith("on_")), "on_configure_sharded_model",
    "on_before_accelerator_backend_setup",
)  # fmt: skip
GONE_FROM_MODULES = (
    *(name for name in GONE if name.startswith(("on_epoch", "on_pretrain")) or name.endswith("_epoch_end")),
    "training_step_end", "validation_step_end", "test_step_end", "configure_sharded_model",
)  # fmt: skip
"""Hooks of Lightning 1.3 that get defaults, because programs call them with ``super()``."""


def adapt(cls: type, hooks: Mapping[str, tuple[str, str]]) -> None:
    """Replace each hook in ``cls`` that has Lightning 1.3's parameters by a wrapper with drivetrain's parameters."""
    for name in hooks:
        if inspect.isfunction(method := vars(cls).get(name)):
            setattr(cls, name, adapted(method, *hooks[name]))


def adapted(method: Callable[..., Any], today: str, then: str) -> Callable[..., Any]:
    """Return a wrapper with the parameters ``today`` if ``method`` has the parameters ``then``; otherwise return
    ``method``.
    """
    if _is_of_that_time(method, today.split(), then.split()):
        return _adapted(method, today.split(), then.split())
    return method


def _is_of_that_time(method: Callable[..., Any], today: list[str], then: list[str]) -> bool:
    kinds = [each.kind for each in inspect.signature(method).parameters.values()][1:]  # self is left out
    named = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds and named:
        return today[:named] != then[:named]
    takes = positional_arity(method) - 1
    return takes <= len(then) and takes != len(today) and (takes > len(today) or len(then) < len(today))


def _adapted(method: Callable[..., Any], today: list[str], then: list[str]) -> Callable[..., Any]:
    taken = then[: positional_arity(method) - 1]

    @functools.wraps(method)
    def called_today(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(today):  # a subclass has passed Lightning 1.3's arguments
            return method(self, *args, **kwargs)
        values: dict[str, Any] = {"dataloader_idx": 0, "on_tpu": False, "using_native_amp": False, "using_lbfgs": False}
        module = args[1] if today[:2] == ["trainer", "pl_module"] else self
        values["outputs"] = vars(module).get("_outputs_of_epoch", [])
        values["results"] = module.trainer.predictions.outputs if "results" in taken else None
        values |= {"optimizer": None, "optimizer_idx": 0, **dict(zip([*today, "dataloader_idx"], args, strict=False))}
        if "optimizer_idx" in taken and (optimizer := getattr(values["optimizer"], "optimizer", values["optimizer"])):
            values["optimizer_idx"] = self.trainer.strategy.index_of(optimizer)
        return method(self, *(values[name] for name in taken), **kwargs)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *today)]
    called_today.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called_today.takes_outputs = "outputs" in taken and "outputs" not in today  # type: ignore[attr-defined]
    return called_today


_STATES = "states_of_callbacks"
"""The key in a checkpoint for the states that callbacks return from ``on_save_checkpoint``."""


def adapt_states(cls: type) -> None:
    """Let callbacks return their state from ``on_save_checkpoint``, and get this state in
    ``on_load_checkpoint(state)``.
    """
    save, load = vars(cls).get("on_save_checkpoint"), vars(cls).get("on_load_checkpoint")
    if inspect.isfunction(save):

        def on_save_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> Any:
            given = (trainer, pl_module, checkpoint)[: positional_arity(save) - 1]
            if isinstance(state := save(self, *given), dict):
                checkpoint.setdefault(_STATES, {})[self.state_key] = state
            return state

        cls.on_save_checkpoint = on_save_checkpoint  # type: ignore[attr-defined]
    if inspect.isfunction(load) and positional_arity(load) == 2:

        def on_load_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if (state := checkpoint.get(_STATES, {}).get(self.state_key)) is not None:
                load(self, state)

        cls.on_load_checkpoint = on_load_checkpoint  # type: ignore[attr-defined]
