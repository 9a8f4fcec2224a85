"""Lightning's ``utilities.types``: types for annotations in programs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
BType = Tensor | str | Mapping[Any, Any] | Iterable[Any]

ArgsType = list[str] | dict[str, Any] | Namespace | None

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


class _RequiredOfScheduler(TypedDict):
    scheduler: LRSchedulerTypeUnion


class LRSchedulerConfigType(_RequiredOfScheduler, total=False):
    """A scheduler and its options: the entry "lr_scheduler" of a dictionary from ``configure_optimizers``."""

    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """A result of ``configure_optimizers``: only an optimizer."""

    optimizer: Optimizer


class _RequiredOfBoth(TypedDict):
    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType


class OptimizerLRSchedulerConfig(_RequiredOfBoth, total=False):
    """A result of ``configure_optimizers``: an optimizer and its scheduler."""

    monitor: str


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfigType]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
MODULE_OPTIMIZERS = Optimizer | list[Optimizer] | Any

FLOAT16_EPSILON = torch.finfo(torch.float16).eps
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
FLOAT64_EPSILON = torch.finfo(torch.float64).eps

TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")
T_destination = TypeVar("T_destination", bound=dict[str, Any])
RedOpType = torch.distributed.ReduceOp.RedOpType if torch.distributed.is_available() else object

_PATH = str | Path
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = (
    _DEVICE | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | dict[_DEVICE, _DEVICE] | None
)
_PARAMETERS = Iterator[nn.Parameter]


@runtime_checkable
class Steppable(Protocol):
    """An object with the method ``step`` of an optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """An object with the method ``step``, the parameter groups and the state dict of an optimizer."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""


@runtime_checkable
class CollectibleGroup(Protocol):
    """An object with the methods ``size`` and ``rank``, such as a process group."""

    def size(self) -> int:
        """Return the number of processes."""

    def rank(self) -> int:
        """Return the rank of this process."""


_PRECISION_INPUT_INT = Literal[64, 32, 16]
_PRECISION_INPUT_STR_ALIAS = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR = Literal[
    "transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true",
    "64-true",
]  # fmt: skip
_PRECISION_INPUT = _PRECISION_INPUT_INT | _PRECISION_INPUT_STR | _PRECISION_INPUT_STR_ALIAS
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
_OUT_DICT = dict[str, Tensor]
_PBAR_DICT = dict[str, float]


class _METRICS(TypedDict):
    """Logged values for callbacks, for loggers and for the progress bar."""

    callback: dict[str, Tensor]
    log: dict[str, Tensor]
    pbar: dict[str, float]
