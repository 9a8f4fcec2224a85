"""Members of LightningModule and LightningDataModule that have no page of their own (spec 3.4)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from drivetrain import LightningDataModule, LightningModule
from drivetrain.errors import CheckpointMismatchError, ConfigurationError, UnknownArgumentError, WrongTypeError


def test_freezing_turns_off_gradients_and_goes_into_evaluation_mode_and_back(regression: Any) -> None:
    module = regression()
    module.freeze()
    assert not any(p.requires_grad for p in module.parameters())
    assert not any(m.training for m in module.modules())
    module.unfreeze()
    assert all(p.requires_grad for p in module.parameters())
    assert all(m.training for m in module.modules())


class Named(LightningModule):
    """Has layers, a parameter and a buffer with names for which other modules have a message."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.fit = nn.Linear(width, width)
        self.score = nn.Parameter(torch.ones(width))
        self.register_buffer("history", torch.ones(width))
        self.load = "a value"

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.fit(x) * self.score + self.history


def test_names_with_a_message_are_free_for_layers_values_and_methods() -> None:
    module = Named()
    assert type(module.fit) is nn.Linear
    assert (module.load, sorted(module.state_dict())) == ("a value", ["fit.bias", "fit.weight", "history", "score"])
    x, whole = torch.ones(3, 2), pickle.loads(pickle.dumps(module))
    for each in (whole.predict, torch.compile(module.predict, backend="eager", fullgraph=True)):
        assert torch.equal(each(x), module.predict(x))
    assert not hasattr(module, "evaluate")
    del module.fit, module.score
    with pytest.raises(AttributeError, match=r"'Named' object has no attribute 'fit'\. The Trainer trains it"):
        _ = module.fit


def test_an_argument_that_save_hyperparameters_keeps_is_found_there() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'width'\. save_hyper.* write self\.hparams\.width\.$"):
        _ = Named().width
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'width'$"):
        _ = Plain().width


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_is_no_state_dict(strict: bool) -> None:
    weights = Plain().state_dict()
    assert not Plain().load_state_dict(weights, strict).missing_keys
    with pytest.raises(
        CheckpointMismatchError, match=r'pass checkpoint\["state_dict"\], or write model = Plain\.load_from'
    ):
        Plain().load_state_dict({"state_dict": weights, "epoch": 1}, strict)


class PickledByLightning:
    """Pickles as ``module`` would have been pickled there: the attributes that are properties have private names."""

    def __init__(self, module: LightningModule, **private: Any) -> None:
        self.module = module
        self.private = private

    def __reduce__(self) -> Any:
        state = self.module.__getstate__()
        for name in ("_book", "_engine", "_toggles"):
            state.pop(name, None)
        return object.__new__, (type(self.module),), {**state, "_fabric": None, **self.private}


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._strict_loading = "its own"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_that_lightning_pickled_is_whole(loader: DataLoader[Any], make_trainer: Any) -> None:
    written = Plain()
    example = torch.ones(2, 4)
    private = {"_automatic_optimization": False, "_strict_loading": None, "_example_input_array": example}
    read = pickle.loads(pickle.dumps(PickledByLightning(written, **private)))
    assert (read.automatic_optimization, read.strict_loading) == (False, True)
    assert torch.equal(read.example_input_array, example)
    assert not private.keys() & vars(read).keys()
    read.automatic_optimization = True
    make_trainer().fit(read, loader)
    assert not torch.equal(read.layer.weight, written.layer.weight)


def test_a_modules_own_private_names_stay_its_own() -> None:
    assert pickle.loads(pickle.dumps(Plain()))._strict_loading == "its own"


def test_configure_model_builds_layers_before_the_optimizers_and_in_every_run(
    loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    class Late(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module | None = None
            self.calls = 0

        def configure_model(self) -> None:
            self.calls += 1
            if self.net is None:
                self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.net is not None
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, trainer = Late(), make_trainer()
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.fit(module, loader)
    assert module.calls == 2
    assert module.net is not None
    loaded = Late.load_from_checkpoint(tmp_path / "a.ckpt")
    assert isinstance(loaded.net, nn.Linear)


def test_gradients_are_clipped_by_a_policy_of_the_modules_own(
    regression: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    norms: list[float] = []

    class Own(regression):  # type: ignore[misc]
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert (gradient_clip_val, gradient_clip_algorithm) == (0.5, "norm")
            self.clip_gradients(optimizer, gradient_clip_val / 5, gradient_clip_algorithm)
            norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

    make_trainer(gradient_clip_val=0.5, gradient_clip_algorithm="norm", limit_train_batches=1).fit(Own(), loader)
    assert norms == pytest.approx([0.1], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["mean", 3])
def test_an_unknown_way_of_clipping(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, algorithm: Any
) -> None:
    class Own(regression):  # type: ignore[misc]
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 0.5, algorithm)

    with pytest.raises(ConfigurationError, match='Write "norm" or "value"'):
        make_trainer(gradient_clip_val=0.5).fit(Own(), loader)


def test_value_clipping_bounds_every_element(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    largest: list[float] = []

    class Watching(regression):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            largest.append(max(float(p.grad.abs().max()) for p in self.parameters()))

    make_trainer(gradient_clip_val=0.01, gradient_clip_algorithm="value").fit(Watching(), loader)
    assert max(largest) == pytest.approx(0.01)


# ---- LightningDataModule ---------------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(4), torch.ones(1))] * 8)


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randn(count, 1))


def test_a_datamodule_from_datasets(validated: Any, make_trainer: Any) -> None:
    data = LightningDataModule.from_datasets(
        samples(8), val_dataset=[samples(4), samples(2)], test_dataset={"a": samples(4)}, batch_size=2
    )
    train = data.train_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert [len(loader) for loader in data.val_dataloader()] == [2, 1]
    assert isinstance(data.val_dataloader()[0].sampler, SequentialSampler)
    assert set(data.test_dataloader()) == {"a"}
    with pytest.raises(NotImplementedError):
        data.predict_dataloader()

    class Several(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    trainer = make_trainer()
    trainer.fit(Several(), datamodule=data)
    assert (trainer.global_step, trainer.num_val_batches) == (4, [2, 1])


def test_an_iterable_dataset_is_not_shuffled() -> None:
    assert len(list(LightningDataModule.from_datasets(Endless(), batch_size=4).train_dataloader())) == 2


def test_a_subclass_is_made_with_its_own_arguments() -> None:
    class Own(LightningDataModule):
        def __init__(self, folder: str) -> None:
            super().__init__()
            self.folder = folder

    made = Own.from_datasets(samples(4), folder="here")
    assert isinstance(made, Own)
    assert made.folder == "here"


def test_a_datamodules_state_goes_through_a_checkpoint(regression: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Counting(LightningDataModule):
        seen = 0

        def train_dataloader(self) -> Any:
            self.seen += 1
            return DataLoader(samples(8), 4)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

    trainer = make_trainer()
    trainer.fit(regression(), datamodule=Counting())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    data = Counting()
    make_trainer(max_epochs=2).fit(regression(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert data.seen == 2


def test_a_module_that_asks_for_its_trainer_too_early_is_told_where_it_has_one() -> None:
    class Early(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.epochs = self.trainer.max_epochs

    with pytest.raises(RuntimeError, match="In __init__ there is no Trainer yet: use self.trainer in setup"):
        Early()


def test_train_with_a_loader_names_the_trainer() -> None:
    module = LightningModule()
    with pytest.raises(WrongTypeError, match=r"^model\.train\(\[1\]\).*Trainer\(max_epochs=3\)\.fit\(model, loader\)"):
        module.train([1])  # type: ignore[arg-type]
    assert not module.train(False).training
    assert module.train().training


@pytest.mark.parametrize(("args", "kwargs"), [(("adam", "mse"), {}), ((), {"optimizer": "adam", "loss": "mse"})])
def test_compile_with_arguments_of_keras_names_the_methods_for_them(args: Any, kwargs: Any) -> None:
    with pytest.raises(UnknownArgumentError, match="configure_optimizers, and compute the loss in training_step"):
        LightningModule().compile(*args, **kwargs)


def test_compile_passes_its_arguments_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda call, **options: seen.update(options) or call)
    LightningModule().compile(dynamic=True)
    assert seen == {"dynamic": True}
