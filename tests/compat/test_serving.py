"""A module that answers requests, and the callback that checks it before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import Regression, regression_data
from torch.utils.data import DataLoader

from drivetrain.compat.serving import ServableModule, ServableModuleValidator
from drivetrain.errors import ConfigurationError, NotSupportedError


class Served(Regression, ServableModule):
    expected = 0.0

    def configure_payload(self) -> dict[str, Any]:
        return {"body": {"x": ((1, 2, 3, 4),)}}

    def configure_serialization(self) -> Any:
        def decode(x: Any) -> torch.Tensor:
            assert x == [[1, 2, 3, 4]]  # it has been through JSON
            return torch.tensor(x, dtype=torch.float)

        return {"x": decode}, {"y": torch.Tensor.tolist}

    def serve_step(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        assert not self.training
        return {"y": self.net(x).relu() * 0}

    def configure_response(self) -> Any:
        return {"y": [[self.expected]]}


def fitted(make_trainer: Any, module: Any, **arguments: Any) -> Any:
    callback = ServableModuleValidator(**arguments)
    make_trainer(callbacks=callback, max_steps=1).fit(module, DataLoader(regression_data(), batch_size=8))
    return callback


def test_the_validator_keeps_the_answer_to_the_example_request(make_trainer: Any) -> None:
    module = Served()
    callback = fitted(make_trainer, module)
    assert callback.resp.json() == {"y": [[0.0]]}
    assert callback.resp.status_code == 200
    assert callback.state_dict() == {"successful": True, "optimization": None, "server": "fastapi"}
    assert module.training


def test_a_module_that_answers_otherwise_or_cannot_answer_is_not_trained(make_trainer: Any) -> None:
    class Fails(Served):
        def serve_step(self, x: Any) -> Any:  # type: ignore[override]
            return {"y": self.net(x[:, :3])}

    class Other(Served):
        expected = 1.0

    class Bodiless(Served):
        def configure_payload(self) -> dict[str, Any]:
            return {"x": 1}

    class Without(Served):
        def configure_payload(self) -> Any:
            return None

    for module, message in (
        (Fails(), "Fails cannot answer the request .*: RuntimeError: mat1"), (Bodiless(), 'has no "body"'),
        (Without(), 'returned None, which has no "body"'),
        (Other(), r"Other answers .* \{'y': \[\[0.0\]\]\}, and configure_response returned \{'y': \[\[1.0\]\]\}"),
        (Regression(), r"Write class Regression\(LightningModule, ServableModule\)"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=message):
            fitted(make_trainer, module)
    assert fitted(make_trainer, Fails(), exit_on_failure=False).successful is False


def test_other_servers_and_formats_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="write server='fastapi'"):
        ServableModuleValidator(server="torchserve")
    with pytest.raises(NotSupportedError, match="write optimization=None"):
        ServableModuleValidator("trace")
