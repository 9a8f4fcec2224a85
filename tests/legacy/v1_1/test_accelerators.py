"""Accelerators of the 1.1 generation: subclasses as the guide of that time prints them, and the named ones."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.clusters import ClusterEnvironment, LocalEnvironment, TorchElasticEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.legacy import v1_1


def trained(make_trainer: Any, regression: Any, data: Any, **arguments: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(3)
    model = regression()
    trainer = make_trainer(**arguments)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return model.state_dict(), trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


# ---- E3-1 ------------------------------------------------------------------------------------------------------------


class Printed(v1_1.Accelerator):
    """The signatures that the guide prints; the bodies leave the work to the base."""

    hardware = "cpu"

    def __init__(self, trainer: Any, cluster_environment: Any = None) -> None:
        super().__init__(trainer, cluster_environment)
        self.nickname = "my_accelerator"
        self.called: list[str] = []

    def setup(self) -> Any:
        self.called.append("setup")
        super().setup()

    def train(self) -> Any:
        self.called.append("train")
        return super().train()

    def training_step(self) -> Any:
        self.called.append("training_step")
        return super().training_step()

    def validation_step(self) -> Any:
        self.called.append("validation_step")
        return super().validation_step()

    def test_step(self) -> Any:
        self.called.append("test_step")
        return super().test_step()

    def backward(self, closure_loss: Any, optimizer: Any, opt_idx: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.append("backward")
        return super().backward(closure_loss, optimizer, opt_idx, *args, **kwargs)

    def barrier(self, name: Any = None) -> None:
        self.called.append("barrier")
        super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.called.append("broadcast")
        return super().broadcast(obj, src)

    def sync_tensor(self, tensor: Any, group: Any = None, reduce_op: Any = None) -> Any:
        self.called.append("sync_tensor")
        return super().sync_tensor(tensor, group, reduce_op)


class WorksItself(Printed):
    """The same signatures; the bodies do the work, and call nothing of the base."""

    def setup(self) -> None:
        self.called.append("setup")

    def train(self) -> Any:
        return self.trainer.strategy.loop()

    def training_step(self) -> Any:
        return self.trainer.lightning_module.training_step(*self.step_args)

    def validation_step(self) -> Any:
        return self.trainer.lightning_module.validation_step(*self.step_args)

    def test_step(self) -> Any:
        return self.trainer.lightning_module.test_step(*self.step_args)

    def backward(self, closure_loss: Any, optimizer: Any, opt_idx: Any, *args: Any, **kwargs: Any) -> Any:
        closure_loss.backward()
        return closure_loss.detach()

    def barrier(self, name: Any = None) -> None:
        pass

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def sync_tensor(self, tensor: Any, group: Any = None, reduce_op: Any = None) -> Any:
        return tensor


class OfVersion11(Printed):
    """The signatures of the version itself, with ``model`` and ``args``."""

    def setup(self, model: Any) -> None:
        self.called.append(f"setup {type(model).__name__}")
        v1_1.Accelerator.setup(self, model)

    def training_step(self, args: Any) -> Any:
        self.called.append("training_step")
        args[0] = self.batch_to_device(args[0], self.root_device)
        return v1_1.Accelerator.training_step(self, args)

    def validation_step(self, args: Any) -> Any:
        self.called.append("validation_step")
        return v1_1.Accelerator.validation_step(self, args)

    def test_step(self, args: Any) -> Any:
        self.called.append("test_step")
        return v1_1.Accelerator.test_step(self, args)


@pytest.mark.parametrize("cls", [Printed, WorksItself, OfVersion11])
def test_e3_1_an_accelerator_as_printed_trains_to_the_weights_of_the_modern_spelling(
    make_trainer: Any, validated: Any, data: Any, cls: Any
) -> None:
    loader = DataLoader(data, batch_size=8)
    found = []
    for accelerator in (cls(), "cpu"):
        torch.manual_seed(3)
        model, trainer = validated(), make_trainer(accelerator=accelerator, num_sanity_val_steps=0)
        trainer.fit(model, loader, loader)
        found.append((model.state_dict(), dict(trainer.callback_metrics), trainer.test(model, loader, verbose=False)))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][2] == found[1][2]


def test_e3_1_each_member_is_called(make_trainer: Any, validated: Any, data: Any) -> None:
    loader, accelerator = DataLoader(data, batch_size=8), Printed()  # type: ignore[call-arg]
    trainer = make_trainer(accelerator=accelerator, num_sanity_val_steps=0)
    trainer.fit(model := validated(), loader, loader)
    steps = [each for each in accelerator.called if each not in ("barrier", "broadcast")]
    assert steps == ["setup", "train", *["training_step", "backward"] * 4, *["validation_step"] * 4]
    accelerator.called.clear()
    trainer.test(model, loader, verbose=False)
    assert [each for each in accelerator.called if each not in ("barrier", "broadcast")] == [
        "setup", "train", *["test_step"] * 4,
    ]  # fmt: skip


def test_c7_a_required_trainer_may_be_left_out_and_may_be_passed(make_trainer: Any, regression: Any, data: Any) -> None:
    cls: Any = WorksItself
    first = make_trainer()
    for accelerator, before in ((cls(), None), (cls(first), first), (cls(trainer=first), first)):
        accelerator.strategy_name = "single_device"
        assert accelerator.trainer is before
        _, trainer = trained(make_trainer, regression, data, accelerator=accelerator)
        assert accelerator.trainer is trainer


def test_c7_named_accelerators_may_be_made_bare() -> None:
    for name in NAMED:
        assert getattr(v1_1, name)().trainer is None


def test_c7_other_arguments_of_a_constructor_stay_required() -> None:
    class Other(v1_1.Accelerator):
        def __init__(self, trainer: Any, another: Any) -> None:
            super().__init__(trainer)

    with pytest.raises(TypeError, match="another"):
        Other()  # type: ignore[call-arg]


def test_s3_4_train_owns_the_run(make_trainer: Any, regression: Any, data: Any) -> None:
    class Twice(v1_1.CPUAccelerator):
        def train(self) -> Any:
            before = [each.clone() for each in self.strategy.lightning_module.parameters()]
            self.results = [super().train()]
            self.moved = any(
                not torch.equal(one, other)
                for one, other in zip(before, self.strategy.lightning_module.parameters(), strict=True)
            )
            return self.results[0]

    accelerator = Twice()
    trained(make_trainer, regression, data, accelerator=accelerator)
    assert accelerator.moved
    with pytest.raises(ConfigurationError, match=r"Trainer\(accelerator=CPUAccelerator\(\)\)\.fit"):
        v1_1.CPUAccelerator().train()


class CallsItsSteps(Printed):
    """Runs the steps as methods of ``trainer.model``."""

    def training_step(self) -> Any:
        return self.trainer.model.training_step(*self.step_args)

    def validation_step(self) -> Any:
        return self.trainer.model.validation_step(*self.step_args)

    def test_step(self) -> Any:
        return self.trainer.model.test_step(*self.step_args)


class CallsTheWrapper(Printed):
    """Calls ``trainer.model``, which runs the step."""

    def training_step(self) -> Any:
        return self.trainer.model(*self.step_args)

    validation_step = test_step = training_step


@pytest.mark.parametrize("cls", [CallsItsSteps, CallsTheWrapper])
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_steps_run_through_the_model_of_the_trainer(
    make_trainer: Any, validated: Any, data: Any, cls: Any, strategy: str
) -> None:
    loader, first = DataLoader(data, batch_size=8), make_trainer()
    found = []
    for accelerator in (cls(), cls(first), "cpu"):
        if accelerator != "cpu":
            accelerator.strategy_name = strategy
        torch.manual_seed(3)
        model, trainer = validated(), make_trainer(accelerator=accelerator, num_sanity_val_steps=0)
        trainer.fit(model, loader, loader)
        found.append((model.state_dict(), dict(trainer.callback_metrics), trainer.test(model, loader, verbose=False)))
    for own in found[:2]:
        assert same(own[0], found[2][0])
        assert own[1:] == found[2][1:]


def test_a_configure_ddp_may_return_the_module_itself(make_trainer: Any, regression: Any, data: Any) -> None:
    class Bare(CallsTheWrapper):
        def configure_ddp(self, model: Any, device_ids: Any) -> Any:
            return model

    own: Any = Bare
    found, trainer = trained(make_trainer, regression, data, accelerator=own())
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    assert same(found, expected)
    assert type(trainer.lightning_module) is regression


def test_a_cluster_of_four_members_is_enough_where_nothing_sets_rank(
    make_trainer: Any, regression: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FourMembers(ClusterEnvironment):
        def master_address(self) -> Any:
            return "127.0.0.1"

        def master_port(self) -> Any:
            return "12910"

        def world_size(self) -> Any:
            return os.environ.get("WORLD_SIZE")

        def local_rank(self) -> Any:
            return int(os.environ["LOCAL_RANK"])

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu", plugins=[LocalEnvironment()])
    own: Any = CallsItsSteps
    found, trainer = trained(make_trainer, regression, data, accelerator=own(), plugins=[FourMembers()])
    assert same(found, expected)
    assert trainer.global_rank == 0


def test_s3_4_train_may_set_up_what_is_set_up_already(make_trainer: Any, regression: Any, data: Any) -> None:
    class AsThen(v1_1.CPUAccelerator):
        def setup(self, model: Any = None) -> None:
            self.trainer.strategy.lightning_module = model

        def train(self) -> Any:
            before = list(self.optimizers)
            self.setup_optimizers(self.strategy.lightning_module)
            assert self.optimizers == before
            return self.train_or_test()

    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    found, _ = trained(make_trainer, regression, data, accelerator=AsThen())
    assert same(found, expected)


def test_s3_4_train_may_leave_the_loop_out_or_run_its_own(make_trainer: Any, regression: Any, data: Any) -> None:
    class Own(v1_1.CPUAccelerator):
        def train(self) -> Any:
            [optimizer] = self.optimizers
            for index, batch in enumerate(DataLoader(data, batch_size=8)):
                loss = self.strategy.lightning_module.training_step(batch, index)
                optimizer.zero_grad()
                self.backward(loss, optimizer, 0)
                optimizer.step()

    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    found, trainer = trained(make_trainer, regression, data, accelerator=Own())
    assert same(found, expected)
    assert trainer.global_step == 0  # the Trainer's loop has not run


# ---- the named accelerators ------------------------------------------------------------------------------------------

NAMED = sorted(name for name in v1_1.__all__ if name.endswith("Accelerator") and name != "Accelerator")
ON_CPU = [name for name in NAMED if name not in ("GPUAccelerator", "TPUAccelerator") and "HPC" not in name]


def test_e3_3_all_eleven_are_there() -> None:
    assert len(NAMED) == 11


@pytest.mark.parametrize("name", ON_CPU)
def test_e3_3_a_named_accelerator_trains_to_the_weights_of_the_modern_spelling(
    make_trainer: Any, regression: Any, data: Any, name: str
) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    accelerator = getattr(v1_1, name)()
    accelerator.hardware = "cpu"
    if "Spawn" in name:
        accelerator.strategy_name = "ddp"  # in this process; test_started.py starts others
    found, trainer = trained(make_trainer, regression, data, accelerator=accelerator)
    assert same(found, expected)
    assert trainer.strategy.source is accelerator


def test_e3_3_data_parallel_on_two_devices_trains_as_one(make_trainer: Any, regression: Any, data: Any) -> None:
    expected, _ = trained(make_trainer, regression, data, accelerator="cpu")
    accelerator = v1_1.DataParallelAccelerator()
    accelerator.hardware = "cpu"
    found, trainer = trained(make_trainer, regression, data, accelerator=accelerator, devices=2)
    assert trainer.num_devices == 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_e3_3_missing_hardware_is_named() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="GPU"):
            Trainer(accelerator=v1_1.GPUAccelerator())
    with pytest.raises(ConfigurationError, match="'tpu' is not available here: torch_xla is not installed"):
        Trainer(accelerator=v1_1.TPUAccelerator())


@pytest.mark.parametrize("name", ["DDPHPCAccelerator", "DDPCPUHPCAccelerator"])
def test_c8_processes_that_a_cluster_must_start_are_asked_for(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} trains in processes that a cluster has started"):
        Trainer(accelerator=getattr(v1_1, name)())


def test_the_constructors_are_those_of_that_time() -> None:
    cluster = TorchElasticEnvironment({})
    for name in NAMED:
        first = ("trainer", 2, cluster) if "Spawn" in name else ("trainer", cluster)
        accelerator = getattr(v1_1, name)(*first)
        assert (accelerator.trainer, accelerator.cluster_environment) == ("trainer", cluster)
        assert getattr(accelerator, "nprocs", 2) == 2


# ---- what an accelerator knows ---------------------------------------------------------------------------------------


def test_s3_1_attributes_and_aliases(make_trainer: Any, regression: Any, data: Any) -> None:
    plugin = v1_1.DDPPlugin(find_unused_parameters=False)
    accelerator = v1_1.DDPAccelerator(ddp_plugin=plugin)
    accelerator.hardware = "cpu"
    assert (accelerator.trainer, accelerator.nickname, accelerator.cluster_environment) == (None, "ddp", None)
    _, trainer = trained(make_trainer, regression, data, accelerator=accelerator)
    assert accelerator.ddp_plugin is plugin
    assert plugin.accelerator is accelerator
    assert trainer.strategy.ddp_arguments == {"find_unused_parameters": False}
    assert accelerator.dist.rank == 0
    assert accelerator.train_loop == accelerator.validation_loop == accelerator.test_loop == accelerator.train_or_test
    accelerator.dist = "own"
    assert accelerator.dist == "own"


def test_s3_1_an_accelerator_can_be_pickled_with_its_strategy() -> None:
    accelerator = v1_1.DDPSpawnAccelerator(None, 2)
    accelerator.hardware = "cpu"
    copy = pickle.loads(pickle.dumps(accelerator.strategy))
    assert type(copy) is type(accelerator.strategy)
    assert copy.source.strategy is copy
    assert copy.source.nprocs == 2


def test_s3_2_the_nickname_is_shown(
    make_trainer: Any, regression: Any, data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Printed()  # type: ignore[call-arg]
    assert repr(accelerator) == "Printed(nickname='my_accelerator')"
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        trained(make_trainer, regression, data, accelerator=accelerator)
    assert "Printed(nickname='my_accelerator') trains by DDPStrategy." in caplog.text
    names = {name: getattr(v1_1, name)().nickname for name in NAMED}
    assert names == {
        "CPUAccelerator": None, "DDP2Accelerator": "ddp2", "DDPAccelerator": "ddp", "DDPCPUHPCAccelerator": "ddp_cpu",
        "DDPCPUSpawnAccelerator": "ddp_cpu", "DDPHPCAccelerator": "ddp", "DDPSpawnAccelerator": "ddp",
        "DataParallelAccelerator": "dp", "GPUAccelerator": None, "HorovodAccelerator": "horovod",
        "TPUAccelerator": None,
    }  # fmt: skip


def test_s3_10_the_cluster_of_the_plugins_is_the_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)

    class Own(TorchElasticEnvironment):
        detect_priority = None

    cluster, accelerator = Own(), Printed()  # type: ignore[call-arg]
    trainer = Trainer(plugins=[cluster], accelerator=accelerator)
    assert accelerator.cluster_environment is cluster
    assert trainer.strategy.cluster_environment is cluster
    single = v1_1.CPUAccelerator()
    Trainer(plugins=[cluster], accelerator=single)
    assert single.cluster_environment is cluster
    given = Printed(None, cluster)
    Trainer(accelerator=given)
    assert given.cluster_environment is cluster
    with pytest.raises(ConfigurationError, match="Give the cluster environment once"):
        Trainer(plugins=[Own()], accelerator=Printed(None, cluster))
    with pytest.raises(ConfigurationError, match="two of a kind"):
        Trainer(plugins=[Own(), Own()], accelerator=Printed())  # type: ignore[call-arg]


def test_s3_20_nprocs_are_the_devices() -> None:
    assert Trainer(accelerator=v1_1.DDPCPUSpawnAccelerator(None, 3)).num_devices == 3
    with pytest.raises(ConfigurationError, match="devices=2"):
        Trainer(accelerator=v1_1.DDPCPUSpawnAccelerator(None, 3), devices=2)


def test_a_plugin_alone_and_outside_of_an_accelerator() -> None:
    trainer = Trainer(accelerator="auto", plugins=[v1_1.DDPPlugin(find_unused_parameters=False)], logger=False)
    assert trainer.strategy.ddp_arguments == {"find_unused_parameters": False}
    assert Trainer(accelerator="cpu", plugins=[v1_1.NativeAMPPlugin()], logger=False).precision == "16-mixed"
    with pytest.raises(ConfigurationError, match=r"plugins=\[DDPPlugin\(\)\]"):
        v1_1.DDPPlugin().configure_ddp(None, None)
