"""LightningDataModule: the data of a run, separate from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.base.introspect import overrides, taken
from drivetrain.base.tree import map_leaves
from drivetrain.module.hooks import DataHooks
from drivetrain.module.hparams import HyperparametersMixin
from drivetrain.module.loading import LoadableMixin

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class LightningDataModule(DataHooks, HyperparametersMixin, LoadableMixin):
    """Downloads and splits the data of a run, and creates the loaders, separately from the model.

    Override the hooks that you need: ``prepare_data`` (called in one process), ``setup`` (called in every process), the
    loader hooks, the transfer hooks, ``teardown``. If the datamodule and the module define the same loader hook or
    transfer hook, the Trainer calls the datamodule's hook.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    name: str | None = None
    trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's state for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> LightningDataModule:
        """Return a data module with loaders for existing datasets.

        Args:
            train_dataset: the training dataset. Its loader shuffles if the dataset is map-style.
            val_dataset, test_dataset, predict_dataset: one dataset, or a list or dictionary of datasets. Each dataset
                gets its own loader.
            batch_size, num_workers: arguments of every DataLoader. Both are also passed to this class's constructor if
                the constructor has parameters of these names.
            datamodule_kwargs: further arguments of this class's constructor.
        """
        module = cls(**datamodule_kwargs, **taken(cls, {"batch_size": batch_size, "num_workers": num_workers}))
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}

        def loaders(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, (list, tuple)):
                return [loaders(item, shuffle) for item in dataset]
            if isinstance(dataset, Mapping):
                return {key: loaders(item, shuffle) for key, item in dataset.items()}
            draws = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size, shuffle=draws, num_workers=num_workers)

        for name, dataset in datasets.items():
            if dataset is not None:  # an attribute of the instance counts as an override
                setattr(module, f"{name}_dataloader", partial(loaders, dataset, name == "train"))
        return module

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run ends with ``exception``."""

    def __str__(self) -> str:
        lines = [f"{name}: {_described(getattr(self, name))}" for name in _HOOKS if overrides(self, name, DataHooks)]
        return "\n  ".join([type(self).__name__, *(lines or ["no loaders"])])


_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def _described(hook: Callable[[], Any]) -> str:
    """Describe each loader that ``hook`` returns, with its number of samples."""
    try:
        given = hook()
    except Exception as error:  # the hook may raise, for example because setup has not run
        return f"not there yet ({type(error).__name__}: {error})"
    return str(map_leaves(_size, given)) if isinstance(given, (list, tuple, Mapping)) else _size(given)


class _Shown(str):
    """A string that prints without quotes inside a printed list."""

    __repr__ = str.__str__


def _size(loader: Any) -> _Shown:
    try:
        return _Shown(f"{type(loader).__name__} of {len(loader.dataset)} samples")
    except (TypeError, NotImplementedError, AttributeError):
        return _Shown(f"{type(loader).__name__} of unknown length")
