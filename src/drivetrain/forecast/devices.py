"""Devices and their links: the constants from which the time of a step is forecast, the sources of the constants, and
the parser of ``--device``.

The table names these sources by their letters:

- N: NVIDIA's data sheets (V100, A100, H100, H200, L4, L40S, HGX B200). Data sheets since Ada state operations per
  second with structured sparsity. The table has half of these numbers.
- S: the total memory that nvidia-smi prints. A program can use this memory, which is often more than the gigabytes in
  the device's name.
- M: the largest measured rate of a matrix multiplication of any shape, as "Maximum Achievable Matmul FLOPS" in
  stas00/ml-engineering, compute/accelerator/README.md: 271.2 of 312 on the A100, 794.5 of 989 (bfloat16) and 1402.6 of
  1979 (float8) on the H100, 1453.4 of 1979 (float8) on the H200, 1745 of 2250 and 3432.5 of 4500 on the B200. The share
  for float16 is assumed to be that for bfloat16.
- F: the measured share of FlashAttention-2, torch's attention kernel: at most 73 % of the peak on the A100
  (arXiv:2307.08691), and 35 % on the H100 (arXiv:2407.08608).
- C: the code of NVIDIA/nccl. src/graph/topo.h has the bandwidth of NVLink (20.6 GB/s for each of the 18 links of the
  H100), and src/graph/tuning.cc has the latencies.
- T: torch/_inductor/comm_analysis.py, for the bandwidth that NCCL reaches over PCIe, and for the network of an NVIDIA
  DGX, which has a card of 100, 200 or 400 Gb/s for each device.
- L: a measurement for this table. On an H100 with torch 2.11, torch.add of two small tensors takes 6.1 us, and 1.0 us
  inside a CUDA graph. The lowest published time is 4.2 us. The table has 4 us.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain.errors import ConfigurationError, closest

_T, _G, _MIB, _US = 1e12, 1e9, 2**20, 1e-6


@dataclass(frozen=True)
class Link:
    """A link of one device.

    Attributes:
        bytes_per_s: the bytes per second in one direction.
        hop_s: the latency of a hop at full bandwidth (NCCL's protocol Simple).
        quick_hop_s: the latency of a hop at half of the bandwidth (NCCL's protocol LL for small tensors).
    """

    bytes_per_s: float
    hop_s: float
    quick_hop_s: float


BASE_S, QUICK_BASE_S = 8.4 * _US, 6.6 * _US
"""The seconds before the first hop of a collective, with NCCL's protocols Simple and LL. Source: C."""


@dataclass(frozen=True)
class Device:
    """The properties of a device from which the time of a step is forecast.

    Attributes:
        name: the name in the table, or the user's name for the device.
        memory: the bytes of memory.
        rates: for each dtype, the dense operations per second. The key "tf32" is for float32 matrices with TF32.
        bandwidth: the bytes per second of the memory.
        inside: the link to the other devices of the machine, or ``None`` if it is unknown.
        between: the link to other machines, or ``None`` if it is unknown.
        shares: for each dtype, and for "attention", the largest measured share of ``rates``. Without an entry, the
            share is 1.
        launch_s: the shortest time between two kernels that Python launches. Source: L.
    """

    name: str
    memory: float
    rates: Mapping[str, float]
    bandwidth: float
    inside: Link | None
    between: Link | None
    shares: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 4 * _US

    def rate(self, dtype: str, *, attention: bool = False) -> float:
        """Return the highest rate of matrix operations in ``dtype``, or of attention, in operations per second."""
        kind = "float8" if dtype.startswith("float8") else dtype
        if kind not in self.rates:
            raise ConfigurationError(
                f"The program computes in {dtype}, and the forecast knows only other rates of {self.name}: "
                f'{", ".join(self.rates)}. Add this one: --device "name={self.name},tflops_{kind}=..."'
            )
        share = "attention" if attention and "attention" in self.shares else kind
        return self.rates[kind] * self.shares.get(share, 1.0)

    def link(self, between: bool) -> Link:
        """Return the link between machines if ``between`` is True, otherwise the link inside a machine."""
        found = self.between if between else self.inside
        if found is None:
            where, key = ("between machines", "between") if between else ("inside a machine", "link")
            raise ConfigurationError(
                f"The program exchanges data {where}, and the forecast knows no bandwidth of {self.name} there. "
                f'Add it, for example --device "name={self.name},{key}=50GB/s"'
            )
        return found


_DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
_HOPS = {"nvlink": (3.4 * _US, 0.6 * _US), "pcie": (5.7 * _US, 1.0 * _US), "network": (14 * _US, 2.7 * _US)}  # C


def _device(row: Mapping[str, str]) -> Device:
    """Return the device in a row of the table."""
    shares = {dtype: row[f"share_{dtype}"].split("/") for dtype in (*_DTYPES[3:], "attention")}
    return Device(
        row["name"], float(row["memory"]) * _MIB, {dtype: float(row[dtype]) * _T for dtype in _DTYPES if row[dtype]},
        float(row["bandwidth"]) * _T, Link(float(row["link_speed"]) * _G, *_HOPS[row["link"]]),
        Link(float(row["between"]) * _G, *_HOPS["network"]) if row["between"] else None,
        {dtype: float(share[0]) / float(share[1]) for dtype, share in shares.items() if share[1:]},
    )  # fmt: skip


with open(Path(__file__).with_name("devices.csv"), encoding="utf-8", newline="") as _file:
    DEVICES = {row["name"]: _device(row) for row in csv.DictReader(_file)}
"""Devices by name. The table has the memory in MiB (source: S), 10^12 dense operations per second for each type and the
bandwidth in TB/s (N), the links inside the machine (C and T) and between machines (T) in GB/s, and the shares that are
reached (M and F).
"""

_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SPEEDS = {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_OPERATIONS = {"T": 1e12, "P": 1e15}
_KEYS: dict[str, tuple[Mapping[str, float], str | None]] = {
    "memory": (_BYTES, None), "gbps": (_SPEEDS, "GB/s"), "link": (_SPEEDS, "GB/s"), "between": (_SPEEDS, "GB/s"),
    "launch": (_SECONDS, None), "link_latency": (_SECONDS, None), "between_latency": (_SECONDS, None),
    **dict.fromkeys(("tflops", *(f"tflops_{dtype}" for dtype in _DTYPES)), (_OPERATIONS, "T")),
}  # fmt: skip
"""For each setting, the allowed units, and the unit of a number without a unit."""

_FORM_FACTORS = {"nvidia", "tesla", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"}


def device_of(text: str) -> Device:
    """Return the device that ``--device`` describes.

    Args:
        text: a name from the table or from torch, such as "H100 80GB" or "NVIDIA A100-SXM4-80GB". Further settings
            override the table: "name=H100 80GB,gbps=2400,between=200Gb/s".
    """
    given = dict(_setting(part) for part in text.split(",")) if "=" in text else {"name": text}
    name = given.pop("name", "").strip()
    values = {key: _number(key, value) for key, value in given.items()}
    missing = [key for key in ("memory", "tflops", "gbps", "link") if key not in values]
    device = _found(name)
    if device is None and (missing or not name):
        raise ConfigurationError(
            f"--device names {name!r}, and the table of devices has no one entry for it. Known devices: "
            f"{', '.join(DEVICES)}. For another one add {', '.join(missing) or 'its name'}, for example "
            f'--device "name={name or "X1"},memory=80GB,tflops=989,gbps=3350,link=450GB/s"'
        )
    return _with(device or Device(name, 0, {}, 0, None, None), values)


def _found(name: str) -> Device | None:
    words = set(name.lower().replace("-", " ").split()) - _FORM_FACTORS
    exact = [device for known, device in DEVICES.items() if set(known.lower().split()) == words]
    part = [device for known, device in DEVICES.items() if words and words <= set(known.lower().split())]
    return exact[0] if exact else part[0] if len(part) == 1 else None


def _setting(part: str) -> tuple[str, str]:
    key, equals, value = (each.strip() for each in part.partition("="))
    if equals and (key == "name" or key in _KEYS):
        return key, value
    meant = closest(key, ["name", *_KEYS])
    raise ConfigurationError(
        f"--device has no setting {key!r}{f'; did you mean {meant!r}?' if meant else '.'} Settings: name, "
        f"{', '.join(_KEYS)}, each as key=value."
    )


def _number(key: str, text: str) -> float:
    units, default = _KEYS[key]
    number = text.rstrip("".join({letter for unit in units for letter in unit}) + " ") if text else text
    unit = text[len(number) :].strip() or default
    try:
        value = float(number) * units[unit or ""]
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"--device: {key}={text} is no number with a known unit. Write {key}=2{next(iter(units))}; units: "
            f"{', '.join(units)}{f', {default} if none is written' if default else ''}."
        ) from None
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"--device: {key}={text} is not above zero. Write a positive number.")
    return value


def _with(device: Device, values: Mapping[str, float]) -> Device:
    rates = dict(device.rates)
    if "tflops" in values:
        rates |= {"float16": values["tflops"], "bfloat16": values["tflops"]}
    rates |= {key.removeprefix("tflops_"): value for key, value in values.items() if key.startswith("tflops_")}
    links = {}
    for key, link in (("link", device.inside), ("between", device.between)):
        if key in values:
            hops = _HOPS["pcie" if key == "link" else "network"]
            link = replace(link or Link(0, *hops), bytes_per_s=values[key])
        if f"{key}_latency" in values and link is not None:
            link = replace(link, hop_s=values[f"{key}_latency"], quick_hop_s=values[f"{key}_latency"])
        links[key] = link
    return replace(
        device, rates=rates, memory=values.get("memory", device.memory), bandwidth=values.get("gbps", device.bandwidth),
        launch_s=values.get("launch", device.launch_s), inside=links["link"], between=links["between"],
    )  # fmt: skip
