"""The files for AWS Batch and SageMaker in docs/platforms.md, compared with the models of AWS's own client."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"


def problems(service: str, operation: str, request: Any) -> str:
    """What AWS's client would refuse before it sends the request."""
    session = pytest.importorskip("botocore.session").get_session()
    shape = session.get_service_model(service).operation_model(operation).input_shape
    text: str = pytest.importorskip("botocore.validate").ParamValidator().validate(request, shape).generate_report()
    return text


@pytest.mark.parametrize(
    ("title", "service", "operation", "machines"),
    [
        ("AWS Batch", "batch", "RegisterJobDefinition", ("nodeProperties", "numNodes")),
        ("SageMaker", "sagemaker", "CreateTrainingJob", ("ResourceConfig", "InstanceCount")),
    ],
)
def test_aws_knows_the_file(title: str, service: str, operation: str, machines: tuple[str, str]) -> None:
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    [text] = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    request = json.loads(text)
    assert problems(service, operation, request) == ""
    part, number = machines
    assert request[part][number] == 2
    assert "Unknown parameter" in problems(service, operation, {**request, "nodes": 2})
    assert "Invalid type" in problems(service, operation, {**request, part: {**request[part], number: "2"}})
