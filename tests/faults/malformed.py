"""Checkpoints that are wrong in every way that a generator of random numbers finds, and everything that reads them."""

from __future__ import annotations

import copy
import io
import operator
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningDataModule, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer
from drivetrain.checkpoints.plain import MARKER
from drivetrain.errors import CheckpointError, ConfigurationError

# ---- valid files -----------------------------------------------------------------------------------------------------


class Net(LightningModule):
    def __init__(self, hidden: int = 3, lr: float = 0.01, name: str = "net") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first)
        return [first], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(first, 2), "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class Data(LightningDataModule):
    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(1)
        self.x, self.seen = torch.randn(size, 2, generator=generator), 0

    def _loader(self, shuffle: bool = False) -> Any:
        return DataLoader(TensorDataset(self.x, self.x.sum(1, keepdim=True)), batch_size=3, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader()

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"] + 0  # a bare KeyError or TypeError where the state is wrong


class Sums(torch.nn.Module):
    """A metric object as torchmetrics makes them."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "counts": torch.zeros(2), "seen": []}
        self.device = torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.total, self.counts, self.seen = torch.zeros(()), torch.zeros(2), list[torch.Tensor]()
        self._update_count = 0

    def update(self, value: torch.Tensor) -> None:
        self._update_count += 1
        self.total, self.counts = self.total + value, self.counts + 1
        self.seen.append(value)

    def compute(self) -> torch.Tensor:
        return self.total + self.counts.sum()


class ByHand(LightningModule):
    """Two optimizers that step by turns, a scaled loss, a metric object, and several training loaders."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other, self.sums = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), Sums()
        self.stops_at: Path | None = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.net(batch["a"]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.sums.update(loss.detach())
        self.log("sums", self.sums, on_step=False, on_epoch=True)
        self.manual_backward(loss)
        self.manual_backward(self.other(batch["b"]).sum())
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.net(batch).sum())

    def on_validation_batch_end(self, *args: Any) -> None:
        if self.stops_at is not None and self.trainer.progress.batches_done == 3:
            self.trainer.save_checkpoint(self.stops_at)
            self.stops_at = None

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.5)]


class Positioned:
    """A loader that saves where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        while self.position < 5:
            self.position += 1
            yield torch.full((1, 2), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = operator.index(state["position"])  # a bare KeyError or TypeError where the state is wrong


def fit_by_hand(folder: Path, module: ByHand, epochs: int, path: Path | None = None) -> None:
    def drawn(count: int) -> Any:
        x = torch.ones(count, 2)
        return DataLoader(x, shuffle=True, generator=torch.Generator().manual_seed(2))  # type: ignore[arg-type]

    made = Trainer(
        accelerator="cpu", precision="16-mixed", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, val_check_interval=3,
        callbacks=[OnExceptionCheckpoint(folder / "exception"), Timer(timedelta(days=1))],
    )  # fmt: skip
    made.fit(module, {"a": Positioned(), "b": drawn(4)}, [drawn(2), drawn(1)], ckpt_path=path)


def trainer(folder: Path, **arguments: Any) -> Trainer:
    saver = ModelCheckpoint(folder / "runs", monitor="val_loss", save_top_k=2, save_last=True)
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        accumulate_grad_batches=3, default_root_dir=folder,
        callbacks=[saver, EarlyStopping("val_loss", patience=9), Timer(timedelta(days=1))], **arguments,
    )  # fmt: skip


def parts() -> dict[str, Any]:
    """What an Engine saves."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3, "note": {"path": Path("x")}}


def originals(folder: Path) -> dict[str, bytes]:
    """Valid files by name.

    Saved inside a window and at an epoch's end of a fit, inside a validation of a fit by hand, by an Engine, and a bare
    state dict.
    """

    class Saves(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.current_epoch == 1 and batch_idx == 1:
                self.trainer.save_checkpoint(folder / "middle.ckpt")

    seed_everything(5)
    made = trainer(folder, max_epochs=2)
    made.fit(Saves(), datamodule=Data())
    Path(folder / "end.ckpt").write_bytes(Path(made.checkpoint_callback.last_model_path).read_bytes())  # type: ignore[union-attr]
    by_hand = ByHand()
    by_hand.stops_at = folder / "by hand.ckpt"
    fit_by_hand(folder, by_hand, 1)
    engine = Engine(accelerator="cpu")
    engine.launch()
    engine.save(folder / "engine.ckpt", {**parts(), "rng": engine.rng})
    torch.save(parts()["model"].state_dict(), folder / "raw.ckpt")
    return {name: (folder / f"{name}.ckpt").read_bytes() for name in ("middle", "end", "by hand", "engine", "raw")}


# ---- damage ----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One malformed file: what was done to which original, and what it holds; ``None`` for a folder."""

    original: str
    damage: str
    content: bytes | None


def _wrong_values(draw: random.Random) -> list[Any]:
    return [
        None, "x", "", [], {}, (), 0, 1, -1, True, 10**30, -(2**63), 2**64, 1.5, float("nan"), float("inf"), b"x",
        "caf\xe9 \x00\n", ["x"], [None], {"a": 1}, {1: 2}, {None: None}, complex(1, 2), torch.ones(3), torch.ones(()),
        torch.ones(2, 2, dtype=torch.complex64), torch.zeros(0), torch.tensor([1, 2]),
        torch.ones(5000, dtype=torch.uint8),
        {MARKER: "int", "value": "zz"}, {MARKER: "int", "value": "0x1"}, {MARKER: "nonsense", "value": 1},
        {MARKER: "path", "value": ["Path", 3]}, {MARKER: "path", "value": ("Path", "a\x00b")}, {MARKER: []},
        {MARKER: "mapping", "value": ["dict", [[[1], 2]], None]}, {MARKER: "reference", "value": "os:system"},
        {MARKER: "enum", "value": (1, 2)}, {MARKER: "bytes", "value": [300]}, "\udce9",
        {MARKER: "set", "value": [[]]}, {MARKER: "numpy array", "value": ["<f8", [2], torch.zeros(3)]},
        {MARKER: "described", "value": ("a", "b")}, {MARKER: "deque", "value": [[], -1]},
        {MARKER: "mapping", "value": ["OrderedDict", [["a", {MARKER: "set", "value": [[1]]}]], None]},
        draw.random(), draw.randrange(10), [draw.random()] * 3, torch.randn(draw.randrange(4), 3),
    ]  # fmt: skip


def _places(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every entry of ``tree``; of long lists only to the first ones."""
    todo: list[tuple[Any, tuple[Any, ...]]] = [(tree, ())]
    while todo:
        node, path = todo.pop()
        for key in list(node) if isinstance(node, dict) else range(min(len(node), 8)):
            yield (*path, key)
            if isinstance(node[key], (dict, list, tuple)):
                todo.append((node[key], (*path, key)))


def _changed(node: Any, path: tuple[Any, ...], change: Callable[[Any, Any], str], done: list[str]) -> Any:
    """``node`` with a change at ``path``; a tuple stays one."""
    items = list(node) if isinstance(node, tuple) else node
    if len(path) == 1:
        done.append(change(items, path[0]))
    else:
        items[path[0]] = _changed(items[path[0]], path[1:], change, done)
    return tuple(items) if isinstance(node, tuple) else items


def _change_tree(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    tree = copy.deepcopy(dict(torch.load(io.BytesIO(content), weights_only=True)))
    changes = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        # Every depth gets the same weight: most entries lie deep in lists of numbers.
        by_depth: dict[int, list[tuple[Any, ...]]] = {}
        for path in _places(tree):
            by_depth.setdefault(len(path), []).append(path)
        if not by_depth:
            break
        path = draw.choice(by_depth[draw.choice(list(by_depth))])
        done: list[str] = []
        _changed(tree, path, lambda node, key: _change(draw, node, key), done)
        changes.append(f"{done[0]} at {path}")
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return "; ".join(changes), buffer.getvalue()


def _change(draw: random.Random, node: Any, key: Any) -> str:
    value = node[key]
    kind = draw.choice(["replace", "replace", "replace", "delete", "rename", "extra", "swap", "nest", "tensor", "cut"])
    if kind == "delete":
        del node[key]
    elif kind == "rename" and isinstance(node, dict):
        node[draw.choice([f"{key}x", 3, "", (1, "a"), None])] = node.pop(key)
    elif kind == "extra" and isinstance(node, dict):
        extra = draw.choice(["step", "load_state_dict", "x", 7, MARKER, "state_dict", "params", "optimizer", "epoch"])
        node[extra] = draw.choice(_wrong_values(draw))
    elif kind == "swap":
        other = draw.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        node[key], node[other] = node[other], node[key]
    elif kind == "nest":
        node[key] = draw.choice([[value], {"value": value}, {MARKER: "mapping", "value": value}])
    elif kind == "tensor" and isinstance(value, torch.Tensor) and value.numel():
        node[key] = draw.choice(
            [value.reshape(-1), value[None], value.double(), value.bool(), value.flatten()[:1], value.to(torch.int64)]
        )
    elif kind == "cut" and isinstance(value, (dict, list)) and value:
        node[key] = dict(list(value.items())[:-1]) if isinstance(value, dict) else value[:-1]
    else:
        kind = "replace"
        node[key] = draw.choice(_wrong_values(draw))
    return f"replace by {_short(node[key])}" if kind == "replace" else kind


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:80]


def _older_layout(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """As other programs and earlier years wrote it; still with one change."""
    tree = dict(torch.load(io.BytesIO(content), weights_only=True))
    tree.pop("drivetrain_version", None)
    shape = draw.randrange(4)
    if shape == 0:
        tree.pop("loops", None)
        tree["hparams"] = tree.pop("hyper_parameters", {})
    elif shape == 1:
        tree["loops"] = {"fit_loop": draw.choice([{}, None, "x", {"epoch_progress": {"current": {}}}])}
    elif shape == 2:
        tree["checkpoint_callback_best_model_path"] = draw.choice(["a.ckpt", 3, None])
        tree.pop("callbacks", None)
        tree.pop("loops", None)
    else:
        tree["native_amp_scaling_state"] = draw.choice([{}, {"scale": 1.0}, 3])
        tree["loops"] = {"fit_loop": 3}
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    damage, changed = _change_tree(draw, buffer.getvalue()) if draw.random() < 0.5 else ("as it is", buffer.getvalue())
    return f"older layout {shape}, {damage}", changed


def _change_bytes(draw: random.Random, content: bytes) -> tuple[str, bytes | None]:
    changed, kind = bytearray(content), draw.randrange(9)
    at = draw.randrange(len(content))
    if kind == 0:
        for _ in range(draw.choice([1, 1, 5])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return "flipped bits", bytes(changed)
    if kind == 1:
        return f"cut at {at}", content[:at]
    if kind == 2:
        return "empty", b""
    if kind == 3:
        return "a folder", None
    if kind == 4:
        changed[at : at + 64] = bytes(64)
        return f"zeros at {at}", bytes(changed)
    if kind == 5:
        return "text", draw.choice([b"hello\n", b"{}", b"PK\x03\x04", b"\x80\x02}q\x00.", b"\x80\x04N.", bytes(100)])
    if kind == 6:
        return "bytes behind it", content + draw.randbytes(draw.randrange(1, 300))
    if kind == 7:  # the directory at the end of the container, which has no checksum
        at = len(content) - 1 - draw.randrange(min(len(content), 4000))
        changed[at] = draw.randrange(256)
        return f"another byte at {at}", bytes(changed)
    buffer = io.BytesIO()
    torch.save(draw.choice(_wrong_values(draw)), buffer)
    return "another object", buffer.getvalue()


def cases(seed: int, number: int, valid: dict[str, bytes]) -> Iterator[Case]:
    """``number`` malformed files."""
    for index in range(number):
        draw = random.Random(f"{seed}/{index}")  # each can be made again alone
        torch.manual_seed(draw.randrange(2**31))
        original = draw.choice(["middle", "middle", "end", "by hand", "by hand", "engine", "raw"])
        kind = draw.random()
        if kind < 0.2:
            yield Case(original, *_change_bytes(draw, valid[original]))
        elif kind < 0.27 and original in _FITTED:
            yield Case(original, *_older_layout(draw, valid[original]))
        else:
            yield Case(original, *_change_tree(draw, valid[original]))


# ---- readers ---------------------------------------------------------------------------------------------------------


def _fit(path: Path) -> None:
    trainer(path.parent, max_epochs=3).fit(Net(), datamodule=Data(), ckpt_path=path)


def _evaluate(name: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        options = {} if name == "predict" else {"verbose": False}
        getattr(trainer(path.parent), name)(Net(), datamodule=Data(), ckpt_path=path, **options)

    return read


def _engine() -> Engine:
    engine = Engine(accelerator="cpu")
    engine.launch()
    return engine


def _load(path: Path) -> None:
    engine, state = _engine(), parts()
    engine.load(path, {**state, "rng": engine.rng})
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()


def _load_raw(path: Path) -> None:
    model = parts()["model"]
    _engine().load_raw(path, model)
    model(torch.ones(1, 2))


_TRAINED: dict[str, Callable[[Path], None]] = {
    "fit": _fit,
    "validate": _evaluate("validate"),
    "test": _evaluate("test"),
    "predict": _evaluate("predict"),
    "module": lambda path: Net.load_from_checkpoint(path) and None,
    "datamodule": lambda path: Data.load_from_checkpoint(path) and None,
    "open file": lambda path: Net.load_from_checkpoint(io.BytesIO(path.read_bytes())) and None,
}
_BY_HAND: dict[str, Callable[[Path], None]] = {
    "fit": lambda path: fit_by_hand(path.parent, ByHand(), 2, path),
    "module": lambda path: ByHand.load_from_checkpoint(path) and None,
}
_OTHERS: dict[str, Callable[[Path], None]] = {
    "Engine.load": _load,
    "Engine.load_raw": _load_raw,
    "module": _TRAINED["module"],
}


_FITTED = {"middle": _TRAINED, "end": _TRAINED, "by hand": _BY_HAND}


def read(case: Case, folder: Path, every: bool = False) -> Iterator[tuple[str, BaseException | None]]:
    """Write the file and let it be read; every reader's name, and its exception.

    Args:
        case: what to write.
        folder: where to.
        every: by every reader; otherwise by the fit, or the Engine, and by one of the others.
    """
    path = folder / "malformed.ckpt"
    path.unlink(missing_ok=True)
    if case.content is None:
        path.mkdir()
    else:
        path.write_bytes(case.content)
    readers = _FITTED.get(case.original, _OTHERS)
    draw = random.Random(case.damage)
    first = {"engine": "Engine.load", "raw": "Engine.load_raw"}.get(case.original, "fit")
    chosen = list(readers) if every else [first, draw.choice(list(readers))]
    for name in dict.fromkeys(chosen):
        if name == "open file" and case.content is None:
            continue
        error: BaseException | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                readers[name](path)
            except Exception as raised:
                error = raised
        yield name, error
    if case.content is None:
        path.rmdir()


def unexplained(reader: str, error: BaseException | None) -> bool:
    """Whether ``error`` is neither success nor an error of this package that names the file."""
    if error is None or isinstance(error, ConfigurationError):
        return False
    return not isinstance(error, CheckpointError) or not ("malformed.ckpt" in str(error) or reader == "open file")
