"""The Trainer's arguments: each rule, each argument of a later version, and one list of them all."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pydoc
import re
from datetime import timedelta
from typing import Any, get_args

import pytest

from drivetrain import Engine, Trainer, settings
from drivetrain.callbacks import ReplayCheck
from drivetrain.errors import ConfigurationError, NotSupportedError, UnknownArgumentError
from drivetrain.loggers import CSVLogger
from drivetrain.loops.run import Limits
from drivetrain.settings import DOCS, Settings, complete, seconds_of
from drivetrain.strategies.strategy import Plugin

FIELDS = dataclasses.fields(Settings)

# name, what is refused, what the message says it should be, what it tells to write
WRONG: list[tuple[str, list[Any], str, str]] = [
    ("num_nodes", [0, -1, 1.0, True, None], "an int of at least 1", "num_nodes=1"),
    ("fast_dev_run", [-1, 1.5, "yes", None], "a bool or a number of batches", "fast_dev_run=True"),
    ("max_epochs", [-2, 1.5, True], "an int of at least -1 or None", "max_epochs=1"),
    ("min_epochs", [-1, 0.5, True], "an int of at least 0 or None", "min_epochs=1"),
    ("max_steps", [-2, 10.0, None, True], "an int of at least -1", "max_steps=1"),
    ("min_steps", [-1, 0.5, True], "an int of at least 0 or None", "min_steps=1"),
    *(
        (name, [-1, 1.5, -0.1, True, "all", float("nan")], "a number of batches .* fraction from 0.0 to 1.0", name)
        for name in (
            "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"
        )
    ),
    ("val_check_interval", [0, -1, 0.0, 1.5, True], "a number of batches .* fraction above 0.0", "val_check_interval"),
    ("check_val_every_n_epoch", [0, -1, 1.0, True], "an int of at least 1 or None", "check_val_every_n_epoch=1"),
    ("num_sanity_val_steps", [-2, 0.5, True], "an int of at least -1 or None", "num_sanity_val_steps=1"),
    ("log_every_n_steps", [-1, 2.5, True], "an int of at least 0 or None", "log_every_n_steps=1"),
    ("enable_checkpointing", [0, 1, "yes"], "one of True, False, None", "enable_checkpointing=True"),
    ("enable_progress_bar", [0, "rich"], "one of True, False, None", "enable_progress_bar=True"),
    ("enable_model_summary", [1, "all"], "one of True, False, None", "enable_model_summary=True"),
    ("accumulate_grad_batches", [0, 1.0, None], "an int of at least 1", "accumulate_grad_batches=1"),
    ("gradient_clip_val", [-0.1, "1", True], "a number of at least 0 or None", "gradient_clip_val=1.0"),
    ("gradient_clip_algorithm", ["l2", 2], "one of 'norm', 'value', None", "gradient_clip_algorithm='norm'"),
    ("deterministic", [1, 0, "yes"], "one of True, False, 'warn', None", "deterministic=True"),
    ("benchmark", [1, "on"], "one of True, False, None", "benchmark=True"),
    ("inference_mode", [1, None], "one of True, False", "inference_mode=True"),
    ("use_distributed_sampler", [0, None], "one of True, False", "use_distributed_sampler=True"),
    ("detect_anomaly", [1, None], "one of True, False", "detect_anomaly=True"),
    ("barebones", [1, None], "one of True, False", "barebones=True"),
    ("sync_batchnorm", [1, None], "one of True, False", "sync_batchnorm=True"),
    ("check_collectives", [1, "all"], "one of True, False, None", "check_collectives=True"),
    ("stall_timeout_s", [-1, "5", True], "a number of at least 0 or None", "stall_timeout_s=300.0"),
    ("reload_dataloaders_every_n_epochs", [-1, 1.0, None], "an int of at least 0", "reload_dataloaders"),
    ("enable_autolog_hparams", [1, None], "one of True, False", "enable_autolog_hparams=True"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "expected", "cure"),
    [
        pytest.param(name, value, expected, cure, id=f"{name}={value!r}")
        for name, values, expected, cure in WRONG
        for value in values
    ],
)
def test_wrong_values_are_refused_with_cause_value_and_cure(name: str, value: Any, expected: str, cure: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings(**{name: value})
    assert not isinstance(caught.value, NotSupportedError)
    caught.match(rf"^Trainer\({name}=.*\): {name} is {expected}.* Write {cure}")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("max_epochs", 2.0, "max_epochs=2"),
        ("max_epochs", "3", "max_epochs=3"),
        ("max_epochs", float("inf"), "max_epochs=1"),
        ("max_epochs", True, "max_epochs=1"),
        ("max_steps", 1e3, "max_steps=1000"),
        ("accumulate_grad_batches", 3.0, "accumulate_grad_batches=3"),
        ("accumulate_grad_batches", -3.0, "accumulate_grad_batches=1"),
        ("limit_val_batches", "5", "limit_val_batches=5"),
        ("limit_train_batches", 10.0, "limit_train_batches=10"),
        ("val_check_interval", 100.0, "val_check_interval=100"),
        ("reload_dataloaders_every_n_epochs", 2.0, "reload_dataloaders_every_n_epochs=2"),
    ],
)
def test_the_cure_of_a_whole_number_of_another_type_is_that_number(name: str, value: Any, cure: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings(**{name: value})
    assert str(caught.value).endswith(f"Write {cure}.")


def test_a_fraction_for_a_count_is_also_a_type_error_as_in_the_callback_that_counts() -> None:
    for make in (lambda: Settings(replay_every=1.5), lambda: ReplayCheck(1.5)):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            make()
        assert isinstance(caught.value, TypeError)


def test_accumulation_by_epoch_is_answered_with_the_callback_that_does_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings(accumulate_grad_batches={0: 3})  # type: ignore[arg-type]
    assert "callbacks=[GradientAccumulationScheduler(scheduling={0: 3})]" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fast_dev_run", [True, False, 0, 7]),
        ("max_epochs", [None, -1, 0, 5]),
        ("max_steps", [-1, 0, 5]),
        ("min_epochs", [None, 0, 5]),
        ("limit_train_batches", [None, 0, 1, 10, 0.0, 0.5, 1.0]),
        ("val_check_interval", [None, 1, 0.5, 1.0, 1000]),
        ("check_val_every_n_epoch", [None, 1, 3]),
        ("num_sanity_val_steps", [None, -1, 0, 5]),
        ("log_every_n_steps", [None, 0, 1]),
        ("enable_progress_bar", [None, True, False]),
        ("gradient_clip_val", [None, 0, 1, 0.5]),
        ("gradient_clip_algorithm", [None, "norm", "value"]),
        ("deterministic", [None, True, False, "warn"]),
        ("overfit_batches", [0, 0.0]),
    ],
)
def test_right_values_are_kept_as_they_are(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(Settings(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("name", "value", "only"),
    [
        ("model_registry", "mine", "None"),
    ],
)
def test_arguments_of_a_later_version_say_so(name: str, value: Any, only: str) -> None:
    with pytest.raises(NotSupportedError, match=f"only knows {name}={only}. Leave {name} out") as caught:
        Settings(**{name: value})
    assert f"Trainer({name}={value!r})" in str(caught.value)


DURATIONS = [("00:01:30:00", 5400.0), (timedelta(minutes=5), 300.0), ({"minutes": 5, "hours": 1}, 3900.0)]


@pytest.mark.parametrize(("value", "seconds"), DURATIONS)
@pytest.mark.parametrize("name", ["val_check_interval", "max_time"])
def test_durations(name: str, value: Any, seconds: float) -> None:
    Settings(**{name: value})
    assert seconds_of(name, value) == seconds


@pytest.mark.parametrize("value", ["1 hour", "01:00:00", timedelta(0), {"minute": 5}, {}, "00:00:00:00"])
@pytest.mark.parametrize("name", ["val_check_interval", "max_time"])
def test_what_is_no_duration(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f'Write {name}="00:01:30:00" for an hour and a half'):
        Settings(**{name: value})


def test_t17_validating_by_the_clock_leaves_the_count_at_the_end_of_the_epoch() -> None:
    limits = Limits.of(Settings(val_check_interval="00:00:00:30"))
    assert (limits.val_check_interval, limits.val_check_seconds) == (1.0, 30.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 1000), ({"max_steps": 5}, -1), ({"max_time": "00:00:01:00"}, -1), ({"max_epochs": 3, "max_steps": 5}, 3)],
)
def test_max_epochs_has_a_default_only_where_nothing_else_ends_training(given: Any, expected: int) -> None:
    found = Limits.of(Settings(**given)).max_epochs
    assert (-1 if found == float("inf") else found) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_checkpointing", True), ("logger", True), ("enable_progress_bar", True),
        ("enable_model_summary", True), ("log_every_n_steps", 10), ("num_sanity_val_steps", 2),
        ("fast_dev_run", True), ("detect_anomaly", True),
    ],
)  # fmt: skip
def test_barebones_contradicts_what_it_switches_off(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"barebones switches {name} off. Leave one of them out"):
        Settings(barebones=True, **{name: value})
    Settings(barebones=True, **({} if name == "detect_anomaly" else {name: False} if value is True else {}))


# ---- the environment -------------------------------------------------------------------------------------------------


def test_t55_the_environment_fills_in_what_was_not_passed() -> None:
    environ = {
        "PL_TRAINER_MAX_EPOCHS": "3", "PL_TRAINER_ACCELERATOR": "cpu", "PL_TRAINER_DEVICES": "[0]",
        "PL_TRAINER_LOGGER": "false", "PL_TRAINER_MAX_STEPS": "7", "PL_TRAINER__X": "1", "OTHER": "2",
    }  # fmt: skip
    assert complete({"max_steps": 9}, environ) == {
        "max_epochs": 3, "accelerator": "cpu", "devices": [0], "logger": False, "max_steps": 9,
    }  # fmt: skip


def test_t55_a_variable_that_names_no_argument_is_said() -> None:
    with pytest.warns(UserWarning, match="PL_TRAINER_MAX_EPOCH='3' names no argument.*Did you mean 'max_epochs'"):
        assert complete({}, {"PL_TRAINER_MAX_EPOCH": "3"}) == {}


def test_t55_a_trainer_reads_its_environment(monkeypatch: pytest.MonkeyPatch, make_trainer: Any) -> None:
    monkeypatch.setenv("PL_TRAINER_ACCUMULATE_GRAD_BATCHES", "4")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "5")
    trainer = make_trainer(max_epochs=2)
    assert (trainer.accumulate_grad_batches, trainer.max_epochs) == (4, 2)
    monkeypatch.setenv("PL_TRAINER_ACCUMULATE_GRAD_BATCHES", "none")
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=None"):
        make_trainer()


def test_a_misspelt_argument_is_answered() -> None:
    with pytest.raises(UnknownArgumentError, match="no argument max_epoch=3. Did you mean 'max_epochs'") as caught:
        Trainer(max_epoch=3)  # type: ignore[call-arg]
    assert isinstance(caught.value, TypeError)
    with pytest.raises(UnknownArgumentError, match='Write accelerator="gpu", devices=... instead'):
        Trainer(gpus=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match=r"no argument epochs=3\. Write max_epochs=\.\.\. instead"):
        Trainer(epochs=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match=r"self\.automatic_optimization = \.\.\. in the module's __init__"):
        Trainer(automatic_optimization=False)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgumentError, match="keyword-only"):
        Trainer("cpu")  # type: ignore[misc]


def test_defaults_pass_every_rule() -> None:
    settings = Settings()
    assert {field.name: getattr(settings, field.name) for field in FIELDS} == {
        field.name: field.default for field in FIELDS
    }


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().max_epochs = 3  # type: ignore[misc]


def test_the_trainer_spells_the_same_arguments() -> None:
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    assert [(p.name, p.default, p.annotation) for p in parameters] == [(f.name, f.default, f.type) for f in FIELDS]
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        Settings("cpu")  # type: ignore[misc]


def test_the_trainer_hands_every_argument_on() -> None:
    given = {
        "accelerator": "cpu", "max_epochs": 3, "limit_val_batches": 0.5, "log_every_n_steps": 7, "precision": "32",
        "gradient_clip_val": 0.5, "num_sanity_val_steps": 0, "inference_mode": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "logger": False, "accumulate_grad_batches": 2, "deterministic": "warn",
    }  # fmt: skip
    settings = Trainer(**given).settings  # type: ignore[arg-type]
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_argument_is_documented(field: dataclasses.Field[Any]) -> None:
    doc = DOCS[field.name]
    assert len(doc) > 10
    assert not doc.endswith(".")


def test_the_surface_of_spec_3_1_is_complete() -> None:
    assert [field.name for field in FIELDS] == [
        "accelerator",
        "strategy",
        "devices",
        "num_nodes",
        "precision",
        "logger",
        "callbacks",
        "fast_dev_run",
        "max_epochs",
        "min_epochs",
        "max_steps",
        "min_steps",
        "max_time",
        "stop_timeout_s",  # ours
        "limit_train_batches",
        "limit_val_batches",
        "limit_test_batches",
        "limit_predict_batches",
        "overfit_batches",
        "val_check_interval",
        "check_val_every_n_epoch",
        "num_sanity_val_steps",
        "log_every_n_steps",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "deterministic",
        "benchmark",
        "inference_mode",
        "use_distributed_sampler",
        "split_batches",  # ours
        "profiler",
        "detect_anomaly",
        "barebones",
        "plugins",
        "sync_batchnorm",
        "check_collectives",  # ours
        "stall_timeout_s",  # ours
        "reload_dataloaders_every_n_epochs",
        "default_root_dir",
        "enable_autolog_hparams",
        "model_registry",
        "compile",
        "split_on_oom",
        "cuda_graphs",
        "optimizer_kernels",
        "save_trainable_only",
        "sample_seeds",
        "replica_check_every",
        "replay_every",
        "plan_check",
    ]


def test_loggers_may_come_from_a_generator() -> None:
    loggers = [CSVLogger("a"), CSVLogger("b")]
    settings = Settings(logger=(logger for logger in loggers))
    assert settings.logger == loggers


def described(cls: type, name: str) -> str:
    """What ``help(cls)`` says of an argument, in one line."""
    lines = [line.removeprefix(" |  ") for line in pydoc.render_doc(cls, renderer=pydoc.plaintext).splitlines()]
    first = next((n for n, line in enumerate(lines) if line.startswith((f"    {name} (", f"    {name}: "))), None)
    assert first is not None, name
    rest = itertools.takewhile(lambda line: line.startswith(" " * 8), lines[first + 1 :])
    return " ".join(" ".join([lines[first], *rest]).split())


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_help_describes_every_argument_with_its_type_and_default(field: dataclasses.Field[Any]) -> None:
    text = described(Trainer, field.name)
    assert f"default {field.default!r}" in text
    assert DOCS[field.name] in text
    assert "PrecisionName" not in text
    if not re.search("Name|Plugin", str(field.type)):
        assert f"({field.type}, default" in text


def test_help_describes_every_argument_of_the_engine_too() -> None:
    for name, parameter in list(inspect.signature(Engine.__init__).parameters.items())[1:]:
        assert len(described(Engine, name)) > 20
        if name in ("accelerator", "precision", "check_collectives"):
            assert f"default {parameter.default!r}" in described(Engine, name)
    assert "except LayerSync" in described(Engine, "plugins")


def test_help_says_what_is_not_supported_yet() -> None:
    assert described(Trainer, "model_registry").endswith("not supported yet: only the default is accepted.")


def test_help_names_the_classes_of_plugins() -> None:
    """A user cannot look up ``Plugin``, which is a name for type checkers."""
    kinds = " | ".join(each.__name__ for each in get_args(Plugin))
    assert described(Trainer, "plugins").startswith(f"plugins ({kinds} | list[{kinds}] | None, default None)")


def test_an_argument_that_the_docstring_lacks_would_be_found() -> None:
    """Negative control of the tests above."""
    with pytest.raises(AssertionError, match="gradient_clip_vale"):
        described(Trainer, "gradient_clip_vale")


@pytest.mark.parametrize("cls", [Trainer, Engine])
def test_a_signature_resolves_at_run_time_to_any_registered_name(cls: type) -> None:
    """A command line that reads it must accept the names of other packages."""
    assert (settings.PrecisionName, settings.StrategyName) == (int | str, str)
    assert inspect.signature(cls).parameters["precision"].annotation == "PrecisionName | None"
