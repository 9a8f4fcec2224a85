"""The field's precisions of one strategy: here every precision works with every strategy."""

from __future__ import annotations

from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision, PrecisionRegistry


class _OfStrategy(Precision):
    """Makes the precision of a name."""

    def __new__(cls, precision: Any = "32-true", scaler: Any = None) -> Any:
        if scaler is None:
            return PrecisionRegistry.get(str(precision))
        if str(precision) not in ("16", "16-mixed"):
            raise ConfigurationError(
                f"{cls.__name__}({precision!r}, scaler={type(scaler).__name__}): only 16-mixed scales losses. Leave "
                'scaler out, or write "16-mixed".'
            )
        return MixedPrecision("16-mixed", scaler=scaler)


class FSDPPrecision(_OfStrategy):
    """Returns the precision of a name, such as ``MixedPrecision`` for "bf16-mixed".

    In other libraries FSDP has a precision of its own. Types in which parameters are gathered and gradients reduced are
    those of ``FSDPStrategy(mixed_precision=...)``.

    Args:
        precision: the name.
        scaler: a ``torch.amp.GradScaler`` for "16-mixed".
    """


class DeepSpeedPrecision(_OfStrategy):
    """Returns the precision of a name, which DeepSpeedStrategy passes on to DeepSpeed's configuration.

    Args:
        precision: the name.
    """
