"""Checks a forward and a backward pass on each device, in each precision, against the CPU in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import Accelerator, AcceleratorRegistry
from drivetrain.doctor.checks import Finding, Items
from drivetrain.engine.engine import Engine
from drivetrain.errors import ConfigurationError, text_of
from drivetrain.precision.precision import PrecisionRegistry

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3}  # relative errors; in float32, TF32 may be used
_TOLERANCE = 0.2  # for types of 16 and 8 bits
_WIDTH = 64


class Kind(NamedTuple):
    """One kind of device on this machine.

    Attributes:
        name: the value for ``accelerator``.
        accelerator: the accelerator.
        devices: the devices of this kind.
    """

    name: str
    accelerator: Accelerator
    devices: list[torch.device]


def available() -> Iterator[Kind | Finding]:
    """Yield each kind of device that this machine can use, but only under one of its names. If asking for a kind raises
    an error, yield a finding.
    """
    for name in AcceleratorRegistry.available():
        if any(other < name for other in AcceleratorRegistry.other_names(name)):
            continue
        try:
            entry = AcceleratorRegistry.entry(name)
            if entry.cls.is_available():
                accelerator = entry.build()
                numbers = list(range(accelerator.auto_device_count()))
                yield Kind(name, accelerator, list(accelerator.get_parallel_devices(numbers)))
        except Exception as error:  # a package or driver may be broken; check the other kinds
            yield Finding(
                f"The accelerator {name!r} raised {type(error).__name__}: {' '.join(text_of(error).split())}",
                "Its devices cannot be used.", "drivetrain devices, and repair or remove its package or driver.",
            )  # fmt: skip


def check() -> Items:
    """Compare the output and the gradients of a small network on each device in each precision."""
    precisions = {}
    # A class may have several names, such as "16" and "16-mixed". The last one is the complete name.
    for name in PrecisionRegistry.available():
        entry = PrecisionRegistry.entry(name)
        precisions[entry.cls, repr(entry.init_params)] = name
    for kind in available():
        if isinstance(kind, Finding):
            yield kind
            continue
        for index in range(len(kind.devices)):
            where = kind.name if len(kind.devices) == 1 else f"{kind.name}:{index}"
            right = []
            for precision in sorted(precisions.values()):
                try:
                    problem = compare(kind, index, precision)
                except ConfigurationError:  # a package is missing, or the device does not support this type
                    continue
                except Exception as error:
                    problem = f"raised {type(error).__name__}: {' '.join(text_of(error).split())}"
                if problem is None:
                    right.append(precision)
                    continue
                other = "64-true" if precision == "32-true" else "32-true"
                yield Finding(
                    f'On {where} with precision="{precision}", a small network {problem}.',
                    "A training with it fails, or learns from wrong numbers.",
                    f'Trainer(precision="{other}"), and report it with the versions of torch and the driver.',
                )  # fmt: skip
            yield f"{where}: {', '.join(right) or 'no precision'}"


def compare(kind: Kind, index: int, precision: str) -> str | None:
    """Say how a network's output or gradients on a device differ from those in float64; ``None`` if they agree.

    Raises:
        ConfigurationError: this precision cannot be used on this device.
    """
    engine = Engine(
        accelerator=kind.name,
        devices=1 if len(kind.devices) == 1 else [index],
        precision=precision,  # type: ignore[arg-type]  # names from the registry
    )
    numbers = torch.linspace(-1, 1, _WIDTH * _WIDTH)
    network = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 16))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_((numbers[: parameter.numel()] * 37).sin().view_as(parameter) / 8)
    batch = (numbers * 53).cos().view(_WIDTH, _WIDTH)
    exact = copy.deepcopy(network).double()
    expected = exact(batch.double())
    expected.square().mean().backward()

    model = engine.setup(network)
    output = model(batch.to(engine.device))
    engine.backward(output.square().mean())
    scale = float(engine.strategy.precision_plugin.scale(torch.ones((), device=engine.device)))
    dtypes = {output.dtype, engine.strategy.precision_plugin.computes_in or output.dtype, network[0].weight.dtype}
    tolerance = max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in dtypes)
    layers: Any = (network[0], exact[0])
    for what, error in (
        ("an output", _difference(output, expected.detach())),
        ("a gradient", _difference(layers[0].weight.grad / scale, layers[1].weight.grad)),
    ):
        if not error <= tolerance:  # "not <=", so that NaN counts as a difference
            return f"computes {what} that differs by {error:.2g} of its size from the one in 64 bits"
    return None


def _difference(found: Tensor, right: Tensor) -> float:
    return float((found.detach().cpu().double() - right).norm() / right.norm())
