"""Checks torch's optimizers in each dtype and with each kernel, also after a skipped step. They must agree with torch's
Python loop in float64.

[Note: skipped steps] If gradients overflow, ``torch.amp.GradScaler`` skips the optimizer's step. But it calls an
optimizer with a fused kernel, and passes ``found_inf``. The kernel then must not change anything. During these checks,
torch fills uninitialized memory with NaN, so a kernel that reads it always gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.torch_private import SCALES_ITSELF
from drivetrain.doctor.checks import Finding, Items
from drivetrain.doctor.devices import Kind, available
from drivetrain.errors import text_of

# These optimizers are left out: LBFGS needs a closure, SparseAdam needs sparse gradients, and Muon computes in 16 bits.
_OTHERS = ("LBFGS", "SparseAdam", "Muon")
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    # with torch's default eps, rounding errors alone would change the first steps
    "Adadelta": [{"lr": 1.0, "rho": 0.5, "eps": 0.01}],
}
_DEFAULT: list[dict[str, Any]] = [{"lr": 0.05}]

KERNELS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
}  # fmt: skip
_SKIPS: tuple[tuple[int, ...], ...] = ((), (0,), (2,))
_STEPS = 5
# A vectorized kernel has a loop for whole vectors, which 100 numbers need, and one for the rest, which 7 numbers need.
_SIZES = (7, 100)
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""For each dtype, the largest allowed error, relative to the largest change of a parameter."""


class Case(NamedTuple):
    """One optimizer with its arguments and its kernel.

    Attributes:
        kind: the optimizer's class.
        options: the optimizer's arguments.
        kernel: one of :data:`KERNELS`.
    """

    kind: Any
    options: dict[str, Any]
    kernel: str

    @property
    def shown(self) -> str:
        """The call that creates the optimizer, for messages."""
        momentum = "momentum=..., " if self.options.get("momentum") else ""
        return f"torch.optim.{self.kind.__name__}({momentum}{self.kernel}=True)"


def kinds() -> list[type[Optimizer]]:
    """Return torch's optimizers."""
    found = (getattr(torch.optim, name) for name in sorted(vars(torch.optim)))
    classes = [each for each in found if isinstance(each, type) and issubclass(each, Optimizer)]
    return [each for each in classes if each is not Optimizer and each.__name__ not in _OTHERS]


def check() -> Items:
    """Check all optimizers on the first device of each kind."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # this makes torch fill new memory with NaN
    for kind in available():
        if isinstance(kind, Kind):  # the check "devices" reports devices that cannot be used
            accelerator = kind.accelerator
            supported = {
                torch.float64: accelerator.supports_float64, torch.float32: True,
                torch.bfloat16: accelerator.supports_bfloat16, torch.float16: accelerator.supports_float16,
            }  # fmt: skip
            yield from compare(kinds(), kind.devices[0], [dtype for dtype, works in supported.items() if works])


def compare(classes: Sequence[type[Optimizer]], device: torch.device, dtypes: Sequence[torch.dtype]) -> Items:
    """Compare the optimizers of ``classes`` with their Python loop (``foreach=False``) in float64 on the CPU.

    All faults of one class with one kernel are one finding. If the class with this kernel fails in a dtype without
    skipped steps, it is not checked in this dtype with skipped steps.
    """
    count, faults = 0, dict[tuple[str, str, bool], dict[str, str]]()
    shown = dict[tuple[str, str, bool], str]()
    for kind, skips, options in (
        (each, skips, options)
        for each in classes for skips in _SKIPS for options in _OPTIONS.get(each.__name__, _DEFAULT)
    ):  # fmt: skip
        expected = train(Case(kind, options, "loop"), HOST, torch.float64, skips)
        for kernel, dtype in ((kernel, dtype) for kernel in KERNELS for dtype in dtypes):
            name, case = str(dtype).removeprefix("torch."), Case(kind, options, kernel)
            if name in faults.get((kind.__name__, kernel, False), ()) and skips:
                continue
            problem = _problem(case, device, dtype, skips, expected)
            count += problem is not None
            if problem:
                key = (kind.__name__, kernel, bool(skips))
                when = f" after step {skips[0] + 1} of {_STEPS} was skipped" if skips else ""
                shown.setdefault(key, f"{case.shown} on {device.type}{when}")
                faults.setdefault(key, {}).setdefault(name, problem)
    yield f"{count} comparisons on {device.type}"
    for key, problems in faults.items():
        yield Finding(
            f"{shown[key]}, in {', '.join(problems)}: {next(iter(problems.values()))}.",
            "Training continues with these weights, and nothing reports it.",
            f"torch.optim.{key[0]}(..., foreach={key[1] != 'foreach'}).",
        )  # fmt: skip


def _problem(
    case: Case, device: torch.device, dtype: torch.dtype, skips: tuple[int, ...], expected: Tensor
) -> str | None:
    """Say what is wrong; "" if nothing is, and ``None`` if the installed torch has no such kernel."""
    try:
        found = train(case, device, dtype, skips)
    except _NoKernel:
        return None
    except Exception as raised:
        return f"a step raised {type(raised).__name__}: {' '.join(text_of(raised).split())}"
    start = start_of(HOST, torch.float64)
    distance = float((expected - start).abs().max())
    error = float((found - expected).abs().max()) / distance
    if error <= TOLERANCES[dtype]:
        return ""
    unmoved = int(((found == start_of(HOST, dtype).double()) & ((expected - start).abs() > 0.1 * distance)).sum())
    if unmoved:
        return f"{unmoved} of {len(found)} numbers do not move"
    return f"weights are {'not numbers' if error != error else f'wrong by {error:.2g} times the way that they moved'}"


class _NoKernel(Exception):
    """Raised if the installed torch cannot create the optimizer with this kernel."""


def start_of(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the parameters before the first step, as one vector."""
    return torch.linspace(-1, 1, sum(_SIZES), dtype=torch.float64).to(device, dtype)


def train(case: Case, device: torch.device, dtype: torch.dtype, skips: tuple[int, ...]) -> Tensor:
    """Step an optimizer a few times, except the steps in ``skips``, as ``torch.amp.GradScaler`` does after an overflow.

    Returns:
        All parameters as one vector in 64 bits on the host.
    """
    parameters = [nn.Parameter(each.clone()) for each in torch.split(start_of(device, dtype), list(_SIZES))]
    try:
        optimizer: Any = case.kind(parameters, **case.options, **KERNELS[case.kernel])
    except (TypeError, RuntimeError, ValueError) as error:
        raise _NoKernel from error
    decides_itself = getattr(optimizer, SCALES_ITSELF, False)
    for step in range(_STEPS):
        if step in skips and not decides_itself:
            continue
        for parameter in parameters:
            slope = torch.linspace(0.5, 2, parameter.numel(), dtype=torch.float64, device=device) - 0.2 * step
            parameter.grad = (slope if step not in skips else slope / 0).to(dtype)
        if decides_itself:
            optimizer.grad_scale, optimizer.found_inf = None, torch.full((), float(step in skips), device=device)
        optimizer.step()
    return torch.cat([parameter.detach().double().cpu() for parameter in parameters])
