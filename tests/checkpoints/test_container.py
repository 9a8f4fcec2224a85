"""What a container gives back is what was written, whatever kinds of tensors are in it."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.checkpoints import TorchCheckpointIO, container


def back(value: Any, protocol: int = 2, weights_only: bool = True) -> Any:
    stream = io.BytesIO()
    container.write(value, stream, protocol)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "numbers": torch.arange(6.0).reshape(2, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "shared": torch.ones(2).share_memory_(),
        "empty": torch.empty(0),
        "number": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_tensors_come_back_as_they_were(protocol: int) -> None:
    for name, tensor in tensors().items():
        found = back(tensor, protocol, weights_only=False)
        assert (found.dtype, found.shape, found.layout, found.stride() if tensor.layout is torch.strided else ()) == (
            tensor.dtype, tensor.shape, tensor.layout, tensor.stride() if tensor.layout is torch.strided else ()
        ), name  # fmt: skip
        assert torch.equal(found.to_dense(), tensor.to_dense()), name
    found = back(torch.empty(3, device="meta"), protocol, weights_only=False)
    assert found.is_meta


def test_views_of_one_memory_stay_so_and_parameters_stay_parameters() -> None:
    layer = nn.Linear(3, 3, bias=False)
    weight, row, again = back([layer.weight, layer.weight[1], layer.weight])
    assert type(weight) is nn.Parameter
    assert weight is again
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(row, torch.zeros(3))


def test_views_of_another_type_are_written_as_copies(tmp_path: Path) -> None:
    """torch refuses them; the control shows that it does."""
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    both = {
        "complex": numbers,
        "real": torch.view_as_real(numbers),
        "again": numbers,
        "parameter": nn.Parameter(numbers),
    }
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save(both, io.BytesIO())
    TorchCheckpointIO().save_checkpoint(both, tmp_path / "x.ckpt")
    for found in (back(both), TorchCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")):
        assert torch.equal(found["complex"], numbers)
        assert torch.equal(found["real"], torch.view_as_real(numbers))
        assert found["again"] is found["complex"]
        assert torch.equal(found["parameter"], numbers)


def test_an_optimizer_still_steps_the_parameters_beside_it() -> None:
    layer = nn.Linear(3, 1)
    found, optimizer = back([layer, torch.optim.SGD(layer.parameters(), lr=0.1)], weights_only=False)
    assert optimizer.param_groups[0]["params"][0] is found.weight


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_structure_is_that_of_torch_and_names_each_memory_once() -> None:
    base = torch.arange(4.0)
    named = torch.ones(2)
    named.note = "kept"  # type: ignore[attr-defined]
    special = {"grad": torch.ones(2, requires_grad=True), "negative": torch.tensor([1j]).conj().imag, "note": named}
    kinds = {"small": base.to(torch.float8_e4m3fn), "unsigned": base.to(torch.uint16), "list": [1, "a", None, (2.0,)]}
    tree = {**tensors(), **special, **kinds, "base": base, "view": base[1:3], "parameter": nn.Parameter(base)}
    written = dict(container.records_of(tree))
    stream = io.BytesIO()
    torch.save(tree, stream, pickle_protocol=2)
    with zipfile.ZipFile(stream) as records:
        assert written["archive/data.pkl"] == records.read("archive/data.pkl")
        sizes = {name: each.nbytes() for name, each in written.items() if "/data/" in name}
        assert len(sizes) > 5
        assert sizes == {name: records.getinfo(name).file_size for name in records.namelist() if "/data/" in name}
