"""Rank ``sys.argv[1]`` of two, each on a lab device of its own; what it finds goes to a file in ``sys.argv[2]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vendor_device import lab

STEPS, BATCH = 6, 8
# The newer names, where torch has them.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def train(net: nn.Module, wrapped: nn.Module, device: torch.device, part: slice) -> tuple[list[Tensor], int]:
    """Weights after some steps, and how often the last ones waited; all ranks together see the whole of each batch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(STEPS):
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        y = (x[:, 0] > 0).long()
        torch.autograd.backward(nn.functional.cross_entropy(wrapped(x[part].to(device)), y[part].to(device)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:  # torch's DDP reads once, when it orders its buckets anew
            lab.reset_counters()
    return list(net.parameters()), lab.waits()


class Checks:
    """Each public method is one, and its result one entry of the file."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.device = torch.device("lab", rank)
        self.half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)

    def mine(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([1, 5], dtype=dtype, device=self.device) * (self.rank + 1)

    def names(self) -> Any:
        group: Any = dist.group.WORLD
        return dist.get_backend(), dist.get_default_backend_for_device("lab"), type(group).__name__, group.name()

    def all_reduce(self) -> Any:
        found = {}
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            value = self.mine()
            dist.all_reduce(value, getattr(dist.ReduceOp, op))
            assert value.device == self.device
            found[op] = value
        return found

    def all_reduce_other_types(self) -> Any:
        values = [self.mine(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64)]
        for value in values:
            dist.all_reduce(value)
        return values

    def all_reduce_part_of_a_tensor(self) -> Any:
        whole = torch.zeros(3, 2, device=self.device)
        whole[:, 1] = self.rank + 1
        dist.all_reduce(whole[1])
        return whole

    def host_tensors(self) -> Any:
        value = self.mine().cpu()
        dist.all_reduce(value)
        return value

    def work(self) -> Any:
        value = self.mine()
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        return work.wait(), work.is_completed(), torch.equal(work.get_future().wait()[0], value)

    def broadcast(self) -> Any:
        value = self.mine()
        dist.broadcast(value, 1)
        return value

    def all_gather(self) -> Any:
        found = [torch.empty(2, device=self.device) for _ in range(2)]
        dist.all_gather(found, self.mine())
        return found

    def all_gather_into_tensor(self) -> Any:
        found = torch.empty(4, device=self.device)
        gather_into(found, self.mine())
        return found

    def reduce_scatter(self) -> Any:
        found = torch.empty(1, device=self.device)
        dist.reduce_scatter(found, list(self.mine().chunk(2)))
        return found

    def reduce_scatter_tensor(self) -> Any:
        found = torch.empty(1, device=self.device)
        scatter_from(found, self.mine(), op=dist.ReduceOp.AVG)
        return found

    def all_to_all(self) -> Any:
        single, several = torch.empty(2, device=self.device), [torch.empty(1, device=self.device) for _ in range(2)]
        dist.all_to_all_single(single, self.mine())
        try:
            dist.all_to_all(several, list(self.mine().chunk(2)))
        except RuntimeError as error:  # with torch 2.9, Gloo has the one of single tensors only
            if "does not support alltoall" not in str(error):
                raise
            several = list(single.chunk(2))
        return single, torch.cat(several)

    def reduce_gather_scatter(self) -> Any:
        reduced, scattered = self.mine(), torch.empty(2, device=self.device)
        gathered = [torch.empty(2, device=self.device) for _ in range(2)] if self.rank == 0 else None
        dist.reduce(reduced, 0)
        dist.gather(self.mine(), gathered, 0)
        dist.scatter(scattered, [self.mine(), self.mine() + 1] if self.rank == 0 else None, 0)
        return (reduced if self.rank == 0 else None), gathered, scattered

    def send_and_receive(self) -> Any:
        value = self.mine()
        if self.rank == 0:
            dist.send(value, 1)
        else:
            dist.recv(value, 0)
        return value

    def objects(self) -> Any:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": self.rank})
        said = [self.rank]
        dist.broadcast_object_list(said, 1)
        return found, said

    def barrier(self) -> Any:
        if self.rank == 1:
            (self.folder / "before").touch()
        dist.barrier()
        return (self.folder / "before").exists()

    def functional(self) -> Any:
        from torch.distributed import _functional_collectives as functional  # what DTensor is made of

        group: Any = dist.group.WORLD
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        found = [
            functional.all_reduce(self.mine(), "sum", group), gather(self.mine(), 0, group),
            scatter(self.mine(), "sum", 0, group),
        ]  # fmt: skip
        return [value + 0 for value in found]  # the addition waits for them

    def subgroups(self) -> Any:
        both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)]
        first, second = self.mine(), self.mine()
        dist.all_reduce(first, group=both)
        dist.all_reduce(second, group=alone[self.rank])
        return first, second

    def different_shapes(self) -> Any:
        try:
            dist.all_gather([torch.empty(2, device=self.device)], self.mine())
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing was said"

    def whole_batches(self) -> Any:
        net = model().to(self.device)
        return train(net, net, self.device, slice(BATCH))[0]

    def ddp(self) -> Any:
        net = model().to(self.device)
        return train(net, nn.parallel.DistributedDataParallel(net), self.device, self.half)

    def ddp_device_ids(self) -> Any:
        net = model().to(self.device)
        options: dict[str, Any] = {"device_ids": [self.rank], "gradient_as_bucket_view": True}
        return train(net, nn.parallel.DistributedDataParallel(net, **options), self.device, self.half)[0]

    def fully_sharded(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        net: Any = fully_shard(model().to(self.device), mesh=init_device_mesh("lab", (2,)))
        train(net, net, self.device, self.half)
        return [parameter.full_tensor() for parameter in net.parameters()]


def on_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def run_two(rank: int, folder: Path) -> None:
    device = torch.device("lab", rank)
    torch.accelerator.set_device_index(device)
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device)
    checks, found = Checks(rank, folder), {}
    for name in vars(Checks):
        check: Callable[[], Any] = getattr(checks, name)
        if not name.startswith("_") and name != "mine":
            found[name] = on_host(check())
    torch.save(found, folder / f"{rank}.pt")
    # The last act is a backward pass, and then the main thread keeps Python's lock to the end.
    net = nn.parallel.DistributedDataParallel(model().to(device))
    sys.setswitchinterval(60)
    net(torch.ones(2, 6, device=device)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_two(int(sys.argv[1]), Path(sys.argv[2]))
