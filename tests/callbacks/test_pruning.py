from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Validated, regression_data
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import ModelPruning
from drivetrain.errors import ConfigurationError


class Net(Validated):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def by_hand(epochs: int, lottery: bool, structured: bool) -> dict[str, Any]:
    module = Net()
    optimizer = module.configure_optimizers()
    layers = [module.net[0], module.net[3]]
    places = [(layer, name) for layer in layers for name in (("weight",) if structured else ("weight", "bias"))]
    initial = [getattr(layer, name).detach().clone() for layer, name in places]
    for _ in range(epochs):
        for batch in DataLoader(regression_data(), batch_size=8):
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
        if structured:
            for layer, name in places:
                prune.ln_structured(layer, name, 0.3, n=2, dim=1)
        else:
            prune.global_unstructured(places, prune.L1Unstructured, amount=0.3)
        for (layer, name), value in zip(places, initial, strict=True) if lottery else ():
            getattr(layer, f"{name}_orig").data.copy_(value)
    for layer, name in places:
        prune.remove(layer, name)
    return module.state_dict()


@pytest.mark.parametrize(("lottery", "structured"), [(False, False), (True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:.*validation_step but there is no validation loader")
def test_it_prunes_as_torchs_functions_in_a_plain_loop(
    make_trainer: Any, loader: Any, lottery: bool, structured: bool
) -> None:
    module = Net()
    kinds: dict[str, Any] = {"pruning_fn": "l1_unstructured"}
    if structured:
        kinds = {"pruning_fn": "ln_structured", "pruning_dim": 1, "pruning_norm": 2, "use_global_unstructured": False}
        kinds |= {"parameter_names": ["weight"]}
    pruning = ModelPruning(amount=0.3, use_lottery_ticket_hypothesis=lottery, **kinds)
    make_trainer(max_epochs=3, callbacks=pruning).fit(module, loader)
    expected = by_hand(3, lottery, structured)
    assert module.state_dict().keys() == expected.keys()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    assert sum(int((value == 0).sum()) for value in expected.values()) > 5


class SavesAt(Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.filterwarnings("ignore:.*validation_step but there is no validation loader")
def test_a_resumed_run_is_bit_equal_and_a_file_has_plain_weights(
    make_trainer: Any, data: Any, tmp_path: Path, permanent: bool
) -> None:
    path = tmp_path / "one.ckpt"

    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module = Net()
        pruning = ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=permanent)
        callbacks = [pruning, *([] if resume else [SavesAt(path, 6)])]
        make_trainer(max_epochs=3, callbacks=callbacks).fit(
            module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume
        )
        return module.state_dict()

    whole, resumed = fitted(), fitted(path)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        torch.testing.assert_close(value, resumed[name], rtol=0, atol=0, msg=name)
    if permanent:
        other = Net()
        other.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert sum(int((value == 0).sum()) for value in other.parameters()) > 5
    tested = Net()
    loader = DataLoader(data, batch_size=8)
    make_trainer(callbacks=ModelPruning("l1_unstructured")).test(tested, loader, ckpt_path=path, verbose=False)
    assert sum(int((value == 0).sum()) for value in tested.parameters()) > 5


@pytest.mark.parametrize(("lottery", "batch"), [(False, 8), (True, 2)])  # after an epoch, and before the first pruning
@pytest.mark.filterwarnings("ignore:.*validation_step but there is no validation loader")
def test_a_resumed_run_chooses_by_the_trained_weights_and_goes_back_to_the_first(
    make_trainer: Any, data: Any, tmp_path: Path, lottery: bool, batch: int
) -> None:
    path = tmp_path / "one.ckpt"

    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module = Net()
        pruning = ModelPruning("l1_unstructured", None, amount=0.3, use_lottery_ticket_hypothesis=lottery)
        if resume:  # other weights than those that were trained
            nn.init.normal_(module.net[0].weight, std=3)
        make_trainer(max_epochs=3, callbacks=[pruning, *([] if resume else [SavesAt(path, batch)])]).fit(
            module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume
        )
        return module.state_dict()

    whole, resumed = fitted(), fitted(path)
    for name, value in whole.items():
        torch.testing.assert_close(value, resumed[name], rtol=0, atol=0, msg=name)


def test_what_it_refuses_and_what_it_may_be_given(make_trainer: Any, loader: Any, caplog: Any) -> None:
    wrong: list[dict[str, Any]] = [
        {"pruning_fn": "l1"}, {"pruning_fn": "ln_structured"}, {"parameter_names": ["scale"]}, {"amount": 1.5},
        {"pruning_fn": "random_structured", "use_global_unstructured": False}, {"verbose": 3},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ConfigurationError, match="ModelPruning"):
            ModelPruning(**{"pruning_fn": "l1_unstructured", **arguments})
    with pytest.raises(ConfigurationError, match="has no such parameter"):
        make_trainer(callbacks=ModelPruning("l1_unstructured", [(nn.Linear(2, 2), "weight")])).fit(
            Net(), loader, loader
        )
    with pytest.raises(ConfigurationError, match="amount=1000.* have 49"):
        make_trainer(callbacks=ModelPruning("l1_unstructured", amount=1000)).fit(Net(), loader, loader)
    module = Net()
    pruning = ModelPruning(
        "random_unstructured", [(module.net[0], "weight")], amount=lambda epoch: 4 if epoch else 0, verbose=2,
        prune_on_train_epoch_end=False, resample_parameters=True,
    )  # fmt: skip
    caplog.set_level("INFO", logger="drivetrain")
    make_trainer(max_epochs=2, callbacks=pruning).fit(module, loader, loader)
    assert int((module.net[0].weight == 0).sum()) == 4
    assert "of all parameters. Pruned: 0/32 (0.00%) -> 4/32 (12.50%)" in caplog.text
    assert "Linear(in_features=4, out_features=8, bias=True).weight. Pruned: 0/32 (0.00%) -> 4/32" in caplog.text


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_the_report_has_the_sparsity_before_and_after_each_pruning(caplog: Any, verbose: int) -> None:
    caplog.set_level("INFO", logger="drivetrain")
    pruning, module = ModelPruning("l1_unstructured", verbose=verbose), Net()
    pruning.setup(None, module, "fit")  # type: ignore[arg-type]
    for _ in range(2):
        pruning.apply_pruning(0.5)
    found = re.findall(r"L1Unstructured, amount=0.5, of (.*)\. Pruned: (\S+ \S+) -> (\S+)", caplog.text)
    whole = [("all parameters", "0/49 (0.00%)", "24/49"), ("all parameters", "24/49 (48.98%)", "36/49")]
    assert [each for each in found if each[0] == "all parameters"] == whole[: 2 * min(verbose, 1)]
    assert len(found) == (0, 2, 10)[verbose]  # of four parameters too


def test_a_parameter_without_values_is_in_the_report(caplog: Any) -> None:
    caplog.set_level("INFO", logger="drivetrain")
    module = Net()
    module.empty = nn.Parameter(torch.ones(0))
    pruning = ModelPruning("l1_unstructured", [(module, "empty"), (module.net[0], "weight")], verbose=2)
    pruning.setup(None, module, "fit")  # type: ignore[arg-type]
    pruning.apply_pruning(0.5)
    assert ".empty. Pruned: 0/0 (0.00%) -> 0/0 (0.00%)" in caplog.text
