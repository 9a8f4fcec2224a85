"""Precisions that need a package of their own, where it is not installed; tests/extras has those where it is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.plugins import BitsandbytesPrecision, Float8Precision, TransformerEnginePrecision


@pytest.mark.parametrize(
    ("package", "cls", "arguments"),
    [
        ("torchao", Float8Precision, {}),
        ("bitsandbytes", BitsandbytesPrecision, {"mode": "nf4"}),
        ("transformer_engine", TransformerEnginePrecision, {"weights_dtype": torch.bfloat16}),
    ],
)
def test_a_missing_package_is_named_with_its_cure(
    package: str, cls: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"{cls.__name__}.* needs the package {package}, .* Run `pip install"):
        cls(**arguments)
