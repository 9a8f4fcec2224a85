"""The state that a launching process passes to the processes of the job: environment variables, torch's switches,
random states.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from drivetrain import parity
from drivetrain.base.seed import set_rng_state

T = TypeVar("T")

# The backends that have torch's newer switch ``fp32_precision``. "" is the switch for all operations.
_FP32_PRECISION = (
    "", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessState:
    """The process-wide state that a program can set before the job's processes start.

    For the random generators of a device, only the seed is passed. Reading a device generator's state would initialize
    the device in this process.
    """

    environ: dict[str, str]
    rng: dict[str, Any]
    seed: int
    deterministic: tuple[bool, bool, bool]  # deterministic algorithms: on, warn only, fill memory
    cudnn: tuple[bool, bool, bool]  # enabled, benchmark, deterministic
    fp32_precision: dict[str, str]
    matmul_precision: str | None  # torch's older switch, or None if it cannot express the values of the newer switches
    cudnn_tf32: bool | None
    default_dtype: torch.dtype
    parity: parity.Parity

    @classmethod
    def current(cls) -> ProcessState:
        """Return the state of this process."""
        rng: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            rng["numpy"] = numpy.random.get_state()
        cudnn = torch.backends.cudnn
        return cls(
            environ=dict(os.environ),
            rng=rng,
            seed=torch.initial_seed(),
            deterministic=_deterministic(),
            cudnn=(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
            fp32_precision={name: _backend(name).fp32_precision for name in _FP32_PRECISION},
            matmul_precision=_unless_mixed(torch.get_float32_matmul_precision),
            cudnn_tf32=_unless_mixed(lambda: cudnn.allow_tf32),
            default_dtype=torch.get_default_dtype(),
            parity=parity.current(),
        )

    def apply(self, ranks: Mapping[str, str]) -> None:
        """Apply the state to this process, and set the environment variables ``ranks``, among them the process's
        rank.
        """
        os.environ.update({**self.environ, **ranks})
        torch.manual_seed(self.seed)
        set_rng_state(self.rng)
        if self.deterministic != _deterministic():  # set only if different, because setting imports torch's compiler
            on, warn_only, fill = self.deterministic
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        cudnn = torch.backends.cudnn
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self.cudnn
        self._apply_fp32_precision()
        torch.set_default_dtype(self.default_dtype)
        parity.use(self.parity)

    def _apply_fp32_precision(self) -> None:
        """Set torch's switches for float32. The older switches come first, because torch refuses them after the newer
        switches were set.
        """
        with warnings.catch_warnings():
            # torch gave the same warnings when the program set the older switches
            warnings.simplefilter("ignore")
            if self.matmul_precision not in (None, _unless_mixed(torch.get_float32_matmul_precision)):
                torch.set_float32_matmul_precision(self.matmul_precision)
            if self.cudnn_tf32 not in (None, _unless_mixed(lambda: torch.backends.cudnn.allow_tf32)):
                torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        for name, precision in self.fp32_precision.items():
            if _backend(name).fp32_precision != precision:
                _backend(name).fp32_precision = precision


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def _unless_mixed(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except RuntimeError:
        return None


def _backend(name: str) -> Any:
    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found
