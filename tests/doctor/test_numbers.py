"""Devices and optimizers against 64 bits: seeded faults are found, and right ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from drivetrain.accelerators import AcceleratorRegistry, CPUAccelerator
from drivetrain.doctor import devices, optimizers
from drivetrain.doctor.checks import Finding
from drivetrain.precision.precision import Precision, PrecisionRegistry

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32]


@pytest.fixture
def fills_memory() -> Iterator[None]:
    """As the check does."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def found(*classes: Any, dtypes: Any = FLOATS) -> list[str]:
    return [each.what for each in optimizers.compare(classes, CPU, dtypes) if isinstance(each, Finding)]


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fills_memory")
def test_torchs_kernels_of_adam_are_right_in_each_type() -> None:
    assert found(Adam, AdamW, dtypes=[*FLOATS, torch.bfloat16, torch.float16]) == []


class Still(Adam):
    """Its foreach kernel does not step."""

    def step(self, closure: Any = None) -> Any:
        return None if self.defaults["foreach"] else super().step(closure)


class Doubled(Adam):
    """Its fused kernel steps twice as far, in 32 bits alone."""

    def step(self, closure: Any = None) -> Any:
        before = [each.detach().clone() for each in self.param_groups[0]["params"]]
        super().step(closure)
        if self.defaults["fused"] and before[0].dtype == torch.float32:
            for parameter, old in zip(self.param_groups[0]["params"], before, strict=True):
                parameter.data.add_(parameter.data - old)


class Steps(SGD):
    """Its fused kernel ignores that a step is to be skipped."""

    def step(self, closure: Any = None) -> Any:
        if getattr(self, "found_inf", None) is not None:
            self.found_inf = torch.zeros(())
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = parameter.grad.nan_to_num(posinf=1.0)
        return super().step(closure)


class Raises(Adam):
    """Its loop raises at the second step in narrow types."""

    def step(self, closure: Any = None) -> Any:
        parameter: Tensor = self.param_groups[0]["params"][0]
        if parameter in self.state and parameter.dtype == torch.bfloat16:
            raise RuntimeError("not implemented\nfor BFloat16")
        return super().step(closure)


@pytest.mark.usefixtures("fills_memory")
@pytest.mark.parametrize(
    ("kind", "dtypes", "what"),
    [
        (Still, FLOATS, "torch.optim.Still(foreach=True) on cpu, in float64, float32: 107 of 107 numbers do not move."),
        (Doubled, FLOATS, "torch.optim.Doubled(fused=True) on cpu, in float32: weights are wrong by "),
        (Steps, [torch.float64],
         "torch.optim.Steps(fused=True) on cpu after step 1 of 5 was skipped, in float64: weights are wrong by "),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_one_finding(kind: Any, dtypes: Any, what: str) -> None:
    [finding] = found(kind, dtypes=dtypes)
    assert finding.startswith(what)


def test_a_step_that_raises_is_a_finding() -> None:
    findings = found(Raises, dtypes=[torch.float32, torch.bfloat16])
    assert len(findings) == 3
    assert all("in bfloat16: a step raised RuntimeError: not implemented for BFloat16." in each for each in findings)


def test_all_of_torchs_optimizers_are_compared_but_three() -> None:
    names = {each.__name__ for each in optimizers.kinds()}
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"} <= names
    assert not names & {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


# ---- devices ---------------------------------------------------------------------------------------------------------


class Wrong(Precision):
    """Its forward pass is right, and its gradients are scaled and never unscaled."""

    name = "wrong"

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 3, *args, **kwargs)


class Broken(Precision):
    """Its forward pass raises."""

    name = "broken"

    def forward_context(self) -> AbstractContextManager[Any]:
        raise RuntimeError("no kernel image\nis available")


@pytest.fixture
def precisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = dict(PrecisionRegistry._registered)
    monkeypatch.setattr(PrecisionRegistry, "available", lambda: ["32-true", "broken", "wrong"])
    monkeypatch.setattr(AcceleratorRegistry, "available", lambda: ["cpu"])
    yield PrecisionRegistry
    PrecisionRegistry._registered.clear()
    PrecisionRegistry._registered.update(before)


def test_a_device_with_wrong_gradients_or_an_exception_is_found(precisions: Any) -> None:
    precisions.register("wrong", Wrong)
    precisions.register("broken", Broken)
    *findings, fact = devices.check()
    assert fact == "cpu: 32-true"
    assert [each.what for each in findings if isinstance(each, Finding)] == [
        'On cpu with precision="broken", a small network raised RuntimeError: no kernel image is available.',
        'On cpu with precision="wrong", a small network computes a gradient that differs by 2 of its size from the '
        "one in 64 bits.",
    ]


class Unplugged(CPUAccelerator):
    """Asking it raises."""

    @staticmethod
    def is_available() -> bool:
        raise RuntimeError("its driver hung")


def test_an_accelerator_that_raises_does_not_hide_the_others() -> None:
    before = dict(AcceleratorRegistry._registered)
    try:
        AcceleratorRegistry.register("unplugged", Unplugged)
        found = {each.what if isinstance(each, Finding) else each.name for each in devices.available()}
    finally:
        AcceleratorRegistry._registered.clear()
        AcceleratorRegistry._registered.update(before)
    assert found >= {"cpu", "The accelerator 'unplugged' raised RuntimeError: its driver hung"}
