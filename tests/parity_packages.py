"""The parity matrix of the precisions that need a package, with a model whose layers these packages exchange."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests import parity_matrix as parity
from tests.parity_matrix import EPOCHS, ParityNet, Row
from torch import Tensor, nn

from drivetrain.callback import Callback
from drivetrain.precision.precision import Precision

STRATEGIES = ("single_device", "ddp", "fsdp")


class WideNet(ParityNet):
    """The packages exchange the layers of its blocks: all their sizes are multiples of 16."""

    width, hidden = 16, 32


class AdaptedNet(WideNet):
    """The weights of the blocks, which bitsandbytes packs, are frozen; everything else is trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.requires_grad_(False)


@dataclass(frozen=True)
class Packaged:
    """A precision, and where its cells run.

    Args:
        label: how a user writes it.
        needs: the package, and the device if it must be another than a CPU.
        tolerance: how far a run may end from the reference.
        measured: the largest distance of the runs when the tolerance was chosen.
        module: what is trained.
        refuses: by strategy, what its error says (a regular expression).
        folder_in: the precision in which FSDP writes the folder that all cells resume from; empty: this one.
    """

    label: str
    needs: str
    tolerance: float = 0.0
    measured: float = 0.0
    module: type[ParityNet] = WideNet
    refuses: Mapping[str, str] = field(default_factory=dict)
    folder_in: str = ""

    def runs_under(self, strategy: str) -> str:
        """Return the target of a cell, or "refused"."""
        return "refused" if strategy in self.refuses else "test-extras"


_NO_SHARDS = "packs weights into integers, .* cannot shard"
_NO_ENGINE = "beside an NVIDIA GPU that multiplies 8-bit floats, needs the package transformer_engine, .* Run `pip"


def _bitsandbytes(mode: str, tolerance: float, measured: float) -> Packaged:
    label = f'`BitsandbytesPrecision("{mode}")`'
    if mode == "int8-training":
        return Packaged(label, "`bitsandbytes`", tolerance, measured)
    return Packaged(label, "`bitsandbytes`", tolerance, measured, AdaptedNet, {"fsdp": _NO_SHARDS}, "bf16-mixed")


def _transformer_engine(name: str) -> Packaged:
    refuses = dict.fromkeys(STRATEGIES, _NO_ENGINE)
    return Packaged(f'`"{name}"`', "`transformer_engine`, an NVIDIA GPU", refuses=refuses)


PRECISIONS: dict[str, Packaged] = {
    "float8": Packaged('`"float8"`', "`torchao`", 8e-2, 3.8e-2),
    "bitsandbytes-nf4": _bitsandbytes("nf4", 1e-1, 6e-2),
    "bitsandbytes-nf4-dq": _bitsandbytes("nf4-dq", 1e-1, 6e-2),
    "bitsandbytes-fp4": _bitsandbytes("fp4", 1.5e-1, 8e-2),
    "bitsandbytes-fp4-dq": _bitsandbytes("fp4-dq", 1.5e-1, 8e-2),
    "bitsandbytes-int8": _bitsandbytes("int8", 6e-3, 2.7e-3),
    "bitsandbytes-int8-training": _bitsandbytes("int8-training", 6e-3, 2.4e-3),
    "transformer-engine": _transformer_engine("transformer-engine"),
    "transformer-engine-float16": _transformer_engine("transformer-engine-float16"),
}
"""The precisions, by what trainer.precision calls them."""


def cells(package: str, target: str = "test-extras") -> list[tuple[str, str]]:
    """Return strategy and precision of each cell of a package's precisions that ``target`` runs."""
    return [
        (name, precision)
        for precision, packaged in PRECISIONS.items()
        for name in STRATEGIES
        if package in packaged.needs and packaged.runs_under(name) == target
    ]


def table() -> str:
    """Return this matrix as docs/parity.md shows it."""
    lines = [f"| precision | needs | {' | '.join(f'`{name}`' for name in STRATEGIES)} | tolerance | measured |"]
    lines.append("|---" * (len(STRATEGIES) + 4) + "|")
    for packaged in PRECISIONS.values():
        found = " | ".join(packaged.runs_under(name) for name in STRATEGIES)
        numbers = f"{packaged.tolerance:.1e} | {packaged.measured:.1e}" if packaged.tolerance else "|"
        lines.append(f"| {packaged.label} | {packaged.needs} | {found} | {numbers} |".replace("|  |", "| |"))
    return "\n".join(lines)


# ---- a cell --------------------------------------------------------------------------------------------------------


class LayersAreExchanged(Callback):
    """Checks that no layer of the blocks computes as it did."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        plain = [path for path, layer in pl_module.blocks.named_modules() if type(layer) is nn.Linear]
        assert not plain, f"{trainer.precision} has not exchanged {plain}"


def train(
    name: str, precision: str, saves: Path, resumes: Path | None = None, epochs: int = EPOCHS
) -> dict[str, float]:
    """Train with the strategy of a row of the other matrix; see :func:`parity_matrix.train`."""
    return parity.train(_row(parity.ROWS[name], precision), precision, saves, resumes, epochs)


def _row(base: Row, precision: str) -> Row:
    """Return the row of a strategy, with what ``precision`` trains."""
    plugin = _plugin(precision)
    arguments: dict[str, Any] = {"precision": None, "plugins": [plugin]} if plugin is not None else {}
    arguments |= {"callbacks": [LayersAreExchanged()]}
    return replace(base, module=PRECISIONS[precision].module, arguments={**base.arguments, **arguments})


def _plugin(precision: str) -> Precision | None:
    package, _, mode = precision.partition("-")
    if package != "bitsandbytes":
        return None
    from drivetrain.precision import BitsandbytesPrecision

    return BitsandbytesPrecision(mode, ignore_modules={"head"})


def run_cell(name: str, precision: str, folder: Path, sources: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Train from the start, and from each of ``sources``; save each run's end in ``folder``, return its metrics."""
    return parity.run_row(_row(parity.ROWS[name], precision), precision, folder, sources)


def write_sharded(precision: str, path: Path) -> None:
    """Write the folder after one epoch, from three processes."""
    packaged = PRECISIONS[precision]
    row = replace(parity.SHARDED, module=packaged.module) if packaged.folder_in else _row(parity.SHARDED, precision)
    parity.train(row, packaged.folder_in or precision, path, epochs=1)


def write_file(name: str, precision: str, path: Path) -> Path:
    """Write a file after one epoch, in one process: from several devices for a row that trains on one."""
    train("dp" if name == "single_device" else "single_device", precision, path, epochs=1)
    return path


@functools.cache
def frozen(precision: str) -> dict[str, Tensor]:
    """Return what no training may change in a checkpoint: frozen parameters, packed where the precision packs them."""
    module: Any = PRECISIONS[precision].module()
    trained = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
    plugin = _plugin(precision)
    if plugin is not None:
        module = plugin.convert_module(module)
    return {name: each for name, each in module.state_dict().items() if name not in trained}


def check_cell(precision: str, folder: Path, ranks: Sequence[Mapping[str, dict[str, float]]]) -> None:
    """Compare each run of a cell with the reference; ``ranks`` are what :func:`run_cell` returned on each."""
    packaged = PRECISIONS[precision]
    for run, metrics in ranks[0].items():
        assert all(rank[run] == metrics for rank in ranks), f"{run}: the ranks have other metrics: {ranks}"
        check_run(run, precision, parity.contents(folder / run, metrics), packaged.tolerance)


def check_run(run: str, precision: str, found: Mapping[str, Any], tolerance: float) -> None:
    """Check that a run has ended near the reference, and has left alone what is frozen."""
    kind = PRECISIONS[precision].module
    weights = dict(found["weights"])
    for name, value in frozen(precision).items():
        assert torch.equal(weights.pop(name), value), f"{run}: {name} has changed"
    expected = parity.by_hand(kind)["weights"]  # type: ignore[arg-type]  # as there
    weights |= {name: expected[name] for name in expected.keys() - weights.keys()}  # which have just been compared
    parity.check_run(run, parity.distances({**found, "weights": weights}, kind), tolerance)
