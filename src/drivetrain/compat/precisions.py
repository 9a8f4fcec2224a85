"""Lightning's precision classes for FSDP and DeepSpeed. They create ordinary precisions, which work with every
strategy.
"""

from __future__ import annotations

import functools
from typing import Any

from drivetrain.base.introspect import is_own_class
from drivetrain.errors import ConfigurationError
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision, PrecisionRegistry


class _OfStrategy(Precision):
    """Base class whose constructor returns an object of another precision class, for example of ``MixedPrecision``. If
    a user's subclass is called, the object also has the methods of the subclass, which have priority.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _made(cls, *args, **kwargs) if is_own_class(cls) else super().__new__(cls)

    def __init__(self, precision: Any = "32-true", scaler: Any = None) -> None:
        cls: Any = type(self)
        made: Any = _made(cls, precision, scaler)
        kind: Any = type(made)
        self.__class__ = _joined(cls, kind)
        self.__dict__.update(made.__dict__)

    def __reduce__(self) -> Any:
        cls, *kinds = type(self).__bases__
        return _restored, (cls, kinds[0], self.__dict__) if kinds else (type(self), None, self.__dict__)


def _made(cls: type, precision: Any = "32-true", scaler: Any = None) -> Precision:
    if scaler is None:
        return PrecisionRegistry.get(str(precision))
    if str(precision) not in ("16", "16-mixed"):
        raise ConfigurationError(
            f"{cls.__name__}({precision!r}, scaler={type(scaler).__name__}): only 16-mixed scales losses. Leave "
            'scaler out, or write "16-mixed".'
        )
    return MixedPrecision("16-mixed", scaler=scaler)


@functools.cache
def _joined(cls: type, kind: type) -> type:
    """Return a class that combines the user's class with the precision class ``kind``."""
    return type(cls.__name__, (cls, kind), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _restored(cls: type, kind: type | None, attributes: dict[str, Any]) -> Any:
    copy: Any = object.__new__(cls if kind is None else _joined(cls, kind))
    copy.__dict__.update(attributes)
    return copy


class FSDPPrecision(_OfStrategy):
    """Returns the precision of this name. For example, ``FSDPPrecision("bf16-mixed")`` returns a ``MixedPrecision``.

    FSDP needs no precision class of its own here. Pass ``FSDPStrategy(mixed_precision=...)`` to set the dtypes in which
    parameters are gathered and gradients are reduced.

    Args:
        precision: the name.
        scaler: a ``torch.amp.GradScaler`` for "16-mixed".
    """


class DeepSpeedPrecision(_OfStrategy):
    """Returns the precision of this name. DeepSpeedStrategy writes it into DeepSpeed's configuration.

    Args:
        precision: the name.
    """
