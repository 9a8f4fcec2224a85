"""A differential equation with PINA: u' = u from u(0) = 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from outcome import ended, metrics, norm, report
from pina import Condition, Trainer
from pina.callback import MetricTracker
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import grad
from pina.problem import SpatialProblem
from pina.solver import PINN, GradientPINN, SelfAdaptivePINN


def growth(inputs: Any, outputs: Any) -> Any:
    return grad(outputs, inputs, components=["u"], d=["x"]) - outputs.extract(["u"])


class Growth(SpatialProblem):
    output_variables: ClassVar[list[str]] = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1]})
    domains: ClassVar[dict[str, Any]] = {"start": CartesianDomain({"x": 0.0}), "inside": CartesianDomain({"x": [0, 1]})}
    conditions: ClassVar[dict[str, Any]] = {
        "start": Condition(domain="start", equation=FixedValue(1.0)),
        "inside": Condition(domain="inside", equation=Equation(growth)),
    }


def numbers(folder: Path, seed: int, solver_of: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    pl.seed_everything(seed)
    problem = Growth()
    problem.discretise_domain(20, "grid", domains="inside")
    problem.discretise_domain(1, "random", domains="start")
    solver, tracker = solver_of(problem, FeedForward(1, 1, layers=[8, 8])), MetricTracker()
    trainer = Trainer(
        solver, max_epochs=6, accelerator="cpu", default_root_dir=str(folder), enable_progress_bar=False,
        callbacks=[tracker], train_size=0.8, val_size=0.2, test_size=0.0, **arguments,
    )  # fmt: skip
    trainer.train()
    return {
        "metrics": metrics(trainer),
        "ended": ended(trainer),
        "weights": norm(solver),
        "tracked": {name: values.tolist() for name, values in sorted(tracker.metrics.items())},
        "logged": {name: value.item() for name, value in sorted(trainer.logged_metrics.items())},
    }


def residuals(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, PINN)


def batches(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, PINN, batch_size=5)


def gradients(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, GradientPINN)


def adaptive(folder: Path, seed: int) -> dict[str, Any]:
    """By manual optimization, with an optimizer for the weights of the losses."""
    return numbers(folder, seed, SelfAdaptivePINN)


if __name__ == "__main__":
    report(residuals=residuals, batches=batches, gradients=gradients, adaptive=adaptive)
