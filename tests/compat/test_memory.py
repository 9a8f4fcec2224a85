from __future__ import annotations

import gc
import weakref

import pytest
import torch

from drivetrain.compat.memory import (
    garbage_collection_cuda,
    is_cuda_out_of_memory,
    is_cudnn_snafu,
    is_oom_error,
    is_out_of_cpu_memory,
    recursive_detach,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("of any device"), is_cuda_out_of_memory),
        (RuntimeError("CUDA out of memory. Tried to allocate"), is_cuda_out_of_memory),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), is_cudnn_snafu),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), is_out_of_cpu_memory),
    ],
)
def test_lack_of_memory_is_told_from_other_failures(error: RuntimeError, kind: object) -> None:
    kinds = (is_cuda_out_of_memory, is_cudnn_snafu, is_out_of_cpu_memory)
    assert [check for check in kinds if check(error)] == [kind]
    assert is_oom_error(error)
    assert not is_oom_error(RuntimeError("shapes cannot be multiplied"))
    assert not is_oom_error(ValueError("out of memory"))


def test_a_real_failure_of_the_host_is_known() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_oom_error(failed.value)


def test_garbage_is_collected() -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert gone() is not None
        garbage_collection_cuda()
    finally:
        gc.enable()
    assert gone() is None


def test_trees_are_cut_from_their_graphs() -> None:
    tree = {"a": [torch.ones(1, requires_grad=True) * 2], "b": "text"}
    for cut in (recursive_detach(tree), recursive_detach(tree, to_cpu=True)):
        assert not cut["a"][0].requires_grad
        assert cut["b"] == "text"
