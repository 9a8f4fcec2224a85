"""LightningDataModule of Lightning 1.3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import drivetrain.module.datamodule
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.arguments import FromCommandLine

_STAGES = ("fit", "validate", "test", "predict")


class _DoneOnce(drivetrain.module.datamodule.LightningDataModule):
    """Runs ``prepare_data`` once per data module, and ``setup`` and ``teardown`` once for each stage.

    If a program calls ``setup``, the Trainer does not call ``setup`` again, and so does not repeat a random split.
    ``has_prepared_data``, ``has_setup_fit``, ``has_teardown_test`` and similar attributes tell which hooks have run.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("prepare_data", "setup", "teardown"):
            method = getattr(cls, name)
            if not hasattr(method, "happens_once") and method is not getattr(_DoneOnce, name):
                setattr(cls, name, _once(name, method))


def _answer(what: str) -> property:
    """Return a property that tells whether a hook has been called. An example of ``what`` is "setup fit"."""
    return property(lambda data: what in vars(data).get("_done", ()), doc=f"Whether ``{what}`` has been called.")


_DoneOnce.has_prepared_data = _answer("prepare_data")  # type: ignore[attr-defined]
for _hook in ("setup", "teardown"):
    for _stage in _STAGES:
        setattr(_DoneOnce, f"has_{_hook}_{_stage}", _answer(f"{_hook} {_stage}"))


def _once(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls ``method`` only once for each stage.

    A call without a stage stands for the stages fit, validate and test. A ``super()`` call inside the hook always calls
    the base class's method.
    """

    @functools.wraps(method)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        done, running = own.setdefault("_done", set()), own.setdefault("_running", set())
        if name in running:
            return method(self, *args, **kwargs)
        stage = next(iter((*args, *kwargs.values())), None)
        stages = _STAGES[:3] if stage is None else (stage,)
        asked = {name} if name == "prepare_data" else {f"{name} {each}" for each in stages}
        if asked <= done:
            return None
        running.add(name)
        try:
            returned = method(self, *args, **kwargs)
        finally:
            running.discard(name)
        done |= asked
        return returned

    once.happens_once = True  # type: ignore[attr-defined]
    return once


class LightningDataModule(FromCommandLine, _DoneOnce):
    """drivetrain's LightningDataModule with Lightning 1.3's arguments; command-line options can set the arguments.

    Args:
        train_transforms, val_transforms, test_transforms: stored for the user's own loaders.
        dims: the shape of a sample, stored for the user's own model; ``None``: the value of the class attribute.
    """

    train_transforms: Any = None
    val_transforms: Any = None
    test_transforms: Any = None
    dims: Any = ()

    def __init__(
        self, train_transforms: Any = None, val_transforms: Any = None, test_transforms: Any = None, dims: Any = None
    ) -> None:
        super().__init__()
        given = {"train_transforms": train_transforms, "val_transforms": val_transforms}
        given |= {"test_transforms": test_transforms, "dims": dims}
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, {name: hooks.OF_MODULES[name] for name in ("transfer_batch_to_device",)})

    def setup(self, stage: str | None = None) -> None:
        """Create datasets for ``stage``; ``None``: for all stages."""

    def teardown(self, stage: str | None = None) -> None:
        """Called after ``stage``; for ``None``, after all stages."""

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of a sample, or the size of one dimension."""
        return self.dims if dim is None else self.dims[dim]
