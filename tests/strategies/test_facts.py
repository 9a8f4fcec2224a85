"""What a strategy declares: as one value, by its class or its constructor, and under the field's names."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, Facts, SingleDeviceStrategy
from drivetrain.strategies.familiar import read_overrides


def test_a_class_changes_some_facts_and_keeps_the_others() -> None:
    class Own(DDPStrategy):
        facts = DDPStrategy.facts.but(allows_inference_mode=False)

    assert Own.facts == Facts(
        is_distributed=True,
        start_method="popen",
        local_passes="drivetrain.strategies.local_passes:of_ddp",
        allows_inference_mode=False,
    )
    assert Own(start_method="spawn").facts == Own.facts.but(start_method="spawn")
    assert Own.facts.start_method == "popen"


@pytest.mark.parametrize(("name", "value"), [("is_distributed", True), ("start_method", "spawn")])
def test_a_fact_as_an_attribute_of_the_class_is_an_error_that_says_what_to_write(name: str, value: Any) -> None:
    cure = rf"facts = DDPStrategy\.facts\.but\({name}={value!r}\)"
    with pytest.raises(ConfigurationError, match=f"Own declares {name} as an attribute of the class.*{cure}"):
        type("Own", (DDPStrategy,), {name: value})


def test_overrides_of_the_fields_names_change_the_facts() -> None:
    class Own(SingleDeviceStrategy):
        handles_gradient_accumulation = True

        @property
        def restore_checkpoint_after_setup(self) -> bool:
            return super().restore_checkpoint_after_setup or self.late

        @property
        def lightning_restore_optimizer(self) -> bool:
            return False

        late = True

    strategy, plain = Own(), SingleDeviceStrategy()
    for each in (strategy, plain):
        read_overrides(each)
    assert plain.facts is SingleDeviceStrategy.facts
    assert strategy.facts == plain.facts.but(
        handles_gradient_accumulation=True, restores_after_setup=True, trainer_restores_optimizers=False
    )


def test_the_fields_names_say_what_is_declared() -> None:
    strategy: Any = DDPStrategy()
    assert (strategy.is_distributed, strategy.restore_checkpoint_after_setup) == (True, False)
    assert (strategy.lightning_restore_optimizer, strategy.handles_gradient_accumulation) == (True, False)
