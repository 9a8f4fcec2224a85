"""Names that programs for Lightning 1.x import from ``pytorch_lightning.utilities`` and ``core.memory``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import drivetrain.compat.model_summary
import drivetrain.compat.parameters
from drivetrain.compat.enums import LightningEnum
from drivetrain.errors import unknown_value


class AMPType(LightningEnum):
    """The implementation of automatic mixed precision."""

    APEX = "apex"
    NATIVE = "native"


class DeviceType(LightningEnum):
    """The kinds of hardware."""

    CPU = "CPU"
    GPU = "GPU"
    TPU = "TPU"


class DistributedType(LightningEnum):
    """The strategies' names, as in ``accelerator=`` and ``distributed_backend=``."""

    DP = "dp"
    DDP = "ddp"
    DDP2 = "ddp2"
    DDP_SPAWN = "ddp_spawn"
    TPU_SPAWN = "tpu_spawn"
    DEEPSPEED = "deepspeed"
    HOROVOD = "horovod"
    DDP_SHARDED = "ddp_sharded"
    DDP_SHARDED_SPAWN = "ddp_sharded_spawn"
    RPC_SEQUENTIAL_PLUGIN = "rpc_sequential"


def apply_to_collection(
    data: Any, dtype: Any, function: Callable[..., Any], *args: Any, wrong_dtype: Any = None, **kwargs: Any
) -> Any:
    """Return ``data`` with each item of type ``dtype`` replaced by ``function(item, *args, **kwargs)``.

    Args:
        data: an object, or a nested structure of dictionaries, lists, tuples and named tuples, whose classes are kept.
        dtype: a type, or several types.
        function: called for each item.
        args, kwargs: further arguments of ``function``.
        wrong_dtype: a type, or several types; items of these types are not replaced.
    """

    def within(item: Any) -> Any:
        return apply_to_collection(item, dtype, function, *args, wrong_dtype=wrong_dtype, **kwargs)

    if isinstance(data, dtype) and (wrong_dtype is None or not isinstance(data, wrong_dtype)):
        return function(data, *args, **kwargs)
    kind: Any = type(data)
    if isinstance(data, Mapping):
        return kind({key: within(value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return kind(*map(within, data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return kind([within(value) for value in data])
    return data


def grad_norm(module: Any, norm_type: float | int | str) -> dict[str, float]:
    """Return the norm of each parameter's gradient and the total norm, rounded as in Lightning 1.3. This function waits
    for the device.
    """
    norms = drivetrain.compat.parameters.grad_norm(module, norm_type, group_separator="_")
    return {name: round(float(value), 4) for name, value in norms.items()}


class ModelSummary(drivetrain.compat.model_summary.ModelSummary):
    """drivetrain's ModelSummary, with the argument ``mode`` instead of ``max_depth``.

    Args:
        model: any module.
        mode: "top" for the model's children, "full" for all submodules.

    Raises:
        ConfigurationError: the mode is unknown.
    """

    MODE_TOP, MODE_FULL, MODE_DEFAULT = "top", "full", "top"
    MODES = ("full", "top")

    def __init__(self, model: Any, mode: str = MODE_DEFAULT) -> None:
        if mode not in self.MODES:
            raise unknown_value("ModelSummary", "mode", mode, self.MODES)
        super().__init__(model, max_depth=1 if mode == self.MODE_TOP else -1)
        self.mode = mode
