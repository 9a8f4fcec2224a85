"""Former names of classes; Lightning 2.6 still has these names. Calling a former name warns, and returns an object of
the current class.

Names of accelerators that Lightning has removed can be imported, but calling them raises an error.
"""

from __future__ import annotations

from typing import Any

from drivetrain import accelerators, precision, strategies
from drivetrain.base.rank_zero import lightning_deprecation
from drivetrain.errors import NotSupportedError


class RemovedError(NotSupportedError, NotImplementedError):
    """The program called a class that Lightning has removed."""


def _former(name: str, current: type, **fixed: Any) -> Any:
    """Return a subclass of ``current`` with a former name. With ``fixed``, its constructor ignores the caller's
    arguments and passes ``fixed``.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        lightning_deprecation(f"{name} is the former name of {current.__name__}. Write {current.__name__}.")
        make: Any = current.__new__
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)

    members: dict[str, Any] = {"__new__": __new__, "__module__": __name__, "__doc__": f"The former {name}."}
    if fixed:

        def __init__(self: Any, *_: Any, **__: Any) -> None:
            super(made, self).__init__(**fixed)

        members["__init__"] = __init__
    made: Any = type(name, (current,), members)
    return made


def _removed(name: str) -> Any:
    """Return a class that can be imported, and raises an error when called."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        raise RemovedError(f"{name} no longer exists, and drivetrain has no support for HPU. Write another class.")

    return type(name, (), {"__init__": __init__, "__module__": __name__, "__doc__": f"The removed {name}."})


PrecisionPlugin = _former("PrecisionPlugin", precision.Precision)
BitsandbytesPrecisionPlugin = _former("BitsandbytesPrecisionPlugin", precision.BitsandbytesPrecision)
DeepSpeedPrecisionPlugin = _former("DeepSpeedPrecisionPlugin", precision.DeepSpeedPrecision)
DoublePrecisionPlugin = _former("DoublePrecisionPlugin", precision.DoublePrecision)
FSDPPrecisionPlugin = _former("FSDPPrecisionPlugin", precision.FSDPPrecision)
HalfPrecisionPlugin = _former("HalfPrecisionPlugin", precision.HalfPrecision)
MixedPrecisionPlugin = _former("MixedPrecisionPlugin", precision.MixedPrecision)
TransformerEnginePrecisionPlugin = _former("TransformerEnginePrecisionPlugin", precision.TransformerEnginePrecision)
XLAPrecisionPlugin = _former("XLAPrecisionPlugin", precision.XLAPrecision)
TPUPrecisionPlugin = _former("TPUPrecisionPlugin", precision.XLAPrecision, precision="32-true")
TPUBf16PrecisionPlugin = _former("TPUBf16PrecisionPlugin", precision.XLAPrecision, precision="bf16-true")
XLABf16PrecisionPlugin = _former("XLABf16PrecisionPlugin", precision.XLAPrecision, precision="bf16-true")
TPUPrecision = _former("TPUPrecision", precision.XLAPrecision, precision="32-true")
TPUBf16Precision = _former("TPUBf16Precision", precision.XLAPrecision, precision="bf16-true")
XLABf16Precision = _former("XLABf16Precision", precision.XLAPrecision, precision="bf16-true")
TPUAccelerator = _former("TPUAccelerator", accelerators.XLAAccelerator)
SingleTPUStrategy = _former("SingleTPUStrategy", strategies.SingleDeviceXLAStrategy)


class FSDPMixedPrecisionPlugin(precision.FSDPPrecision):
    """FSDPPrecision under its former name; the former argument ``device`` is ignored."""

    def __new__(cls, precision: Any = "16-mixed", device: Any = None, scaler: Any = None) -> Any:
        lightning_deprecation(
            "FSDPMixedPrecisionPlugin is the former name of FSDPPrecision, which has no argument device. "
            "Write FSDPPrecision."
        )
        return super().__new__(cls, precision, scaler)


HPUAccelerator = _removed("HPUAccelerator")
HPUCheckpointIO = _removed("HPUCheckpointIO")
HPUParallelStrategy = _removed("HPUParallelStrategy")
HPUPrecisionPlugin = _removed("HPUPrecisionPlugin")
SingleHPUStrategy = _removed("SingleHPUStrategy")
