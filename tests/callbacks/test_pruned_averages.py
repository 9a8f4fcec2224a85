"""Averages of weights beside pruning: resumed from each restart point, a run ends as one without a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Validated, regression_data
from torch.utils.data import DataLoader

from drivetrain import Callback, Trainer
from drivetrain.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging, WeightAveraging

AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "mean": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
}
POINTS = ("on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")


class Net(Validated):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(dropout=0.2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SavesEverywhere(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[Path]()


def _save(hook: str) -> Any:
    def save(self: SavesEverywhere, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.files.append(self.folder / f"{len(self.files):02} {hook}.ckpt")
            trainer.save_checkpoint(self.files[-1])

    return save


for _name in POINTS:
    setattr(SavesEverywhere, _name, _save(_name))


def fit(make_trainer: Any, callbacks: list[Callback], resume: Path | None = None) -> dict[str, Any]:
    """What a run of three epochs of four batches ends with."""
    module = Net(3 if resume is None else 99)
    torch.manual_seed(7 if resume is None else 77)
    trainer = make_trainer(max_epochs=3, accumulate_grad_batches=2, callbacks=callbacks, num_sanity_val_steps=0)
    data = DataLoader(regression_data(32), batch_size=8, shuffle=True)
    trainer.fit(module, data, DataLoader(regression_data(16), batch_size=8), ckpt_path=resume)
    trainer.save_checkpoint(end := Path(trainer.default_root_dir) / "end.ckpt")
    content = torch.load(end, weights_only=True)
    kept = {key: content.get(key) for key in ("state_dict", "averaged_state_dict", "global_step")}
    # by shape: a pruned layer has its parameters in another order, and so has an optimizer that is made for it
    momentum = [each["momentum_buffer"] for each in content["optimizer_states"][0]["state"].values()]
    return {**kept, "momentum": {each.shape: each for each in momentum}, "rng": torch.get_rng_state()}


def made(average: str, pruning_first: bool) -> list[Callback]:
    pruning = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.2)
    both: list[Callback] = [AVERAGES[average](), pruning]
    return both[::-1] if pruning_first else both


def differ(one: Any, other: Any, place: str = "") -> list[str]:
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [place]
    if isinstance(one, (dict, list)):
        keys: Any = one.keys() | other.keys() if isinstance(one, dict) else range(max(len(one), len(other)))
        return [each for key in keys for each in differ(one[key], other[key], f"{place}/{key}")]
    return [] if one == other else [place]


@pytest.mark.parametrize("pruning_first", [False, True])
@pytest.mark.parametrize("average", AVERAGES)
def test_a_resumed_run_is_that_of_one_without_a_break(
    make_trainer: Any, tmp_path: Path, average: str, pruning_first: bool
) -> None:
    saves = SavesEverywhere(tmp_path)
    expected = fit(make_trainer, [*made(average, pruning_first), saves])
    assert len(saves.files) == 3 * (1 + 4 + 1 + 1)
    assert sum(int((value == 0).sum()) for value in expected["state_dict"].values()) > 5  # it has pruned
    for file in saves.files:
        assert not differ(fit(make_trainer, made(average, pruning_first), file), expected), file.name
