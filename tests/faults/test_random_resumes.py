"""Random fits that are interrupted once or several times end as those that were not; the long form runs hundreds.

They draw callbacks that keep tensors of the model, a finder before the fit, the loader, and where exceptions come. Jobs
of two ranks draw the strategy, the precision, who saves, and the rank that fails, is killed in a hook or inside a save,
or sends SIGTERM to the job.
"""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import regression_data
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from drivetrain.data import CombinedLoader

pytestmark = [
    pytest.mark.timeout(3600),  # the long form takes minutes
    pytest.mark.filterwarnings("ignore"),  # of what is drawn: few losses for a finder, no update of an average
]

HOOKS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end",
)  # fmt: skip


class Fails(Callback):
    """Raises in one hook, when it is called for the n-th time."""

    def __init__(self, hook: str, count: int) -> None:
        self.left, self.hook = count, hook

    def raise_if_due(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("on purpose")


def _hook(name: str) -> Any:
    def called(self: Fails, *_: Any, **__: Any) -> None:
        if self.hook == name:
            self.raise_if_due()

    return called


for _name in HOOKS:
    setattr(Fails, _name, _hook(_name))


class Net(LightningModule):
    def __init__(self, scheduler: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
        self.net, self.scheduler, self.lr = nn.Linear(6, 1), scheduler, 0.02

    def loss(self, batch: Any) -> torch.Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        losses = [nn.functional.mse_loss(self.net(self.backbone(x)), y) for x, y in (p for p in parts if p is not None)]
        return torch.stack(losses).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)
        if self.scheduler == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduler}}


class Pairs:
    """A loader with a state: a new pass begins with each iteration, but for the first after a state was loaded."""

    def __init__(self) -> None:
        self.given, self.passes, self.continues = 0, 0, False

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self.passes = state["given"], state["passes"]
        self.continues = self.passes > 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        if not self.continues:
            self.given, self.passes = 0, self.passes + 1
        self.continues = False
        return self.rest()

    def rest(self) -> Any:
        while self.given < 4:
            self.given += 1
            x = torch.arange(12.0).view(3, 4) / 10 + self.given + self.passes / 7
            yield x, x.sum(1, keepdim=True) / 20


def loader_of(kind: str) -> Any:
    if kind == "stateful":
        return Pairs()
    if kind == "own sampler":
        data = regression_data(12)
        return DataLoader(data, 3, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(4)))
    if kind in ("min_size", "max_size", "max_size_cycle"):
        return CombinedLoader(
            {"a": DataLoader(regression_data(12), 3, shuffle=True), "b": DataLoader(regression_data(6), 2)}, kind
        )
    return DataLoader(regression_data(12), 3, shuffle=kind == "shuffled")


class Fit:
    """One program, drawn by its seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = random.Random(seed)
        self.seed, self.folder = seed, folder
        self.loader = rng.choice(
            ["plain", "shuffled", "stateful", "own sampler", "min_size", "max_size", "max_size_cycle"]
        )
        self.keeps = rng.sample(["pruning", "average", "finetuning", "spike"], rng.randint(1, 3))
        self.average, self.scheduler = rng.choice(["ema", "mean", "swa"]), rng.choice(["none", "step", "epoch"])
        self.finder, self.lottery, self.thaws = rng.random() < 0.3, rng.random() < 0.5, rng.randint(0, 2)
        self.arguments = {
            "accumulate_grad_batches": rng.choice([1, 1, 2]),
            "limit_train_batches": rng.choice([1.0, 1.0, 3, 2]),
            "check_val_every_n_epoch": rng.choice([1, 2]),
            "limit_val_batches": rng.choice([0, 2]),
            "num_sanity_val_steps": rng.choice([0, 1]),
        }
        self.interruptions = [(rng.choice(HOOKS), rng.randint(1, 6)) for _ in range(rng.randint(1, 3))]

    def __str__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name != "folder"})

    def callbacks(self) -> list[Callback]:
        averages = {
            "ema": lambda: EMAWeightAveraging(decay=0.7),
            "mean": WeightAveraging,
            "swa": lambda: StochasticWeightAveraging(0.01, 1, 2),
        }
        made: dict[str, Any] = {
            "pruning": lambda: ModelPruning(
                "l1_unstructured", parameter_names=["weight"], amount=0.2, use_lottery_ticket_hypothesis=self.lottery
            ),
            "average": averages[self.average],
            "finetuning": lambda: BackboneFinetuning(self.thaws),
            "spike": lambda: SpikeDetection(rtol=1e9, exclude_batches_path=self.folder),
        }
        finder: list[Callback] = [LearningRateFinder(1e-4, 1e-2, 14)] if self.finder else []
        return [*finder, *(made[name]() for name in self.keeps)]

    def run(self, resume: Path | None = None, fails: Fails | None = None) -> Any:
        """Run it once; each run has fresh objects, with other weights and random states where it resumes."""
        torch.manual_seed(self.seed if resume is None else 999)
        random.seed(self.seed if resume is None else 999)
        module, loader = Net(self.scheduler), loader_of(self.loader)
        saves: list[Callback] = [] if fails is None else [fails, OnExceptionCheckpoint(self.folder)]
        trainer = Trainer(
            max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=bool(saves), enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*self.callbacks(), *saves], **self.arguments,
        )  # fmt: skip
        trainer.fit(module, loader, DataLoader(regression_data(6), 3), ckpt_path=resume)
        [optimizer] = trainer.optimizers
        rates = [group["lr"] for group in optimizer.param_groups]
        return {**module.state_dict(), "rates": torch.tensor(rates), "rng": torch.get_rng_state()}


def check(seed: int, folder: Path) -> str | None:
    """Return what is wrong with the program of ``seed``."""
    fit, path, last = Fit(seed, folder), folder / "on_exception.ckpt", None
    try:
        whole = fit.run()
        for hook, count in fit.interruptions:
            try:
                fit.run(last, Fails(hook, count))
            except RuntimeError as error:
                if str(error) != "on purpose":
                    raise
                last = path if path.exists() else last
        resumed = fit.run(last)
    except Exception as error:
        return f"{fit}: {error!r}"
    if whole.keys() != resumed.keys():
        return f"{fit}: {whole.keys() ^ resumed.keys()}"
    wrong = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
    return f"{fit}: {wrong}" if wrong else None


def test_fits_that_were_interrupted_end_as_those_that_were_not(long_form: bool, seed: int, tmp_path: Path) -> None:
    found = []
    for number in range(400 if long_form else 12):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(check(1000 * seed + number, folder))
    assert [each for each in found if each is not None] == []


# ---- jobs of two ranks -----------------------------------------------------------------------------------------------

PROGRAM = Path(__file__).with_name("chain_program.py")
PER_EPOCH = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end")
PER_BATCH = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
SAVES = {"": ("epoch=", "step=", "last"), "term": ("stopped", "on_exception"), "exception": ("on_exception",)}

Options = dict[str, Any]


def draw_job(seed: int) -> tuple[Options, list[Options]]:
    """Return a program of two ranks, and how it ends, once or twice."""
    rng = random.Random(seed)
    job = {
        "strategy": rng.choice(["ddp", "fsdp"]),
        "precision": rng.choice(["32-true", "16-mixed", "bf16-mixed"]),
        "accumulate": rng.choice([1, 1, 2]),
        "last": rng.choice([None, True, "link"]),
        "on_exception": rng.random() < 0.6,
        "every_2": rng.random() < 0.6,
    }
    faults = []
    for _ in range(rng.randint(1, 2)):
        how = rng.choice(["kill", "kill", "exception", "term", ""])
        hook, most = rng.choice([(PER_EPOCH, 3), (PER_BATCH, 6)])
        fault: Options = {"fault": [rng.choice(hook), rng.randint(1, most), rng.randint(0, 1), how]} if how else {}
        if not how or (how in SAVES and rng.random() < 0.6):  # its save is not finished
            fault["save"] = [rng.randint(0, 1), rng.choice(SAVES[how]), rng.randint(1, 12)]
        faults.append(fault)
    return job, faults


class Jobs:
    """Runs the programs, each in a folder of its own: copies of a process, or under torchrun."""

    def __init__(self, programs: Any, folder: Path) -> None:
        self.programs, self.folder = programs, folder

    def run(self, folder: Path, options: Options, torchrun: bool) -> Any:
        folder.mkdir(exist_ok=True)
        if not torchrun:
            return self.programs.run(PROGRAM, json.dumps(options), cwd=folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
        return subprocess.run([*command, json.dumps(options)], cwd=folder, capture_output=True, text=True, timeout=300)

    def check(self, name: str, job: Options, faults: list[Options], torchrun: bool = False) -> tuple[str, str]:
        """Return what is wrong, "" if nothing is, and what the ends and the resumed run have printed."""
        # Who saves, and who starts the ranks, makes no difference to what the fit comes to.
        whole = self.folder / " ".join(str(job[key]) for key in ("strategy", "precision", "accumulate"))
        folder, said = self.folder / name, ""
        if not whole.exists():
            assert self.run(whole, {**job, "last": None, "on_exception": False}, False).returncode == 0
        for fault in [*faults, {}]:
            done = self.run(folder, {**job, **fault}, torchrun)
            said += done.stdout + done.stderr
        if done.returncode != 0:
            return f"{job} {faults}: {done.stderr}", said
        found, expected = outcome(folder), outcome(whole)
        wrong = [key for key in expected if found[key] != expected[key]]
        return (f"{job} {faults}: {wrong}" if wrong else ""), said


def outcome(folder: Path) -> dict[str, Any]:
    """What a program has come to; of rows that were written again, the last."""
    logged: dict[str, dict[str, str]] = {}
    with open(folder / "logs" / "v" / "metrics.csv") as stream:
        for row in csv.DictReader(stream):
            logged.setdefault(row["step"], {}).update({name: value for name, value in row.items() if value})
    found: dict[str, Any] = {"logged": logged}
    for rank in (0, 1):
        lines = map(json.loads, (folder / f"batches-{rank}.jsonl").read_text().splitlines())
        found[f"batches of rank {rank}"] = {tuple(place): batch for place, batch in lines}
        found[f"end of rank {rank}"] = json.loads((folder / f"end-{rank}.json").read_text())
    return found


JOB = {"strategy": "fsdp", "precision": "32-true", "accumulate": 1, "last": "link"}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")


@pytest.fixture(scope="module")
def jobs(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(programs, tmp_path_factory.mktemp("jobs"))


@ON_LINUX
@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ([{"fault": ["on_train_batch_end", 6, 0, "term"], "save": [0, "stopped", 5]}], "stopped.ckpt was not finished"),
        ([{"fault": ["on_train_batch_end", 6, 1, "exception"]}], "Resuming from .*on_exception.ckpt"),
    ],
)  # fmt: skip
def test_a_job_of_two_ranks_that_has_failed_ends_as_one_that_has_not(
    jobs: Jobs, faults: list[Options], line: str
) -> None:
    """A rank is killed inside the save after SIGTERM; a rank fails before the other has logged the step."""
    wrong, said = jobs.check(line[:1], {**JOB, "on_exception": "stopped" not in line}, faults)
    assert "the fault was injected" in said, said
    assert re.search(line, said), said
    assert wrong == ""


@ON_LINUX
def test_random_jobs_of_two_ranks(jobs: Jobs, long_form: bool, seed: int) -> None:
    found = []
    for number in range(50 if long_form else 1):
        job, faults = draw_job(1000 * seed + number)
        found.append(jobs.check(str(number), job, faults, torchrun=long_form and number % 4 == 0)[0])
    assert [each for each in found if each] == []
