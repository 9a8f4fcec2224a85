"""Random chains of runs, resumed under other strategies and on other ranks, train as one process without a break."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.faults.test_random_strategies import LENGTH, PARTS, WIDTH, Net, differences, draw
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Trainer
from drivetrain.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.checkpoints.sharded import place, read
from drivetrain.errors import CheckpointError
from drivetrain.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, PipelineStrategy, Strategy

pytestmark = pytest.mark.timeout(3600)  # the long form takes minutes

BATCH, EPOCHS = 12, 3  # of all ranks together


def _mesh(**sizes: int) -> Callable[[], Strategy]:
    return lambda: ModelParallelStrategy(**{"data_parallel_size": 1, **sizes})


RUNS: dict[str, tuple[Callable[[], Strategy | str], int, int]] = {
    # what makes it, processes, and over how many of them a batch is split
    "alone": (lambda: "auto", 1, 1),
    "dp": (lambda: "dp", 1, 1),
    "ddp on 2": (lambda: DDPStrategy(find_unused_parameters=True), 2, 2),
    "ddp on 3": (lambda: DDPStrategy(find_unused_parameters=True), 3, 3),
    "horovod on 2": (lambda: "horovod", 2, 2),
    "horovod on 3": (lambda: "horovod", 3, 3),
    "fsdp on 2": (lambda: "fsdp", 2, 2),
    "fsdp on 3": (lambda: "fsdp", 3, 3),
    "fsdp in folders": (lambda: FSDPStrategy(state_dict_type="sharded"), 2, 2),
    "fsdp by window": (lambda: FSDPStrategy(gradient_exchange="window"), 2, 2),
    "hybrid": (lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4, 4),
    "tp": (_mesh(tensor_parallel_size=2), 2, 1),
    "tp and fsdp": (_mesh(data_parallel_size=2, tensor_parallel_size=2), 4, 2),
    "pipeline": (lambda: PipelineStrategy("1f1b", num_microbatches=2, pipeline_parallel_size=2), 2, 1),
}
HOOKS = ("on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
WAYS = ("in the hook", "after the fit", "max_steps", "max_epochs", "ModelCheckpoint", "exception")
FAILING = ("on_train_batch_start", "on_before_optimizer_step", "on_before_zero_grad")

Point = tuple[str, int, int]
"""A hook; the epoch; and the batches of it that are done."""


class ChainNet(Net):
    """Of a run that resumes: what is frozen later is frozen then."""

    def on_train_start(self) -> None:
        if self.current_epoch >= 1:
            self.freeze("frozen later")
            self.freeze("thawed")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.drawn["watches"]:
            self.log("watched", outputs["loss"], sync_dist=True, on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        if self.drawn["logs"]:
            self.log("val_loss", (self(x) - y).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        [optimizer], schedulers = super().configure_optimizers()
        if not self.drawn["watches"]:
            return [optimizer], schedulers
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "watched"}}


class Looks(Callback):
    """Notes where the run is at each point, and saves at some of them."""

    def __init__(self, points: Mapping[Point, Path]) -> None:
        self.points, self.seen = points, dict[Point, int]()

    def at(self, trainer: Trainer, hook: str) -> None:
        point = (hook, trainer.current_epoch, trainer.progress.batches_done)
        self.seen[point] = trainer.global_step
        if point in self.points:
            trainer.save_checkpoint(self.points[point])


class Stops(Callback):
    """Ends the fit at a point, or with an exception in the next hook of this name."""

    def __init__(self, point: Point, raises: str = "") -> None:
        self.point, self.raises, self.due = point, raises, False

    def at(self, trainer: Trainer, hook: str) -> None:
        if (hook, trainer.current_epoch, trainer.progress.batches_done) == self.point:
            self.due, trainer.should_stop = True, not self.raises

    def fail(self, hook: str) -> None:
        if self.due and hook == self.raises:
            raise RuntimeError("on purpose")


def _hook(method: str, name: str) -> Any:
    return lambda self, *arguments: getattr(self, method)(*arguments[:1], name)


for _name in HOOKS:
    setattr(Looks, _name, _hook("at", _name))
    setattr(Stops, _name, _hook("at", _name))
for _name in FAILING:
    setattr(Stops, _name, lambda self, *_, name=_name: self.fail(name))


def draw_chain(seed: int) -> dict[str, Any]:
    """A program and its legs, as plain data."""
    rng = random.Random(seed)
    drawn = draw(rng.randrange(10**6), "")
    drawn["parts"] = [(False, shares, use) for _, shares, use in drawn["parts"]]
    drawn["changes"] = {}  # a run that resumes would not know of them
    drawn["count"], drawn["watches"] = rng.choice([36, 37, 44, 48, 50, 54]), rng.random() < 0.3
    limit = rng.choice([1.0, 1.0, 3, 2])
    batches = min(-(-drawn["count"] // BATCH), limit) if isinstance(limit, int) else -(-drawn["count"] // BATCH)
    arguments = {
        "limit_train_batches": limit, "check_val_every_n_epoch": rng.choice([1, 1, 2]),
        "val_check_interval": rng.choice([1.0, 1.0, 1, 2]), "num_sanity_val_steps": rng.choice([0, 1]),
        "limit_val_batches": rng.choice([0, 1, 1]),
    }  # fmt: skip
    legs: list[dict[str, Any]] = []
    done = 0.0  # epochs
    for _ in range(rng.choice([1, 2, 2, 3])):
        hook = rng.choice(HOOKS)
        epoch, batch = rng.randrange(EPOCHS), rng.randint(1, batches)
        if hook == "on_train_epoch_start":
            batch = 0
        elif hook == "on_train_epoch_end":
            batch = batches
        at = epoch + batch / (batches + 1) + HOOKS.index(hook) / 100
        if at <= done:
            continue
        done = at
        way = rng.choice(WAYS)
        leg = {"point": (hook, epoch, batch), "way": way, "name": rng.choice([*RUNS]), "fails": rng.choice(FAILING)}
        legs.append(leg)
    legs.append({"point": None, "way": "after the fit", "name": rng.choice([*RUNS])})
    return {"program": drawn, "arguments": arguments, "legs": legs, "shuffle": rng.random() < 0.5,
            "splits": rng.random() < 0.5}  # fmt: skip


def fit(
    chain: Mapping[str, Any], name: str, callbacks: list[Callback], resume: Path | None, **arguments: Any
) -> Trainer:
    make, processes, parts = RUNS[name]
    drawn = chain["program"]
    trainer = Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        accelerator="cpu", precision="64-true", split_batches=chain["splits"] and parts > 1, callbacks=callbacks,
        **{"strategy": make(), "devices": 2 if name == "dp" else processes, "max_epochs": EPOCHS,
           **drawn["arguments"], **chain["arguments"], **arguments},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(drawn["count"], LENGTH, WIDTH, generator=generator) for _ in range(2))
    tokens = torch.randint(1, 9, (drawn["count"], LENGTH), generator=generator)
    data = TensorDataset(x, y, tokens)
    size = BATCH if chain["splits"] or parts == 1 else BATCH // parts
    module = ChainNet(drawn)
    torch.manual_seed(5 if resume is None else 99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, DataLoader(data, batch_size=size, shuffle=chain["shuffle"]),
            DataLoader(data, batch_size=size), ckpt_path=None if "forgets" in chain else resume,
        )  # fmt: skip
    return trainer


def run_leg(
    chain: Mapping[str, Any], leg: Mapping[str, Any], name: str, resume: Path | None, path: Path, steps: int
) -> str | None:
    """Run one leg, which is to leave a checkpoint at ``path``; return why it cannot resume, or ``None``."""
    point, way = leg["point"], leg["way"]
    callbacks: list[Callback] = []
    arguments: dict[str, Any] = {}
    if point is not None:
        callbacks = [Looks({point: path} if way == "in the hook" else {})]
        if way in ("max_steps", "max_epochs"):
            arguments[way] = steps if way == "max_steps" else point[1] + 1
        else:
            callbacks.append(Stops(point, leg["fails"] if way == "exception" else ""))
        if way == "exception":
            callbacks.append(OnExceptionCheckpoint(path.parent, path.stem))
        elif way == "ModelCheckpoint":
            often: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": point[0] != "on_validation_end"}
            if point[0] == "on_train_batch_end" and steps:
                often = {"every_n_train_steps": steps}
            callbacks.append(
                ModelCheckpoint(path.parent, path.stem, save_top_k=-1, enable_version_counter=False, **often)
            )
    try:
        trainer = fit(chain, name, callbacks, resume, **arguments)
    except CheckpointError as error:
        return str(error)
    except RuntimeError as error:
        if str(error) != "on purpose":
            error.add_note(f"{leg} as {name}, resumed from {resume}, of {chain}")
            raise
        return None
    if way in ("after the fit", "max_steps", "max_epochs"):
        trainer.save_checkpoint(path)
    return None


def reference(chain: Mapping[str, Any], folder: Path) -> dict[Point, int]:
    """Train without a break in one process, save after each batch and epoch, and return the steps at each point."""
    points = [("on_train_batch_end", epoch, batch) for epoch in range(EPOCHS) for batch in range(1, 10)]
    points += [("on_train_epoch_start", epoch, 0) for epoch in range(1, EPOCHS)]
    looks = Looks({(hook, epoch, batch): folder / f"{epoch} {batch}.ckpt" for hook, epoch, batch in points})
    fit(chain, "alone", [looks], None).save_checkpoint(folder / f"{EPOCHS} 0.ckpt")
    return looks.seen


def load(path: Path) -> dict[str, Any]:
    return read(place(path)) if path.is_dir() else TorchCheckpointIO().load_checkpoint(path)  # type: ignore[no-any-return]


def refusal_is_right(message: str, file: Mapping[str, Any], before: str, now: str) -> bool:
    """Whether a run of ``now`` may refuse this checkpoint of ``before`` in these words."""
    progress = file["loops"]["drivetrain"]
    if "was saved in the middle of an epoch by" in message:
        inside = progress["cut_batches"] if progress["epoch_cut"] else progress["batches_done"]
        shares_all = all(RUNS[each][1] == RUNS[each][2] for each in (before, now))  # then any number of ranks goes on
        return bool(inside) and RUNS[before][1] != RUNS[now][1] and not shares_all
    return "inside a window of batches" in message and "window" in file["restart"] and before != now


def compare(path: Path, folder: Path, places: Sequence[tuple[int, int]]) -> list[str]:
    """What a checkpoint differs in from the one of the reference that was saved after as many batches."""
    file = load(path)
    progress = file["loops"]["drivetrain"]
    done = progress["earlier_batches"] + progress["batches_done"]
    if not done:
        return [] if file["global_step"] == 0 else [f"{file['global_step']} steps before the first batch"]
    closed = not (progress["batches_done"] or progress["epoch_cut"])
    epoch, batch = (progress["current_epoch"], 0) if closed else places[done - 1]
    expected = load(folder / f"{epoch} {batch}.ckpt")
    counted = expected["loops"]["drivetrain"]
    names = ("global_step", "stepped_batches", "held", *(["divisor"] if counted["held"] else []))
    pairs = [(name, progress[name], counted[name]) for name in names]
    found = [f"{name} is {mine}, and {right} is right" for name, mine, right in pairs if mine != right]
    return [f"after {done} batches: {each}" for each in [*found, *differences(file, expected)]]


class Outcome(NamedTuple):
    """What differs; how many legs another strategy or other ranks have resumed, and how many of those refused."""

    found: list[str]
    moved: int
    refused: int


def check(chain: Mapping[str, Any], pool: Any, folder: Path) -> Outcome:
    """Run a chain beside its reference."""
    steps = reference(chain, folder)
    places = sorted({(epoch, batch) for hook, epoch, batch in steps if hook == "on_train_batch_end"})
    file: Path | None = None
    before, found, moved, refused = "alone", list[str](), 0, 0
    for number, leg in enumerate(chain["legs"]):
        point, path = leg["point"], folder / f"leg {number}.ckpt"
        step = steps.get(point, 0)
        if point is not None and (point not in steps or (leg["way"] == "max_steps" and not step)):
            continue
        for name in dict.fromkeys([leg["name"], before]):
            arguments = (chain, leg, name, file, path, step)
            size = RUNS[name][1]
            why = run_leg(*arguments) if size == 1 else pool.run(
                run_leg, *arguments, world_size=size, group=False)[0]  # fmt: skip
            if why is None:
                moved += file is not None and name != before
                break
            if file is None or not refusal_is_right(why, load(file), before, name):
                return Outcome([*found, f"leg {number} as {name} after {before}: {why}"], moved, refused)
            refused += 1
        if path.exists():
            found += [f"leg {number} as {name} after {before}, {each}" for each in compare(path, folder, places)]
            file, before = path, name
    progress = load(file)["loops"]["drivetrain"]  # type: ignore[arg-type]  # the last leg has left one
    if progress["earlier_batches"] != len(places):
        found.append(f"{progress['earlier_batches']} batches in the end, and {len(places)} are right")
    return Outcome(found, moved, refused)


LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
CHAINS = 100


@pytest.mark.skipif(not LONG, reason="takes minutes; make test-faults runs it")
def test_random_chains_train_as_one_process(pool: Any, seed: int, tmp_path: Path) -> None:
    wrong, moved, refused = list[str](), 0, 0
    for each in range(seed, seed + CHAINS):
        chain, folder = draw_chain(each), tmp_path / str(each)
        folder.mkdir()
        try:
            outcome = check(chain, pool, folder)
        except Exception as error:
            outcome = Outcome([repr(error), *getattr(error, "__notes__", [])], 0, 0)
        moved, refused = moved + outcome.moved, refused + outcome.refused
        if outcome.found:
            wrong.append(f"chain {each}: {chain}\n" + "\n".join(outcome.found[:5]))
        shutil.rmtree(folder)
    print(f"{CHAINS} chains: {moved} legs resumed under another strategy or on other ranks, and {refused} were refused")
    assert not wrong, f"{len(wrong)} differ:\n" + "\n\n".join(wrong)
    assert moved > CHAINS / 3


def chain_of(*legs: tuple[str, str, int, int, str], **more: Any) -> dict[str, Any]:
    """A chain through these strategies: each with the hook, the epoch and the batches of its end, and how it ends."""
    chain = draw_chain(3)
    program = {**chain["program"], "arguments": {"accumulate_grad_batches": 3}, "count": 50, "watches": True, **more}
    program["parts"] = [(False, False, "sometimes")] * PARTS
    arguments = {"num_sanity_val_steps": 0, "limit_val_batches": 1}
    drawn = [{"name": name, "point": point, "way": way, "fails": FAILING[0]} for name, *point_, way in legs
             for point in [tuple(point_)]]  # fmt: skip
    drawn[-1]["point"] = None
    return {"program": program, "arguments": arguments, "legs": drawn, "shuffle": True, "splits": True}


END, EPOCH = "on_train_batch_end", "on_train_epoch_end"


@pytest.mark.parametrize(
    "chain",
    [
        chain_of(("fsdp on 3", END, 0, 2, "in the hook"), ("fsdp on 3", EPOCH, 0, 5, "in the hook"),
                 ("fsdp on 2", EPOCH, 2, 5, "after the fit")),
        chain_of(("tp", EPOCH, 0, 5, "max_epochs"), ("horovod on 3", EPOCH, 1, 5, "ModelCheckpoint"),
                 ("fsdp on 2", EPOCH, 2, 5, "after the fit")),
        chain_of(("ddp on 2", END, 0, 2, "after the fit"), ("ddp on 2", EPOCH, 2, 5, "after the fit")),
        chain_of(("horovod on 3", END, 0, 2, "in the hook"), ("fsdp on 2", END, 1, 4, "in the hook"),
                 ("alone", END, 2, 1, "in the hook"), ("ddp on 3", EPOCH, 2, 5, "after the fit")),
    ],
    ids=["fewer ranks", "three strategies", "inside a window", "other ranks inside windows"],
)  # fmt: skip
def test_chains_train_as_one_process(pool: Any, chain: dict[str, Any], tmp_path: Path) -> None:
    found, _, refused = check(chain, pool, tmp_path)
    assert not found
    assert not refused


def test_a_chain_that_forgets_where_it_was_differs(pool: Any, tmp_path: Path) -> None:
    """The control."""
    legs = ("alone", EPOCH, 0, 5, "in the hook"), ("alone", EPOCH, 2, 5, "after the fit")
    assert check({**chain_of(*legs), "forgets": True, "splits": False}, pool, tmp_path).found
