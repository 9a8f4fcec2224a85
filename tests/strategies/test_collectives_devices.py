"""Where tensors travel and where they arrive, on a device that not every process group can reach.

The device is examples/vendor_device. It is torch's accelerator for the rest of a process, hence the fresh processes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.strategies.group import TorchGroup

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def devices(pool: Any) -> Iterator[Any]:
    """Processes that may have the device; it is compiled once, some 15 s, and kept."""
    spec = importlib.util.spec_from_file_location("vendor_build", EXAMPLES / "vendor_device" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    try:
        build.library()
    except build.BuildError:
        if build.compiler() is not None:
            raise
        pytest.skip("the example device is C++, and there is no C++ compiler here: install g++, or set CXX")
    with pool.fresh() as processes:
        yield processes


class Travels:
    """Notes where the tensors lie that torch is asked to exchange."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        for name, position in (("all_gather", 1), ("broadcast", 0), ("all_reduce", 0)):
            setattr(dist, name, self._noting(getattr(dist, name), position))

    def _noting(self, function: Any, position: int) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.kinds.append(args[position].device.type)
            return function(*args, **kwargs)

        return noting

    def taken(self) -> list[str]:
        kinds, self.kinds = self.kinds, []
        return kinds


class Products(TorchDispatchMode):
    """Notes where torch multiplies the elements of a tensor."""

    kind = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.prod:
            self.kind = args[0].device.type
        return func(*args, **(kwargs or {}))


def product_of_complex_numbers(examples: str) -> Any:
    sys.path.insert(0, examples)
    import vendor_device  # noqa: F401  # registers the device

    rank = int(os.environ["RANK"])
    dist.init_process_group("cpu:gloo")
    with Products() as products:
        value = TorchGroup().all_reduce(torch.tensor(rank + 1j, device=torch.device("lab", rank)), "product")
    return products.kind, str(value.device), value.item()


def test_complex_numbers_are_multiplied_where_they_are_exchanged(devices: Any) -> None:
    found = devices.run(product_of_complex_numbers, str(EXAMPLES), group=False)
    assert found == [("cpu", f"lab:{rank}", -1 + 1j) for rank in range(2)]


def on_devices(backend: str, examples: str, named: bool) -> Any:
    sys.path.insert(0, examples)
    import vendor_device  # noqa: F401  # registers the device

    rank = int(os.environ["RANK"])
    mine = torch.device("lab", rank)
    torch.accelerator.set_device_index(mine)
    dist.init_process_group(backend)
    originals, travels, found = (dist.all_gather, dist.broadcast, dist.all_reduce), Travels(), {}
    options: dict[str, Any] = {"device": mine} if named else {}
    for kind, home in (("host", torch.device("cpu")), ("lab", mine)):
        x = torch.tensor([rank + 1.0, 5.0], device=home, requires_grad=True)
        gathered = TorchGroup(**options).all_gather(x, sync_grads=True)
        (gathered[1].sum() * (rank + 1)).backward()
        assert x.grad is not None
        results = {
            "gathered": gathered.detach(),
            "gradient": x.grad,
            "mean": TorchGroup(**options).all_reduce(x),
            "count": TorchGroup(**options).all_reduce(torch.tensor(rank + 1, device=home)),
            "keyed": TorchGroup(**options).gather_keyed(["a", "b"], x),
            "tensor": TorchGroup(**options).broadcast(x.detach() if rank == 1 else None, 1),
            "object": TorchGroup(**options).broadcast({"deep": [x.detach()]} if rank == 1 else None, 1)["deep"][0],
            "other's": TorchGroup(**options).gather_objects(x.detach())[1 - rank],
        }
        found[kind] = {name: (str(value.device), value.cpu()) for name, value in results.items()}, travels.taken()
    TorchGroup(**options).barrier()
    found["barrier"] = travels.taken()
    dist.all_gather, dist.broadcast, dist.all_reduce = originals
    return found


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize(
    ("backend", "wires", "barrier"),
    [
        ("lab:labccl", {"host": {"lab"}, "lab": {"lab"}}, ["lab"]),
        ("cpu:gloo", {"host": {"cpu"}, "lab": {"cpu"}}, ["cpu"]),
        ("cpu:gloo,lab:labccl", {"host": {"cpu"}, "lab": {"cpu", "lab"}}, ["cpu"]),
    ],
)
def test_what_a_group_cannot_reach_goes_another_way_and_arrives_where_it_came_from(
    devices: Any, backend: str, wires: dict[str, set[str]], barrier: list[str], named: bool
) -> None:
    for rank, found in enumerate(devices.run(on_devices, backend, str(EXAMPLES), named, group=False)):
        wanted = {
            "gathered": [[1, 5], [2, 5]], "gradient": [0, 0] if rank == 0 else [3, 3], "mean": [1.5, 5], "count": 1.5,
            "keyed": [[1, 5], [2, 5]], "tensor": [2, 5], "object": [2, 5], "other's": [2 - rank, 5],
        }  # fmt: skip
        for kind, home in (("host", "cpu"), ("lab", f"lab:{rank}")):
            results, travelled = found[kind]
            assert {name: values.tolist() for name, (_, values) in results.items()} == wanted
            assert {name: device for name, (device, _) in results.items()} == dict.fromkeys(wanted, home)
            assert set(travelled) == wires[kind]
        assert found["barrier"] == barrier
