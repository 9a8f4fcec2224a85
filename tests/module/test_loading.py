"""load_from_checkpoint: a new object out of a file, and what a checkpoint keeps of the hyperparameters."""

from __future__ import annotations

import argparse
import datetime
import enum
import importlib.util
import io
import pathlib
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import LightningDataModule, LightningModule
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.checkpoints.plain import encode
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.module.hparams import AttributeDict
from drivetrain.module.loading import encode_hparams, raw_hparams


class Model(LightningModule):
    def __init__(self, hidden: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0][:, :2]).sum(1, keepdim=True), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def written_hparams(obj: Any, prefix: str = "") -> dict[str, Any]:
    """What a Trainer writes of the hyperparameters of ``obj``."""
    found = raw_hparams(obj, prefix)
    return {key: encode_hparams(obj, value) if isinstance(value, dict) else value for key, value in found.items()}


def saved(path: Path, model: Any, **more: Any) -> Path:
    """A checkpoint of ``model`` as a Trainer would write it, with the parts that matter here."""
    TorchCheckpointIO().save_checkpoint({"state_dict": model.state_dict(), **written_hparams(model), **more}, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt"


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_t24_a_hook_finds_the_hyperparameters_in_a_checkpoint(loader: Any, make_trainer: Any, path: Path) -> None:
    class Adding(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint[self.CHECKPOINT_HYPER_PARAMS_NAME] == "kwargs"
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY].update(lr=0.7)
            assert checkpoint[Data.CHECKPOINT_HYPER_PARAMS_NAME] == "kwargs"
            checkpoint[Data.CHECKPOINT_HYPER_PARAMS_KEY].update(size=9)

    class Data(LightningDataModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader

    module, trainer = Adding(hidden=3), make_trainer()
    trainer.fit(module, datamodule=Data(size=4))
    trainer.save_checkpoint(path)
    assert module.hparams == {"hidden": 3, "lr": 0.1}
    assert Model.load_from_checkpoint(path).hparams == {"hidden": 3, "lr": 0.7}
    assert Data.load_from_checkpoint(path).hparams == {"size": 9}


def test_t24_what_a_trainer_writes_builds_the_module_again(make_trainer: Any, loader: Any, path: Path) -> None:
    model, trainer = Model(hidden=3, lr=0.01), make_trainer()
    trainer.fit(model, loader)
    trainer.save_checkpoint(path)
    keys = torch.load(path, weights_only=True)
    assert keys["hyper_parameters"] == {"hidden": 3, "lr": 0.01}
    assert type(keys["hyper_parameters"]) is dict
    assert keys["hparams_name"] == "kwargs"

    again = Model.load_from_checkpoint(path)
    assert type(again) is Model
    assert again.hparams == {"hidden": 3, "lr": 0.01}
    assert same_weights(again, model)
    assert Model.load_from_checkpoint(str(path), lr=5.0).hparams == {"hidden": 3, "lr": 5.0}


class Unsaved(LightningModule):
    def __init__(self, hidden: int, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(2, hidden)


def test_without_hyperparameters_the_caller_gives_them(path: Path) -> None:
    model = Unsaved(3)
    saved(path, model)
    assert "hyper_parameters" not in torch.load(path, weights_only=True)
    again = Unsaved.load_from_checkpoint(path, hidden=3, lr=0.5)
    assert same_weights(again, model)
    assert again.lr == 0.5
    with pytest.raises(
        ConfigurationError, match=r"Unsaved.__init__ needs 'hidden'.*load_from_checkpoint\(path, hidden="
    ):
        Unsaved.load_from_checkpoint(path)


def test_a_bare_state_dict_will_do(path: Path) -> None:
    model = Unsaved(3)
    torch.save(model.state_dict(), path)
    assert same_weights(Unsaved.load_from_checkpoint(path, hidden=3), model)


@pytest.mark.parametrize(
    ("content", "message"),
    [({"epoch": 1, "w": torch.ones(1)}, r"has no 'state_dict', only \['epoch', 'w'\]"), ([1], "holds a list")],
)
def test_something_else_is_refused(path: Path, content: Any, message: str) -> None:
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        Unsaved.load_from_checkpoint(path, hidden=3)


def test_the_base_class_asks_for_the_class_that_was_trained(path: Path) -> None:
    saved(path, Model(3))
    with pytest.raises(CheckpointError, match="(?s)fit LightningModule.*on the class that was trained"):
        LightningModule.load_from_checkpoint(path)


def test_a_class_without_arguments_and_hyperparameters_from_elsewhere(path: Path) -> None:
    class NoInit(LightningModule):
        pass

    model = NoInit()
    model.save_hyperparameters({"note": "x"})
    assert NoInit.load_from_checkpoint(saved(path, model)).hparams == {}


# ---- which arguments -------------------------------------------------------------------------------------------------


class General(LightningModule):
    def __init__(self, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, hidden, bias)


class Special(General):
    def __init__(self, width: int = 3) -> None:
        super().__init__(hidden=width, bias=False)


class Keywords(LightningModule):
    def __init__(self, *layers: int, hidden: int = 1, **extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.extra = extra


def test_only_what_init_accepts_is_passed(path: Path) -> None:
    model = Special(5)
    assert set(written_hparams(model)["hyper_parameters"]) == {"width", "hidden", "bias"}
    assert same_weights(Special.load_from_checkpoint(saved(path, model)), model)


def test_keywords_take_everything(path: Path) -> None:
    again = Keywords.load_from_checkpoint(saved(path, Keywords(7, hidden=2, depth=3)), seed=1)
    assert again.extra == {"depth": 3, "seed": 1}
    assert again.hparams == {"hidden": 2, "depth": 3, "seed": 1}


def test_an_argument_of_the_caller_that_init_does_not_take_is_warned_of(path: Path) -> None:
    saved(path, Model(3))
    with pytest.warns(UserWarning, match="got hiden=.*left out. Did you mean 'hidden'?") as caught:
        assert Model.load_from_checkpoint(path, hiden=4).hparams.hidden == 3
    assert caught[0].filename == __file__


@dataclass(eq=False)
class DataclassModule(LightningModule):
    hidden: int
    layers: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, self.hidden)


def test_a_dataclass_module(path: Path) -> None:
    model = DataclassModule(3, [4])
    again = DataclassModule.load_from_checkpoint(saved(path, model))
    assert (again.hidden, again.layers) == (3, [4])
    assert same_weights(again, model)


class Configured(LightningModule):
    def __init__(self, conf: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.scale = scale
        self.layer = nn.Linear(2, conf.hidden)


def test_one_object_comes_back_as_one(path: Path) -> None:
    model = Configured(argparse.Namespace(hidden=3, lr=0.1))
    saved(path, model)
    again = Configured.load_from_checkpoint(path)
    assert same_weights(again, model)
    assert again.hparams == {"hidden": 3, "lr": 0.1}

    changed = Configured.load_from_checkpoint(path, lr=0.5, scale=2.0)  # into the object, and beside it
    assert changed.hparams == {"hidden": 3, "lr": 0.5}
    assert changed.scale == 2.0
    other = Configured.load_from_checkpoint(path, conf=argparse.Namespace(hidden=3, lr=7))
    assert other.hparams.lr == 7


def test_an_object_under_a_name_that_init_does_not_have_is_taken_apart(path: Path) -> None:
    saved(path, Configured(argparse.Namespace(hidden=3, lr=0.1)))
    assert Model.load_from_checkpoint(path).hparams == {"hidden": 3, "lr": 0.1}


# ---- a file of hyperparameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.yaml", "hidden: 3\nlr: 0.5\nother: [1, 2]\n"),
        ("h.yml", '{"hidden": 3, "lr": 0.5}'),
        ("h.csv", "key,value\nhidden,3\nlr,0.5\nother,text\n"),
        ("h.CSV", "hidden,3\n\nlr,0.5\n"),
    ],
)
def test_a_file_replaces_what_was_saved_and_the_caller_replaces_both(path: Path, name: str, text: str) -> None:
    file = path.parent / name
    file.write_text(text)
    saved(path, Model(3, lr=0.1))
    assert Model.load_from_checkpoint(path, hparams_file=file).hparams == {"hidden": 3, "lr": 0.5}
    assert Model.load_from_checkpoint(path, hparams_file=str(file), lr=2).hparams.lr == 2


def test_an_empty_file_changes_nothing(path: Path) -> None:
    (path.parent / "h.yaml").write_text("")
    saved(path, Model(3))
    assert Model.load_from_checkpoint(path, hparams_file=path.parent / "h.yaml").hparams == {"hidden": 3, "lr": 0.1}


def test_values_in_a_csv_file_are_read_as_python_writes_them(path: Path) -> None:
    (path.parent / "h.csv").write_text('a,None\nb,"[1, 2]"\nc,cosine\nd,1e-3\ne,\n')
    saved(path, Keywords())
    again = Keywords.load_from_checkpoint(path, hparams_file=path.parent / "h.csv")
    assert again.extra == {"a": None, "b": [1, 2], "c": "cosine", "d": 1e-3, "e": ""}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("h.yaml", "a: !!python/object/apply:os.getcwd []", "is no YAML of plain data"),
        ("h.yaml", "- 1", "holds a list. Write a mapping."),
        ("h.csv", "a,1,2", "a row that is not a key and a value"),
        ("h.toml", "", "is of an unknown kind. Pass a .yaml or a .csv file."),
        ("h.yaml", None, "There is no file"),
    ],
)
def test_a_file_that_cannot_be_used(path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (path.parent / name).write_text(text)
    saved(path, Model(3))
    with pytest.raises(ConfigurationError, match=message):
        Model.load_from_checkpoint(path, hparams_file=path.parent / name)


def test_yaml_without_its_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "h.yaml").write_text("lr: 1")
    saved(path, Model(3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs the package yaml.*pip install pyyaml"):
        Model.load_from_checkpoint(path, hparams_file=path.parent / "h.yaml")


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_a_checkpoint_error(path: Path) -> None:
    saved(path, Model(3))
    with pytest.raises(CheckpointError, match=r"does not fit Model: [\s\S]*size mismatch.*Build the module as it was"):
        Model.load_from_checkpoint(path, hidden=4)


def test_weights_that_do_not_fit_are_answered_with_the_hyperparameters(path: Path) -> None:
    saved(path, Model(3))
    with pytest.raises(CheckpointError, match=r"Model was built with the hyperparameters hidden=4, lr=0\.1.* pass"):
        Model.load_from_checkpoint(path, hidden=4)

    class Plain(LightningModule):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.layer = nn.Linear(width, 1)

    torch.save({"state_dict": Plain(3).state_dict()}, path)
    advice = r"no hyperparameters: call self\.save_hyperparameters\(\) in __init__ .*load_from_checkpoint\(path, width="
    with pytest.raises(CheckpointError, match=advice):
        Plain.load_from_checkpoint(path)


def test_a_file_of_which_no_name_fits_is_warned_of(path: Path) -> None:
    class Other(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)

    saved(path, Model(3))
    with pytest.warns(UserWarning, match=r"Other has no parameter of any name in it \(the first is 'l"):
        Other.load_from_checkpoint(path, strict=False)


class Grown(Model):
    def __init__(self, hidden: int, lr: float = 0.1) -> None:
        super().__init__(hidden, lr)
        self.more = nn.Linear(2, 2)


@pytest.mark.parametrize(("loading", "strict", "fits"), [
    (True, None, False), (True, True, False), (False, None, True), (False, False, True),
    (None, None, False), (None, True, False), (None, False, True),
])  # fmt: skip
def test_t27_strict_loading_says_what_strict_is_by_default(
    path: Path, loading: bool | None, strict: bool | None, fits: bool
) -> None:
    model = Model(3)
    saved(path, model)
    kind = type("Grown", (Grown,), {"strict_loading": loading})
    if fits:
        assert torch.equal(kind.load_from_checkpoint(path, strict=strict).layer.weight, model.layer.weight)
    else:
        with pytest.raises(CheckpointError, match="more.weight"):
            kind.load_from_checkpoint(path, strict=strict)


@pytest.mark.parametrize("loading", [True, False])
def test_t27_strict_that_contradicts_strict_loading_is_an_error(path: Path, loading: bool) -> None:
    saved(path, Model(3))
    kind = type("Grown", (Grown,), {"strict_loading": loading})
    with pytest.raises(ConfigurationError, match=rf"strict={not loading}\) contradicts Grown\.strict_loading"):
        kind.load_from_checkpoint(path, strict=not loading)


def test_t27_strict_wins_where_strict_loading_is_not_set(path: Path) -> None:
    saved(path, Model(3))
    Grown.load_from_checkpoint(path, strict=False)
    with pytest.raises(CheckpointError, match="more.weight"):
        Grown.load_from_checkpoint(path, strict=True)


class Lazy(LightningModule):
    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []
        self.layer: Any = None

    def configure_model(self) -> None:
        self.calls.append("configure_model")
        if self.layer is None:
            self.layer = nn.Linear(2, self.hparams.hidden)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")
        checkpoint["state_dict"] = {f"layer.{name}": value for name, value in checkpoint["state_dict"].items()}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("load_state_dict")
        return super().load_state_dict(*args, **kwargs)


def test_layers_are_built_and_the_hook_is_called_before_the_weights_are_loaded(path: Path) -> None:
    model = Lazy(5)
    model.configure_model()
    TorchCheckpointIO().save_checkpoint({"state_dict": model.layer.state_dict(), **written_hparams(model)}, path)
    again = Lazy.load_from_checkpoint(path)
    assert again.calls == ["configure_model", "on_load_checkpoint", "load_state_dict"]
    assert same_weights(again, model)


def test_map_location_is_where_the_module_goes(path: Path) -> None:
    saved(path, Model(3))
    assert Model.load_from_checkpoint(path).device.type == "cpu"
    assert Model.load_from_checkpoint(path, map_location="meta").device.type == "meta"
    assert Model.load_from_checkpoint(path, map_location=torch.device("meta")).layer.bias.device.type == "meta"


def test_without_map_location_a_module_stays_where_it_was_built(path: Path) -> None:
    class Placed(Model):
        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.float().to(torch.float64)

        def to(self, *args: Any, **kwargs: Any) -> Any:
            assert args == (torch.float64,)  # the only move is the module's own
            return super().to(*args, **kwargs)

    assert Placed.load_from_checkpoint(saved(path, Placed(3))).dtype == torch.float64


class Marker:
    """What no reader of plain data knows; unpickling it leaves a trace."""

    read = 0

    def __reduce__(self) -> Any:
        return _count, ()


def _count() -> int:
    Marker.read += 1
    return Marker.read


def test_t27_code_runs_only_where_the_caller_says_so(path: Path) -> None:
    model = Unsaved(3)
    TorchCheckpointIO().save_checkpoint({"state_dict": model.state_dict(), "trap": Marker()}, path)
    before = Marker.read
    for weights_only in (None, True):
        with pytest.warns(UserWarning, match="no plain data"):
            Unsaved.load_from_checkpoint(path, weights_only=weights_only, hidden=3)
    assert Marker.read == before
    again = Unsaved.load_from_checkpoint(path, weights_only=False, hidden=3)
    assert Marker.read == before + 1
    assert same_weights(again, model)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        Model.load_from_checkpoint(path)


@pytest.mark.parametrize("kind", [TypeError, ConfigurationError])
def test_it_is_called_on_the_class(path: Path, kind: type[Exception]) -> None:
    model = Model(3)
    saved(path, model)
    before = model.layer.weight.clone()
    with pytest.raises(
        kind, match=r"on an instance of Model.*Call it on the class: model = Model.load_from_checkpoint"
    ):
        model.load_from_checkpoint(path)
    assert torch.equal(model.layer.weight, before)
    assert hasattr(model, "load_from_checkpoint")  # looking is no calling


def test_an_override_can_call_the_original(path: Path) -> None:
    class Own(Model):
        @classmethod
        def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().load_from_checkpoint(checkpoint_path, lr=9.0, **kwargs)

    assert Own.load_from_checkpoint(saved(path, Own(3))).hparams.lr == 9.0
    assert type(Own.load_from_checkpoint(path)) is Own


# ---- data modules ----------------------------------------------------------------------------------------------------


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, root: str = ".") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]

    def train_dataloader(self) -> Any:
        x = torch.ones(8, 2)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4)


def test_t24_a_data_module_has_keys_of_its_own(make_trainer: Any, path: Path) -> None:
    data, trainer = Data(batch_size=2), make_trainer()
    data.position = 17
    trainer.fit(Model(3), datamodule=data)
    trainer.save_checkpoint(path)
    keys = torch.load(path, weights_only=True)
    assert keys["datamodule_hyper_parameters"] == {"batch_size": 2, "root": "."}
    assert keys["datamodule_hparams_name"] == "kwargs"
    assert keys["hyper_parameters"] == {"hidden": 3, "lr": 0.1}

    again = Data.load_from_checkpoint(path, root="elsewhere")
    assert type(again) is Data
    assert again.hparams == {"batch_size": 2, "root": "elsewhere"}
    assert again.position == 17
    assert Model.load_from_checkpoint(path).hparams.hidden == 3


def test_a_data_module_from_a_file_without_one(path: Path) -> None:
    again = Data.load_from_checkpoint(saved(path, Model(3)), batch_size=9)
    assert (again.hparams.batch_size, again.position) == (9, 0)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_nothing_saved_nothing_written() -> None:
    assert written_hparams(LightningModule()) == {}
    model = LightningModule()
    assert model.hparams == {}  # asking makes an empty one
    assert written_hparams(model) == {}


def test_changes_are_written_and_names_kept() -> None:
    model = Model(3)
    model.hparams.lr = 1.0
    assert written_hparams(model) == {"hparams_name": "kwargs", "hyper_parameters": {"hidden": 3, "lr": 1.0}}
    data = Data()
    assert written_hparams(data, prefix="datamodule_")["datamodule_hyper_parameters"] == {"batch_size": 4, "root": "."}
    assert written_hparams(Configured(argparse.Namespace(hidden=2)))["hparams_name"] == "conf"


class Colour(enum.Enum):
    RED = 1


def test_t27_mappings_become_dictionaries_and_plain_data_stays_plain(path: Path) -> None:
    model = LightningModule()
    model.save_hyperparameters({"nested": {"conf": AttributeDict(a=1), "pair": (1, [2])}})
    model.save_hyperparameters({"w": torch.ones(2), "dtype": torch.float16})
    written = written_hparams(model)["hyper_parameters"]
    assert type(written["nested"]["conf"]) is dict
    assert written["nested"]["pair"] == (1, [2])
    torch.save(written, path)
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["w"], torch.ones(2))
    assert read["dtype"] is torch.float16


class Exotic(LightningModule):
    def __init__(
        self,
        root: Path,
        colour: Colour = Colour.RED,
        rates: Any = None,
        act: Any = nn.ReLU,
        fn: Any = None,
        deep: Any = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = act()


def test_t27_what_weights_only_refuses_comes_back_as_it_was(path: Path) -> None:
    values = {
        "root": pathlib.Path("data") / "x",
        "colour": Colour.RED,
        "rates": np.linspace(0, 1, 3),
        "act": nn.GELU,
        "fn": F.relu,
        "deep": [{"when": datetime.timedelta(hours=1), "lr": np.float32(0.1)}, argparse.Namespace(a=range(3))],
    }
    saved(path, Exotic(**values))
    torch.load(path, weights_only=True)
    again = Exotic.load_from_checkpoint(path).hparams
    assert np.array_equal(again.pop("rates"), values.pop("rates"))
    assert again == values
    assert type(again.deep[0]["lr"]) is np.float32
    assert again.colour is Colour.RED


class Unstorable:
    def __repr__(self) -> str:
        return "Unstorable()"


def test_t27_what_cannot_be_stored_is_described_with_one_warning(path: Path) -> None:
    model = Exotic(Path("x"), fn=lambda: 1, deep=[{"c": Unstorable()}])
    with pytest.warns(
        UserWarning, match=r"only a description .* of Exotic: fn \(function\), deep\[0\]\['c'\] \(.*Unstorable\)\. Pass"
    ) as caught:
        saved(path, model)
    assert len(caught) == 1
    assert str(caught[0].message).endswith("Exotic.load_from_checkpoint(path, fn=...).")
    saved(path, model)  # not said again
    model.hparams.rates = Unstorable()
    with pytest.warns(UserWarning, match=r"of Exotic: rates \(.*Unstorable\)\. Pass"):
        saved(path, model)


def test_t27_a_description_is_never_given_to_init(path: Path) -> None:
    with pytest.warns(UserWarning, match="keep only a description"):
        saved(path, Exotic(Path("x"), fn=lambda: 1, deep=[{"c": Unstorable()}]))
    with pytest.warns(
        UserWarning, match=r"Exotic is built without these .*fn <only described: function: .*>, deep <only.*fn=\.\.\.\)"
    ) as caught:
        again = Exotic.load_from_checkpoint(path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (again.hparams.fn, again.hparams.deep) == (None, None)
    again = Exotic.load_from_checkpoint(path, fn=1, deep=2)  # and nothing to warn of
    assert (again.hparams.fn, again.hparams.deep) == (1, 2)


def test_t27_an_argument_of_which_there_is_only_a_description_must_be_given(path: Path) -> None:
    with pytest.warns(UserWarning, match="keep only a description"):
        saved(path, Exotic(Unstorable()))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError,
        match=r"needs 'root', and the caller does not give it and the checkpoint has only <only described: "
        r".*Unstorable: Unstorable\(\)>\. Write Exotic.load_from_checkpoint\(path, root=",
    ):
        Exotic.load_from_checkpoint(path)
    assert Exotic.load_from_checkpoint(path, root=Path("y")).hparams.root == Path("y")


def test_t27_descriptions_in_one_object_are_left_out_of_it(path: Path) -> None:
    conf = argparse.Namespace(hidden=3, fn=lambda: 1)
    with pytest.warns(UserWarning, match="keep only a description"):
        saved(path, Configured(conf))
    with pytest.warns(UserWarning, match="Configured is built without these"):
        assert Configured.load_from_checkpoint(path).hparams == {"hidden": 3}
    assert Configured.load_from_checkpoint(path, fn=1).hparams == {"hidden": 3, "fn": 1}
    assert Configured.load_from_checkpoint(path, conf=argparse.Namespace(hidden=3)).hparams == {"hidden": 3}


def test_t27_a_class_whose_module_is_not_imported_is_described(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_module_of_theirs")
    exec("import enum\nclass Mode(enum.Enum):\n    FAST = 1", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    saved(path, Exotic(Path("x"), deep=vars(module)["Mode"].FAST))
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.warns(
        UserWarning, match="deep <only described: enum a_module_of_theirs:Mode: FAST>. Import the module"
    ):
        assert Exotic.load_from_checkpoint(path).hparams.deep is None


def test_what_a_hook_saved_comes_back_to_the_hook(path: Path) -> None:
    class Hooked(Unsaved):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"]

    model = Hooked(3)
    saved(path, model, mine=encode({"root": Path("x")}, "mine"), callbacks=encode([lambda: 1], "", True, []))
    assert Hooked.load_from_checkpoint(path, hidden=3).seen == {"root": Path("x")}


def test_a_module_is_left_out_without_a_second_warning() -> None:
    model = LightningModule()
    with pytest.warns(UserWarning, match="is an nn.Module"):
        model.save_hyperparameters({"net": nn.Linear(1, 1), "lr": 0.1})
    assert written_hparams(model)["hyper_parameters"] == {"lr": 0.1}


# ---- open files, and files that are wrong ----------------------------------------------------------------------------


def test_a_module_is_read_from_an_open_file(path: Path) -> None:
    model = Model(3)
    saved(path, model)
    assert same_weights(Model.load_from_checkpoint(io.BytesIO(path.read_bytes())), model)
    with open(path, "rb") as stream:
        assert same_weights(Model.load_from_checkpoint(stream), model)
    content = bytearray(path.read_bytes())
    content[content.index(model.layer.weight.detach().numpy().tobytes())] ^= 1
    with pytest.raises(CheckpointError, match="the open file .BytesIO. is damaged"):
        Model.load_from_checkpoint(io.BytesIO(bytes(content)))


def test_a_constructor_that_refuses_a_hyperparameter_of_the_file_is_named_with_it(path: Path) -> None:
    saved(path, Model(3), hyper_parameters={"hidden": "three"})
    with pytest.raises(CheckpointError, match=r"model.ckpt: Model.__init__ raised .* hidden='three'") as caught:
        Model.load_from_checkpoint(path)
    assert isinstance(caught.value.__cause__, (TypeError, RuntimeError))
    with pytest.raises((TypeError, RuntimeError)):
        Model.load_from_checkpoint(path, hidden="four")  # what the caller passes is the caller's


@pytest.mark.parametrize(
    ("part", "value"),
    [("hyper_parameters", [1]), ("hyper_parameters", {3: 4}), ("hparams_name", ["x"]), ("state_dict", [1]),
     ("state_dict", None)],
)  # fmt: skip
def test_an_entry_of_the_wrong_kind_is_named(path: Path, part: str, value: Any) -> None:
    saved(path, Model(3), drivetrain_version="0.1", **{part: value})
    with pytest.raises(CheckpointError, match=f"model.ckpt: .*({part}|weights of Model)"):
        Model.load_from_checkpoint(path)


def test_an_error_of_ones_own_hook_stays_ones_own(path: Path) -> None:
    class Own(Model):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise KeyError("mine")

    saved(path, Model(3))
    with pytest.raises(KeyError, match="mine"):
        Own.load_from_checkpoint(path)
