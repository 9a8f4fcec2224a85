"""Choose the kernel with which torch's optimizers step parameters on the host: a loop, ``foreach`` or ``fused``.

[Note: when]
On the host, torch loops over parameters in Python unless the optimizer was created with another kernel. The loop makes
one call per operation and parameter; ``foreach`` makes one call per operation for all parameters. For most optimizers,
both compute numbers that are equal bit for bit (``_EQUAL``). ``foreach`` is faster for many small parameters, and
slower if the parameters do not fit into the processor's cache. ``fused`` makes one call for all operations and
parameters. ``fused`` is faster at any size, but rounds differently. benchmarks/optimizer_kernels.py measures these
speeds. On other devices torch chooses ``foreach`` itself, and this module chooses nothing.

The options of an optimizer belong to the user, and checkpoints contain the options. A kernel is therefore set only
while the optimizer steps. If torch would choose the loop, this module sets ``foreach=False``. Otherwise torch would
inspect each parameter in each step to choose the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

_EQUAL = ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "Rprop")
"""Optimizers whose ``foreach`` computes the same numbers as the loop."""

_ROUNDING = ("NAdam", "RAdam")
"""Optimizers whose ``foreach`` is faster than the loop, but rounds differently."""

_LOOPS = (*_EQUAL, *_ROUNDING, "Adagrad", "ASGD")
"""Optimizers that loop over parameters on the host, unless an option asks for another kernel."""

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""Optimizers that have a fused kernel on the host."""

_FEWEST, _MOST_NUMBERS = 12, 300_000
"""``foreach`` is faster, and therefore used, for at least 12 parameters with at most 300,000 elements in total."""

_DTYPES = (torch.float32, torch.float64)
"""The dtypes of parameters for which a kernel is chosen. With narrower dtypes, ``foreach`` rounds differently, and
``fused`` has lost updates (pytorch#191763).
"""

# optimizer class, kernel, dtype, options -> whether a toy model got the same numbers as from torch's default kernel;
# kernels that round differently may differ slightly
_agree: dict[tuple[Any, ...], bool] = {}


class Kernel(NamedTuple):
    """The kernel of one group of parameters.

    Attributes:
        group: one of ``optimizer.param_groups``.
        name: the option that chooses the kernel, "foreach" or "fused".
        size: the number of parameters for which the kernel was chosen.
        value: the option's value; ``False`` chooses the loop, which fits any number of parameters.
    """

    group: dict[str, Any]
    name: str
    size: int
    value: bool = True

    def fits(self) -> bool:
        """Return whether the kernel can be set: no kernel is set, the learning rate is no tensor, and the group still
        has ``size`` parameters.
        """
        group = self.group
        is_free = group["foreach"] is None and group.get("fused") is None
        return is_free and len(group["params"]) == self.size and type(group["lr"]) is not Tensor


def choose(optimizer: Optimizer, wanted: str | None) -> list[Kernel]:
    """Return the kernels that are faster than torch's default kernel: at most one for each parameter group.

    Args:
        optimizer: an instance of a torch class, not of a subclass.
        wanted: "equal": only kernels that compute the same numbers as the default; "fastest": also kernels that round
            differently; ``None``: no kernels.
    """
    if wanted is None:
        return []
    found = (_kernel(type(optimizer), group, wanted == "fastest") for group in optimizer.param_groups)
    return [each for each in found if each is not None and each.fits() and _agrees(type(optimizer), each)]


def loops(optimizer: Optimizer, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return one kernel that selects the loop for each parameter group that has no kernel in ``kernels``. Groups for
    which torch would not choose the loop are left out.
    """
    if type(optimizer).__name__ not in _LOOPS:
        return []
    others = [group for group in optimizer.param_groups if not any(group is each.group for each in kernels)]
    looped = [group for group in others if all(type(each) is nn.Parameter and each.is_cpu for each in group["params"])]
    return [Kernel(group, "foreach", len(group["params"]), value=False) for group in looped]


def with_kernels(step: Callable[[Optimizer], Any], kernels: Sequence[Kernel]) -> Callable[[Optimizer], Any]:
    """Return a function that calls ``step`` while the options of ``kernels`` are set."""
    if not kernels:
        return step

    def step_with_kernels(optimizer: Optimizer) -> None:
        chosen = []  # no comprehension, which is a function call in older Pythons
        for kernel in kernels:
            group, name, _, value = kernel
            if group["foreach"] is None and (not value or kernel.fits()):
                group[name] = value
                chosen.append(kernel)
        try:
            step(optimizer)
        finally:
            for group, name, _, _ in chosen:
                group[name] = None

    return step_with_kernels


def _kernel(kind: type[Optimizer], group: dict[str, Any], may_round: bool) -> Kernel | None:
    parameters = group["params"]
    if not all(type(each) is nn.Parameter and each.is_cpu and each.dtype in _DTYPES for each in parameters):
        return None
    # If two parameters share memory, other kernels may compute other numbers than the loop.
    count, numbers = len({each.data_ptr() for each in parameters}), sum(each.numel() for each in parameters)
    if count < len(parameters):
        return None
    has_state = kind is not SGD or group["momentum"] != 0  # plain SGD is no faster with ``fused``
    if may_round and kind.__name__ in _FUSED and has_state and count > 0:
        return Kernel(group, "fused", count)
    has_foreach = kind.__name__ in (_EQUAL + _ROUNDING if may_round else _EQUAL)
    if has_foreach and count >= _FEWEST and numbers <= _MOST_NUMBERS:
        return Kernel(group, "foreach", count)
    return None


def _agrees(kind: type[Optimizer], kernel: Kernel) -> bool:
    """Whether a toy model with the group's options gets the same numbers from this kernel as from torch's default
    kernel.
    """
    sample, options = kernel.group["params"][0], {key: each for key, each in kernel.group.items() if key != "params"}
    toy = (kind, kernel.name, sample.dtype, repr(sorted(options.items())))
    if toy not in _agree:
        is_exact = kernel.name == "foreach" and kind.__name__ in _EQUAL
        relative, absolute = (0.0, 0.0) if is_exact else (1e-4, 1e-6)
        try:
            one, other = (_train_toy(kind, sample.dtype, {**options, kernel.name: on}) for on in (None, True))
            _agree[toy] = torch.allclose(one, other, rtol=relative, atol=absolute)
        except Exception:  # the installed torch lacks this kernel for this optimizer
            _agree[toy] = False
    return _agree[toy]


def _train_toy(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    values = torch.arange(1.0, 13.0, dtype=dtype) / 4
    toys = [nn.Parameter(values), nn.Parameter(-values[:7])]
    optimizer = kind([{"params": toys, **options}])
    for step in range(1, 4):
        for toy in toys:
            toy.grad = toy.detach() * step - 1
        optimizer.step()
    return torch.cat([toy.detach() for toy in toys])
