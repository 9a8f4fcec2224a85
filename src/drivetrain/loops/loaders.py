"""Where a run's loaders come from: what was passed, the datamodule, or the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.data.feed import count_batches, fetches_ahead, seed_workers
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.hooks import DataHooks, overrides
from drivetrain.tree import leaves

_HOOKS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}
_LIMITS = {"validate": "limit_val_batches", "test": "limit_test_batches"}


@dataclass
class EvalLoader:
    """One evaluation loader, how many of its batches a pass takes, and whether it is fetched ahead."""

    loader: Any
    num_batches: float
    ahead: bool


class Loaders:
    """The loaders of one run, each made when it is first needed and once only.

    Args:
        module, datamodule: whose hooks make what was not passed; the datamodule's win.
        passed: by stage ("fit", "validate", "test"), what the caller gave; ``None`` where nothing was.
        limits: by evaluation stage, how many batches of each loader to take.
        call: calls a module's hook by name.
    """

    def __init__(
        self,
        module: Any,
        datamodule: Any,
        passed: Mapping[str, Any],
        limits: Mapping[str, int | float],
        call: Callable[[str], Any],
    ) -> None:
        self._module = module
        self._datamodule = datamodule
        self._passed = passed
        self._limits = limits
        self._call = call
        self._evaluation: dict[str, list[EvalLoader]] = {}
        self._training: Any = None

    def available(self, stage: str) -> bool:
        """Whether anybody offers a loader for ``stage``."""
        return self._passed.get(stage) is not None or self._owner(stage) is not None

    def defined(self, stage: str) -> bool:
        """Whether the evaluation ``stage`` has both a loader and a step."""
        from drivetrain.module import LightningModule

        step = "validation_step" if stage == "validate" else "test_step"
        return overrides(self._module, step, LightningModule) and self.available(stage)

    def training(self) -> Any:
        """The training loader.

        Raises:
            ConfigurationError: there is none.
            NotSupportedError: there are several.
        """
        if self._training is None:
            found = [loader for _, loader in leaves(self._make("fit"))]
            if len(found) != 1:
                raise NotSupportedError(
                    f"There are {len(found)} training loaders, and this version trains on one. Pass one loader."
                )
            self._training = found[0]
            _check_iterable(self._training, "train_dataloader")
            seed_workers(self._training)
        return self._training

    @property
    def made_training(self) -> Any:
        """The training loader if it was made already, else ``None``."""
        return self._training

    def evaluation(self, stage: str) -> list[EvalLoader]:
        """The loaders of an evaluation stage, flattened in order."""
        if stage not in self._evaluation:
            sources = []
            for _, loader in leaves(self._make(stage)):
                _check_iterable(loader, _HOOKS[stage])
                seed_workers(loader)
                count = count_batches(loader, self._limits[stage], _LIMITS[stage])
                sources.append(EvalLoader(loader, count, fetches_ahead(loader)))
            self._evaluation[stage] = sources
        return self._evaluation[stage]

    @property
    def made_evaluation(self) -> Mapping[str, list[EvalLoader]]:
        """The evaluation loaders that were made already, by stage."""
        return self._evaluation

    def _owner(self, stage: str) -> Any:
        hook = _HOOKS[stage]
        for party in (self._datamodule, self._module):
            if party is not None and overrides(party, hook, DataHooks):
                return party
        return None

    def _make(self, stage: str) -> Any:
        if (given := self._passed.get(stage)) is not None:
            return given
        owner = self._owner(stage)
        if owner is None:
            raise ConfigurationError(
                f"There is no loader for {stage}. Pass one, or define {_HOOKS[stage]} on the module or a datamodule."
            )
        return self._call(_HOOKS[stage]) if owner is self._module else getattr(owner, _HOOKS[stage])()


def _check_iterable(loader: Any, hook: str) -> None:
    if not hasattr(loader, "__iter__"):
        raise ConfigurationError(
            f"{hook} gave a {type(loader).__name__}, which cannot be iterated. Give a DataLoader or another iterable."
        )
