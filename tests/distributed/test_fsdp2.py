"""The example of a strategy for sharded models trains, evaluates and resumes as one process does."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import NEW_TORCH, Saves, near, same, token_data, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.base.tree import map_leaves
from drivetrain.errors import CheckpointError

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
# torch's clip_grad_norm_, which the example has, adds its 1e-6 to each rank's part of the norm in torch 2.9.
CLIPPED = {"rtol": 1e-9, "atol": 1e-9} if NEW_TORCH else {"rtol": 1e-6, "atol": 1e-6}
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_strategy.py"


def strategy() -> Any:
    """What the documentation shows, from its own file."""
    if "fsdp2_strategy" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fsdp2_strategy", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["fsdp2_strategy"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["fsdp2_strategy"].FSDP2Strategy()


class Scaled(LightningModule):
    """``scale`` belongs to the module itself, and its steps use it; three does not divide by two ranks."""

    def __init__(self, weighted: bool | str = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.head = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5, 0.25]))
        self.weighted = weighted
        self.batches = 0
        self.losses: list[Tensor] = []
        self.gradients: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x) * self.scale)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        self.batches += 1
        output = self.head(self.net(x) * self.scale)
        if self.weighted:
            each = F.mse_loss(output, y, reduction="none").squeeze(1)
            weight = tokens.sum() if self.weighted == "tensor" else int(tokens.sum())
            return WeightedLoss((each * tokens).sum() / tokens.sum(), weight)
        loss = F.mse_loss(output, y)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([whole(parameter.grad).clone() for parameter in self.parameters()])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self.head(self.net(batch[0]) * self.scale), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]) * self.scale  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def trainer(ranks: int, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2,
    }  # fmt: skip
    if ranks > 1:
        quiet |= {"strategy": strategy(), "devices": ranks}
    return Trainer(**{**quiet, **arguments})


def loader(ranks: int, count: int = 48, batch_size: int = 8) -> Any:
    return DataLoader(token_data(count), batch_size=batch_size // ranks)


def state_of(module: LightningModule, ours: Trainer) -> dict[str, Any]:
    """Weights and the optimizer's state as whole tensors, on every rank."""
    weights = {name: whole(value).detach().clone() for name, value in module.state_dict().items()}
    optimizer = map_leaves(whole, ours.optimizers[0].state_dict()["state"])
    return {"weights": weights, "optimizer": optimizer}


def fitted(
    ranks: int,
    weighted: bool | str = False,
    resume: Path | None = None,
    save: tuple[Path, int] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    module = Scaled(weighted)
    ours = trainer(ranks, callbacks=[Saves(*save)] if save else [], **{"precision": "64-true", **arguments})
    ours.fit(module, loader(ranks), loader(ranks, 12), ckpt_path=resume)
    return {
        **state_of(module, ours), "losses": module.losses, "gradients": module.gradients, "steps": ours.global_step,
        "batches": module.batches,
    }  # fmt: skip


def mean_losses(ranks: list[dict[str, Any]]) -> list[Tensor]:
    return [torch.stack(losses).mean() for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]


# ---- the numbers of one process --------------------------------------------------------------------------------------


CLIPPING: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.05},
    "unclipped": {},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("clipping", CLIPPING.values() if LONG else [CLIPPING["norm"]])
def test_it_trains_to_the_numbers_of_one_process(pool: Any, clipping: dict[str, Any]) -> None:
    arguments = {"accumulate_grad_batches": 4, **clipping}  # an epoch's six batches end in a smaller window
    alone = fitted(1, **arguments)
    ranks = pool.run(_fitted, arguments, group=False)
    for rank in ranks:
        assert rank["steps"] == alone["steps"] == 4
        torch.testing.assert_close(rank["weights"], alone["weights"], **CLIPPED)
        torch.testing.assert_close(rank["gradients"], alone["gradients"], **CLIPPED)
    torch.testing.assert_close(mean_losses(ranks), alone["losses"], **CLIPPED)


def _fitted(arguments: dict[str, Any]) -> dict[str, Any]:
    return fitted(2, **arguments)


def test_clipping_is_seen(pool: Any) -> None:
    """The control: the limits above change the weights."""
    plain, norm, value = (
        fitted(1, accumulate_grad_batches=4, **clipping)["weights"]["scale"]
        for clipping in (
            {},
            {"gradient_clip_val": 0.05},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        )
    )
    assert not torch.allclose(plain, norm, rtol=1e-6)
    assert not torch.allclose(plain, value, rtol=1e-6)


@pytest.mark.parametrize("weighted", ["number", "tensor"] if LONG else ["tensor"])
def test_weighted_losses_add_up_to_those_of_one_process(pool: Any, weighted: str) -> None:
    arguments = {"weighted": weighted, "accumulate_grad_batches": 4, "gradient_clip_val": 0.05}
    alone = fitted(1, **arguments)
    for rank in pool.run(_fitted, arguments, group=False):
        torch.testing.assert_close(rank["weights"], alone["weights"], **CLIPPED)
        torch.testing.assert_close(rank["gradients"], alone["gradients"], **CLIPPED)


# ---- every entry point -----------------------------------------------------------------------------------------------


def everything(ranks: int, precision: str) -> dict[str, Any]:
    module, batches = Scaled(), loader(ranks, 24)
    ours = trainer(ranks, precision=precision, val_check_interval=2, accumulate_grad_batches=4)
    ours.fit(module, loader(ranks), batches)
    found: dict[str, Any] = {"first": float(module.losses[0]), "fit": float(ours.callback_metrics["loss"])}
    found["validate"] = ours.validate(module, batches, verbose=False)[0]["loss"]
    found["test"] = ours.test(module, batches, verbose=False)[0]["loss"]
    found["predict"] = ours.predict(module, batches)
    other, ours = Scaled(), trainer(ranks, precision=precision, accumulate_grad_batches=4)
    found["untrained"] = ours.validate(other, batches, verbose=False)[0]["loss"]
    ours.fit(other, loader(ranks), batches)
    found["fit after validate"] = float(ours.callback_metrics["loss"])
    return found


def test_it_validates_tests_and_predicts(pool: Any) -> None:
    """Also inside an open window, and a module that was not trained."""
    alone, ranks = everything(1, "64-true"), pool.run(everything, 2, "64-true", group=False)
    for rank in ranks:
        for name in ("fit", "validate", "test", "untrained", "fit after validate"):
            assert rank[name] == pytest.approx(alone[name], abs=1e-9)
    near(torch.cat(ranks[0]["predict"]), torch.cat(alone["predict"]))
    assert ranks[1]["predict"] == []


@pytest.mark.skipif(not LONG, reason="make test-faults")
def test_it_trains_in_mixed_precision(pool: Any) -> None:
    alone = everything(1, "bf16-mixed")
    for rank in pool.run(everything, 2, "bf16-mixed", group=False):
        assert rank["fit"] == pytest.approx(alone["fit"], rel=0.05)
        assert rank["fit"] < rank["untrained"]


# ---- saving and resuming ---------------------------------------------------------------------------------------------


def saved_and_resumed(folder: Path, at: int, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An uninterrupted run that saves after batch ``at`` of its twelve, and one that resumes from there."""
    uninterrupted = fitted(2, save=(folder / "one.ckpt", at), **arguments)
    return uninterrupted, fitted(2, resume=folder / "one.ckpt", **arguments)


@pytest.mark.parametrize(
    ("at", "arguments"),
    [
        (9, {"accumulate_grad_batches": 4, "weighted": "number"}),
        *([(6, {}), (9, {}), (9, {"accumulate_grad_batches": 4})] if LONG else []),
    ],
)
def test_it_resumes_exactly(pool: Any, tmp_path: Path, at: int, arguments: dict[str, Any]) -> None:
    for uninterrupted, resumed in pool.run(saved_and_resumed, tmp_path, at, arguments, group=False):
        assert resumed["batches"] == 12 - at
        for part in ("weights", "optimizer"):
            same(resumed[part], uninterrupted[part])
        same(resumed["losses"], uninterrupted["losses"][-len(resumed["losses"]) :])


def resumed_by_ddp(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        fitted(2, resume=path, accumulate_grad_batches=4, strategy="ddp")
    return str(caught.value)


def test_another_strategy_refuses_the_gradients_of_a_window(pool: Any, tmp_path: Path) -> None:
    pool.run(saved_and_resumed, tmp_path, 9, {"accumulate_grad_batches": 4}, group=False)
    for message in pool.run(resumed_by_ddp, tmp_path / "one.ckpt", group=False):
        assert "one.ckpt" in message
        assert "This rank's part of scale had the shape (" in message


def saved_after_an_epoch(ranks: int, folder: Path) -> dict[str, Any]:
    module, ours = Scaled(), trainer(ranks, precision="64-true", max_epochs=1)
    ours.fit(module, loader(ranks), loader(ranks, 12))
    ours.save_checkpoint(folder / "one.ckpt")
    return state_of(module, ours)


def resumed_from(ranks: int, folder: Path) -> dict[str, Any]:
    return fitted(ranks, resume=folder / "one.ckpt")


def test_files_are_those_of_one_process(pool: Any, tmp_path: Path) -> None:
    alone = fitted(1)
    for rank in pool.run(saved_after_an_epoch, 2, tmp_path, group=False):
        near(rank, saved_after_an_epoch(1, tmp_path / "alone"))
    resumed = resumed_from(1, tmp_path)
    near({part: resumed[part] for part in ("weights", "optimizer")}, {
        part: alone[part] for part in ("weights", "optimizer")
    })  # fmt: skip


def test_files_of_one_process_are_resumed(pool: Any, tmp_path: Path) -> None:
    alone = fitted(1)
    saved_after_an_epoch(1, tmp_path)
    for rank in pool.run(resumed_from, 2, tmp_path, group=False):
        near(rank["weights"], alone["weights"])
        near(rank["optimizer"], alone["optimizer"])


# ---- processes that the Trainer starts -------------------------------------------------------------------------------


def started_here(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))]:
        del os.environ[name]  # no launcher has started this one
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    forking, module = strategy(), Scaled()
    forking.facts = forking.facts.but(start_method="fork")
    ours = trainer(2, strategy=forking, precision="64-true", max_epochs=1)
    ours.fit(module, loader(2), loader(2, 12))
    returned = state_of(module, ours)
    ours.save_checkpoint(folder / "one.ckpt")
    ours = trainer(2, strategy=forking, precision="64-true")
    ours.fit(module, loader(2), loader(2, 12), ckpt_path=folder / "one.ckpt")
    return returned, state_of(module, ours)


@pytest.mark.skipif(not LONG, reason="make test-faults")
def test_the_launching_process_has_the_whole_model_afterwards(pool: Any, tmp_path: Path) -> None:
    with pool.fresh() as processes:  # one that has been in a group has threads, and cannot be copied
        [(returned, again)] = processes.run(started_here, tmp_path, world_size=1, group=False)
    near(returned, saved_after_an_epoch(1, tmp_path))
    alone = fitted(1)
    near(again, {part: alone[part] for part in ("weights", "optimizer")})
