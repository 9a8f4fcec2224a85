"""The parity matrix: what every strategy trains in every precision, and the 64-bit loop that it is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.module.losses import WeightedLoss
from drivetrain.module.module import LightningModule
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.trainer import Trainer

GLOBAL_BATCH = 12  # samples: two, three and four ranks get equal parts
SAMPLES = 4 * GLOBAL_BATCH + 7  # the last batch of an epoch is smaller, and no number of ranks divides it
VALIDATION_SAMPLES = 17
ACCUMULATE = 2  # batches of a window: the last window of an epoch holds one
CLIP = 0.5
EPOCHS = 2

TOLERANCES = {
    "64-true": 1e-9, "32-true": 1e-5, "16-mixed": 5e-3, "bf16-mixed": 2e-2, "16-true": 1e-2, "bf16-true": 8e-2,
}  # fmt: skip
"""By precision, how far a run may end from the reference: see :func:`distances`."""


class Front(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.again = nn.Linear(width, width), nn.Linear(width, width)
        self.again.weight = self.before.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.before(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two layers, and what skips them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """``scale`` has fewer elements than there are ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.scale = nn.Linear(width, 1), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.scale  # type: ignore[no-any-return]


class ParityNet(LightningModule):
    """A weight that two layers share, a frozen parameter, one with a single element, and losses that are weighted."""

    tp_plan: ClassVar = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}
    width: ClassVar = 4  # of a sample, too
    hidden: ClassVar = 6  # two ranks divide it, and no number of ranks divides a half

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.front = Front(self.width)
            self.blocks = nn.ModuleList(Block(self.width, self.hidden) for _ in range(2))
            self.head = Head(self.width)
        self.frozen.requires_grad_(False)

    @property
    def frozen(self) -> nn.Parameter:
        """The parameter that does not train."""
        block: Any = self.blocks[0]
        return block.first.bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, y: Tensor, tokens: Tensor) -> WeightedLoss:
        """Return the mean over tokens, with their number."""
        each = F.mse_loss(output, y, reduction="none").squeeze(1)
        return WeightedLoss((each * tokens).sum() / tokens.sum(), int(tokens.sum()))

    def training_step(self, batch: Any, batch_idx: int) -> WeightedLoss:
        x, y, tokens = batch
        loss = self.loss(self(x), y, tokens)
        self.log_training(loss.loss, tokens)
        return loss

    def log_training(self, loss: Any, tokens: Tensor) -> None:
        """Log the mean over tokens, and their number, of an epoch on all ranks."""
        count = int(tokens.sum())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=count, sync_dist=True)
        self.log("tokens", float(count), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class PipelinedNet(ParityNet):
    """The same in stages, which a pipeline calls instead of ``training_step``."""

    def configure_pipeline(self, num_stages: int) -> Any:
        return [nn.Sequential(self.front, self.blocks[0]), nn.Sequential(self.blocks[1], self.head)], self.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_training(outputs["loss"], batch[2])


def _samples(count: int, seed: int, width: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, features, generator=generator) for features in (width, 1))
    return TensorDataset(x, y, torch.randint(1, 9, (count,), generator=generator))


def loaders(width: int = ParityNet.width) -> tuple[Any, Any]:
    """Return the training loader and the validation loader; each batch is a global one."""
    training, validation = _samples(SAMPLES, 0, width), _samples(VALIDATION_SAMPLES, 1, width)
    return DataLoader(training, batch_size=GLOBAL_BATCH), DataLoader(validation, batch_size=GLOBAL_BATCH)


# ---- the reference -------------------------------------------------------------------------------------------------


@functools.cache
def by_hand(
    kind: type[ParityNet] = ParityNet,
    clip: float = CLIP,
    weighted: bool = True,
    tied: bool = True,
    frozen: bool = True,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Train in one process and in 64 bits, with torch alone; return what :func:`contents` does, and ``"start"``.

    The arguments after ``kind`` make a control of the reference: a run with a fault.
    """
    module = kind().double()
    start = {name: each.detach().clone() for name, each in module.state_dict().items()}
    if not tied:
        module.front.again.weight = nn.Parameter(module.front.again.weight.detach().clone())
    module.frozen.requires_grad_(not frozen)
    [optimizer], [scheduler] = module.configure_optimizers()
    training, validation = ([tuple(each) for each in loader] for loader in loaders(kind.width))
    metrics: dict[str, float] = {}
    norms = []
    for _ in range(epochs):
        total, count = 0.0, 0
        for first in range(0, len(training), ACCUMULATE):
            window = training[first : first + ACCUMULATE]
            tokens = sum(int(batch[2].sum()) for batch in window)
            optimizer.zero_grad()
            for x, y, each in window:
                squared = (module(x.double()) - y.double()).square().squeeze(1)
                total += float((squared.detach() * each).sum())
                mean = (squared * each).sum() / tokens if weighted else squared.mean() / len(window)
                mean.backward()
            count += tokens
            norms.append(float(nn.utils.clip_grad_norm_([*module.parameters()], clip)))
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            errors = torch.cat([(module(x.double()) - y.double()).square() for x, y, _ in validation])
        metrics = {"loss": total / count, "tokens": float(count), "val_loss": float(errors.mean())}
    states = optimizer.state_dict()["state"]
    return {
        "weights": {name: each.detach() for name, each in module.state_dict().items()}, "metrics": metrics,
        "momenta": {number: state["momentum_buffer"] for number, state in states.items()}, "start": start,
        "norms": norms,
    }  # fmt: skip


# ---- the matrix ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A strategy of the matrix, and where its cells run.

    Args:
        make: returns the strategy, or its name.
        processes: how many.
        arguments: further ones of the Trainer.
        module: what it trains.
        target: what of the Makefile runs its cells, but for the one in ``make test``.
        in_test: the precision of that one.
        refuses: the precisions that are an error.
        remark: what else the page says of it.
    """

    make: Callable[[], Strategy | str]
    processes: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    module: type[ParityNet] = ParityNet
    target: str = "test-faults"
    in_test: str = ""
    refuses: tuple[str, ...] = ()
    remark: str = ""

    def runs_in(self, precision: str) -> str:
        """Return the target of a cell, or "refused"."""
        if precision in self.refuses:
            return "refused"
        return "test" if precision == self.in_test else self.target


def _tensor_parallel() -> Strategy:
    from drivetrain.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


def _mesh() -> Strategy:
    from drivetrain.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, save_distributed_checkpoint=False)


def _sharded() -> Strategy:
    from drivetrain.strategies import FSDPStrategy

    return FSDPStrategy(state_dict_type="sharded")


def _keeps_parameters() -> Strategy:
    from drivetrain.strategies import FSDPStrategy

    return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")


def _pipeline() -> Strategy:
    from drivetrain.strategies import PipelineStrategy

    return PipelineStrategy(num_microbatches=2)


def _zero(name: str) -> Row:
    return Row(lambda: name, 2, target="test-extras", refuses=("64-true", "16-true"), remark="needs `deepspeed`")


ROWS: dict[str, Row] = {
    "single_device": Row(lambda: "single_device", in_test="32-true"),
    "dp": Row(lambda: "dp", arguments={"devices": 2}, in_test="32-true", remark="two devices"),
    "ddp": Row(lambda: "ddp", 2, in_test="32-true"),
    "ddp_find_unused_parameters_true": Row(lambda: "ddp_find_unused_parameters_true", 2),
    "ddp2": Row(lambda: "ddp2", 2, {"devices": 2, "num_nodes": 2}, remark="two devices each"),
    "horovod": Row(lambda: "horovod", 2, remark="without its package"),
    "fsdp": Row(lambda: "fsdp", 2, in_test="32-true"),
    "fsdp, parameters kept": Row(_keeps_parameters, 2, remark='`sharding_strategy="SHARD_GRAD_OP"`'),
    "fsdp_cpu_offload": Row(lambda: "fsdp_cpu_offload", 2),
    "model_parallel": Row(_tensor_parallel, 2, in_test="32-true", remark="tensor parallelism"),
    "model_parallel, with FSDP": Row(_mesh, 4, remark="a mesh of two by two"),
    "pipeline": Row(_pipeline, 2, module=PipelinedNet, refuses=("16-mixed",), remark="two stages"),
    **{f"deepspeed_stage_{stage}": _zero(f"deepspeed_stage_{stage}") for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}_offload": _zero(f"deepspeed_stage_{stage}_offload") for stage in (1, 2, 3)},
}
"""The strategies of the matrix; a name may be followed by what sets it apart."""

SHARDED = Row(_sharded, 3)
"""What writes the folder from which all cells resume."""


def cells(target: str) -> list[tuple[str, str]]:
    """Return strategy and precision of each cell that ``target`` runs."""
    return [(name, each) for name, row in ROWS.items() for each in TOLERANCES if row.runs_in(each) == target]


def table() -> str:
    """Return the matrix as docs/parity.md shows it."""
    lines = ["| strategy | processes | " + " | ".join(f"`{name}`" for name in TOLERANCES) + " | |"]
    lines.append("|---" * (len(TOLERANCES) + 3) + "|")
    for name, row in ROWS.items():
        first, _, more = name.partition(", ")
        label = f"`{first}`, {more}" if more else f"`{first}`"
        found = " | ".join(row.runs_in(precision) for precision in TOLERANCES)
        lines.append(f"| {label} | {row.processes} | {found} | {row.remark} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


# ---- a cell --------------------------------------------------------------------------------------------------------


def train(row: Row, precision: str, saves: Path, resumes: Path | None = None, epochs: int = EPOCHS) -> dict[str, float]:
    """Train, from a checkpoint if ``resumes`` is one, and save a checkpoint; return the metrics."""
    arguments: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "strategy": row.make(), "devices": row.processes, "split_batches": row.processes > 1,
        "precision": precision, "max_epochs": epochs, "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": CLIP, "num_sanity_val_steps": 0,
    }  # fmt: skip
    if precision == "16-mixed":  # with torch's first scale, 65,536, the first steps would be skipped
        device = "cuda" if row.arguments.get("accelerator") == "cuda" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
        arguments |= {"precision": None, "plugins": [MixedPrecision(precision, scaler=scaler)]}
    trainer = Trainer(**{**arguments, **row.arguments})
    trainer.fit(row.module(), *loaders(row.module.width), ckpt_path=resumes)
    trainer.save_checkpoint(saves)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def run_cell(name: str, precision: str, folder: Path, sources: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Train from the start, and from each of ``sources``; save each run's end in ``folder``, return its metrics."""
    return run_row(ROWS[name], precision, folder, sources)


def run_row(row: Row, precision: str, folder: Path, sources: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Do what :func:`run_cell` does, for any row."""
    found = {"trained": train(row, precision, folder / "trained")}
    for source, path in sources.items():
        found[source] = train(row, precision, folder / source, path)
    return found


def write_sharded(precision: str, path: Path) -> None:
    """Write the folder after one epoch, from three processes."""
    train(SHARDED, precision, path, epochs=1)


def write_file(name: str, precision: str, path: Path) -> Path:
    """Write a file after one epoch, in one process: from several devices for a row that trains on one."""
    train(ROWS["dp" if name == "single_device" else "single_device"], precision, path, epochs=1)
    return path


def contents(path: Path, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the weights and momenta in a checkpoint, a file or a folder, beside the metrics of its run."""
    checkpoint = TorchCheckpointIO().load_checkpoint(path)
    states = checkpoint["optimizer_states"][0]["state"]
    momenta = {number: state["momentum_buffer"] for number, state in states.items()}
    return {"weights": dict(checkpoint["state_dict"]), "momenta": momenta, "metrics": metrics}


def distances(found: Mapping[str, Any], kind: type[ParityNet] = ParityNet) -> dict[str, float]:
    """Return how far a run has ended from the reference.

    Of weights, the distance from the reference's relative to how far the reference has moved them in training, so that
    a run that does not train has a distance of 1; of momenta and metrics, the distance relative to their size.
    """
    expected = by_hand(kind)  # type: ignore[arg-type]  # mypy takes classes of modules for unhashable

    def distance(one: Mapping[Any, Any], other: Mapping[Any, Any], base: Mapping[Any, Any] | None = None) -> float:
        assert one.keys() == other.keys(), f"{sorted(one)}, and {sorted(other)} is right"
        gap = torch.cat([(one[name].double() - other[name]).reshape(-1) for name in other])
        size = torch.cat([(other[name] - (base[name] if base else 0)).reshape(-1) for name in other])
        return float(gap.norm() / size.norm())

    metrics = {name: abs(found["metrics"][name] - value) / abs(value) for name, value in expected["metrics"].items()}
    return {
        "weights": distance(found["weights"], expected["weights"], expected["start"]),
        "momenta": distance(found["momenta"], expected["momenta"]),
        **metrics,
    }


def check_cell(precision: str, folder: Path, ranks: Sequence[Mapping[str, dict[str, float]]]) -> None:
    """Compare each run of a cell with the reference; ``ranks`` are what :func:`run_cell` returned on each."""
    for run, metrics in ranks[0].items():
        assert all(rank[run] == metrics for rank in ranks), f"{run}: the ranks have other metrics: {ranks}"
        check_run(run, distances(contents(folder / run, metrics)), TOLERANCES[precision])


def check_run(run: str, found: Mapping[str, float], tolerance: float) -> None:
    """Check what :func:`distances` has returned for a run."""
    for what, distance in found.items():
        limit = 0 if what == "tokens" else tolerance
        assert distance <= limit, f"{run}: {what} are {distance:.1e} from the reference, and {limit:.0e} is allowed"
