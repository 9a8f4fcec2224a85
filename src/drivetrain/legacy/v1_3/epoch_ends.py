"""A callback that calls Lightning 1.x's former hooks, such as ``training_epoch_end``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.callback import Callback
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_3.defaults import hook_of


class EpochEnds(Callback):
    """Collects the outputs of steps, and passes the outputs to the module's ``training_epoch_end`` and similar hooks.

    These hooks run before ``on_train_epoch_end`` and ``on_validation_epoch_end`` of other callbacks. The other
    callbacks therefore see the values that the hooks log.

    Args:
        in_evaluation: whether evaluations also call ``on_epoch_start`` and ``on_epoch_end``.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        _call_callbacks(trainer, "on_batch_start")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            _call_callbacks(trainer, "on_keyboard_interrupt")

    position = "first"

    def __init__(self, in_evaluation: bool = True) -> None:
        self._in_evaluation = in_evaluation
        self._training: list[Any] = []
        self._evaluation: dict[int, list[Any]] = {}
        self._last: Any = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._training = vars(pl_module)["_outputs_of_epoch"] = []
        call_all(trainer, "on_epoch_start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # In Lightning 1.x, ``global_step`` grows by 1 even if several optimizers have stepped.
        if trainer.validates_last and trainer.current_run.window.batches_done == 0:
            trainer.progress.count_once()
        takes_outputs = getattr(pl_module.on_train_epoch_end, "takes_outputs", False)
        if takes_outputs or hook_of(pl_module, "training_epoch_end"):
            several = trainer.strategy.outputs_of_batch
            self._training.append(outputs if several is None else several)
        _call_callbacks(trainer, "on_batch_end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        outputs, self._training = self._training, []
        if outputs and isinstance(outputs[0], list):  # the outputs have one list per optimizer
            outputs = [[each for each in column if each is not None] for column in zip(*outputs, strict=True)]
        outputs = [each for each in outputs if each is not None]
        vars(pl_module)["_outputs_of_epoch"] = outputs  # read by hooks with the parameter ``outputs``
        outputs = trainer.strategy.epoch_outputs("training_step", outputs)
        _log(pl_module, _call(pl_module, "training_epoch_end", outputs))
        if not self._in_evaluation:  # else the strategy calls on_epoch_end
            call_all(trainer, "on_epoch_end")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._evaluation = {}
        if self._in_evaluation:
            call_all(trainer, "on_epoch_start")

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if hook_of(pl_module, f"{_stage(trainer)}_epoch_end") and outputs is not None:
            self._evaluation.setdefault(dataloader_idx, []).append(outputs)
        elif _takes_dictionaries(pl_module):
            self._last = outputs  # this dictionary is logged at the end of the evaluation

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        stage, outputs_of = _stage(trainer), trainer.strategy.epoch_outputs
        kept = [outputs_of(f"{stage}_step", outputs) for _, outputs in sorted(self._evaluation.items())]
        self._evaluation = {}
        last, self._last = self._last, None
        if hook_of(pl_module, f"{stage}_epoch_end"):
            last = _call(pl_module, f"{stage}_epoch_end", kept[0] if len(kept) == 1 else kept)
        _log(pl_module, last)
        getattr(pl_module, "save_predictions", lambda: None)()

    on_test_epoch_end = on_validation_epoch_end


def _stage(trainer: Any) -> str:
    return "test" if trainer.testing else "validation"


def call_all(trainer: Any, name: str) -> None:
    """Call a hook of Lightning 1.x: first on all callbacks, then on the module."""
    _call_callbacks(trainer, name)
    _call(trainer.lightning_module, name)


def _call_callbacks(trainer: Any, name: str) -> None:
    for callback in trainer.callbacks:
        _call(callback, name, trainer, trainer.lightning_module)


def _call(party: Any, name: str, *args: Any) -> Any:
    hook = hook_of(party, name)
    return None if hook is None else hook(*args)


def _log(module: Any, returned: Any) -> None:
    if hasattr(returned, "logged_by"):
        returned.logged_by(module)
    elif isinstance(returned, Mapping):
        log_dictionaries(module, returned)


def log_dictionaries(module: Any, returned: Mapping[str, Any]) -> None:
    """Log the entries "log" and "progress_bar" of a step's result. For Lightning 1.1, callbacks also get the other
    numbers in the result.
    """
    logged, shown = returned.get("log") or {}, returned.get("progress_bar") or {}
    if logged or shown:
        what = f"{type(module).__name__} returns a dictionary with 'log' or 'progress_bar', which"
        warn_deprecated(what, "self.log(name, value, prog_bar=True)", once_for=module)
    for name in {**logged, **shown}:
        value = logged.get(name, shown.get(name))
        module.log(name, value, logger=name in logged, prog_bar=name in shown)
    if _takes_dictionaries(module):
        module.trainer.logbook.keep_returned(module, returned)


def _takes_dictionaries(module: Any) -> bool:
    return bool(getattr(module.trainer.logbook, "takes_dictionaries", False))
