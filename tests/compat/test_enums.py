from __future__ import annotations

import pytest

from drivetrain.compat.enums import GradClipAlgorithmType, Interval, LightningEnum


class Mode(LightningEnum):
    SLOW = "slow-one"
    FAST = "quick"


def test_members_are_found_by_name_value_or_either() -> None:
    assert Mode.from_str("slow") is Mode.SLOW
    assert Mode.from_str("Quick", source="value") is Mode.FAST
    assert Mode.from_str("quick", source="any") is Mode.from_str("FAST", source="any") is Mode.FAST
    assert Mode.try_from_str("quick") is None
    with pytest.raises(ValueError, match=r"Mode has no member 'quick'\. Known: SLOW, FAST"):
        Mode.from_str("quick")


def test_members_compare_as_words_without_regard_to_case() -> None:
    assert Mode.SLOW == "SLOW-one"
    assert Mode.SLOW != "slow"
    assert Mode.SLOW != Mode.FAST
    assert {Mode.FAST: 1}["quick"] == 1  # type: ignore[index]


def test_what_the_options_know_of_themselves() -> None:
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert GradClipAlgorithmType.supported_type("norm")
    assert not GradClipAlgorithmType.supported_type("max")


def test_drivetrain_takes_them() -> None:
    from drivetrain import Trainer
    from drivetrain.callbacks import Timer

    assert Trainer(gradient_clip_val=1, gradient_clip_algorithm=GradClipAlgorithmType.NORM, logger=False)
    assert Timer("00:00:01:00", interval=Interval.step)
