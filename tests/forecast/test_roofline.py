"""Times of operations, computed by hand for a device of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.forecast.devices import device_of
from drivetrain.forecast.operations import Exchange, Operation, Phase, Ranks
from drivetrain.forecast.roofline import arithmetic, duration, fused, is_launched

DEVICE = device_of("name=X1,memory=1GB,tflops=100,tflops_float32=10,tflops_tf32=50,gbps=1TB/s,link=100GB/s")
"""100 operations take as long in bfloat16 as a byte of memory."""


def made(name: str, flops: int = 0, moved: int = 0, dtype: str = "bfloat16", phase: Phase = "forward") -> Operation:
    return Operation(name, dtype, flops, moved, phase, "layers.0", "")


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    # 2e12 operations at 1e14 a second; 3e9 bytes at 1e12 a second
    assert duration(made("aten.mm", 2 * 10**12, 3 * 10**9), DEVICE) == pytest.approx(0.020)
    assert duration(made("aten.mm", 2 * 10**11, 3 * 10**9), DEVICE) == pytest.approx(0.003)
    assert duration(made("aten.add", 0, 3 * 10**9), DEVICE) == pytest.approx(0.003)
    assert arithmetic(made("aten.add", 0, 3 * 10**9), DEVICE) == 0


def test_matrices_of_float32_take_longer_unless_tf32_is_allowed() -> None:
    operation = made("aten.mm", 10**12, 1, "float32")
    assert duration(operation, DEVICE) == pytest.approx(0.1)
    assert duration(operation, DEVICE, tf32=True) == pytest.approx(0.02)
    assert duration(replace(operation, dtype="bfloat16"), DEVICE, tf32=True) == pytest.approx(0.01)


def test_attention_reaches_less_than_matrices() -> None:
    h100 = device_of("H100 80GB")
    attention = made("aten._scaled_dot_product_flash_attention", 10**12, 1)
    # 1e12 operations at 35 % of 989.4e12, and at 80.3 %
    assert duration(attention, h100) == pytest.approx(2.888e-3, rel=1e-3)
    assert duration(replace(attention, name="aten.mm"), h100) == pytest.approx(1.258e-3, rel=1e-3)


def test_time_grows_with_bytes_and_with_operations() -> None:
    times = [duration(made("aten.add", 0, moved), DEVICE) for moved in (1, 10, 10**6, 10**9)]
    assert times == sorted(times)
    assert len(set(times)) == 4
    times = [duration(made("aten.mm", flops, 10), DEVICE) for flops in (10, 10**6, 10**9, 10**12)]
    assert times == sorted(times)


def test_a_view_is_no_kernel() -> None:
    assert not is_launched(made("aten.view"))
    assert is_launched(made("aten.add", 0, 1))
    assert is_launched(made("aten.mm", 1, 0))


def test_operations_between_two_matrix_operations_become_one_kernel_of_the_largest() -> None:
    steps = [
        made("aten.mm", 5, 100), made("aten.silu", 0, 20), made("aten.view"), made("aten.mul", 0, 30),
        made("aten.neg", 0, 5), made("aten.mm", 7, 100), made("aten.add", 0, 40),
    ]  # fmt: skip
    assert [(each.name, each.bytes_moved) for each in fused(steps) if isinstance(each, Operation)] == [
        ("aten.mm", 100), ("aten.mul", 30), ("aten.mm", 100), ("aten.add", 40)
    ]  # fmt: skip


def test_phases_optimizers_and_copies_of_fsdp_are_not_fused() -> None:
    steps = [
        made("aten.add", 0, 1), made("aten.mul", 0, 2, phase="recompute"), made("aten.mul", 0, 3, phase="backward"),
        made("fsdp.chunk_cat", 0, 4, phase="backward"), made("aten.mul", 0, 5, phase="backward"),
        made("aten.mul", 0, 6, phase="optimizer"), made("aten.add", 0, 7, phase="optimizer"),
    ]  # fmt: skip
    assert fused(steps) == tuple(steps)
    assert len(fused([made("aten.add", 0, 1), made("aten.mul", 0, 2)])) == 1


def test_exchanges_and_waits_separate_kernels_and_keep_their_places() -> None:
    """The wait before "c" is between "b" and "c", after as before."""
    exchange = Exchange("all_reduce", Ranks(2, 1), 8, "bfloat16", "forward", "", 5)
    after_all = replace(exchange, waited_on_at=7)
    steps = [made("a0", 0, 1), made("a", 0, 2), exchange, after_all, made("b", 0, 3), made("c", 0, 4), made("d", 0, 5)]
    kept = fused(steps)
    assert [each.name for each in kept] == ["a", "all_reduce", "all_reduce", "b", "d"]
    assert [each.waited_on_at for each in kept if isinstance(each, Exchange)] == [4, 5]


def test_a_wait_at_a_view_separates_too() -> None:
    exchange = Exchange("all_reduce", Ranks(2, 1), 8, "bfloat16", "forward", "", 2)
    steps = [exchange, made("a", 0, 1), made("aten.view"), made("b", 0, 2)]
    kept = fused(steps)
    assert [each.name for each in kept] == ["all_reduce", "a", "b"]
    assert isinstance(first := kept[0], Exchange)
    assert first.waited_on_at == 2
