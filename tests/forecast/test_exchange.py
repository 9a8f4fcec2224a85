"""Times of exchanges and of windows, computed by hand for a device of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.forecast.devices import device_of
from drivetrain.forecast.exchange import (
    COPY_IN,
    Forecast,
    exchange_time,
    fastest_first,
    forecast,
    in_pipeline,
    of_window,
    spread,
)  # fmt: skip
from drivetrain.forecast.operations import Exchange, Operation, Phase, Ranks, Recorded

ONE = (
    "name=X1,memory=1GB,tflops=100,gbps=1TB/s,launch=1ns,"
    "link=100GB/s,link_latency=1us,between=10GB/s,between_latency=10us"
)
DEVICE = device_of(ONE)
BIG = 8 * 10**9
"""So many bytes that latencies do not count."""


def exchange(name: str, count: int, stride: int = 1, size: int = BIG, until: int = 0) -> Exchange:
    return Exchange(name, Ranks(count, stride), size, "bfloat16", "backward", "", until)


def kernel(milliseconds: float, name: str = "aten.mul", phase: Phase = "forward") -> Operation:
    return Operation(name, "bfloat16", 0, int(milliseconds * 1e9), phase, "", "")


def took(name: str, count: int, stride: int = 1, size: int = BIG, device: str = ONE) -> float:
    return exchange_time(exchange(name, count, stride, size), device_of(device), 8)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Ranks(8, 1), (1, 8)), (Ranks(4, 1), (1, 4)), (Ranks(4, 2), (1, 4)), (Ranks(16, 1), (2, 8)),
        (Ranks(4, 8), (4, 1)), (Ranks(8, 4), (4, 2)), (Ranks(8, 64), (8, 1)), (Ranks(12, 1), (2, 8)),
    ],
)  # fmt: skip
def test_the_machines_of_a_group_follow_from_its_stride(ranks: Ranks, expected: tuple[int, int]) -> None:
    """Eight ranks on a machine: 0 to 7, 8 to 15, ..."""
    assert spread(ranks, 8) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # a ring of 8: each rank sends 7/8 of 8 GB at 100 GB/s; all_reduce twice that
        ("all_gather", 0.07), ("reduce_scatter", 0.07), ("all_reduce", 0.14), ("broadcast", 0.08), ("all_to_all", 0.07),
    ],
)  # fmt: skip
def test_large_exchanges_in_a_machine_take_bytes_by_bandwidth(name: str, expected: float) -> None:
    assert took(name, 8) == pytest.approx(expected, rel=1e-3)


def test_a_pair_sends_all_bytes_over_its_link() -> None:
    assert took("send", 2, 1) == pytest.approx(0.08, rel=1e-3)
    assert took("recv", 2, 8) == pytest.approx(0.8, rel=1e-3)


def test_every_rank_of_a_machine_has_a_network_card() -> None:
    """16 ranks on 2 machines: 8 cards of 10 GB/s carry 15/16 of 8 GB. One rank on each of 8: its card carries 7/8."""
    assert took("all_gather", 16) == pytest.approx(8 * 15 / 16 / 80, rel=1e-2)
    assert took("all_gather", 8, 8) == pytest.approx(8 * 7 / 8 / 10, rel=1e-3)
    # with fast cards the link inside of the machine limits
    fast = ONE.replace("between=10GB/s", "between=50GB/s")
    assert took("all_gather", 16, device=fast) == pytest.approx(8 * 15 / 16 / 100, rel=1e-2)


def test_all_to_all_between_machines_waits_for_the_slower_part() -> None:
    """Of 8 GB, 8 of 16 parts leave the machine through the rank's own card: 4 GB at 10 GB/s."""
    assert took("all_to_all", 16) == pytest.approx(0.4, rel=1e-2)


def test_small_exchanges_take_the_hops_of_the_shorter_way() -> None:
    """The base is NCCL's 6.6 us with its protocol for small tensors. A ring of 8 has 7 hops of 1 us."""
    assert took("all_gather", 8, size=8) == pytest.approx(13.6e-6, rel=1e-3)
    # 16 machines, one rank each: a ring of 15 hops twice would be 300 us, a tree needs 4 up and 4 down
    assert took("all_reduce", 16, 8, size=8) == pytest.approx(86.6e-6, rel=1e-3)
    # 2 machines of 8: a ring has 14 hops inside and 1 between
    assert took("all_gather", 16, size=8) == pytest.approx(30.6e-6, rel=1e-3)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_time_grows_with_bytes_and_with_ranks(name: str) -> None:
    by_bytes = [took(name, 8, size=size) for size in (8, 10**3, 10**6, 10**7, 10**9)]
    assert by_bytes == sorted(by_bytes)
    assert len(set(by_bytes)) == 5
    for size in (8, 10**6, 10**9):
        by_machines = [took(name, count, 8, size) for count in (2, 4, 8, 16, 128)]
        assert by_machines == sorted(by_machines)
        inside = [took(name, count, 1, size) for count in (2, 3, 4, 8)]
        assert inside == sorted(inside)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all", "send"])
def test_between_machines_takes_longer_than_inside_of_one(name: str) -> None:
    for size in (8, 10**6, 10**9):
        assert took(name, 2, 8, size) > took(name, 2, 1, size)


def test_one_rank_exchanges_nothing_and_asks_for_no_link() -> None:
    assert took("all_reduce", 1) == 0
    alone = device_of("name=X1,memory=1GB,tflops=100,gbps=1TB/s,link=100GB/s")
    assert exchange_time(exchange("all_reduce", 8), alone, 8) > 0
    with pytest.raises(ConfigurationError, match="between machines"):
        exchange_time(exchange("all_reduce", 9), alone, 8)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'gather' is not known; known are all_gather, "):
        took("gather", 8)


def test_without_exchanges_a_window_takes_the_sum_of_its_kernels() -> None:
    steps = [kernel(2), kernel(0), kernel(3), Operation("aten.mm", "bfloat16", 10**12, 10**9, "forward", "", "")]
    told = forecast(steps, DEVICE, 8)
    # 1e12 operations at 1e14 a second take 10 ms
    assert (told.step, told.operations, told.arithmetic) == pytest.approx((0.015, 0.015, 0.010), rel=1e-3)
    assert (told.exchange, told.exposed, told.bubble) == (0, 0, 0)


def test_python_launches_no_faster_than_its_floor() -> None:
    slow = replace(DEVICE, launch_s=1e-3)
    tiny = [kernel(0.001)] * 10
    assert forecast(tiny, slow, 8).step == pytest.approx(10.001e-3)
    assert forecast(tiny, slow, 8).launch == pytest.approx(10.001e-3 - 0.01e-3)
    # while a long kernel runs, Python launches the next ones
    assert forecast([kernel(20), *tiny], slow, 8).step == pytest.approx(21.01e-3)
    assert forecast([kernel(0)] * 10, slow, 8).step == 0  # views


def test_a_bucket_of_ddp_overlaps_with_the_rest_of_the_backward_pass() -> None:
    """1 GB in a ring of 2: 10 ms. Issued after 5 ms, waited for at the end."""
    bucket = exchange("all_reduce", 2, size=10**9, until=3)
    hidden = forecast([kernel(5), bucket, kernel(30)], DEVICE, 8)
    assert (hidden.step, hidden.exposed) == pytest.approx((0.035, 0), abs=1e-4)
    shown = forecast([kernel(5), bucket, kernel(4)], DEVICE, 8)
    assert (shown.step, shown.exposed) == pytest.approx((0.015, 0.006), abs=1e-4)


def test_buckets_of_a_group_follow_each_other_and_groups_do_not_wait_for_each_other() -> None:
    one, other = exchange("all_reduce", 2, size=10**9, until=2), exchange("all_reduce", 2, 2, size=10**9, until=2)
    assert forecast([one, one], DEVICE, 8).step == pytest.approx(0.020, abs=1e-4)
    assert forecast([one, other], DEVICE, 8).step == pytest.approx(0.010, abs=1e-4)


def test_an_exchange_that_is_waited_for_at_once_is_not_hidden() -> None:
    told = forecast([kernel(5), exchange("all_reduce", 2, size=10**9, until=2), kernel(30)], DEVICE, 8)
    assert (told.step, told.exposed) == pytest.approx((0.045, 0.010), abs=1e-4)


def test_the_parameters_of_fsdp_are_gathered_one_layer_in_advance() -> None:
    """Each all_gather takes 5 ms and each layer 8 ms. The first is exposed. The second starts when the first layer
    does, although it is issued after it, and the third when the second does: both are hidden.
    """
    copy = kernel(0.001, COPY_IN)
    steps: list[Operation | Exchange] = []
    for _ in range(3):
        steps += [copy, exchange("all_gather", 2, size=10**9, until=len(steps) + 2), kernel(8)]
    told = forecast(steps, DEVICE, 8)
    assert (told.step, told.exposed) == pytest.approx((0.029, 0.005), abs=1e-4)
    # the same without FSDP's copy: tensors that the layer before has computed, so each waits for it
    plain = [replace(each, name="aten.copy_") if each is copy else each for each in steps]
    assert forecast(plain, DEVICE, 8).step == pytest.approx(0.039, abs=1e-4)


def test_only_one_layer_is_gathered_in_advance() -> None:
    """All_gathers of 5 ms, layers of 1 ms: the third one cannot start before the second was waited for."""
    steps: list[Operation | Exchange] = []
    for _ in range(4):
        gather = exchange("all_gather", 2, size=10**9, until=len(steps) + 2)
        steps += [kernel(0.001, COPY_IN), gather, kernel(1)]
    told = forecast(steps, DEVICE, 8)
    assert told.step == pytest.approx(0.021, abs=1e-4)
    assert told.exposed == pytest.approx(0.017, abs=1e-4)


@pytest.mark.parametrize("until", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [10, 10**8, 10**9, 10**10])
def test_a_window_takes_at_least_its_longest_part_and_at_most_all_of_them(size: int, until: int) -> None:
    steps = [kernel(3), exchange("all_reduce", 16, size=size, until=until), kernel(2), kernel(4), kernel(1)]
    told = forecast(steps, DEVICE, 8)
    assert max(told.operations, told.exchange) <= told.step <= told.operations + told.exchange + told.launch + 1e-9
    assert told.step == pytest.approx(told.operations + told.exposed + told.launch)
    assert told.exposed <= told.exchange + 1e-12


def test_waiting_later_never_takes_longer() -> None:
    steps = [kernel(3), exchange("all_reduce", 16, size=10**9, until=2), kernel(2), kernel(4), kernel(1)]
    times = []
    for until in (2, 3, 4, 5):
        steps[1] = exchange("all_reduce", 16, size=10**9, until=until)
        times.append(forecast(steps, DEVICE, 8).step)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_long_layer_does_not_hide_the_all_gathers_of_two_others() -> None:
    """Layers of 20, 1 and 1 ms, all_gathers of 5 ms. The third all_gather starts when the rank waits for the
    second one, at 25 ms, so that the third layer starts at 30 ms.
    """
    steps: list[Operation | Exchange] = []
    for layer in (20, 1, 1):
        gather = exchange("all_gather", 2, size=10**9, until=len(steps) + 2)
        steps += [kernel(0.001, COPY_IN), gather, kernel(layer)]
    assert forecast(steps, DEVICE, 8).step == pytest.approx(0.031, abs=1e-4)


def test_further_batches_of_a_window_repeat_the_first() -> None:
    """The first batch takes 2 + 3 ms, the second one 2 + 4 and exchanges 10 ms, the optimizer 1 ms."""
    steps = (
        kernel(2), kernel(3, phase="backward"), kernel(2), kernel(4, phase="backward"),
        exchange("all_reduce", 2, size=10**9, until=5), kernel(1, phase="optimizer"),
    )  # fmt: skip
    recorded = Recorded(steps)
    assert of_window(recorded, 2, DEVICE, 8) == forecast(steps, DEVICE, 8)
    assert of_window(recorded, 2, DEVICE, 8).step == pytest.approx(0.022, abs=1e-4)
    told = of_window(recorded, 6, DEVICE, 8)
    assert (told.step, told.operations, told.exposed) == pytest.approx((0.042, 0.032, 0.010), abs=1e-4)
    alone = Recorded((kernel(2), kernel(3, phase="backward")))
    assert of_window(alone, 1, DEVICE, 8).step == pytest.approx(0.005, abs=1e-4)


def test_a_compiled_module_is_forecast_as_one() -> None:
    steps = (kernel(2), kernel(3), kernel(4))
    assert of_window(Recorded(steps), 1, DEVICE, 8).step == pytest.approx(0.009, abs=1e-5)
    assert of_window(Recorded(steps, is_compiled=True), 1, DEVICE, 8).step == pytest.approx(0.004, abs=1e-5)


def test_tf32_is_used_where_the_program_allows_it() -> None:
    steps = (Operation("aten.mm", "float32", 10**12, 1, "forward", "", ""),)
    device = device_of(f"{ONE},tflops_float32=10,tflops_tf32=50")
    assert of_window(Recorded(steps), 1, device, 8).step == pytest.approx(0.1, abs=1e-5)
    assert of_window(Recorded(steps, allows_tf32=True), 1, device, 8).step == pytest.approx(0.02, abs=1e-5)


def test_an_exchange_that_nothing_waits_for_ends_before_the_window() -> None:
    assert forecast([exchange("send", 2, size=10**9, until=2), kernel(1)], DEVICE, 8).step == pytest.approx(
        0.01, abs=1e-4
    )


def test_the_bubble_of_a_pipeline() -> None:
    """8 micro-batches of 1 s on 4 ranks: 3 s of waiting; with 2 stages on each rank, half of it."""
    window = Forecast(8.0, 7.0, 6.0, 1.0, 1.0, 0.0)
    assert (in_pipeline(window, 4, 8).step, in_pipeline(window, 4, 8).bubble) == (11.0, 3.0)
    assert in_pipeline(window, 4, 8, stages_per_rank=2).step == 9.5
    assert in_pipeline(window, 1, 8) == window


def test_a_forecast_says_where_its_time_goes() -> None:
    told = forecast([kernel(5), exchange("all_reduce", 2, size=10**9, until=3), kernel(4)], DEVICE, 8)
    assert (
        str(told)
        == "at best 15 ms a step (0 ms of arithmetic; 9 ms of memory; 6.01 ms of exchanges, 4 ms more are hidden)"
    )
    assert "2.5 s a step" in str(Forecast(2.5, 2.5, 2.5, 0, 0, 0))
    assert "exchanges" not in str(Forecast(2.5, 2.5, 2.5, 0, 0, 0))
    assert "1 s of waiting for Python" in str(Forecast(2.5, 1.5, 1.5, 0, 0, 1.0))
    assert "pipeline's bubble" in str(in_pipeline(Forecast(2.5, 2.5, 2.5, 0, 0, 0), 4, 8))


def test_the_fastest_of_several_strategies_comes_first() -> None:
    assert fastest_first({"ddp": 2.0, "fsdp": 3.0, "hsdp": 1.0}) == [("hsdp", 1.0), ("ddp", 2.0), ("fsdp", 3.0)]
    assert fastest_first({}) == []
