"""The manifest of ``drivetrain recipe k8s``, read by the models of Kubernetes' own client: nothing in it is unknown."""

from __future__ import annotations

import json

import pytest
import yaml

from drivetrain.cli import command

client = pytest.importorskip("kubernetes").client


@pytest.mark.parametrize("options", [[], ["--cpu"]], ids=["gpu", "cpu"])
def test_the_service_and_the_job_are_of_their_schema(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert command.main(["recipe", "k8s", "train.py", "--nodes=2", "--devices=8", "--image=me/train:1", *options]) == 0
    api = client.ApiClient()
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document, model in zip(documents, ["V1Service", "V1Job"], strict=True):
        read = api.deserialize(json.dumps(document), model, "application/json")  # leaves out what it does not know
        assert api.sanitize_for_serialization(read) == document
