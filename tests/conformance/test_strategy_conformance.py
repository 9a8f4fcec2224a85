"""The suite for strategies itself: each way of being wrong fails the row that is about it."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.test_strategies import example

from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy
from drivetrain.strategies.step_parts import StepParts
from drivetrain.testing._ranks import Ranks
from drivetrain.testing.strategy_conformance import StrategyConformance


def failure(suite: type[StrategyConformance], row: str, folder: Path) -> str:
    """What the row says; "" if it passes."""
    ranks = Ranks(suite, suite.devices)
    try:
        ranks.run(row, folder)
    except BaseException as error:  # pytest.raises says with one that nothing was raised
        return f"{type(error).__name__}: {error}"
    finally:
        ranks.close()
    return ""


class StepsTwice(SingleDeviceStrategy):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        super().optimizer_step(*args, **kwargs)
        return super().optimizer_step(args[0], None)


class DoesNotClip(SingleDeviceStrategy):
    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        return None


class ForgetsToCallSuper(SingleDeviceStrategy):
    """Its own step is right; the step of a subclass that overrides ``backward`` is not."""

    def bind_step(self, parts: Any) -> Any:
        own = type(self).backward is SingleDeviceStrategy.backward

        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> tuple[Any, int]:
            if index == 0:
                parts.begin(size)
            output = parts.training_step(batch, batch_idx)
            loss = parts.loss_of(output, index, last)
            if own and loss is not None:
                parts.backward(loss)
            if not last:
                return output, 0
            parts.before_step()
            return output, int(parts.optimizer_step())

        return step

    facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)


class ClaimsHooks(ForgetsToCallSuper):
    facts = ForgetsToCallSuper.facts.but(honoured_hooks="all")


class LosesOptimizerState(SingleDeviceStrategy):
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass


class NamesWeightsDifferently(SingleDeviceStrategy):
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {f"module.{name}": value for name, value in super().lightning_module_state_dict().items()}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        plain = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({"state_dict": plain}, strict)


class KeepsInferenceTensors(SingleDeviceStrategy):
    """What it has made in an evaluation under inference mode cannot be changed in a training step."""

    kept: Any = None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = torch.zeros(1) if self.kept is None else self.kept
        return super().validation_step(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.kept.add_(1)
        return super().training_step(*args, **kwargs)


class CannotTravel(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class DropsErrors(SingleDeviceStrategy):
    def run(self, function: Any) -> Any:
        try:
            return super().run(function)
        except ZeroDivisionError:
            return None


class TeardownNeedsAModel(SingleDeviceStrategy):
    def teardown(self) -> None:
        self.lightning_module.to("cpu")
        super().teardown()


class GathersWrongly(SingleDeviceStrategy):
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return [obj]


BROKEN = {
    StepsTwice: ("test_it_trains_like_the_plain_loop", "not close"),
    DoesNotClip: ("test_it_clips", "not close"),
    ForgetsToCallSuper: ("test_a_verb_that_only_calls_super_changes_nothing", "overriding every verb with super()"),
    ClaimsHooks: ("test_hooks_inside_a_step_are_called_or_refused", "optimizer_step is overridden, and neither"),
    LosesOptimizerState: ("test_it_resumes_exactly", "not equal"),
    NamesWeightsDifferently: ("test_its_files_are_those_of_a_plain_module", "names of the weights"),
    KeepsInferenceTensors: ("test_it_trains_a_module_that_it_has_evaluated", "Inplace update to inference tensor"),
    CannotTravel: ("test_a_copy_of_it_trains", "cannot pickle"),
    DropsErrors: ("test_an_error_in_a_step_is_what_the_caller_sees", "DID NOT RAISE"),
    TeardownNeedsAModel: ("test_it_can_be_torn_down_at_any_time", "'NoneType' object has no attribute 'to'"),
    GathersWrongly: ("test_ranks_exchange_values", "broadcast: [{'rank': 0}]"),
}


@pytest.mark.parametrize("strategy", BROKEN, ids=lambda strategy: strategy.__name__)
def test_a_broken_strategy_fails_the_row_about_it(strategy: Any, tmp_path: Path) -> None:
    row, words = BROKEN[strategy]
    suite = type("TestIt", (StrategyConformance,), {"strategy": strategy})
    assert words in failure(suite, row, tmp_path)


# ---- several ranks ---------------------------------------------------------------------------------------------------


class KeepsGradientsToItself(DDPStrategy):
    def setup_module(self, module: Any, move_to_device: bool = True) -> Any:
        self._wraps = False  # nothing exchanges gradients
        return super().setup_module(module, move_to_device)


class OfOwnGradients(StrategyConformance):
    strategy = KeepsGradientsToItself
    devices = 2


class ExchangesTooEarly(DDPStrategy):
    """Gradients of a window's first batches are averaged in their own passes, and it says that they are not."""

    def accumulating(self, model: Any) -> Any:
        return nullcontext()


class OfEarlyExchange(StrategyConformance):
    strategy = ExchangesTooEarly
    devices = 2


class Lonely(DDPStrategy):
    facts = DDPStrategy.facts.but(is_distributed=False)


class OfLonely(StrategyConformance):
    strategy = Lonely
    devices = 2


class Dies(DDPStrategy):
    def on_train_start(self) -> None:
        if self.global_rank == 1:
            os._exit(3)


class OfDying(StrategyConformance):
    strategy = Dies
    devices = 2


RoundedGradients: Any = example("rounded_gradients").RoundedGradients


class ExchangesAfterClipping(RoundedGradients):
    """Each rank clips its own gradient. Where every rank's is short, nobody notices."""

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super(RoundedGradients, self).backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        for module in self.residuals:
            self.exchange(module)
        super().optimizer_step(optimizer, None, model, **kwargs)
        return loss


class OfLateExchange(StrategyConformance):
    strategy = ExchangesAfterClipping
    devices = 2
    tolerance = 10.0  # any: what rounds must be found out too


class ForgetsItsResidual(RoundedGradients):
    def rank_state(self, module: Any) -> Any:
        return super(RoundedGradients, self).rank_state(module)

    def load_rank_state(self, module: Any, state: Any) -> None:
        super(RoundedGradients, self).load_rank_state(module, state)


class OfForgetfulRanks(StrategyConformance):
    strategy = ForgetsItsResidual
    devices = 2
    tolerance = 10.0


class StartsApart(RoundedGradients):
    def share_from_rank_zero(self, tensors: Any, group: Any = None) -> None:
        pass


class OfApart(StrategyConformance):
    strategy = StartsApart
    devices = 2
    tolerance = 0.02


class Unit:
    """What stands for the driver where a strategy forgets the factor of a window."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def remaining_factor(self) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class KeepsNoUnit(RoundedGradients):
    def exchange(self, module: Any) -> None:
        driver, self.driver = self.driver, Unit(self.driver)  # type: ignore[has-type]
        try:
            super().exchange(module)
        finally:
            self.driver = driver


class OfNoUnit(StrategyConformance):
    strategy = KeepsNoUnit
    devices = 2
    tolerance = 10.0


@pytest.mark.parametrize(
    ("suite", "row", "words"),
    [
        (OfApart, "test_all_ranks_start_with_the_weights_of_rank_0", "not close"),
        (OfNoUnit, "test_the_length_of_a_window_does_not_matter", "not close"),
        (OfOwnGradients, "test_it_trains_like_the_plain_loop", "not close"),
        (OfEarlyExchange, "test_it_weighs_losses", "not close"),
        (OfLonely, "test_it_knows_its_ranks", "trains in one process, and 2 were started"),
        (OfLateExchange, "test_the_optimizer_steps_the_gradients_that_hooks_see", "ranks have different gradients"),
        (OfLateExchange, "test_an_engine_trains_like_the_plain_loop", "ranks have different gradients"),
        (OfForgetfulRanks, "test_it_resumes_exactly", "not equal"),
        (OfForgetfulRanks, "test_an_engine_resumes_exactly", "not equal"),
        (OfDying, "test_it_trains_like_the_plain_loop", "the process died"),
    ],
)
def test_a_broken_strategy_of_several_ranks_fails_too(suite: Any, row: str, words: str, tmp_path: Path) -> None:
    assert words in failure(suite, row, tmp_path)
