"""Engine.save and Engine.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Engine
from drivetrain.errors import CheckpointError, ConfigurationError


def parts(seed: int = 0) -> tuple[Engine, Any, Any, Any]:
    torch.manual_seed(seed)
    engine, module = Engine(accelerator="cpu"), nn.Linear(2, 2)
    model, optimizer = engine.setup(module, torch.optim.Adam(module.parameters(), lr=0.1 + seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    return engine, model, optimizer, scheduler


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_objects_take_their_state_back_and_values_are_replaced(tmp_path: Path) -> None:
    engine, model, optimizer, scheduler = parts()
    counter = Counter()
    counter.count = 3
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": counter, "step": 7,
             "path": tmp_path, "more": [1, 2]}  # fmt: skip
    engine.save(tmp_path / "x.ckpt", state)
    other, new, new_optimizer, new_scheduler = parts(seed=1)
    taken = {"model": new, "optimizer": new_optimizer, "scheduler": new_scheduler, "counter": Counter(), "step": 0}
    rest = other.load(tmp_path / "x.ckpt", taken)
    assert rest == {"path": tmp_path, "more": [1, 2]}
    assert (taken["step"], taken["counter"].count) == (7, 3)
    assert torch.equal(new.weight, model.weight)
    assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert new_scheduler.last_epoch == 1
    for twin, its in ((model, optimizer), (new, new_optimizer)):
        twin(torch.ones(1, 2)).square().sum().backward()
        its.step()
    assert torch.equal(new.weight, model.weight)
    everything = engine.load(tmp_path / "x.ckpt")
    assert everything["step"] == 7
    assert set(everything["model"]) == {"weight", "bias"}
    torch.load(tmp_path / "x.ckpt", weights_only=True)  # plain data


def test_a_filter_chooses_what_of_an_entry_is_saved(tmp_path: Path) -> None:
    engine, model, *_ = parts()
    engine.save(tmp_path / "x.ckpt", {"model": model, "step": 1}, filter={"model": lambda key, value: key == "bias"})
    assert set(engine.load(tmp_path / "x.ckpt")["model"]) == {"bias"}
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"missing: weight.*strict=False"):
        engine.load(tmp_path / "x.ckpt", {"model": model})
    engine.load(tmp_path / "x.ckpt", {"model": model}, strict=False)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"modle": lambda key, value: True}, "Did you mean 'model'"),
        ({"step": lambda key, value: True}, "needs a dictionary"),
        ({"model": "weight"}, "needs a dictionary to filter and a function"),
    ],
)
def test_a_wrong_filter_is_said_and_nothing_is_written(tmp_path: Path, filters: Any, said: str) -> None:
    engine, model, *_ = parts()
    with pytest.raises(ConfigurationError, match=said):
        engine.save(tmp_path / "x.ckpt", {"model": model, "step": 1}, filter=filters)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_restores_nothing(tmp_path: Path) -> None:
    engine, model, *_ = parts()
    engine.save(tmp_path / "x.ckpt", {"model": model, "other": model})
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    before = first.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"of another shape: weight \(\(2, 2\) for \(3, 2\)\)"):
        engine.load(tmp_path / "x.ckpt", {"model": first, "other": second})
    with pytest.raises(CheckpointError, match="has no 'third', only"):
        engine.load(tmp_path / "x.ckpt", {"model": first, "third": 1})
    assert torch.equal(first.weight, before)
    state = {"model": first, "third": 1}
    engine.load(tmp_path / "x.ckpt", state, strict=False)
    assert state["third"] == 1
    assert torch.equal(first.weight, model.weight)


def test_what_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="thing"):
        parts()[0].save(tmp_path / "x.ckpt", {"thing": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("loads", [True, False])
def test_a_file_fits_with_and_without_a_compiled_submodule(saves: bool, loads: bool, tmp_path: Path) -> None:
    def net(compiles: bool) -> nn.Sequential:
        layer: Any = nn.Linear(2, 3)
        return nn.Sequential(torch.compile(layer, backend="eager") if compiles else layer)

    engine = Engine(accelerator="cpu")
    source, target = engine.setup(net(saves)), engine.setup(net(loads))
    engine.save(tmp_path / "x.ckpt", {"model": source})
    assert list(engine.load(tmp_path / "x.ckpt")["model"]) == ["0.weight", "0.bias"]
    engine.load(tmp_path / "x.ckpt", {"model": target})
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_load_raw_reads_a_bare_state_dict(tmp_path: Path) -> None:
    engine, model, optimizer, _ = parts()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    _, new, new_optimizer, _ = parts(seed=1)
    engine.load_raw(tmp_path / "model.pt", new)
    engine.load_raw(tmp_path / "optimizer.pt", new_optimizer)
    assert torch.equal(new.weight, model.weight)
    assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    with pytest.raises(CheckpointError, match="does not fit Linear"):
        engine.load_raw(tmp_path / "model.pt", nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        engine.load_raw(tmp_path / "nothing.pt", new)


def test_a_file_of_which_no_name_fits_is_warned_of(tmp_path: Path) -> None:
    engine, model, _, _ = parts()
    engine.save(tmp_path / "x.ckpt", {"model": model})
    with pytest.warns(UserWarning, match=r"Sequential has no parameter of any name in it \(the first is 'weight'\)"):
        engine.load(tmp_path / "x.ckpt", {"model": nn.Sequential(nn.Linear(2, 2))}, strict=False)
    engine.load(tmp_path / "x.ckpt", {"model": model}, strict=False)


def test_what_refuses_late_leaves_everything_as_it_was(tmp_path: Path) -> None:
    engine, model, optimizer, _ = parts()
    engine.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer, "counter": {"wrong": 1}, "rng": 3})
    _, new, _, _ = parts(seed=1)
    before = new.weight.detach().clone()
    counter = Counter()
    counter.count = 5
    grouped = torch.optim.Adam([{"params": [new.weight]}, {"params": [new.bias]}])
    for state, said in (
        (
            {"model": new, "counter": counter},
            r"x.ckpt: .* counter \(Counter\) could not be restored: KeyError: 'count'",
        ),
        (
            {"model": new, "optimizer": grouped},
            r"x.ckpt: .* optimizer \(Adam\) does not fit: .* whose groups hold \[2\] parameters, and those of this one "
            r"hold \[1, 1\]. Build it as it was when it was saved.",
        ),
        ({"model": new, "rng": engine.rng}, "no state dict"),
    ):
        with pytest.raises(CheckpointError, match=said):
            engine.load(tmp_path / "x.ckpt", state)
        assert torch.equal(new.weight, before)
        assert counter.count == 5
    with pytest.raises(ConfigurationError, match='{"model": model}'):
        engine.load(tmp_path / "x.ckpt", model)
    with pytest.raises(ConfigurationError, match="names are texts"):
        engine.save(tmp_path / "y.ckpt", {0: model})  # type: ignore[dict-item]
    assert not (tmp_path / "y.ckpt").exists()


def test_lazy_and_converted_modules_are_judged_by_torch(tmp_path: Path) -> None:
    engine = parts()[0]
    lazy = nn.LazyLinear(3)
    made = nn.Linear(2, 3)
    torch.save(made.state_dict(), tmp_path / "lazy.pt")
    engine.load_raw(tmp_path / "lazy.pt", lazy)
    assert torch.equal(lazy.weight, made.weight)
    new_style = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    old = {"weight_g": torch.ones(2, 1), "weight_v": torch.ones(2, 2), "bias": torch.zeros(2)}
    torch.save(old, tmp_path / "old.pt")
    engine.load_raw(tmp_path / "old.pt", new_style)
    torch.testing.assert_close(new_style.weight, torch.full((2, 2), 0.5**0.5))


def test_a_state_that_is_no_dictionary_is_an_error_that_shows_the_call(tmp_path: Path) -> None:
    engine, model, _, _ = parts()
    for arguments in ((tmp_path / "x.ckpt", model), ({"model": model}, tmp_path / "x.ckpt")):
        with pytest.raises(ConfigurationError, match=r"Pass the path first.*engine\.save\("):
            engine.save(*arguments)
    engine.save(tmp_path / "x.ckpt", {"model": model})
    for arguments in ((tmp_path / "x.ckpt", model), ({"model": model}, tmp_path / "x.ckpt")):
        with pytest.raises((ConfigurationError, CheckpointError), match="dictionary"):
            engine.load(*arguments)
