"""What plans change in torch."""

from __future__ import annotations

import pytest
import torch

from drivetrain.forecast import torch_tools


def test_a_plan_sees_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers ask an accelerator that is there whether it records a graph, which fails in a forked process."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    torch_tools.hide_devices()
    assert not torch.accelerator.is_available()
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
