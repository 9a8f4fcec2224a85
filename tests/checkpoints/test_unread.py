"""Tensors that are read when they are used, and files into which they are written one at a time."""

from __future__ import annotations

import copy
import io
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoints import container
from drivetrain.checkpoints.unread import UnreadTensor


class LateTensor(UnreadTensor):
    """Notes how often it was read."""

    value: Tensor
    reads = 0

    @classmethod
    def of(cls, value: Tensor) -> Any:
        made: Any = cls(value.shape, value.dtype)
        made.value = value
        return made

    def whole(self) -> Tensor:
        self.reads += 1
        return self.value


def test_shape_and_type_are_known_and_an_operation_reads() -> None:
    late = LateTensor.of(torch.arange(6.0).reshape(2, 3))
    assert (late.shape, late.dtype, late.nbytes, late.reads) == ((2, 3), torch.float32, 24, 0)
    torch.testing.assert_close(late + 1, late.value + 1)
    assert late.reads == 1
    assert type(copy.deepcopy(late)) is Tensor


VALUES: dict[str, Tensor] = {
    "matrix": torch.randn(3, 4), "turned": torch.randn(2, 5).t(), "half": torch.randn(3).bfloat16(),
    "number": torch.tensor(3), "empty": torch.zeros(0, 2), "flag": torch.tensor([True]), "wave": torch.tensor([1 + 2j]),
    "unsigned": torch.tensor([7], dtype=torch.uint16), "small": torch.ones(3).to(torch.float8_e4m3fn),
}  # fmt: skip


def test_what_is_written_late_is_what_torch_would_write() -> None:
    late = {name: LateTensor.of(each) for name, each in VALUES.items()}
    base = torch.arange(10.0)
    tree = {**late, "tied": late["matrix"], "base": base, "view": base[2:5], "again": [VALUES["turned"]], "text": "x",
            "parameter": torch.nn.Parameter(torch.ones(2)), "bits": base.view(torch.int32)}  # fmt: skip
    stream = io.BytesIO()
    container.write_unread(tree, stream)
    assert {name: each.reads for name, each in late.items()} == dict.fromkeys(late, 1)
    with zipfile.ZipFile(stream) as records:
        assert records.testzip() is None
        assert all(each.CRC for each in records.infolist() if each.file_size and "data/" in each.filename)
    stream.seek(0)
    found = torch.load(stream, weights_only=True)
    for name, value in VALUES.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tolist() == value.tolist() if value.dtype != torch.float8_e4m3fn else True
    assert found["tied"].data_ptr() == found["matrix"].data_ptr()
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    assert (found["text"], found["bits"].tolist()) == ("x", base.view(torch.int32).tolist())
    assert isinstance(found["parameter"], torch.nn.Parameter)


class UnreadableTensor(LateTensor):
    def whole(self) -> Tensor:
        raise ValueError("damaged")


def test_an_error_while_reading_ends_in_an_exception() -> None:
    with pytest.raises(ValueError, match="damaged"):
        container.write_unread({"w": UnreadableTensor.of(torch.ones(2))}, io.BytesIO())
