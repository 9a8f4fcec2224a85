"""Whatever is wrong with a part of a checkpoint ends in an error that names the part and the file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.base.restoring import (
    WrongForm,
    check_form,
    check_optimizer_state,
    check_rng_state,
    check_scheduler_state,
    count,
    expect,
    naming,
    restoring,
)
from drivetrain.base.seed import rng_state
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError


def failing(error: Exception) -> None:
    with restoring("optimizer 0 (Adam)"):
        raise error


def test_any_exception_names_the_part_and_stays_the_cause() -> None:
    with pytest.raises(
        CheckpointError, match=r"entry for optimizer 0 \(Adam\) could not be restored: KeyError: 'lr'"
    ) as caught:
        failing(KeyError("lr"))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(CheckpointError, match=r"optimizer 0 .* is damaged.*: \['lr'\] is missing. Use another"):
        failing(WrongForm("['lr']", "is missing"))
    with pytest.raises(ConfigurationError, match="as it is"):
        failing(ConfigurationError("as it is"))


def test_the_file_is_named_once() -> None:
    def fail(text: str) -> None:
        with naming("runs/a.ckpt"), naming("runs/a.ckpt"):
            raise CheckpointError(text)

    with pytest.raises(CheckpointError, match=r"^runs/a.ckpt: It is wrong.$"):
        fail("It is wrong.")
    with pytest.raises(CheckpointError, match=r"^There is no runs/a.ckpt.$"):
        fail("There is no runs/a.ckpt.")


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (1, int), (None, (int, None)), (1, (int, None, count)), ({"a": 1, "c": 0}, {"a": int, "b?": str}),
        ({}, {str: int}), ({"a": 1}, {str: count}), ([1, 2], [int]), ((), [int]), (None, (None, {"a": int})),
        ({"a": [{"b": None}]}, {"a": [{"b": (int, None)}]}), ([], (list, [str])),
    ],
)  # fmt: skip
def test_a_value_of_a_form_is_returned(value: Any, form: Any) -> None:
    assert expect(value, form, "['x']") is value


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        ("a", int, "it is 'a', and int is expected"),
        (None, int, "it is None, and int is expected"),
        ("a", (int, None), "it is 'a', and int or NoneType is expected"),
        (-1, (int, None, count), "it is -1, and a count is expected"),
        ("a", (int, count), "it is 'a', and int is expected"),
        (3, {"a": int}, "it is 3, and Mapping is expected"),
        (None, {"a": int}, "it is None, and Mapping is expected"),
        ({}, {"a": int}, "['a'] is missing"),
        ({"b": "x"}, {"b?": int}, "['b'] is 'x', and int is expected"),
        ({3: 1}, {str: int}, "it is 3, and str is expected"),
        ({"a": "x"}, {str: int}, "['a'] is 'x', and int is expected"),
        ({"a": [1, "x"]}, {"a": [int]}, "['a'][1] is 'x', and int is expected"),
        (3, [int], "it is 3, and list or tuple is expected"),
        ((1,), (list, [int]), "it is (1,), and list is expected"),
        ({"a": {"b": 3}}, (None, {"a": {"b": str}}), "['a']['b'] is 3, and str is expected"),
    ],
)  # fmt: skip
def test_another_one_is_refused_with_its_place(value: Any, form: Any, message: str) -> None:
    with pytest.raises(WrongForm) as caught:
        expect(value, form)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("saved", "own"),
    [(1, 2), (1.0, 2), (2, 1.5), (torch.tensor(1.0), 0.1), (None, None), (0.5, None), ((1, 2), (3, 4)), ([1, 2], [0]),
     ({"a": 1, "new": "x"}, {"a": 2, "old": 1}), ("max", "min"), (float("nan"), 0.1), (10**9, 3)],
)  # fmt: skip
def test_the_same_form(saved: Any, own: Any) -> None:
    check_form(saved, own)


@pytest.mark.parametrize(
    ("saved", "own", "place"),
    [("x", 1, "it"), (None, 1.0, "it"), (2**70, 1, "it"), (float("inf"), 1, "it"), (1, True, "it"),
     ((1,), (1, 2), "it"),
     ([1, "x"], [0], "[1]"), ({"a": {"b": None}}, {"a": {"b": 3}}, "['a']['b']"), (torch.ones(2), 1.0, "it"),
     (torch.ones(2), torch.ones(3), "it"), (1j, 1.0, "it"), ([], {}, "it"), ([1], None, "it"), (3, "x", "it")],
)  # fmt: skip
def test_another_form(saved: Any, own: Any, place: str) -> None:
    with pytest.raises(WrongForm) as caught:
        check_form(saved, own)
    assert str(caught.value).startswith(place)


# ---- optimizers, schedulers, random states ---------------------------------------------------------------------------


def stepped(kind: Any, **options: Any) -> Any:
    layer = torch.nn.Linear(2, 3)
    optimizer = kind(layer.parameters(), lr=0.1, **options)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


OPTIMIZERS = [
    (torch.optim.Adam, {"amsgrad": True}), (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}), (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}), (torch.optim.Adamax, {}), (torch.optim.ASGD, {}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.Rprop, {}), (torch.optim.Adafactor, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=[f"{kind.__name__}{len(o)}" for kind, o in OPTIMIZERS])
def test_an_optimizers_own_state_is_right(kind: Any, options: Any) -> None:
    optimizer = stepped(kind, **options)
    check_optimizer_state(copy.deepcopy(optimizer.state_dict()), optimizer)
    check_optimizer_state(stepped(kind, **options).state_dict(), kind(torch.nn.Linear(2, 3).parameters(), **options))


DAMAGE: list[tuple[str, Any]] = [
    ("is missing", lambda state: state.pop("param_groups")),
    ("is missing", lambda state: state["state"][0].pop("exp_avg")),
    ("has the shape", lambda state: state["state"][0].update(exp_avg=torch.ones(5))),
    ("is expected", lambda state: state["state"][0].update(step=torch.ones(2))),
    ("a count is expected", lambda state: state["state"][0].update(step=-1.0)),
    ("belongs to no parameter", lambda state: state["state"].update({9: {}})),
    ("twice", lambda state: state["param_groups"][0].update(params=[0, 0])),
    (r"hold \[1\] parameters", lambda state: state["param_groups"][0].update(params=[0])),
    ("is missing", lambda state: state["param_groups"][0].pop("lr")),
    ("'lr'", lambda state: state["param_groups"][0].update(lr="x")),
    ("2 are expected", lambda state: state["param_groups"][0].update(betas=(0.9,))),
    ("Adam refuses", lambda state: state["param_groups"][0].update(betas=(0.9, 1.0))),
    ("capturable", lambda state: state["param_groups"][0].update(capturable=True)),
    (r"hold \[2, 2\] parameters", lambda state: state["param_groups"].append(state["param_groups"][0])),
]


@pytest.mark.parametrize(("word", "damage"), DAMAGE)
def test_what_an_optimizer_would_only_find_in_its_step(word: str, damage: Any) -> None:
    optimizer = stepped(torch.optim.Adam)
    state = copy.deepcopy(optimizer.state_dict())
    damage(state)
    with pytest.raises(WrongForm, match=word):
        check_optimizer_state(state, optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
def test_a_schedulers_own_state_is_right(make: Any) -> None:
    optimizer = stepped(torch.optim.SGD)
    scheduler = make(optimizer)
    for _ in range(5):
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    state = copy.deepcopy(scheduler.state_dict())
    check_scheduler_state(state, scheduler)
    check_scheduler_state(state, make(stepped(torch.optim.SGD)))


@pytest.mark.parametrize(
    ("word", "change"),
    [("'last_epoch'.* is missing", {"last_epoch": ...}), ("'last_epoch'", {"last_epoch": "x"}),
     ("'base_lrs'.* has 0 items", {"base_lrs": []}), ("'step'.* is no entry", {"step": 3}), ("3", {3: 4}),
     ("'optimizer'.* is no entry", {"optimizer": 3})],
)  # fmt: skip
def test_what_a_scheduler_would_make_attributes_of(word: str, change: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(stepped(torch.optim.SGD), 2)
    state = {key: value for key, value in {**scheduler.state_dict(), **change}.items() if value is not ...}
    with pytest.raises(WrongForm, match=word):
        check_scheduler_state(state, scheduler)


@pytest.mark.parametrize(("key", "value"), [("optimizer", 3), ("step", 3), ("last_epoch", "x")])
def test_what_the_schedulers_of_a_scheduler_would_make_attributes_of(key: str, value: Any) -> None:
    optimizer, schedulers = stepped(torch.optim.SGD), torch.optim.lr_scheduler
    parts: list[Any] = [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    scheduler = schedulers.SequentialLR(optimizer, parts, [2])
    state = copy.deepcopy(scheduler.state_dict())
    check_scheduler_state(state, scheduler)
    state["_schedulers"][1][key] = value
    with pytest.raises(WrongForm, match=rf"\['_schedulers'\]\[1\]\['{key}'\]"):
        check_scheduler_state(state, scheduler)


def test_a_random_state_is_tried_where_nobody_draws() -> None:
    before = rng_state()
    check_rng_state({**before, "generators": [torch.Generator().get_state()]})
    for key, value in (("python", (3, (1,), None)), ("torch", torch.zeros(10, dtype=torch.uint8)), ("numpy", (1, 2))):
        with pytest.raises(WrongForm, match=key):
            check_rng_state({**before, key: value})
    assert rng_state()["python"] == before["python"]
    assert torch.equal(rng_state()["torch"], before["torch"])


# ---- in a fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("optimizer_states", [{"state": {}}], r"optimizer 0 \(SGD\).*'param_groups'.* is missing"),
        ("rng", None, "'rng' is damaged"),
        ("restart", {"data": 3}, "restart point"),
        ("callbacks", ..., "has no 'callbacks'"),
        ("lr_schedulers", ..., "has no 'lr_schedulers'"),
        ("loops", {"drivetrain": {"current_epoch": 1}}, "progress of the fit.*'batches_done'.* is missing"),
        ("state_dict", {3: 4}, "weights of Regression"),
        ("loops", 3, "'loops' is damaged.*it is 3, and Mapping is expected"),
    ],
)
def test_a_fit_names_file_and_part(
    tmp_path: Path, make_trainer: Any, regression: Any, loader: Any, part: str, change: Any, message: str
) -> None:
    path, store = tmp_path / "run.ckpt", TorchCheckpointIO()
    trainer = make_trainer()
    trainer.fit(regression(), loader)
    trainer.save_checkpoint(path)
    checkpoint = {**store.load_checkpoint(path), part: change}
    store.save_checkpoint({key: value for key, value in checkpoint.items() if value is not ...}, path)
    with pytest.raises(CheckpointError, match=f"run.ckpt: .*{message}"):
        make_trainer(max_epochs=2).fit(regression(), loader, ckpt_path=path)


def test_a_hook_of_the_users_keeps_its_own_error(
    tmp_path: Path, make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Own(regression):  # type: ignore[misc]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise KeyError("mine")

    trainer = make_trainer()
    trainer.fit(regression(), loader)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(KeyError, match="mine"):
        make_trainer(max_epochs=2).fit(Own(), loader, ckpt_path=tmp_path / "run.ckpt")
