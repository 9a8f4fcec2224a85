"""Record what torch's allocator does for a Llama 3.1 8B of torchtitan, as one rank of a job whose exchanges do nothing.

``python benchmarks/gpu/allocations.py RANKS [compiled]`` from the root of the repository, on a GPU with 100 GiB, prints
the peaks of three windows and writes ``allocations.json``, for tests/forecast/recorded_allocations.json.gz.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, KIND = int(sys.argv[1]), (*sys.argv, "eager")[2]
sys.argv = ["llama_program.py", "8B", "2", "8192", "op", "1", "eager"]
sys.path[:0] = ["src", "tests/forecast"]

import llama_program as llama  # noqa: E402  # it reads its arguments when it is imported

GIB = 2**30


def main() -> None:
    memory: Any = torch.cuda
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with torch.device("meta"):
        model: Any = llama.Llama()
    llama.Llama.forward = llama.Llama.training_step  # type: ignore[method-assign, assignment]  # FSDP's hooks follow it
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.layers):
        if KIND == "compiled":
            block.compile(fullgraph=True)
        fully_shard(block, mp_policy=policy, reshard_after_forward=number < llama.LAYERS - 1)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for each in model.parameters():
            each._local_tensor.normal_(0, 0.02)
        model.angles.fill_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    words = torch.zeros(2, llama.LENGTH, dtype=torch.long, device="cuda")
    memory.memory._record_memory_history(context=None, max_entries=1_000_000)
    for window in range(3):
        optimizer.zero_grad()
        model(words, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found = memory.memory_stats()
        peaks = {name: found[f"{name}_bytes.all.peak"] / GIB for name in ("allocated", "requested", "reserved")}
        print(window, peaks, flush=True)
    written, live, streams, reserved, count = [], dict[int, int](), dict[int, str](), 0, 0
    for each in memory.memory._snapshot()["device_traces"][0]:
        kind, at, size = each["action"], each["addr"], each["size"]
        if kind == "alloc":
            live[at], count = count, count + 1
            stream = "" if each["stream"] == 0 else streams.setdefault(each["stream"], "ab"[len(streams)])
            written.append(f"{size}{stream}")
        elif kind == "free_completed" and at in live:
            written.append(f"-{count - live.pop(at)}")
        elif kind == "segment_alloc":
            reserved += size
    result = {"reserved": reserved, "allocations": " ".join(written)}
    Path("allocations.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
