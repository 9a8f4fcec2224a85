"""The text in which the tables of served modules are written."""

from __future__ import annotations

from drivetrain.compat.rows import table_of


def test_a_row_has_the_sources_of_a_module_and_may_go_on_below() -> None:
    text = """
- drivetrain: Trainer
timer .callbacks.timer: Timer | .compat.enums:
    Interval
nothing
"""
    assert table_of(text) == {
        "": ("drivetrain: Trainer",),
        "timer": ("drivetrain.callbacks.timer: Timer", "drivetrain.compat.enums: Interval"),
        "nothing": (),
    }


def test_a_row_in_braces_is_one_for_each_file_with_the_names_that_the_folder_has_from_it() -> None:
    assert table_of("c.{spike finetuning} .callbacks") == {
        "c.spike": ("drivetrain.callbacks.spike: SpikeDetection",),
        "c.finetuning": ("drivetrain.callbacks.finetuning: BackboneFinetuning BaseFinetuning",),
    }


def test_a_row_in_braces_may_say_the_one_name_of_each_file() -> None:
    assert table_of("c.{spike:Size tuned:Stop=Timer} .callbacks") == {
        "c.spike": ("drivetrain.callbacks: Size",),
        "c.tuned": ("drivetrain.callbacks: Stop=Timer",),
    }


def test_a_row_may_name_others() -> None:
    later = {"core": ("torch: Tensor",), "core.saving": ("torch: save",)}
    text = """
*both torch: load
core =
core.{saving} =
io =*both | torch: device
top =core
all * | torch: Size
all.one torch: one
all.two torch: two
"""
    assert table_of(text, later) == {
        **later,
        "io": ("torch: load", "torch: device"),
        "top": ("torch: Tensor",),
        "all": ("torch: one", "torch: two", "torch: Size"),
        "all.one": ("torch: one",),
        "all.two": ("torch: two",),
    }
