"""Where batches come from: several loaders, the same few batches, loaders made anew."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

from drivetrain import Callback, Engine, LightningDataModule, LightningModule
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.samplers import share
from drivetrain.errors import ConfigurationError
from drivetrain.loops.loaders import check_orders, order_shared
from drivetrain.strategies import DDPStrategy


class Seen(LightningModule):
    """Keeps every batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch)
        return self.net(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validating(Seen):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((dataloader_idx, batch))


def numbers(*values: float, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(list(values), batch_size=1, **arguments)  # type: ignore[arg-type]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(item) for item in batch]
    return None if batch is None else int(batch)


def test_t38_a_dictionary_of_loaders_is_trained_on_together(make_trainer: Any) -> None:
    module = Seen()
    make_trainer(num_sanity_val_steps=0).fit(module, {"a": numbers(1, 2, 3), "b": numbers(7, 8)})

    assert [plain(b) for b in module.trained] == [{"a": 1, "b": 7}, {"a": 2, "b": 8}, {"a": 3, "b": 7}]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [[1, 7], [2, 8]]),
        ("max_size_cycle", [[1, 7], [2, 8], [3, 7]]),
        ("max_size", [[1, 7], [2, 8], [3, None]]),
    ],
)
def test_t38_every_mode_of_a_combined_loader(make_trainer: Any, mode: str, expected: list[Any]) -> None:
    module = Seen()
    combined = CombinedLoader([numbers(1, 2, 3), numbers(7, 8)], mode)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, combined)

    assert [plain(b) for b in module.trained] == expected * 2
    assert trainer.num_training_batches == len(expected)
    assert trainer.train_dataloader == combined.iterables


def test_t38_training_on_a_sequence_of_loaders_is_an_error(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match='Write mode="max_size_cycle"'):
        make_trainer().fit(Seen(), CombinedLoader([numbers(1), numbers(2)], "sequential"))


ONE = [torch.ones(1), torch.zeros(1)]
LISTS: list[tuple[str, Any, int]] = [  # what is passed, and how many loaders it is
    ("tensors", ONE, 1),
    ("a tuple of tensors", tuple(ONE), 1),
    ("pairs", [(one, one) for one in ONE], 1),
    ("lists", [[one, one] for one in ONE], 1),
    ("dictionaries", [{"x": one} for one in ONE], 1),
    ("arrays", [np.ones(1), np.zeros(1)], 1),
    ("numbers", [1, 2.5], 1),
    ("numbers of numpy", [np.float32(1), np.int64(2)], 1),
    ("texts", ["a", "b"], 1),
    ("a tensor and an iterable", [torch.ones(1), range(2)], 1),
    ("one DataLoader", [numbers(1, 2)], 1),
    ("two DataLoaders", [numbers(1, 2), numbers(3)], 2),
    ("nested DataLoaders", [[numbers(1)], {"a": numbers(2), "b": numbers(3)}], 3),
    ("iterables", [range(2), {4, 5}], 2),
    ("a DataLoader and an iterable", [numbers(1), range(2)], 2),
    ("a dictionary of DataLoaders", {"a": numbers(1), "b": numbers(2)}, 2),
    ("a dictionary of lists of batches", {"a": ONE, "b": [torch.ones(1)]}, 2),
    ("a dictionary of a DataLoader and a list", {"a": numbers(1), "b": ONE}, 2),
    ("a dictionary of lists of iterables", {"a": [range(2), range(1)], "b": ONE}, 3),
]


@pytest.mark.parametrize(("given", "count"), [each[1:] for each in LISTS], ids=[each[0] for each in LISTS])
@pytest.mark.parametrize("source", ["argument", "module", "datamodule"])
def test_a_list_is_several_loaders_if_every_element_is_one_else_one_loader_of_batches(
    make_trainer: Any, given: Any, count: int, source: str
) -> None:
    module, trainer = Validating(), make_trainer(num_sanity_val_steps=0)
    if source == "argument":
        trainer.fit(module, given, given)
    else:
        datamodule = module if source == "module" else LightningDataModule()
        datamodule.train_dataloader = datamodule.val_dataloader = lambda: given
        trainer.fit(module, datamodule=None if source == "module" else datamodule)

    assert len(trainer.num_val_batches) == count
    assert {index for index, _ in module.validated} == set(range(count))
    if count == 1 and not isinstance(given[0], DataLoader):
        assert trainer.train_dataloader is given
        assert trainer.val_dataloaders is given
        assert all(seen is batch for seen, batch in zip(module.trained, given, strict=True) if isinstance(batch, str))
        assert trainer.num_training_batches == len(given)
    else:
        assert trainer.train_dataloader == trainer.val_dataloaders == given


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_a_list_of_batches_is_one_loader_of_every_stage(make_trainer: Any, call: str) -> None:
    class Module(Validating):
        test_step = Validating.validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    module = Module()
    result = getattr(make_trainer(), call)(module, ["a", "b"])
    assert result == ["a", "b"] if call == "predict" else module.validated == [(0, "a"), (0, "b")]


MIXED: list[tuple[str, Any, str, str]] = [
    ("a tensor", [numbers(1), torch.ones(1)], "at position 1, a Tensor", "DataLoader(batches, batch_size=None)"),
    ("a text", ["train", numbers(1)], "at position 0, a str: 'train'", "Give a DataLoader"),
    ("a nested batch", [numbers(1), [range(2), torch.ones(1)]], "at position 1/1, a Tensor", "batch_size=None"),
    ("a dataset", [numbers(1), TensorDataset(torch.ones(1))], "at position 1, a TensorDataset", "Wrap the dataset"),
    ("datasets", [TensorDataset(torch.ones(1))] * 2, "at position 0, a TensorDataset", "Wrap the dataset"),
    ("a class", [DataLoader], "at position 0, the class DataLoader itself", "Write DataLoader(...)"),
    ("a method", [numbers(1).__iter__], "at position 0, a method", "Call it"),
    ("None", [numbers(1), None], "at position 1, None", "Give a DataLoader"),
    ("a batch in a dictionary", {"x": torch.ones(1)}, "a dict with a Tensor: tensor([1.]) at 'x'", "[batch]"),
    ("a number in a dictionary", {"a": range(2), "b": 3}, "a dict with an int: 3 at 'b'", "[batch]"),
]


@pytest.mark.parametrize(("given", "what", "cure"), [each[1:] for each in MIXED], ids=[each[0] for each in MIXED])
@pytest.mark.parametrize("from_hook", [False, True])
def test_what_is_no_loader_among_loaders_is_an_error_that_names_the_position(
    make_trainer: Any, given: Any, what: str, cure: str, from_hook: bool
) -> None:
    module = Seen()
    if from_hook:
        module.train_dataloader = lambda: given  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError) as caught:
        make_trainer().fit(module, None if from_hook else given)
    assert str(caught.value).startswith("train_dataloader gave" if from_hook else "trainer.fit(train_dataloaders=...)")
    assert what in str(caught.value)
    assert cure in str(caught.value)


@pytest.mark.parametrize("combined", [True, False])
def test_t38_evaluation_takes_loaders_one_after_another(make_trainer: Any, combined: bool) -> None:
    module = Validating()
    loaders: Any = [numbers(1, 2), numbers(3)]
    make_trainer(max_epochs=1).validate(module, CombinedLoader(loaders, "sequential") if combined else loaders)

    assert [(index, plain(b)) for index, b in module.validated] == [(0, 1), (0, 2), (1, 3)]


def test_t38_evaluation_of_loaders_side_by_side(make_trainer: Any) -> None:
    module = Validating()
    make_trainer().validate(module, CombinedLoader({"a": numbers(1, 2), "b": numbers(3)}, "max_size"))

    assert [(i, plain(b)) for i, b in module.validated] == [(0, {"a": 1, "b": 3}), (0, {"a": 2, "b": None})]


def test_t34_limits_hold_for_each_evaluation_loader_and_for_the_combined_one(make_trainer: Any) -> None:
    module = Validating()
    trainer = make_trainer(limit_train_batches=2, limit_val_batches=0.5, num_sanity_val_steps=0)
    trainer.fit(module, [numbers(1, 2, 3), numbers(4)], [numbers(1, 2, 3, 4), numbers(5, 6)])

    assert [plain(b) for b in module.trained] == [[1, 4], [2, 4]]
    assert [(i, plain(b)) for i, b in module.validated] == [(0, 1), (0, 2), (1, 5)]
    assert trainer.num_val_batches == [2, 1]


def test_t35_overfitting_sees_the_same_batches_in_every_epoch(make_trainer: Any) -> None:
    module = Validating()
    train, val = numbers(*range(10), shuffle=True), numbers(*range(20, 30), shuffle=True)
    trainer = make_trainer(overfit_batches=3, max_epochs=3, num_sanity_val_steps=0, limit_val_batches=1.0)
    with pytest.warns(UserWarning, match="overfit_batches|shuffl|order"):
        trainer.fit(module, train, val)

    assert [plain(b) for b in module.trained] == [0, 1, 2] * 3
    assert [plain(b) for _, b in module.validated] == [20, 21, 22] * 3
    assert isinstance(train.sampler, RandomSampler)  # the user's own loader is as it was
    assert trainer.limit_train_batches == trainer.limit_val_batches == 3


def test_t35_a_fraction_to_overfit(make_trainer: Any) -> None:
    module = Seen()
    make_trainer(overfit_batches=0.25).fit(module, numbers(*range(8)))

    assert [plain(b) for b in module.trained] == [0, 1]


class Reloading(Validating):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        self.made.append(("train", self.current_epoch))
        return numbers(*range(1 + self.current_epoch))

    def val_dataloader(self) -> Any:
        self.made.append(("val", self.current_epoch))
        return numbers(1)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, [("val", 0), ("train", 0)]),
        (1, [("val", 0), ("train", 0), *((k, e) for e in range(1, 5) for k in ("train", "val"))]),
        (2, [("val", 0), ("train", 0), ("train", 2), ("val", 2), ("train", 4), ("val", 4)]),
    ],
)
def test_t40_loaders_are_made_anew_every_n_epochs(make_trainer: Any, every: int, expected: list[Any]) -> None:
    module = Reloading()
    make_trainer(max_epochs=5, reload_dataloaders_every_n_epochs=every).fit(module)

    assert module.made == expected
    if every == 1:
        assert len(module.trained) == 1 + 2 + 3 + 4 + 5


def test_t40_validation_that_is_rarer_counts_from_its_own_last_reload(make_trainer: Any) -> None:
    module = Reloading()
    make_trainer(
        max_epochs=6, reload_dataloaders_every_n_epochs=2, check_val_every_n_epoch=3, num_sanity_val_steps=0
    ).fit(module)

    assert [epoch for kind, epoch in module.made if kind == "val"] == [2, 5]


def test_t40_an_iterator_is_made_once_per_epoch(make_trainer: Any) -> None:
    class Counting:
        made = 0

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            self.made += 1
            return iter([1, 2])

    loader = Counting()
    make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Seen(), loader)

    assert loader.made == 3


def test_a_new_limit_holds_from_the_next_pass(make_trainer: Any) -> None:
    class Changing(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.limit_train_batches = 1
            trainer.limit_val_batches = 2

    module = Validating()
    trainer = make_trainer(max_epochs=2, callbacks=Changing(), num_sanity_val_steps=0)
    trainer.fit(module, numbers(1, 2, 3), numbers(*range(5)))

    assert len(module.trained) == 3 + 1
    assert len(module.validated) == 2 + 2


def test_an_empty_collection_of_training_loaders(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="Give a loader"):
        make_trainer().fit(Seen(), {})


def test_persistent_workers_of_loaders_that_a_hook_made_end_with_the_run(make_trainer: Any) -> None:
    class Own(Validating):
        def train_dataloader(self) -> Any:
            return numbers(1, 2, num_workers=1, persistent_workers=True)

        def val_dataloader(self) -> Any:
            return numbers(3, num_workers=1, persistent_workers=True)

    before = set(multiprocessing.active_children())
    module, trainer = Own(), make_trainer(max_epochs=2)
    trainer.fit(module)
    gc.collect()
    assert len(module.validated) == 3  # once more in the sanity check
    assert set(multiprocessing.active_children()) <= before


class SharesSamples(DDPStrategy):
    """Ranks 4 and 5 of a job would get the same samples."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 4, "rank": 2}


def test_workers_are_seeded_by_the_part_of_the_samples_that_the_strategy_names(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a Trainer and in an Engine's loop: ranks with the same samples augment them alike."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loaders = [DataLoader(torch.zeros(2, 2), num_workers=1) for _ in range(2)]  # type: ignore[arg-type]
    trainer = make_trainer(strategy=SharesSamples(), use_distributed_sampler=False, limit_train_batches=0)
    trainer.fit(Seen(), loaders[0])
    Engine(strategy=SharesSamples(), accelerator="cpu").setup_dataloaders(loaders[1], use_distributed_sampler=False)
    for loader in loaders:
        assert loader.worker_init_fn.keywords == {"rank": 2}  # type: ignore[union-attr]


def test_the_samples_of_a_subset_are_compared_between_ranks() -> None:
    """random_split without a seed divides otherwise on each rank: one's validation is another's training."""
    data = TensorDataset(torch.arange(100.0))

    def order(indices: Any) -> str:
        loader = DataLoader(Subset(data, indices), batch_size=2)
        return order_shared(share(loader, 0, 2, lambda value: value, draws=True))

    assert order(range(50)) == order(range(50))
    assert order(range(50)) != order(range(50, 100))
    with pytest.raises(ConfigurationError, match=r"random_split divides alike after seed_everything"):
        check_orders([order(range(50)), order(range(50, 100))], [0, 1], "training")
