"""Precisions that use one 16-bit type for parameters, inputs and new tensors. Also the base class of all precisions
with one type.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from drivetrain.base.torch_private import apply
from drivetrain.base.tree import map_leaves
from drivetrain.errors import check_known
from drivetrain.precision.precision import Precision, in_default_dtype

_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class TruePrecision(Precision):
    """Base class of precisions with one floating-point type for parameters, buffers, inputs and new tensors.

    Integer, boolean and complex tensors are not converted, as in ``Module.half()`` and ``Module.double()``. Tensors
    inside objects of other libraries are also not converted. Convert such tensors in ``on_before_batch_transfer``.

    Args:
        name: the name of the precision, as in ``Trainer(precision=name)``.
        dtype: the floating-point type.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = self.computes_in = dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        # module.to(dtype) would also convert complex tensors, and drop their imaginary parts
        apply(module, self._convert)
        return module

    def convert_input(self, data: Any) -> Any:
        return map_leaves(self._convert_leaf, data)

    def convert_output(self, data: Any) -> Any:
        return in_default_dtype(data)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        return DefaultDtype(self.dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any] | None:
        return DefaultDtype(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any] | None:
        return self.tensor_init_context()

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _convert_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._convert(leaf)
        if isinstance(leaf, PackedSequence):
            return leaf.to(self._convert(leaf.data[:0]).dtype)
        return leaf


class HalfPrecision(TruePrecision):
    """All floating-point tensors have 16 bits, including the optimizer's state.

    Small updates of weights are rounded to zero.

    Args:
        precision: "bf16-true", which has the range of float32 and few digits, or "16-true", which has more digits and a
            small range. The loss is not scaled. Small constants of an optimizer may be rounded to 0: Adam needs
            ``eps=1e-4`` in "16-true".

    Raises:
        ConfigurationError: the precision is unknown.
    """

    _names: ClassVar = {name: {"precision": name} for name in _DTYPES}

    def __init__(self, precision: str = "16-true") -> None:
        check_known("HalfPrecision", precision, "half precision", _DTYPES)
        super().__init__(precision, _DTYPES[precision])


class DefaultDtype:
    """A context in which new floating-point tensors have one dtype. The context can be entered several times, even
    while it is active.

    Args:
        dtype: the dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._outer: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._outer.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._outer.pop())
