"""What torch.compile returned becomes a LightningModule, and one that is not compiled again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.compat.boring_classes import BoringModel, RandomDataset
from drivetrain.compat.compiled import _maybe_unwrap_optimized, from_compiled, to_uncompiled


class Counts:
    """A backend of torch.compile that counts how often what it compiled is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, example: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def test_a_module_is_compiled_in_place_and_back() -> None:
    backend, x = Counts(), torch.ones(1, 32)
    net = BoringModel()
    compiled = torch.compile(net, backend=backend)
    for turn in (from_compiled, _maybe_unwrap_optimized):
        assert turn(compiled) is net
    expected = net.forward(x)
    assert torch.equal(net(x), expected)
    assert backend.calls == 1
    assert to_uncompiled(net) is net
    assert torch.equal(net(x), expected)
    assert backend.calls == 1
    assert _maybe_unwrap_optimized(net) is net


def test_a_model_that_was_trained_compiled_is_exported_uncompiled() -> None:
    """As the original's documentation shows it, with what torch.compile returned passed to the Trainer."""
    backend = Counts()
    compiled: Any = torch.compile(BoringModel(), backend=backend)
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, **quiet)  # type: ignore[arg-type]
    trainer.fit(compiled, DataLoader(RandomDataset(32, 4)))
    assert backend.calls > 0
    calls = backend.calls
    model = to_uncompiled(compiled)
    assert type(model) is BoringModel
    model(torch.ones(1, 32))
    model.training_step(torch.ones(1, 32), 0)
    assert backend.calls == calls


@pytest.mark.parametrize(
    ("turn", "given", "kind", "said"),
    [
        (from_compiled, BoringModel(), ValueError, "got a BoringModel"),
        (from_compiled, torch.compile(nn.Linear(1, 1), backend="eager"), ValueError, "got a Linear"),
        (to_uncompiled, torch.compile(nn.Linear(1, 1), backend="eager"), TypeError, "got a Linear"),
        (to_uncompiled, BoringModel(), ValueError, "not compiled"),
        (to_uncompiled, nn.Linear(1, 1), ValueError, "got a Linear"),
        (_maybe_unwrap_optimized, nn.Linear(1, 1), TypeError, "got a Linear"),
    ],
    ids=range(6),
)
def test_anything_else_is_refused(turn: Any, given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        turn(given)
