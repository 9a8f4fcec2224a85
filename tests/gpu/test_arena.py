"""The memory for copies of checkpoints, on a real CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch

from drivetrain.accelerators import CUDAAccelerator
from drivetrain.checkpoints.arena import Arena

pytestmark = pytest.mark.skipif(
    not CUDAAccelerator.is_available(), reason=f"no CUDA device: {CUDAAccelerator.why_unavailable()}"
)


def test_the_device_copies_into_memory_that_is_locked_also_after_it_has_grown() -> None:
    arena, kept = Arena(), []
    for size in (5, 2**24, 7):
        values = torch.randn(size, device="cuda")
        host = torch.arange(3.0)
        expected = values.cpu()
        copies = arena.hold([values, host])
        arena.fill()
        values.zero_()  # the device does this after the copy, which may not even have begun
        arena.wait()
        assert all(each.is_pinned() for each in copies)
        kept.append((copies, expected))
    assert all(torch.equal(copies[0], values) and copies[1].tolist() == [0, 1, 2] for copies, values in kept)
    again = [each for copies, _ in kept for each in copies]
    arena.close()
    assert not any(each.is_pinned() for each in again)
