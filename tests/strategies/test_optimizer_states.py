"""An optimizer's state follows its parameters' names, also where a later version of the model has another order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule
from drivetrain.base.restoring import WrongForm, check_optimizer_state
from drivetrain.errors import CheckpointError
from drivetrain.strategies.optimizer_states import by_name, by_number, describe, fitted, parameter_names


class Ordered(LightningModule):
    """Three layers of one shape, made in the order of their names."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = {name: nn.Linear(2, 2) for name in "abc"}
        for name in names:
            setattr(self, name, layers[name])

    def forward(self, x: Any) -> Any:
        for name in "abc":
            x = getattr(self, name)(x).tanh()
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture
def batches() -> Any:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(12, 2, generator=generator)), batch_size=4)


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def saved_after_one_epoch(make_trainer: Any, batches: Any, path: Path) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Ordered(), batches)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("order", ["cba", "bac"])
def test_a_model_with_another_order_of_layers_resumes_exactly(
    make_trainer: Any, batches: Any, tmp_path: Path, caplog: Any, order: str
) -> None:
    saved_after_one_epoch(make_trainer, batches, tmp_path / "file.ckpt")
    whole, other = Ordered(), Ordered(order)
    make_trainer(max_epochs=3).fit(whole, batches)
    with caplog.at_level("INFO"):
        make_trainer(max_epochs=3).fit(other, batches, ckpt_path=tmp_path / "file.ckpt")
    torch.testing.assert_close(weights(other), weights(whole), rtol=0, atol=0)
    assert "Adam has its parameters in another order than when the checkpoint was saved" in caplog.text


def test_without_names_each_state_would_reach_another_parameter(
    make_trainer: Any, batches: Any, tmp_path: Path
) -> None:
    saved_after_one_epoch(make_trainer, batches, tmp_path / "file.ckpt")
    checkpoint = torch.load(tmp_path / "file.ckpt", weights_only=True)
    del checkpoint["optimizers"]  # as in files of earlier versions, which still load
    torch.save(checkpoint, tmp_path / "old.ckpt")
    whole, other = Ordered(), Ordered("cba")
    make_trainer(max_epochs=3).fit(whole, batches)
    make_trainer(max_epochs=3).fit(other, batches, ckpt_path=tmp_path / "old.ckpt")
    assert not torch.equal(other.a.weight, whole.a.weight)


def test_the_same_order_is_left_alone_in_silence(make_trainer: Any, batches: Any, tmp_path: Path, caplog: Any) -> None:
    saved_after_one_epoch(make_trainer, batches, tmp_path / "file.ckpt")
    with caplog.at_level("INFO"):
        make_trainer(max_epochs=2).fit(Ordered(), batches, ckpt_path=tmp_path / "file.ckpt")
    assert "another order" not in caplog.text


class Renamed(Ordered):
    """Its first layer has another name, which the hook gives to the weights of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = self.a, nn.ModuleList([self.b, self.c])
        del self.a, self.b, self.c

    def forward(self, x: Any) -> Any:
        for layer in (self.first, *self.rest):
            x = layer(x).tanh()
        return x

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {"a": "first", "b": "rest.0", "c": "rest.1"}
        checkpoint["state_dict"] = {names[key[0]] + key[1:]: value for key, value in checkpoint["state_dict"].items()}


def test_renamed_parameters_are_restored_by_their_order(make_trainer: Any, batches: Any, tmp_path: Path) -> None:
    saved_after_one_epoch(make_trainer, batches, tmp_path / "file.ckpt")
    whole, other = Ordered(), Renamed()
    make_trainer(max_epochs=3).fit(whole, batches)
    make_trainer(max_epochs=3).fit(other, batches, ckpt_path=tmp_path / "file.ckpt")
    torch.testing.assert_close(list(weights(other).values()), list(weights(whole).values()), rtol=0, atol=0)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    a, b, c = (list(getattr(module, name).parameters()) for name in "abc")
    return torch.optim.SGD([{"params": a, "lr": 0.1}, {"params": [*b, *c], "lr": 0.2}], momentum=0.9)


def test_names_are_those_of_the_groups_without_what_wrappers_put_in() -> None:
    module = Ordered()
    assert parameter_names(module, two_groups(module)) == [
        ["a.weight", "a.bias"],
        ["b.weight", "b.bias", "c.weight", "c.bias"],
    ]
    wrapped = nn.ModuleDict({"_orig_mod": module})
    assert parameter_names(wrapped, torch.optim.SGD(module.a.parameters())) == [["a.weight", "a.bias"]]


def test_parameters_of_no_module_are_numbered() -> None:
    module, other = Ordered(), [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([other[0], module.a.bias, other[1]], lr=0.1)
    first, second = (f"parameter {number} that is in no module" for number in range(2))
    assert parameter_names(module, optimizer) == [[first, "a.bias", second]]


def test_a_tied_parameter_has_one_name_whatever_the_order_of_the_layers() -> None:
    for order in ("abc", "cba"):
        module = Ordered(order)
        module.c.weight = module.a.weight
        names = parameter_names(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert sorted(names[0]) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.bias"]


def test_a_parameter_that_has_moved_to_another_group_or_optimizer_is_named() -> None:
    module = Ordered()
    a, b, c = (list(getattr(module, name).parameters()) for name in "abc")
    before, after = (
        torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
        for first, second in ((a, b), (b, a))
    )
    with pytest.raises(
        CheckpointError, match=r"b.weight was in parameter group 1 of optimizer 0, and now it is in group"
    ):
        fitted(module, [after], [before.state_dict()], [describe(module, before)])
    one, other = torch.optim.Adam(a), torch.optim.Adam(c)
    with pytest.raises(CheckpointError, match=r"c.weight was in .* of optimizer 1, and now .* of optimizer 0 \(Adam\)"):
        fitted(
            module, [other, one], [one.state_dict(), other.state_dict()],
            [describe(module, one), describe(module, other)],
        )  # fmt: skip


def test_by_name_and_by_number_are_each_others_inverse() -> None:
    module = Ordered()
    optimizer = two_groups(module)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state, names = optimizer.state_dict(), parameter_names(module, optimizer)
    named = by_name(state, names)
    assert set(named["state"]) == {name for own in names for name in own}
    assert by_number(named, names) == state


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: "abc", r"the description of optimizer 0 \(SGD\).*it is 'abc', and Mapping is expected"),
        (lambda saved: {**saved, "class": 3}, r"\['class'\] is 3, and str is expected"),
        (lambda saved: {**saved, "parameters": "abc"}, r"\['parameters'\] is 'abc', and list is expected"),
        (lambda saved: {**saved, "parameters": [["a.weight", 5]]}, "is 5, and str is expected"),
    ],
)
def test_a_damaged_description_is_named(damage: Any, message: str) -> None:
    module = Ordered()
    optimizer = two_groups(module)
    with pytest.raises(CheckpointError, match=message):
        fitted(module, [optimizer], [optimizer.state_dict()], [damage(describe(module, optimizer))])


def test_a_damaged_state_is_named() -> None:
    module, later = Ordered(), Ordered("cba")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"]
    with pytest.raises(CheckpointError, match=r"optimizer 0 \(SGD\)"):
        fitted(later, [torch.optim.SGD(later.parameters(), lr=0.1)], [state], [describe(module, optimizer)])


# ---- another optimizer -----------------------------------------------------------------------------------------------


def resumed_with(make_trainer: Any, batches: Any, path: Path, optimizer: Any) -> Ordered:
    """The module of a run that resumes with ``optimizer(module)`` from a file that was saved with Adam."""

    class Other(Ordered):
        def configure_optimizers(self) -> Any:
            return optimizer(self)

    saved_after_one_epoch(make_trainer, batches, path)
    module = Other()
    make_trainer(max_epochs=2).fit(module, batches, ckpt_path=path)
    return module


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            r"saved with Adam as optimizer 0, and configure_optimizers now returns SGD, which cannot continue from "
            r"that state: \['param_groups'\]\[0\]\['momentum'\] is missing. Return Adam, or load only the weights.",
        ),
        (
            lambda m: torch.optim.Adam([{"params": list(getattr(m, name).parameters())} for name in "abc"]),
            r"optimizer 0 \(Adam\) had 1 parameter groups, and now it has 3. Return the same groups",
        ),
        (
            lambda m: torch.optim.Adam([*m.a.parameters(), m.b.weight]),
            r"group 0 of optimizer 0 \(Adam\) had 6 parameters, and now it has 3. "
            r"Missing now: b.bias, c.bias, c.weight. Return",
        ),
    ],
)
def test_another_optimizer_is_named_with_both_sides(
    make_trainer: Any, batches: Any, tmp_path: Path, optimizer: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        resumed_with(make_trainer, batches, tmp_path / "file.ckpt", optimizer)


def test_a_class_that_can_continue_from_the_state_does_so_with_a_warning(
    make_trainer: Any, batches: Any, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"saved with Adam as optimizer 0, .* now returns AdamW. It continues from"):
        module = resumed_with(
            make_trainer, batches, tmp_path / "file.ckpt", lambda m: torch.optim.AdamW(m.parameters(), lr=0.5)
        )
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.01


def test_without_a_description_the_sizes_are_still_compared() -> None:
    module = Ordered()
    optimizer = torch.optim.SGD(module.a.parameters(), lr=0.1)
    state = torch.optim.SGD(module.parameters(), lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 0 \(SGD\) had 6 parameters, and now it has 2."):
        fitted(module, [optimizer], [state])


@pytest.mark.parametrize("params", [None, 3, "ab"])
def test_a_group_whose_parameters_are_no_list_is_left_to_the_check(params: Any) -> None:
    module = Ordered()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = params
    assert fitted(module, [optimizer], [state], [describe(module, optimizer)]) == [state]
    with pytest.raises(WrongForm, match="params"):
        check_optimizer_state(state, optimizer)


def test_options_that_the_checkpoint_replaces_are_one_line(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Any, caplog: Any
) -> None:
    class Model(regression):  # type: ignore[misc]
        def __init__(self, lr: float, schedules: bool = False) -> None:
            super().__init__()
            self.lr, self.schedules = lr, schedules

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if self.schedules else []
            return [optimizer], schedulers

    for schedules in (False, True):
        trainer, path = make_trainer(), tmp_path / f"{schedules}.ckpt"
        trainer.fit(Model(0.5, schedules), loader)
        trainer.save_checkpoint(path)
        with caplog.at_level("INFO", "drivetrain"):
            make_trainer(max_epochs=2).fit(Model(0.5, schedules), loader, ckpt_path=path)
            assert "continues with" not in caplog.text
            make_trainer(max_epochs=2).fit(Model(0.25, schedules), loader, ckpt_path=path)
            assert "Optimizer 0 (SGD) continues with lr=0.5 instead of 0.25, as the checkpoint says." in caplog.text
            caplog.clear()
