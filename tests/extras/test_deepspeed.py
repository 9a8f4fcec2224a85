"""DeepSpeed on two processes of the CPU: the suite for strategies, and what is particular about its engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoints import AsyncCheckpointIO, TorchCheckpointIO
from drivetrain.cli.command import main
from drivetrain.compat.deepspeed_files import convert_zero_checkpoint_to_fp32_state_dict
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.precision import MixedPrecision
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.deepspeed import DeepSpeedStrategy
from drivetrain.testing._regression import BATCHES, Saves, Small, whole
from drivetrain.testing.strategy_conformance import StrategyConformance, needs_every_rank, same


def complete(strategy: Any, optimizer: Any) -> tuple[Any, Any]:
    """Weights and optimizer states as a checkpoint has them, on every rank."""
    parts = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer).get("state")
    found: tuple[Any, Any] = strategy.broadcast(parts)
    return found


class Suite(StrategyConformance):
    """The rows of the suite, where DeepSpeed's engine does what they ask; the others say what is refused."""

    devices = 2
    precision = "32-true"
    tolerance = 1e-5
    test_the_optimizer_steps_the_gradients_that_hooks_see: Any = None  # the engine has them
    test_an_engine_trains_like_the_plain_loop: Any = None  # its strategy under an Engine is another class
    test_an_engine_resumes_exactly: Any = None

    def fit(self, module: Small, trainer: Any = None, **arguments: Any) -> dict[str, Any]:
        trainer = trainer or self.trainer(**{"max_epochs": arguments.pop("max_epochs", 2), **_without(arguments)})
        trainer.fit(module, self.loader(), self.loader(2), ckpt_path=arguments.get("ckpt_path"))
        weights, states = complete(trainer.strategy, trainer.optimizers[0])
        losses = [loss.cpu() for loss in module.losses]
        everyones = trainer.strategy.world.gather_objects(torch.stack(losses) if losses else torch.zeros(0))
        return {
            "weights": weights, "optimizer": whole(states), "losses": torch.stack(everyones).mean(0), "gradients": [],
            "steps": trainer.global_step,
        }  # fmt: skip

    def compare(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        super().compare(found, {**expected, "gradients": []})  # the engine has cleared, or cut up, what hooks could see

    def reference_of(self, module: Small) -> Small:
        strategy: Any = module.trainer.strategy
        plain = self.plain_module()
        plain.load_state_dict(strategy.broadcast(strategy.lightning_module_state_dict()))
        return plain

    @needs_every_rank
    def test_it_clips(self, folder: Path) -> None:
        """By the norm of the whole gradient; by value is refused."""
        found = self.fit(Small(), accumulate_grad_batches=4, gradient_clip_val=0.05)
        self.compare(found, self.plain_loop(accumulate=4, clip=("norm", 0.05)))
        with pytest.raises(ConfigurationError, match='Write gradient_clip_algorithm="norm"'):
            self.fit(Small(), gradient_clip_val=0.05, gradient_clip_algorithm="value")

    @needs_every_rank
    def test_manual_optimization_works(self, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(ConfigurationError, match="automatic_optimization = False"):
            self.fit(Small("manual"))

    @needs_every_rank
    def test_it_resumes_exactly(self, folder: Path) -> None:
        """From an epoch's end and its middle; an open window cannot be saved."""
        for at in (6, 9):
            uninterrupted = self.fit(Small(), callbacks=[Saves(folder / f"{at}.ckpt", at)])
            resumed = self.fit(Small(), ckpt_path=folder / f"{at}.ckpt")
            same(len(resumed["losses"]), 2 * BATCHES - at, "batches of the resumed run")
            for part in ("weights", "optimizer"):
                torch.testing.assert_close(resumed[part], uninterrupted[part], rtol=0, atol=0)
        with pytest.raises(CheckpointError, match="Save after an optimizer step"):
            self.fit(Small(), accumulate_grad_batches=4, callbacks=[Saves(folder / "open.ckpt", 9)])

    @needs_every_rank
    def test_a_checkpoint_is_written_in_the_background(self, folder: Path) -> None:
        """It has what one has that is written at once, and a run resumes from it exactly."""
        read, store = [], TorchCheckpointIO()
        for number, plugins in enumerate(([], [AsyncCheckpointIO()])):
            saved = folder / f"{number}.ckpt"
            uninterrupted = self.fit(Small(), callbacks=[Saves(saved, 6)], plugins=plugins)
            checkpoint = store.load_checkpoint(saved)
            read.append([checkpoint[part] for part in ("state_dict", "optimizer_states", "global_step")])
        torch.testing.assert_close(read[1], read[0], rtol=0, atol=0)
        resumed = self.fit(Small(), ckpt_path=saved)
        for part in ("weights", "optimizer"):
            torch.testing.assert_close(resumed[part], uninterrupted[part], rtol=0, atol=0)

    @needs_every_rank
    def test_it_resumes_exactly_with_parameter_groups_and_frozen_layers(self, folder: Path) -> None:
        uninterrupted = self.fit(Grouped(), callbacks=[Saves(folder / "groups.ckpt", 7)])
        states = torch.load(folder / "groups.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        same(sorted(states), [0, 1, 2, 5, 6], "parameters with a state")
        resumed = self.fit(Grouped(), ckpt_path=folder / "groups.ckpt")
        for part in ("weights", "optimizer"):
            torch.testing.assert_close(resumed[part], uninterrupted[part], rtol=0, atol=0)


class Grouped(Small):
    """Has two groups of parameters, and a frozen layer in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.scale, *self.net.parameters()]}, {"params": self.head.parameters(), "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.05)


def _without(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "ckpt_path"}


class Hooked(Small):
    """Runs ``then(module)`` when the fit starts, and steps a scheduler if ``gamma`` is given."""

    def __init__(self, then: Any = None, gamma: float | None = None, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.then, self.gamma, self.optimizer, self.rates = then, gamma, optimizer, []  # type: ignore[var-annotated]
        self.infinite_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == self.infinite_at else loss

    def on_train_start(self) -> None:
        if self.then is not None:
            self.then(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        if self.gamma is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loading(folder: Path) -> Any:
    return lambda module: module.trainer.strategy.load_deepspeed_checkpoint(folder)


def raising(error: type[Exception], match: str) -> Any:
    return pytest.raises(error, match=match)


class Own(Suite):
    """What the suite for strategies does not ask for; each of its rows runs on every rank."""

    stages: tuple[int, ...] = (1, 2, 3)

    def with_stage(self, stage: int, **arguments: Any) -> Any:
        own = arguments.pop("own", {})
        return self.trainer(DeepSpeedStrategy(stage=stage, **own), **arguments)

    @needs_every_rank
    def test_gradients_are_not_clipped_unasked(self, folder: Path) -> None:
        """DeepSpeed's own default is a norm of 1."""

        class Steep(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return 100 * super().training_step(batch, batch_idx)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-4)

        module = Steep()
        self.trainer(DDPStrategy()).fit(module, self.loader())
        for stage in self.stages:
            found = self.fit(Steep(), self.with_stage(stage))
            self.near(found["weights"], module.state_dict())

    @needs_every_rank
    def test_the_strategy_offloads(self, folder: Path) -> None:
        """Stages 1 to 3 keep optimizer states, and stage 3 parameters, in host memory: the numbers stay."""
        expected = self.plain_loop(accumulate=2, clip=("norm", 0.05))
        for stage in self.stages:
            own = {"offload_optimizer": True, "offload_parameters": stage == 3}
            trainer = self.with_stage(stage, own=own, accumulate_grad_batches=2, gradient_clip_val=0.05)
            self.compare(self.fit(Small(), trainer), expected)
            assert trainer.strategy.deepspeed_engine.zero_offload_optimizer() is not None

    @needs_every_rank
    def test_autocast_gives_the_numbers_of_one_process(self, folder: Path) -> None:
        """bf16-mixed keeps parameters in 32 bits and computes in 16, as it does with DDP."""
        for stage in self.stages:
            found = self.fit(Small(), self.with_stage(stage, precision="bf16-mixed"))
            ddp = self.trainer(DDPStrategy(), precision="bf16-mixed")
            module = Small()
            ddp.fit(module, self.loader())
            for name, value in module.state_dict().items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-2, atol=1e-2)

    @needs_every_rank
    def test_16_mixed_scales_losses_and_skips_steps_that_overflow(self, folder: Path) -> None:
        """Parameters have 32 bits; the scale shrinks, is saved with the run, and a file goes on under DDP too."""
        for stage in self.stages:
            path, arguments = folder / f"{stage}.ckpt", {"precision": "16-mixed"}
            module = Hooked()
            module.infinite_at = 1
            trainer = self.with_stage(stage, **arguments, max_epochs=1, accumulate_grad_batches=1)
            found = self.fit(module, trainer)
            assert trainer.scaler.get_scale() == 2**15
            same(trainer.global_step, BATCHES - 1, "optimizer steps")
            assert all(value.isfinite().all() and value.dtype == torch.float32 for value in found["weights"].values())
            small = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
            trainer = self.with_stage(stage, precision=None, plugins=small, accumulate_grad_batches=2)
            whole_run = self.fit(Small("weighted"), trainer)
            expected = self.plain_loop(kind="weighted", accumulate=2)
            for name, value in whole_run["weights"].items():
                torch.testing.assert_close(value, expected["weights"][name], rtol=0.05, atol=0.05)
            whole_run = self.fit(Small(), self.with_stage(stage, **arguments, callbacks=[Saves(path, 6)]))
            resumed = self.fit(Small(), self.with_stage(stage, **arguments), ckpt_path=path)
            for part in ("weights", "optimizer"):
                torch.testing.assert_close(resumed[part], whole_run[part], rtol=0, atol=0)
            other, ddp = Small(), self.trainer(DDPStrategy(), **arguments)
            ddp.fit(other, self.loader(), ckpt_path=path)
            for name, value in other.state_dict().items():
                torch.testing.assert_close(value, whole_run["weights"][name], rtol=0.02, atol=0.02)

    @needs_every_rank
    def test_16_bit_parameters_are_saved_in_32(self, folder: Path) -> None:
        """bf16-true steps copies in 32 bits; a checkpoint has those, and a resumed run goes on from them exactly."""
        for stage in self.stages:
            path = folder / f"{stage}.ckpt"
            arguments = {"precision": "bf16-true"}
            whole_run = self.fit(Small(), self.with_stage(stage, **arguments, callbacks=[Saves(path, 6)]))
            saved = torch.load(path, weights_only=True)["state_dict"]
            assert {value.dtype for value in saved.values()} == {torch.float32}
            assert any((value != value.bfloat16()).any() for value in saved.values())
            resumed = self.fit(Small(), self.with_stage(stage, **arguments), ckpt_path=path)
            for part in ("weights", "optimizer"):
                torch.testing.assert_close(resumed[part], whole_run[part], rtol=0, atol=0)
            torch.testing.assert_close(whole_run["losses"].float(), self.plain_loop()["losses"], rtol=0.1, atol=0.05)

    @needs_every_rank
    def test_a_skipped_step_is_not_counted_and_no_scheduler_steps(self, folder: Path) -> None:
        """Gradients that overflow change nothing; global_step and the scheduler stay behind by one."""
        for stage in self.stages:
            own = {"config": {"bf16": {"check_grad_overflow": True}}}
            module = Hooked(gamma=0.5)
            module.infinite_at = 1
            trainer = self.with_stage(stage, own=own, precision="bf16-true", max_epochs=1, limit_train_batches=3)
            found = self.fit(module, trainer)
            same(trainer.global_step, 2, "optimizer steps")
            same(trainer.strategy.deepspeed_engine.skipped_steps, 1, "skipped steps")
            same(module.rates, [0.025, 0.025, 0.0125], "learning rates")
            assert all(value.isfinite().all() for value in found["weights"].values())

    @needs_every_rank
    def test_schedulers_change_what_the_engine_steps_with(self, folder: Path) -> None:
        """A scheduler of configure_optimizers, and one in DeepSpeed's configuration; both are seen by callbacks."""
        for stage in self.stages:
            module = Hooked(gamma=0.0)  # after the first step nothing moves
            trainer = self.with_stage(stage, max_epochs=1)
            weights = self.fit(module, trainer)["weights"]
            same(module.rates, [0.0] * BATCHES, "learning rates")
            first = self.fit(Hooked(), self.with_stage(stage, max_epochs=1, limit_train_batches=1))["weights"]
            for name, value in first.items():
                # AdamW decays weights by the rate, so that nothing at all moves at 0
                torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
            scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1,
                         "warmup_num_steps": 4, "warmup_type": "linear"}}  # fmt: skip
            module = Hooked()
            self.fit(module, self.with_stage(stage, own={"config": {"scheduler": scheduler}}, max_epochs=1))
            assert module.rates[0] < module.rates[2] < module.rates[-1] == 0.1

    @needs_every_rank
    def test_the_configuration_may_name_the_optimizer(self, folder: Path) -> None:
        """It is one that checkpoints and callbacks see as any other."""
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01, "torch_adam": True}}}
        for stage in self.stages:
            module = Small()
            module.configure_optimizers = lambda: None  # type: ignore[method-assign]
            self.compare(self.fit(module, self.with_stage(stage, own={"config": config})), self.plain_loop())
            with raising(ConfigurationError, "one optimizer, and DeepSpeed's configuration names one too"):
                self.fit(Small(), self.with_stage(stage, own={"config": config}))

    @needs_every_rank
    def test_what_the_engine_cannot_do_is_refused_by_name(self, folder: Path) -> None:
        """LBFGS, several optimizers, none, a step without a loss, thawed layers, options that nobody knows."""

        def returning(value: Any) -> Small:
            module = Small()
            module.configure_optimizers = lambda: value(module)  # type: ignore[method-assign]
            return module

        weights = Small.parameters
        sgd = torch.optim.SGD
        for stage in self.stages:
            make = self.with_stage
            with raising(ConfigurationError, "LBFGS evaluates the loss several times"):
                self.fit(returning(lambda module: torch.optim.LBFGS(weights(module))), make(stage))
            with raising(ConfigurationError, "2 optimizers, and DeepSpeed's engine steps one"):
                self.fit(returning(lambda module: [sgd(weights(module)), sgd(weights(module))]), make(stage))
            with raising(ConfigurationError, "no optimizer, and DeepSpeed cannot train without one"):
                self.fit(returning(lambda module: None), make(stage))
            silent = Small()
            silent.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
            with raising(ConfigurationError, "training_step returned None"):
                self.fit(silent, make(stage))
            thawing = Hooked(lambda module: module.head.requires_grad_(True))
            thawing.head.requires_grad_(False)
            with raising(ConfigurationError, "head.weight was frozen when DeepSpeed's engine started"):
                self.fit(thawing, make(stage))
            with raising(
                ConfigurationError, "DeepSpeed has no fp16 for the device 'cpu'. Write precision=\"16-mixed\""
            ):
                self.fit(Small(), make(stage, precision="16-true"))
            with raising(ConfigurationError, "precision='64-true': its engine trains float32 parameters"):
                self.fit(Small(), make(stage, precision="64-true"))
            with raising(ConfigurationError, r"algather_bucket_size=...\) .* did you mean 'allgather_bucket_size'"):
                self.fit(Small(), make(stage, own={"algather_bucket_size": 10}))
        trainer = self.with_stage(2, own={"allgather_bucket_size": 1000, "gradient_clipping": 0.05})
        self.compare(self.fit(Small(), trainer), self.plain_loop(clip=("norm", 0.05)))
        assert trainer.strategy.deepspeed_engine.zero_allgather_bucket_size() == 1000

    @needs_every_rank
    def test_files_are_exchanged_with_other_strategies(self, folder: Path) -> None:
        """A file of one strategy at an epoch's end is resumed by the others, as if one had trained it all."""
        expected = self.plain_loop()
        for stage in self.stages:
            for first, then in ((stage, "ddp"), ("ddp", stage)):
                path = folder / f"{first}-{then}.ckpt"
                for which, options in ((first, {"callbacks": [Saves(path, BATCHES)], "max_epochs": 1}), (then, {})):
                    module = Small()
                    trainer = (
                        self.trainer(DDPStrategy(), **options) if which == "ddp" else self.with_stage(which, **options)  # type: ignore[arg-type]
                    )
                    resumes = path if which == then else None
                    trainer.fit(module, self.loader(), ckpt_path=resumes)
                weights = trainer.strategy.broadcast(trainer.strategy.lightning_module_state_dict())
                for name, value in expected["weights"].items():
                    self.near(weights[name], value.detach())

    @staticmethod
    def filled(weights: Any) -> Small:
        module = Small()
        module.load_state_dict(weights)
        return module

    @needs_every_rank
    def test_deepspeeds_own_folder_can_be_read_and_loaded(self, folder: Path) -> None:
        """DeepSpeed's tool finds the weights in it, and so does ckpt_path; another number of processes cannot go on."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        for stage in self.stages:
            own = folder / str(stage)

            def save(trainer: Any, own: Path = own) -> None:
                trainer.strategy.save_deepspeed_checkpoint(own, tag="t")

            at_end = LambdaCallback(on_train_epoch_end=lambda trainer, module: save(trainer))
            trained = self.fit(Small(), self.with_stage(stage, max_epochs=1, callbacks=[at_end]))
            found = get_fp32_state_dict_from_zero_checkpoint(str(own), tag="t")
            for name, value in trained["weights"].items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)
            trainer = self.with_stage(stage)
            results = trainer.validate(Small(), self.loader(2), ckpt_path=own, weights_only=False, verbose=False)
            one = convert_zero_checkpoint_to_fp32_state_dict(own, folder / f"{stage}-{trainer.global_rank}.pt")
            for name, value in trained["weights"].items():
                torch.testing.assert_close(one["state_dict"][name], value, rtol=0, atol=0)
            tool = folder / f"tool-{stage}-{trainer.global_rank}.ckpt"  # reads the folder without DeepSpeed
            assert main(["checkpoint", "consolidate", str(own), str(tool)]) == 0
            for name, value in trained["weights"].items():
                found_there = torch.load(tool, weights_only=True)["state_dict"]
                torch.testing.assert_close(found_there[name], value, rtol=0, atol=0)
            again = self.with_stage(stage)
            plain = again.validate(self.filled(trained["weights"]), self.loader(2), verbose=False)
            assert results == plain
            with raising(CheckpointError, "can run code. If you trust them, pass weights_only=False"):
                trainer.validate(Small(), self.loader(2), ckpt_path=own, verbose=False)
            with raising(CheckpointError, "holds no progress of a Trainer. Call trainer.strategy.load_deepspeed_ch"):
                self.with_stage(stage).fit(Small(), self.loader(), self.loader(2), ckpt_path=own)
            further = Hooked(loading(own))
            resumed = self.fit(further, self.with_stage(stage, max_epochs=1))
            for part in ("weights", "optimizer"):
                self.near(resumed[part], self.plain_loop()[part])
            with raising(CheckpointError, "There is no checkpoint of DeepSpeed in"):
                self.fit(Hooked(loading(folder)), self.with_stage(stage))
            if further.trainer.is_global_zero:
                (own / "t" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
            further.trainer.strategy.barrier()
            with raising(CheckpointError, r"pieces of 1 processes, and there are 2\. Start 1 .*ds_to_universal"):
                self.fit(Hooked(loading(own)), self.with_stage(stage))

    @needs_every_rank
    def test_layers_of_configure_model_are_divided_when_they_are_made(self, folder: Path) -> None:
        """Stage 3; such a module trains, saves and loads complete weights."""

        class Late(Small):
            def configure_model(self) -> None:
                if isinstance(self.head, torch.nn.Linear) and not hasattr(self.head.weight, "ds_id"):
                    self.head = torch.nn.Linear(3, 1)
                    self.divided = hasattr(self.head.weight, "ds_id")

        path = folder / "late.ckpt"
        module = Late()
        trained = self.fit(module, self.with_stage(3, max_epochs=1, callbacks=[Saves(path, BATCHES)]))
        assert module.divided
        again, trainer = Late(), self.with_stage(3)
        trainer.validate(again, self.loader(2), ckpt_path=path, verbose=False)
        weights = trainer.strategy.broadcast(trainer.strategy.lightning_module_state_dict())
        torch.testing.assert_close(weights, trained["weights"], rtol=0, atol=0)
        resumed = self.fit(Late(), self.with_stage(3, max_epochs=2), ckpt_path=path)
        same(resumed["steps"], 2 * BATCHES, "steps")


class TestOwn(Own):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy()


for _inherited in [name for name in dir(StrategyConformance) if name.startswith("test_")]:
    setattr(TestOwn, _inherited, None)  # those of the suite run with each stage below


class TestStage1(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=1)


class TestStage2(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=2)


class TestStage3(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "devices"), [(1, 1), (3, 1), (3, 2)])
def test_a_program_trains_and_ends_well(stage: int, devices: int, tmp_path: Path) -> None:
    """One process gives the loop's numbers bit for bit; ZeRO-3 in several ends without an abort."""
    program = [sys.executable, str(Path(__file__).parent / "deepspeed_program.py"), str(stage), str(devices), tmp_path]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("trained") == devices
    assert "terminate called" not in done.stderr
