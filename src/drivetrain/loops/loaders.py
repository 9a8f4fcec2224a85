"""Get a run's loaders from the caller, the datamodule or the module, check the loaders, and divide their samples among
the ranks.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Subset

from drivetrain.base.introspect import overrides
from drivetrain.base.torch_private import keep_iterator
from drivetrain.base.tree import leaves, map_leaves
from drivetrain.data import sample_seeds, samplers
from drivetrain.data.batched import log_fetching
from drivetrain.data.combined import BatchList, CombinedLoader, arranged, check_iterable
from drivetrain.data.feed import count_batches, count_of, fetches_ahead, make_room_for_sockets, seed_workers
from drivetrain.data.kept import loader_states, set_loader_states
from drivetrain.data.loader_passes import Passes, sized_length
from drivetrain.data.passes import passes_over
from drivetrain.data.resample import with_every_sample, without_shuffle
from drivetrain.errors import ConfigurationError
from drivetrain.module.hooks import DataHooks
from drivetrain.module.trainable import TrainableModule
from drivetrain.settings import Settings
from drivetrain.strategies import familiar
from drivetrain.strategies.model import Model
from drivetrain.strategies.peers import by_rank
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.data.sample_seeds import SampleSeeds

LOADER_WORDS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The word for a stage's loaders, in names such as ``val_dataloader`` and ``limit_val_batches``."""
LOADER_HOOKS = {stage: f"{word}_dataloader" for stage, word in LOADER_WORDS.items()}


def _limit_name(stage: str) -> str:
    return f"limit_{LOADER_WORDS[stage]}_batches"


def no_batches(loader: Any, purpose: str = "train") -> str:
    """Return the error message for loaders that have no batch; ``purpose`` is a verb, such as "train"."""
    loader = getattr(loader, "iterables", loader)
    if isinstance(loader, list) and len(loader) == 1:
        loader = loader[0]
    described, cures = list[str](), list[str]()
    for path, each in leaves(loader):
        text, cure = _without_batches(each)
        described.append(f"{path}: {text}" if path else text)
        cures += [] if cure in cures else [cure]
    return f"There is nothing to {purpose} on: {'; '.join(described)}. {' '.join(cures)}"


def _without_batches(loader: Any) -> tuple[str, str]:
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"the {name} has the length 0", "Pass a loader with at least one batch."
    dataset = f"the {type(loader.dataset).__name__}"
    try:
        samples = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return f"the {name} over {dataset} has the length 0", "Pass a dataset with samples."
    text = f"the {name} over {dataset} of {samples} samples, with batch_size={loader.batch_size} and "
    text += f"drop_last={loader.drop_last}, has no batch"
    if samples == 0:
        return text, "Pass a dataset with samples."
    if loader.drop_last:
        return text, "Write a smaller batch_size, or drop_last=False."
    return text, f"Its sampler, a {type(loader.sampler).__name__}, draws none: give it samples."


def check_counts(counts: Sequence[float], word: str) -> None:
    """Raise if some ranks have batches and some have none. ``counts``: each rank's number of batches. ``word``: the
    kind of loader, for the message.

    Raises:
        ConfigurationError: only some ranks have batches. These ranks would wait in collectives for the other ranks.
    """
    if 0 in counts and any(counts):
        raise ConfigurationError(
            f"The {word} loaders of the ranks have {', '.join(f'{count:g}' for count in counts)} batches. Give every "
            "rank at least one batch, or let drivetrain share one data set out: use_distributed_sampler=True. [DT1061]"
        )


def order_shared(loader: Any) -> str:
    """Return a description of the loader's order of samples, for :func:`check_orders`. Ranks with the same order return
    equal descriptions.
    """
    if isinstance(loader, CombinedLoader):
        return " and ".join(map(order_shared, loader.flattened))
    batches = rank_batches(loader)
    order = None if batches is None else samplers.order_of(loader)
    if order is None:
        return "a loader that is not split"
    options = "".join(f", {name}={value}" for name, value in order["options"].items())
    size = ""
    if isinstance(batches, samplers.SlicedBatches):
        size = f" in batches of {batches.batch_size}{', without the last part' * batches.drop_last}"
    count = order["dataset"] if order["samples"] is None else order["samples"]
    return f"{count} samples{_chosen(loader.dataset)} of a {order['sampler']}{options}{size}"


def _chosen(dataset: Any) -> str:
    """Return a text that identifies the samples of a ``torch.utils.data.Subset``; "" for other data sets.

    Without a seed, ``random_split`` divides the samples differently on each rank. Then a validation sample of one rank
    may be a training sample of another rank.
    """
    if not (isinstance(dataset, Subset) and isinstance(dataset.indices, Sequence)) or len(dataset) == 0:
        return ""
    indices = dataset.indices
    some = [indices[place] for place in range(0, len(indices), max(1, len(indices) // 1000))]
    return f" (numbers {', '.join(map(str, some[:3]))}, ..., checksum {zlib.crc32(repr(some).encode()):08x})"


def check_orders(orders: Sequence[str], ranks: Sequence[int], word: str) -> None:
    """Raise if the ranks' orders of samples differ. ``orders``: the result of :func:`order_shared` on each rank;
    ``word``: the kind of loader.

    Raises:
        ConfigurationError: the ranks' orders differ, so samples would be left out or seen twice.
    """
    if len(set(orders)) > 1:
        raise ConfigurationError(
            f"The {word} loaders of the ranks differ, and the Trainer divides one order of samples among all: "
            f"{by_rank(orders, ranks)}. Give every rank the same dataset and batch_size (random_split divides alike "
            "after seed_everything(...) on every rank), or write Trainer(use_distributed_sampler=False)."
        )


def _is_shared(loader: Any) -> bool:
    """Whether the Trainer has divided ``loader`` among the ranks, so that all ranks have equal lengths."""
    if isinstance(loader, CombinedLoader):
        return all(map(_is_shared, loader.flattened))
    return rank_batches(loader) is not None


def rank_batches(loader: Any) -> samplers.RankBatches | None:
    """Return the sampler or batch sampler of ``loader`` that divides the samples among the ranks; ``None`` if there is
    none.
    """
    places = [getattr(loader, place, None) for place in ("batch_sampler", "sampler")]
    return next((place for place in places if isinstance(place, samplers.RankBatches)), None)


def _own(loader: Any) -> Any:
    """If ``loader`` wraps a user's list of batches, return the list; else return ``loader``."""
    return loader.batches if isinstance(loader, BatchList) else loader


@dataclass
class EvalLoader:
    """One evaluation loader, its number of batches, and whether batches are fetched ahead.

    ``counts``: the number of batches on every rank; empty until the ranks have exchanged these numbers. ``started``:
    the iterator of the next pass if ``early.py`` has created one.
    """

    loader: Any
    num_batches: float
    ahead: bool
    counts: list[float] = field(default_factory=list)
    started: Any = None


@dataclass(eq=False)
class Loaders:
    """The loaders of one run. A loader is created on first use, and kept until it is reloaded.

    Args:
        module, datamodule: their hooks, such as ``val_dataloader``, create the loaders that the caller did not pass.
            The datamodule's hook has precedence.
        passed: for each stage ("fit", "validate", "test", "predict"), the loaders that the caller passed, or ``None``.
        limit: returns the present limit on a stage's number of batches. User code may change limits during the run.
        call: calls a hook of the module or the datamodule by name.
        epoch: returns the index of the current epoch.
        strategy: the strategy; divides the loaders among the ranks, and may replace loaders.
        settings: the Trainer's arguments that change loaders.
        found: called with the loaders that the caller passed or a hook returned, before the loaders are prepared.

    Attributes:
        made_training: the training loader, or a CombinedLoader if there are several; ``None`` until it is created.
        made_passes: the passes over the training loader; ``None`` until training begins.
        made_evaluation: for each stage, the evaluation loaders that exist.
        made_in: for each stage, the epoch in which its loaders were created.
        makes_training: whether the training loader is being created.
        tried: the stages on whose loaders ``early.py`` has called ``iter``.
        pins: the argument ``pins`` of :func:`drivetrain.data.batched.start_pass`.
    """

    module: Any
    datamodule: Any
    passed: Mapping[str, Any]
    limit: Callable[[str], int | float]
    call: Callable[[Any, str], Any]
    epoch: Callable[[], int]
    strategy: Strategy
    settings: Settings
    found: Callable[[Any], None] | None = None
    made_training: Any = field(default=None, init=False)
    made_passes: Passes | None = field(default=None, init=False)
    made_evaluation: dict[str, list[EvalLoader]] = field(default_factory=dict, init=False)
    made_in: dict[str, int] = field(default_factory=dict, init=False)
    makes_training: bool = field(default=False, init=False)
    tried: set[str] = field(default_factory=set, init=False)
    pins: bool = field(default=False, init=False)
    _made_before: dict[str, int] = field(default_factory=dict, init=False)  # ``made_in`` of a checkpoint
    _nested: dict[str, Any] = field(default_factory=dict, init=False)
    # the training loader's length on every rank
    _lengths: list[int | None] = field(default_factory=list, init=False)
    _sample_seeds: SampleSeeds | None = field(default=None, init=False)

    def again(
        self, limit: Callable[[str], int | float], call: Callable[[Any, str], Any], epoch: Callable[[], int]
    ) -> Loaders:
        """Return a copy that gets its loaders from the same caller and hooks, but has not created any loader."""
        other = replace(self, limit=limit, call=call, epoch=epoch)
        other._nested = self._nested  # shared, so that ``other`` also finds the loaders that ``self`` creates later
        return other

    def is_passed(self, stage: str) -> bool:
        """Whether the caller passed the loaders of ``stage``. If so, hooks for this stage are not called."""
        return self.passed.get(stage) is not None

    def restore_ages(self, made_in: Mapping[str, int]) -> None:
        """Restore from a checkpoint in which epochs the loaders were created. A loader that does not exist yet gets its
        restored epoch when it is created.
        """
        self._made_before = {stage: epoch for stage, epoch in made_in.items() if stage not in self.made_in}
        self.made_in.update({stage: made_in[stage] for stage in self.made_in if stage in made_in})

    def evaluation_states(self, stage: str) -> list[dict[str, Any]]:
        """Return the states that the stage's existing loaders keep between two passes."""
        return loader_states(source.loader for source in self.made_evaluation.get(stage, []))

    def restore_evaluation(self, stage: str, states: list[dict[str, Any]]) -> None:
        """Create the stage's loaders, and restore the loaders' states, a result of :meth:`evaluation_states`."""
        set_loader_states([source.loader for source in self.evaluation(stage)], states)

    def available(self, stage: str) -> bool:
        """Whether a loader for ``stage`` was passed or a hook can return one."""
        return self.passed.get(stage) is not None or self._owner(stage) is not None

    def is_made(self, stage: str) -> bool:
        """Whether the loaders of the evaluation ``stage`` were created."""
        return stage in self.made_evaluation

    def is_known(self, stage: str) -> bool:
        """Whether the caller passed the loaders of the evaluation ``stage``, or a hook has already created them."""
        return self.passed.get(stage) is not None or self.is_made(stage)

    def defined(self, stage: str) -> bool:
        """Whether the evaluation ``stage`` has both a loader and a step."""
        step = "validation_step" if stage == "validate" else "test_step"
        return overrides(self.module, step, TrainableModule) and self.available(stage)

    def training(self) -> Any:
        """The training loader. Several loaders are combined: a loader that is exhausted restarts until the longest
        loader ends.

        Raises:
            ConfigurationError: there is no training loader, or its type is not supported.
        """
        if self.made_training is None:
            self.makes_training = True
            try:
                made, is_tree = self._prepared("fit")
            finally:
                self.makes_training = False
            if is_tree:
                if not list(leaves(made)):
                    raise ConfigurationError(f"train_dataloader gave an empty {type(made).__name__}. Give a loader.")
                made = CombinedLoader(made, "max_size_cycle")
            if isinstance(made, CombinedLoader) and made.mode == "sequential":
                raise ConfigurationError(
                    'CombinedLoader(mode="sequential") cannot be trained on: its batches have no common structure. '
                    'Write mode="max_size_cycle", "min_size" or "max_size".'
                )
            self.made_training = made
        return self.made_training

    def passes(self) -> Passes:
        """The passes over the training loader."""
        if self.made_passes is None:
            if self.settings.sample_seeds and self._sample_seeds is None:
                self._sample_seeds = sample_seeds.SampleSeeds(sample_seeds.seed_of_program(), self.epoch)
            self.made_passes = passes_over(self.training(), self.pins, self._sample_seeds)
        return self.made_passes

    def division(self) -> dict[str, int | None]:
        """Return a checkpoint's entries ``data_ranks`` and ``divided_from``: how samples are divided among the
        ranks.
        """
        if self.made_training is None:
            return {}
        batches = rank_batches(self.made_training)
        ranks = batches.world_size if batches is not None else 1 if self.strategy.world_size == 1 else None
        divided = {"divided_from": batches.divided_from} if batches is not None and batches.divided_from else {}
        return {"data_ranks": ranks, **divided}

    def divide_from(self, done: int, shares: bool = False) -> int:
        """Divide the epoch's samples after the first ``done`` samples among the ranks of this run.

        With one rank, the training loader may have no :class:`RankBatches` (a sampler that divides samples among
        ranks). If ``done`` is not 0 or ``shares`` is true, the loader is then replaced by a copy that has one.

        Returns:
            The number of batches of this run that correspond to the first ``done`` samples.
        """
        batches = rank_batches(self.training())
        if batches is None and (done or shares):
            self.made_training = samplers.share(self.training(), 0, 1, agree=lambda value: value)
            self.made_passes, batches = None, rank_batches(self.made_training)
        if batches is not None and batches.divided_from != done:
            batches.divided_from, self._lengths = done, []
        return 0 if batches is None else batches.batches_before()

    def close(self) -> None:
        """Stop persistent workers, except those of evaluation loaders that the caller passed."""
        if self.made_passes is not None:
            self.made_passes.close()
        for stage, sources in self.made_evaluation.items():
            for source in sources:
                if self.passed.get(stage) is None and isinstance(source.loader, DataLoader):
                    keep_iterator(source.loader, None)

    def made(self, stage: str) -> Any:
        """Return the created loaders of ``stage`` in the structure in which they were given, for example a dictionary;
        ``None`` if none was created.
        """
        if not (self.made_training is not None if stage == "fit" else stage in self.made_evaluation):
            return None
        given = self._nested[stage]
        return given.iterables if isinstance(given, CombinedLoader) else given

    def count_training(self) -> float:
        """Return the number of training batches in an epoch; ``inf`` if it is unknown.

        With several processes, the result is the largest number on any rank. If the ranks' loaders may differ in
        length, the first call exchanges the lengths. All ranks must therefore make the first call.

        Raises:
            ConfigurationError: some ranks have batches and some have none. All ranks raise the error.
        """
        loader = self.training()
        if not self._lengths:
            own, differs = sized_length(loader), self.strategy.facts.is_distributed and not _is_shared(loader)
            self._lengths = self.strategy.data.gather_objects(own) if differs else [own]
        limit, name = self.limit("fit"), type(loader).__name__
        counts = [count_of(length, limit, _limit_name("fit"), name) for length in self._lengths]
        check_counts(counts, "training")
        return max(counts)

    def count_own_training(self) -> float:
        """Return the number of training batches in an epoch on this rank."""
        return count_batches(self.training(), self.limit("fit"), _limit_name("fit"))

    def evaluation(self, stage: str) -> list[EvalLoader]:
        """The loaders of an evaluation stage, as a flat list."""
        if stage not in self.made_evaluation:
            made, is_tree = self._prepared(stage)
            if isinstance(made, CombinedLoader):
                found = made.flattened if made.mode == "sequential" else [made]
            else:
                found = [loader for _, loader in leaves(made)] if is_tree else [made]
            self.made_evaluation[stage] = [EvalLoader(loader, 0, fetches_ahead(loader)) for loader in found]
            self.count_evaluation(stage)
        return self.made_evaluation[stage]

    def count_evaluation(self, stage: str) -> None:
        """Count the batches of a stage's loaders under the current limits."""
        for source in self.made_evaluation.get(stage, []):
            source.num_batches = count_batches(source.loader, self.limit(stage), _limit_name(stage))

    def reload(self, stage: str, every: int) -> bool:
        """Discard the loaders of ``stage`` if they are at least ``every`` epochs old. Return whether they are that old.

        With ``every=0``, loaders are never that old. Loaders that the caller passed are kept, because only a hook can
        create new ones.
        """
        age = self.epoch() - self.made_in.get(stage, self.epoch())
        if not every or age < every:
            return False
        if self.passed.get(stage) is not None:
            self.made_in[stage] = self.epoch()
            return True
        if stage == "fit":
            self.close()
            self.made_training = self.made_passes = None
            self._lengths = []
        else:
            self.made_evaluation.pop(stage, None)
        return True

    def _owner(self, stage: str) -> Any:
        hook = LOADER_HOOKS[stage]
        for owner in (self.datamodule, self.module):
            if owner is not None and overrides(owner, hook, DataHooks):
                return owner
        return None

    def _prepared(self, stage: str) -> tuple[Any, bool]:
        """Return the checked and prepared loaders of ``stage``, and whether they are nested in lists or dictionaries.

        A CombinedLoader counts as one loader.
        """
        made = self.unshared(stage)
        if self.found is not None:
            self.found(made)
        self.made_in[stage] = self._made_before.pop(stage, self.epoch())
        start = f"{LOADER_HOOKS[stage]} gave"
        combined = isinstance(made, CombinedLoader)
        tree = made if combined else arranged(made, start)
        is_tree = isinstance(tree, (list, tuple, Mapping))
        several = made.mode != "sequential" if combined else stage == "fit" and is_tree
        strategy, settings = self.strategy, self.settings
        shares = strategy.facts.is_distributed and settings.use_distributed_sampler
        has_last_word = overrides(strategy, "process_dataloader", Model)
        part = familiar.part_of_data(strategy)

        def prepare(loader: Any) -> Any:
            if combined:
                check_iterable(loader, start)
            seed_workers(loader, part)
            make_room_for_sockets(loader)
            if settings.overfit_batches and stage in ("fit", "validate"):
                loader = without_shuffle(loader)
            if stage == "predict":
                loader = with_every_sample(loader)
            if shares:  # combined loaders are padded to equal lengths on all ranks
                loader = familiar.share(strategy, loader, settings.split_batches, pads=several)
            loader = strategy.process_dataloader(loader) if has_last_word else loader
            log_fetching(loader)
            return loader

        if isinstance(made, CombinedLoader):
            # copied, because another run with the user's object must begin with the user's own loaders
            made = copy.copy(made) if shares else made
            made.flattened = [prepare(loader) for loader in made.flattened]
        else:
            made = map_leaves(prepare, tree) if is_tree else prepare(made)  # a list of batches stays a list
        self._nested[stage] = map_leaves(_own, made) if is_tree else made
        return made, is_tree

    def unshared(self, stage: str) -> Any:
        """Return the loaders of ``stage`` that the caller passed or a hook returns."""
        if (given := self.passed.get(stage)) is not None:
            return given
        owner = self._owner(stage)
        if owner is None:
            raise self.missing(stage)
        return self.call(owner, LOADER_HOOKS[stage])

    def missing(self, stage: str) -> ConfigurationError:
        """Return the error for a stage that has no loader."""
        return ConfigurationError(
            f"trainer.{stage} has no loader. Pass one, or define {LOADER_HOOKS[stage]} on "
            f"{type(self.module).__name__} or a datamodule. [DT1019]"
        )
