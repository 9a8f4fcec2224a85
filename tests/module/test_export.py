"""Exports: the same numbers without this package, and the module untouched."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from drivetrain import LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.export import example_pass, undisturbed

# torch's own advice against TorchScript
advice = pytest.mark.filterwarnings("ignore:.torch.jit")


class Encoder(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Net(LightningModule):
    """With dropout, another LightningModule inside a container, and hyperparameters."""

    def __init__(self, lr: float = 0.1, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(Encoder(width), nn.Dropout(0.5))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0][:, :3]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Scaled(Net):
    """Reads in ``forward`` what only Python knows, so it can be traced and not scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.hparams.lr + self.current_epoch


class Pair(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What ``model`` returns in evaluation mode, in which it is left."""
    found: torch.Tensor = model.eval()(*args, **kwargs)
    return found.detach()


def modes(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


# ---- TorchScript -----------------------------------------------------------------------------------------------------


@advice
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_computes_the_same_from_a_file(tmp_path: Path, method: Any) -> None:
    model = Net()
    model.example_input_array = torch.zeros(1, 3)
    path = tmp_path / "new folder" / "net.pt"
    exported = model.to_torchscript(path, method=method)
    loaded = torch.jit.load(path)
    expected = outputs(model, X)
    assert torch.equal(exported(X), expected)
    assert torch.equal(loaded(X), expected)
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert [entry.name for entry in path.parent.iterdir()] == ["net.pt"]


@advice
@pytest.mark.parametrize("method", ["script", "trace"])
def test_the_module_keeps_its_modes_its_gradients_and_its_run(make_trainer: Any, loader: Any, method: Any) -> None:
    model, trainer = Net(), make_trainer()
    trainer.fit(model, loader)
    assert model.trainer is trainer
    model.train()
    model.body[1].eval()
    before, state = modes(model), dict(model.__dict__)
    exported = model.to_torchscript(method=method, example_inputs=X)
    assert modes(model) == before
    assert not any(modes(exported))
    assert {name: value for name, value in model.__dict__.items() if name in state} == state
    assert set(model.__dict__) == set(state)
    assert model.trainer is trainer
    assert model.body[0].trainer is trainer
    assert not any(value is trainer for part in exported.modules() for value in vars(part).values())
    assert torch.is_grad_enabled()
    assert model(X).requires_grad


@advice
def test_modes_are_restored_after_a_failure() -> None:
    model = Scaled()
    model.head.eval()
    before = modes(model)
    with pytest.raises(RuntimeError):  # TorchScript knows no hyperparameters
        model.to_torchscript()
    assert modes(model) == before
    assert torch.is_grad_enabled()


@advice
def test_a_failure_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError):
        Scaled().to_torchscript(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.pt"]


@advice
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_folder_is_never_replaced_and_nothing_is_exported_first(tmp_path: Path) -> None:
    pipe, folder, passes = tmp_path / "pipe", tmp_path / "folder", []
    os.mkfifo(pipe)
    folder.mkdir()
    model = Net()
    model.forward = lambda x: passes.append(x) or x  # type: ignore[method-assign]
    for path, message in ((pipe, "pipe, a device or a socket"), (folder, "a folder has this name")):
        with pytest.raises(OSError, match=message):
            model.to_torchscript(path, "trace", X)
    assert pipe.is_fifo()
    assert not passes
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


@advice
def test_tracing_runs_python_with_its_hyperparameters_and_without_a_trainer() -> None:
    model = Scaled(lr=0.25)
    assert torch.equal(model.to_torchscript(method="trace", example_inputs=X)(X), outputs(model, X))


@advice
@pytest.mark.parametrize(
    "sample", [(X, torch.full((2,), 3.0)), {"scale": torch.full((2,), 3.0), "x": X}], ids=["tuple", "mapping"]
)
def test_a_tuple_is_arguments_and_a_mapping_arguments_with_names(sample: Any) -> None:
    model = Pair()
    exported = model.to_torchscript(method="trace", example_inputs=sample)
    assert torch.equal(exported(x=X, scale=torch.ones(2)), outputs(model, X, torch.ones(2)))


@advice
def test_a_named_tuple_is_one_argument() -> None:
    class Batch(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Model(Pair):
        def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
            return self.layer(batch[0]) + batch[1]

    exported = Model().to_torchscript(method="trace", example_inputs=Batch(X, torch.ones(2)))
    assert exported((X, torch.ones(2))).shape == (5, 2)


@advice
def test_users_properties_and_exported_methods_are_theirs() -> None:
    class Model(Pair):
        __jit_unused_properties__ = ("unscriptable",)

        @property
        def unscriptable(self) -> Any:
            return {1: object()}

        @property
        def width(self) -> int:
            return 2

        @torch.jit.export
        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.width

    model = Model()
    assert torch.equal(model.to_torchscript().doubled(X), model.layer(X) * 2)


@advice
def test_a_module_in_two_places_stays_one_and_classes_are_not_registered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[str] = []

    class Registered(Encoder):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            known.append(cls.__name__)

    class Model(Registered):
        def __init__(self) -> None:
            super().__init__(width=3)
            self.first = self.second = Encoder(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model = Model()
    exported = model.to_torchscript()
    assert torch.equal(exported(X), outputs(model, X))
    assert exported.original_name == "Model"
    assert known == ["Model"]
    monkeypatch.setattr(torch.jit, "script", lambda shown: shown)
    shown = model.to_torchscript()
    assert shown is not model
    assert shown.first is shown.second


def test_an_unknown_method() -> None:
    with pytest.raises(ConfigurationError, match='method=\'onnx\'.*Write "script" or "trace"'):
        Net().to_torchscript(method="onnx")  # type: ignore[arg-type]


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("export", "argument"),
    [
        (lambda model: model.to_onnx(), "input_sample"),
        (lambda model: model.to_torchscript(method="trace"), "example_inputs"),
        (lambda model: model.to_tensorrt(), "input_sample"),
    ],
)
def test_without_inputs_there_is_an_error(export: Any, argument: str) -> None:
    model = Net()
    assert model.example_input_array is None
    with pytest.raises(ConfigurationError, match=f"Set self.example_input_array in __init__, or pass {argument}="):
        export(model)


def test_example_inputs_are_no_part_of_the_weights() -> None:
    class Early(Encoder):
        def __init__(self) -> None:
            self.example_input_array = X  # even before the module is initialised
            super().__init__()

    model = Early()
    assert model.example_input_array is X
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}


@advice
def test_inputs_are_moved_to_the_module() -> None:
    model = Encoder().to("meta")
    exported = model.to_torchscript(method="trace", example_inputs=X, check_trace=False)
    assert exported(X.to("meta")).device.type == "meta"


# ---- a pass that leaves no trace -------------------------------------------------------------------------------------


def test_t18_undisturbed_restores_everything_also_after_an_exception() -> None:
    class Merging(Net):
        def train(self, mode: bool = True) -> Any:
            raise AssertionError("what it does could not be undone")

    model, book = Merging(), object()
    model.head.eval()
    model.body[0].__dict__["_book"] = book
    before, random = modes(model), torch.get_rng_state()

    def trial() -> None:
        with undisturbed(model):
            assert not any(modes(model))
            assert not torch.is_grad_enabled()
            model.body[0].log("a", torch.rand(1))
            model.log_dict({"b": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trial()
    assert modes(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert model.body[0].__dict__["_book"] is book
    assert model.__dict__["_book"] is None


def test_an_example_is_copied_and_one_that_is_drawn_draws_nothing_from_the_run() -> None:
    class Drawn(Encoder):
        @property
        def example_input_array(self) -> torch.Tensor:
            return torch.rand(2, 3)

    model = Drawn()
    random = torch.get_rng_state()
    with example_pass(model) as inputs:
        assert inputs is not None
        assert inputs[0][0].shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), random)
    kept = Encoder()
    kept.example_input_array = torch.ones(2, 3)
    with example_pass(kept) as inputs:
        assert inputs is not None
        inputs[0][0].zero_()
    assert torch.equal(kept.example_input_array, torch.ones(2, 3))


def test_without_an_example_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.module.export.undisturbed", None)
    with example_pass(Net()) as inputs:
        assert inputs is None


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def without_packages(name: str) -> None:
    return None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({}, "needs the package onnx, which is not installed. Run `pip install onnx onnxscript`."),
     ({"dynamo": False}, "needs the package onnx, which is not installed. Run `pip install onnx`.")],
)  # fmt: skip
def test_onnx_without_its_packages(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", without_packages)
    with pytest.raises(ConfigurationError, match=message):
        Net().to_onnx(input_sample=X, **arguments)


@pytest.mark.parametrize(
    ("sample", "args", "kwargs"),
    [(X, [X], None), ((X, X), [X, X], None), ({"a": X}, [], {"a": X})],
    ids=["tensor", "tuple", "mapping"],
)
def test_what_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sample: Any, args: list[Any], kwargs: dict[str, Any] | None
) -> None:
    asked: dict[str, Any] = {}

    def export(model: nn.Module, args: Any, f: str, *, kwargs: Any, **options: Any) -> str:
        asked.update(args=list(args), kwargs=kwargs, options=options)
        assert not any(modes(model))
        assert not torch.is_grad_enabled()
        Path(f).write_text("model")
        Path(f"{f}.data").write_text("weights")
        assert not (tmp_path / "net.onnx").exists()  # until it is complete
        return "program"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.onnx, "export", export)
    model = Net()
    assert model.to_onnx(str(tmp_path / "net.onnx"), sample, opset_version=18) == "program"
    assert asked["options"] == {"opset_version": 18}
    assert [value is given for value, given in zip(asked["args"], args, strict=True)] == [True] * len(args)
    assert asked["kwargs"] == kwargs
    assert {entry.name for entry in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    assert model.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's exporter itself
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_computes_the_same(tmp_path: Path, dynamo: bool) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    from onnx.reference import ReferenceEvaluator

    model = Scaled(lr=0.25)
    model.example_input_array = X
    before = modes(model)
    path = tmp_path / "net.onnx"
    program = model.to_onnx(path, dynamo=dynamo, input_names=["x"])
    assert (program is not None) is dynamo
    assert modes(model) == before
    (found,) = ReferenceEvaluator(str(path)).run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), outputs(model, X))


# ---- TensorRT --------------------------------------------------------------------------------------------------------


def test_tensorrt_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", without_packages)
    with pytest.raises(ConfigurationError, match="needs the package torch_tensorrt.*Run `pip install torch-tensorrt`"):
        Net().to_tensorrt(input_sample=X)


class FakeTensorRT(ModuleType):
    """Stands for the package, which needs its hardware: it shows what it is asked for, not that it would do it."""

    def __init__(self) -> None:
        super().__init__("torch_tensorrt")
        self.__spec__ = ModuleSpec("torch_tensorrt", None)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def compile(self, model: nn.Module, **options: Any) -> Any:
        assert not any(modes(model))
        self.asked.append(("compile", options))
        return torch.jit.trace(model, tuple(options["inputs"])) if options["ir"] == "ts" else "compiled"

    def save(self, compiled: Any, path: str, **options: Any) -> None:
        assert compiled == "compiled"
        Path(path).write_text("engine")
        self.asked.append(("save", options))


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", fake)
    return fake


def test_tensorrt_compiles_and_saves(tensorrt: FakeTensorRT, tmp_path: Path) -> None:
    model = Pair()
    sample = {"x": X, "scale": torch.ones(2)}
    found = model.to_tensorrt(tmp_path / "net.ep", sample, ir="dynamo", retrace=True, min_block_size=1)
    assert found == "compiled"
    assert model.training
    assert (tmp_path / "net.ep").read_text() == "engine"
    (_, compiled), (_, written) = tensorrt.asked
    assert compiled == {"ir": "dynamo", "inputs": [], "kwarg_inputs": sample, "min_block_size": 1}
    assert written == {
        "inputs": [], "kwarg_inputs": sample, "output_format": "exported_program", "retrace": True
    }  # fmt: skip


@advice
def test_tensorrt_with_torchscript_is_saved_as_such(tensorrt: FakeTensorRT, tmp_path: Path) -> None:
    model = Net()
    model.to_tensorrt(tmp_path / "net.ts", X, ir="ts")
    assert [name for name, _ in tensorrt.asked] == ["compile"]
    assert torch.equal(torch.jit.load(tmp_path / "net.ts")(X), outputs(model, X))
