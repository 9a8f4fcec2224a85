from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.accelerators.peak_flops import peak_of
from drivetrain.errors import ConfigurationError
from drivetrain.forecast import devices
from drivetrain.forecast.devices import DEVICES, Link, device_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100 80GB", "H100 80GB"), ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("nvidia h100 pcie", "H100 PCIe 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA H200", "H200 141GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"), ("NVIDIA L4", "L4 24GB"), ("name=L4", "L4 24GB"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_the_name_that_torch_shows(text: str, name: str) -> None:
    assert device_of(text) == DEVICES[name]


@pytest.mark.parametrize("text", ["H100", "A100", "B300 288GB", "", "name=H100", "gbps=3000", "L4 48GB"])
def test_a_device_that_is_not_in_the_table_is_asked_for(text: str) -> None:
    """None is guessed, also where a part of the name would fit several."""
    with pytest.raises(
        ConfigurationError, match=r"no one entry .* H100 80GB, H100 PCIe 80GB, .*memory=80GB,tflops=989"
    ):
        device_of(text)


def test_a_device_of_ones_own_needs_four_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"For another one add memory, link, for example"):
        device_of("name=X1,tflops=400,gbps=2000")
    own = device_of("name=X1,memory=64GiB,tflops=400,gbps=2TB/s,link=200Gb/s")
    assert (own.name, own.memory, own.bandwidth) == ("X1", 64 * 2**30, 2e12)
    assert (own.rate("bfloat16"), own.rate("float16", attention=True)) == (400e12, 400e12)
    assert own.link(between=False).bytes_per_s == 25e9


def test_what_nobody_stated_about_a_device_is_asked_for_when_a_program_needs_it() -> None:
    own = device_of("name=X1,memory=64GiB,tflops=400,gbps=2TB/s,link=200Gb/s")
    with pytest.raises(ConfigurationError, match=r'between machines, .* X1 .*--device "name=X1,between=50GB/s"'):
        own.link(between=True)
    with pytest.raises(ConfigurationError, match=r"computes in float8_e4m3fn, .* float16, bfloat16\. .*tflops_float8="):
        own.rate("float8_e4m3fn")
    with pytest.raises(ConfigurationError, match=r"computes in bfloat16"):
        device_of("V100 32GB").rate("bfloat16")


def test_each_constant_can_be_overridden_and_the_others_stay() -> None:
    table = DEVICES["H100 80GB"]
    changed = device_of(
        "name=H100 80GB, memory=96GB, tflops=800, tflops_float8=1.5P, tflops_float32=60, gbps=2400, launch=2us, "
        "link=400Gb/s, link_latency=3us, between=25GB/s, between_latency=20us"
    )
    assert (changed.name, changed.memory, changed.bandwidth) == ("H100 80GB", 96e9, 2.4e12)
    assert changed.launch_s == pytest.approx(2e-6)
    assert changed.inside == Link(50e9, pytest.approx(3e-6), pytest.approx(3e-6))
    assert changed.between == Link(25e9, pytest.approx(20e-6), pytest.approx(20e-6))
    assert changed.rates["bfloat16"] == changed.rates["float16"] == 800e12
    assert (changed.rates["float8"], changed.rates["float32"]) == (1.5e15, 60e12)
    assert (changed.rates["tf32"], changed.shares) == (table.rates["tf32"], table.shares)
    assert device_of("name=H100 80GB,gbps=2.4TB/s").inside == table.inside


@pytest.mark.parametrize(
    ("setting", "units"),
    [
        ("gbps=3mph", "MB/s, GB/s, TB/s"), ("memory=80", "kB, MB, GB"), ("memory=80GB/s", "kB, MB, GB"),
        ("launch=4", "s, ms, us"), ("tflops=fast", "T, P"), ("link=", "MB/s, GB/s"),
        ("between=1.2.3GB/s", "MB/s, GB/s"),
    ],
)  # fmt: skip
def test_an_unknown_unit_is_refused(setting: str, units: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ConfigurationError, match=rf"{key}={value} is no number with a known unit.*{units}"):
        device_of(f"name=H100 80GB,{setting}")


@pytest.mark.parametrize("value", ["0", "-3", "inf", "nan"])
def test_a_number_that_is_not_above_zero_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="no number with a known unit|not above zero"):
        device_of(f"name=H100 80GB,gbps={value}")


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"no setting 'gpbs'; did you mean 'gbps'\? Settings: name, memory"):
        device_of("name=H100 80GB,gpbs=2400")
    with pytest.raises(ConfigurationError, match=r"no setting '2400'"):
        device_of("name=H100 80GB,2400")


def test_memory_is_what_the_driver_shows() -> None:
    assert device_of("H100 80GB").memory / 2**30 == pytest.approx(79.65, abs=0.01)
    assert device_of("A100 80GB").memory == 80 * 2**30
    assert device_of("L4").memory / 2**30 == pytest.approx(22.49, abs=0.01)


def test_the_best_measured_rate_is_below_the_peak() -> None:
    """794.5 of 989 for matrices, 35 % in attention; a device without a measurement keeps its peak."""
    h100 = device_of("H100 80GB")
    assert h100.rate("bfloat16") == pytest.approx(794.5e12, rel=1e-3)
    assert h100.rate("bfloat16", attention=True) == pytest.approx(346e12, rel=1e-2)
    assert h100.rate("float8_e5m2") == pytest.approx(1402.6e12)
    assert h100.rate("float32") == 67e12
    assert device_of("L40S").rate("bfloat16") == 362e12
    assert all(0 < share <= 1 for device in DEVICES.values() for share in device.shares.values())


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_table_agrees_with_that_of_the_throughput_monitor(name: str, dtype: str) -> None:
    assert DEVICES[name].rates[dtype] == peak_of(f"NVIDIA {name}", dtype)


def test_no_other_file_of_the_forecast_of_time_has_a_constant() -> None:
    """A float literal of a device stands in devices.py, where its source is."""
    for name in ("roofline", "exchange"):
        source = Path(devices.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        assert "e-6" not in source
        assert "e9" not in source
        assert "e12" not in source
