"""DeepSpeed without the package: what is said then, and what its configuration is made of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DeepSpeedStrategy, StrategyRegistry, _deepspeed_config, _deepspeed_optimizers

NAMES = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_1_offload", "deepspeed_stage_2", "deepspeed_stage_2_offload",
    "deepspeed_stage_3", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme",
]  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there, which a constructor asks for."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "deepspeed" else find(name))


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == "deepspeed" else find(asked))
    with pytest.raises(ConfigurationError, match=r"needs the package deepspeed, .* Run `pip install deepspeed`\."):
        Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)


def test_the_names_are_those_of_the_field(installed: None) -> None:
    assert [name for name in StrategyRegistry.available() if name.startswith("deepspeed")] == sorted(NAMES)
    sections = {name: StrategyRegistry.get(name).config["zero_optimization"] for name in NAMES}
    assert {name: section["stage"] for name, section in sections.items()} == {
        name: int(name.removeprefix("deepspeed_stage_")[0]) if "stage" in name else 2 for name in NAMES
    }
    assert sections["deepspeed_stage_2_offload"]["offload_optimizer"] == {"device": "cpu"}
    nvme = sections["deepspeed_stage_3_offload_nvme"]
    assert nvme["offload_param"] == nvme["offload_optimizer"] == {"device": "nvme", "nvme_path": "/local_nvme"}
    assert "offload_optimizer" not in sections["deepspeed_stage_3"]


@pytest.mark.parametrize("form", ["file", "path", "mapping"])
def test_a_configuration_may_be_a_file_or_a_mapping(installed: None, tmp_path: Path, form: str) -> None:
    given = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "gradient_clipping": 0.5}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    config: Any = {"file": str(path), "path": path, "mapping": given}[form]
    strategy = DeepSpeedStrategy(config=config)
    assert strategy.config == given
    assert strategy.stage == 3
    assert DeepSpeedStrategy(config=config, stage=1).stage == 1
    assert not strategy.facts.allows_inference_mode
    assert DeepSpeedStrategy(stage=2).facts.allows_inference_mode
    assert given["zero_optimization"] == {"stage": 3, "overlap_comm": False}  # the user's is not changed


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"stage": 0}, r"stage=0\): write one of stage=1, 2 and 3"),
        ({"stage": 2, "offload_parameters": True}, "only stage 3 can offload parameters. Write stage=3"),
        ({"config": "no.json"}, r"config='no.json'\): the file cannot be read as JSON: .* Check the path"),
        ({"config": {"gradient_accumulation_steps": 4}}, r"Write Trainer\(accumulate_grad_batches=...\)"),
        ({"train_batch_size": 64}, "Set the batch size of the DataLoader"),
        ({"config": {"bf16": {"enabled": True}}}, r'Write Trainer\(precision="bf16-true"\)'),
        ({"config": {"fp16": {"enabled": True}}}, r'Write Trainer\(precision="16-true"\)'),
    ],
)
def test_what_contradicts_the_trainer_is_refused(installed: None, arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        DeepSpeedStrategy(**arguments)


@pytest.mark.parametrize("precision", ["transformer-engine", "64-true"])
def test_precisions_that_the_engine_cannot_do_are_named(precision: str) -> None:
    with pytest.raises(ConfigurationError, match=f"precision='{precision}'.*Write one of '32-true', 'bf16-mixed'"):
        _deepspeed_config.complete({"zero_optimization": {}}, {}, precision)


def test_the_engine_steps_another_optimizer_of_the_same_kind() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    weights[2].requires_grad_(False)
    mine = torch.optim.AdamW([{"params": weights[:1], "lr": 0.5}, {"params": weights[2:]}, {"params": weights[1:2]}])
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 1)  # it replaces mine.step
    theirs = _deepspeed_optimizers.stand_in(mine)
    assert type(theirs) is torch.optim.AdamW
    assert [group["params"] for group in theirs.param_groups] == [weights[:1], weights[1:2]]
    theirs.param_groups[0]["params"] = []
    mine.param_groups[0]["lr"] = 0.25
    _deepspeed_optimizers.pass_options(_deepspeed_optimizers.trained_groups(mine), theirs.param_groups)
    assert theirs.param_groups[0]["lr"] == 0.25
    assert mine.param_groups[0]["params"] == weights[:1]
    weights[1].grad = torch.ones(2)
    theirs.step()
    assert theirs.state
    assert not mine.state
    assert scheduler.optimizer is mine


def test_clipping_by_a_value_of_0_is_none(installed: None) -> None:
    strategy = DeepSpeedStrategy()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.clip_gradients_value(model, optimizer, 0.0)
    with pytest.raises(ConfigurationError, match="clips gradients by their norm"):
        strategy.clip_gradients_value(model, optimizer, 0.5)
