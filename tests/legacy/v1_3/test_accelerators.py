"""An accelerator of the 1.3 generation trains to the weights of the modern spelling."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.v1_3 import (
    Accelerator,
    ApexMixedPrecisionPlugin,
    CPUAccelerator,
    DataParallelPlugin,
    DDP2Plugin,
    DDPPlugin,
    DDPShardedPlugin,
    DoublePrecisionPlugin,
    GPUAccelerator,
    HorovodPlugin,
    NativeMixedPrecisionPlugin,
    PrecisionPlugin,
    SingleDevicePlugin,
    SingleTPUPlugin,
    TPUAccelerator,
    TPUSpawnPlugin,
    TrainingTypePluginsRegistry,
)
from drivetrain.legacy.v1_3.training_type_plugins import PLUGINS
from drivetrain.precision import MixedPrecision


def trained(make_trainer: Any, regression: Any, data: Any, **arguments: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(3)
    model = regression()
    trainer = make_trainer(**arguments)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return model.state_dict(), trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


CPU_PLUGINS = [
    SingleDevicePlugin, DataParallelPlugin, DDPPlugin, DDP2Plugin, DDPShardedPlugin, HorovodPlugin,
]  # fmt: skip


@pytest.mark.parametrize("plugin", CPU_PLUGINS, ids=lambda plugin: plugin.__name__)
def test_e1_every_training_type_plugin_trains_to_the_weights_of_the_modern_spelling(
    make_trainer: Any, regression: Any, data: Any, plugin: Any
) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    accelerator = CPUAccelerator(precision_plugin=PrecisionPlugin(), training_type_plugin=plugin())
    found, trainer = trained(make_trainer, regression, data, accelerator=accelerator)
    assert same(found, expected)
    assert trainer.strategy.source is accelerator


@pytest.mark.parametrize(
    ("plugin", "modern"),
    [
        (PrecisionPlugin(), "32-true"), (NativeMixedPrecisionPlugin(), "16-mixed"),
        (NativeMixedPrecisionPlugin("bf16"), "bf16-mixed"), (MixedPrecision("bf16-mixed"), "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"), (DoublePrecisionPlugin(), "64-true"), (ApexMixedPrecisionPlugin("O0"), "32-true"),
        (ApexMixedPrecisionPlugin("O1"), "16-mixed"), (ApexMixedPrecisionPlugin("O2"), "16-mixed"),
        (ApexMixedPrecisionPlugin("O3"), "16-true"),
    ],
    ids=["full", "native", "native-bf16", "object", "name", "double", "apex-O0", "apex-O1", "apex-O2", "apex-O3"],
)  # fmt: skip
def test_s1_4_every_precision_plugin_trains_to_the_weights_of_the_modern_spelling(
    make_trainer: Any, regression: Any, data: Any, plugin: Any, modern: str
) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu", precision=modern)
    accelerator = CPUAccelerator(precision_plugin=plugin, training_type_plugin=SingleDevicePlugin())
    found, trainer = trained(make_trainer, regression, data, accelerator=accelerator)
    assert same(found, expected)
    assert trainer.precision == modern


def test_an_unknown_level_of_apex_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="O0, O1, O2, O3"):
        ApexMixedPrecisionPlugin("O4")


def test_s1_3_cpu_twin_computes_in_bf16(make_trainer: Any, regression: Any, data: Any) -> None:
    seen: list[torch.dtype] = []

    class Seen(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.net(batch[0]).dtype if hasattr(self, "net") else torch.get_autocast_dtype("cpu"))
            return super().training_step(batch, batch_idx)

    accelerator = CPUAccelerator(NativeMixedPrecisionPlugin("bf16"), DDPPlugin())
    trained(make_trainer, Seen, data, accelerator=accelerator)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("name", ["ddp", "dp", "single_device"])
def test_plugins_by_their_names(make_trainer: Any, regression: Any, data: Any, name: str) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    found, _ = trained(make_trainer, regression, data, accelerator=CPUAccelerator("32-true", name))
    assert same(found, expected)


def test_a_plugin_of_ones_own_by_its_name(make_trainer: Any, regression: Any, data: Any) -> None:
    @TrainingTypePluginsRegistry.register("own", description="a plugin of one's own", find_unused_parameters=False)
    class Own(DDPPlugin):
        pass

    try:
        _, trainer = trained(make_trainer, regression, data, accelerator=CPUAccelerator("32-true", "own"))
        assert type(trainer.strategy.source.training_type_plugin) is Own
        assert trainer.strategy.ddp_arguments == {"find_unused_parameters": False}
        assert "own" in TrainingTypePluginsRegistry.available_plugins()
        assert isinstance(TrainingTypePluginsRegistry.get(name="own"), Own)
    finally:
        del PLUGINS["own"]


def test_a_training_type_plugin_alone_in_plugins(make_trainer: Any, regression: Any, data: Any) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    found, trainer = trained(make_trainer, regression, data, accelerator="cpu", plugins=[DDPPlugin()])
    assert same(found, expected)
    assert isinstance(trainer.strategy.source.training_type_plugin, DDPPlugin)


def test_a_training_type_plugin_alone_computes_in_the_trainers_precision(
    make_trainer: Any, regression: Any, data: Any
) -> None:
    expected, _ = trained(make_trainer, regression, data, precision="bf16-mixed")
    found, _ = trained(make_trainer, regression, data, plugins=[DDPPlugin()], precision="bf16-mixed")
    assert same(found, expected)


def test_a_precision_plugin_alone_in_plugins() -> None:
    trainer = Trainer(accelerator="cpu", plugins=[NativeMixedPrecisionPlugin("bf16")], logger=False)
    assert trainer.precision == "bf16-mixed"


def test_a_precision_plugin_alone_whose_methods_nothing_would_call_is_refused() -> None:
    class Own(PrecisionPlugin):
        def pre_optimizer_step(self, *args: Any, **kwargs: Any) -> bool:
            return False

    with pytest.raises(ConfigurationError, match="pre_optimizer_step"):
        Trainer(accelerator="cpu", plugins=[Own()])


def test_c6_inner_plugins_are_resolved_when_the_trainer_takes_the_accelerator() -> None:
    plugin = DDPPlugin(sync_batchnorm=True)
    trainer = Trainer(accelerator=CPUAccelerator(PrecisionPlugin(), plugin), devices=2)
    assert plugin.parallel_devices == (torch.device("cpu"),) * 2
    assert plugin.cluster_environment is trainer.plan.environment
    assert (plugin.world_size, trainer.settings.sync_batchnorm) == (2, True)


def test_the_accelerator_alone_takes_all_devices_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import drivetrain.accelerators.cpu as cpu

    monkeypatch.setattr(cpu.CPUAccelerator, "auto_device_count", staticmethod(lambda: 3))
    assert Trainer(accelerator=CPUAccelerator(PrecisionPlugin(), DDPPlugin())).num_devices == 3


def test_an_argument_given_by_both_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="strategy='dp'"):
        Trainer(accelerator=CPUAccelerator(PrecisionPlugin(), DDPPlugin()), strategy="dp")
    with pytest.raises(ConfigurationError, match="Give the precision once"):
        Trainer(accelerator=CPUAccelerator(PrecisionPlugin(), DDPPlugin()), precision="bf16-mixed")


def test_missing_hardware_is_named() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="GPU"):
            Trainer(accelerator=GPUAccelerator(NativeMixedPrecisionPlugin(), DDPPlugin()))
    for plugin in (TPUSpawnPlugin(), SingleTPUPlugin()):
        with pytest.raises(ConfigurationError, match="'tpu' is not available here: torch_xla is not installed"):
            Trainer(accelerator=TPUAccelerator(PrecisionPlugin(), plugin))


def test_a_plugin_outside_of_an_accelerator_says_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match="CPUAccelerator"):
        DDPPlugin().barrier()
    with pytest.raises(ConfigurationError, match="training_type_plugin got an int"):
        Accelerator(PrecisionPlugin(), 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="precision_plugin got"):
        Accelerator(3.5, SingleDevicePlugin())  # type: ignore[arg-type]


def test_a_composed_accelerator_can_be_pickled_with_its_strategy() -> None:
    accelerator = CPUAccelerator(PrecisionPlugin(), DDPPlugin())
    copy = pickle.loads(pickle.dumps(accelerator.strategy))
    assert type(copy) is type(accelerator.strategy)
    assert copy.source.training_type_plugin.strategy is copy


def test_any_object_with_as_settings_stands_for_arguments() -> None:
    class Foreign:
        def as_settings(self) -> dict[str, Any]:
            return {"accelerator": "cpu", "devices": 2, "strategy": "dp"}

    trainer = Trainer(accelerator=Foreign())  # type: ignore[arg-type]
    assert (trainer.num_devices, type(trainer.strategy).__name__) == (2, "DataParallelStrategy")
