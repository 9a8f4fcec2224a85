"""The class of tensors that are read from a checkpoint only at the first use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.base import torch_private

HOST = torch.device("cpu")


class UnreadTensor(Tensor):
    """A tensor whose values are still in a checkpoint's files.

    Shape and dtype are known. Any operation reads all values.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> UnreadTensor:
        return torch_private.make_wrapper(cls, tuple(shape), dtype=dtype, device=HOST)

    def __init__(self, *_: Any) -> None:
        """Accept the arguments of ``__new__``."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch has no types for it

        def whole(value: Any) -> Any:
            return value.whole() if isinstance(value, UnreadTensor) else value

        return func(*torch_private.tree_map(whole, args), **torch_private.tree_map(whole, kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.whole()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @abstractmethod
    def whole(self) -> Tensor:
        """Read the complete tensor.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
