"""Random training programs, which a Trainer and a plain loop can both run.

A :class:`Program` is a frozen description: data, network, optimizers, schedulers, precision, limits, validation, and
the behaviour of the user's code at given batches. Its methods build the parts with torch alone, so that the plain loop
in :mod:`tests.random_programs.plain_loop` shares no code with the Trainer under test.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

FEATURES = 4
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")
Source = Literal["dataset", "augmented", "iterable", "sized", "epilogue"]
Loss = Literal["tensor", "mapping", "sometimes_none", "weighted", "weighted_tensor"]

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4),
}
_SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "warmup": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 4)),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0),
}


@dataclass(frozen=True)
class Schedule:
    """A learning-rate scheduler of torch, named by ``kind``. It is stepped every ``frequency`` steps or epochs, as
    ``interval`` says.
    """

    kind: str
    interval: Literal["step", "epoch"]
    frequency: int = 1

    @property
    def watches(self) -> bool:
        """Whether the scheduler uses a monitored value."""
        return self.kind == "plateau"

    def build(self, optimizer: Optimizer) -> Any:
        """Return the scheduler for ``optimizer``."""
        return _SCHEDULERS[self.kind](optimizer)


@dataclass(frozen=True)
class Program:
    """One training program.

    Attributes:
        seed: the seed of all random numbers of the program.
        samples, batch_size, drop_last, shuffle: arguments of the training data.
        source: "dataset" and "augmented" are map-style datasets in a DataLoader, the latter with draws from torch's
            generator for each sample; "iterable" is an IterableDataset without a length; "sized" is an object with a
            length that yields batches; "epilogue" runs code after its last batch.
        own_generator: whether the DataLoader shuffles with a generator of its own.
        workers: the number of the DataLoader's workers. persistent: whether the workers stay from epoch to epoch.
        dropout, batch_norm: whether the network has such layers.
        optimizer: "sgd", "momentum", "adam", "adamw", "rmsprop" or "lbfgs".
        schedules: its schedulers.
        precision: the Trainer's argument.
        loss: the form in which ``training_step`` returns the loss. zero_weights: whether some losses have the weight 0.
        accumulate, clip_val, clip_algorithm, max_epochs, max_steps, limit_train, limit_val, val_check_interval,
            check_val_every_n_epoch, log_every_n_steps, sanity_steps: the Trainer's arguments.
        val_samples: the number of validation samples; 0: no validation. Validation batches have 3 samples.
        manual: manual optimization, with two optimizers, each stepped every ``manual_every`` batches.
        hooks: names of the hooks that the module overrides.
        cut: the ``(epoch, batch)`` at which ``on_train_batch_start`` returns -1, which ends the epoch.
        passed: the loaders are passed to ``fit``; otherwise the module's hooks return them.
    """

    seed: int
    samples: int = 12
    batch_size: int = 4
    drop_last: bool = False
    shuffle: bool = False
    source: Source = "dataset"
    own_generator: bool = False
    workers: int = 0
    persistent: bool = False
    dropout: float = 0.0
    batch_norm: bool = False
    optimizer: str = "sgd"
    schedules: tuple[Schedule, ...] = ()
    precision: str = "32-true"
    loss: Loss = "tensor"
    zero_weights: bool = False
    accumulate: int = 1
    clip_val: float | None = None
    clip_algorithm: str | None = None
    max_epochs: int = 2
    max_steps: int = -1
    limit_train: int | float = 1.0
    limit_val: int | float = 1.0
    val_samples: int = 0
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    log_every_n_steps: int = 1
    sanity_steps: int = 0
    manual: bool = False
    manual_every: int = 1
    hooks: frozenset[str] = field(default_factory=frozenset)
    cut: tuple[int, int] | None = None
    passed: bool = True

    def __str__(self) -> str:
        changed = [
            f"{item.name}={value!r}"
            for item in dataclasses.fields(self)
            if item.name != "seed" and repr(value := getattr(self, item.name)) != repr(getattr(_PLAINEST, item.name))
        ]
        return f"Program({', '.join([f'seed={self.seed}', *changed])})"

    # ---- parts ---------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float64 if self.precision == "64-true" else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; ``None`` without it."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision)

    @property
    def has_length(self) -> bool:
        """Whether the training loader has a length."""
        return self.source != "iterable"

    @property
    def tolerance(self) -> float:
        """The allowed relative difference of numbers; 0: bit-equal.

        Numbers may differ by rounding if the Trainer must rescale accumulated gradients, because losses are weighted or
        missing, or the number of batches is unknown.
        """
        rescales = self.accumulate > 1 and (not self.has_length or self.loss in ("sometimes_none", *_WEIGHTED))
        return 1e-9 if rescales else 0.0

    def seed_everything(self) -> None:
        """Seed torch's and Python's generators."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)

    def network(self) -> nn.Module:
        """Build the network; its parameters are drawn from torch's generator. The network maps (B, 4) to (B, 1)."""
        # No bias before a batch norm, because its gradient would be only rounding noise, which Adam would amplify.
        layers: list[nn.Module] = [nn.Linear(FEATURES, 6, bias=not self.batch_norm)]
        if self.batch_norm:
            layers.append(nn.BatchNorm1d(6))
        layers += [nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(6, 1)]
        return nn.Sequential(*layers)

    def optimizers(self, network: nn.Module) -> list[Optimizer]:
        """Build the optimizer; in manual optimization two, for the first layer and for the rest."""
        parameters, build = list(network.parameters()), _OPTIMIZERS[self.optimizer]
        return [build(parameters[:2]), build(parameters[2:])] if self.manual else [build(parameters)]

    def training_loader(self) -> Any:
        """Build the training loader, with generators and counters of its own."""
        data = _numbers(self.samples, self.seed)
        if self.source in ("sized", "epilogue"):
            batches = [data[i : i + self.batch_size] for i in range(0, self.samples, self.batch_size)]
            return Batches(batches) if self.source == "sized" else Epilogue(batches)
        if self.source == "iterable":
            return DataLoader(Stream(data), batch_size=self.batch_size, drop_last=self.drop_last)
        return DataLoader(
            Rows(data, self.source == "augmented"),
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_workers=self.workers,
            persistent_workers=self.persistent,
            generator=torch.Generator().manual_seed(self.seed + 1) if self.own_generator else None,
        )

    def validation_loader(self) -> Any:
        """Build the validation loader."""
        return DataLoader(Rows(_numbers(self.val_samples, self.seed + 2), False), batch_size=3)

    # ---- behaviour of the user's code ----------------------------------------------------------------------------

    def gives_loss(self, epoch: int, batch_idx: int) -> bool:
        """Return whether ``training_step`` returns a loss for this batch."""
        return self.loss != "sometimes_none" or (self.seed + epoch * 5 + batch_idx * 3) % 4 != 0

    def weight(self, batch: Tensor, epoch: int, batch_idx: int) -> float | None:
        """Return the weight of a weighted loss; ``None`` for a plain one."""
        if self.loss not in _WEIGHTED:
            return None
        zero = self.zero_weights and (self.seed + epoch + batch_idx) % 5 == 0
        return 0.0 if zero else float(len(batch)) * (1 + batch_idx % 3)

    def steps_closure_only(self, epoch: int, batch_idx: int) -> bool:
        """Return whether the overridden ``optimizer_step`` computes gradients and does not change the parameters."""
        return (epoch + batch_idx + self.seed) % 3 == 0


_WEIGHTED = ("weighted", "weighted_tensor")
_PLAINEST = Program(0)


def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean squared error of ``network`` on ``batch``, of shape (B, 5): four features and a target per
    row.
    """
    difference = network(batch[:, :FEATURES]) - batch[:, FEATURES:]
    wide: Tensor = difference if difference.dtype is torch.float64 else difference.float()
    return wide.pow(2).mean()


def _numbers(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, FEATURES + 1, generator=torch.Generator().manual_seed(seed))


class Rows(Dataset[Tensor]):
    """A data set of the rows of a tensor; ``augmented``: each row gets noise from torch's generator."""

    def __init__(self, data: Tensor, augmented: bool) -> None:
        self.data, self.augmented = data, augmented

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        row = self.data[index]
        return row + 0.1 * torch.randn(row.shape) if self.augmented else row


class Stream(IterableDataset[Tensor]):
    """Yields the rows of a tensor, with noise from a generator of its own; it has no length."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(len(data))

    def __iter__(self) -> Iterator[Tensor]:
        for row in self.data:
            yield row + 0.1 * torch.randn(row.shape, generator=self.generator)


class Batches:
    """Precomputed batches."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Epilogue(Batches):
    """Yields batches; after the last one, it counts complete passes, and draws a number that shifts the next pass."""

    def __init__(self, batches: list[Tensor]) -> None:
        super().__init__(batches)
        self.passes = 0
        self.shift = 0.0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            yield batch + self.shift
        self.passes += 1
        self.shift = float(torch.rand(()))


# ---- random ones ---------------------------------------------------------------------------------------------------

HOOKS = (
    "optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_optimizer_step",
    "lr_scheduler_step", "on_train_epoch_start", "on_train_batch_end", "on_after_backward",
)  # fmt: skip


def random_program(seed: int, exactly_shared: bool = False) -> Program:
    """Return the program of ``seed``.

    Args:
        seed: the same seed gives the same program.
        exactly_shared: only programs whose numbers do not depend on how many processes share a global batch: in
            float64, without dropout, batch norm, noise or L-BFGS, and without hooks that count batches.
    """
    rng = random.Random(seed)

    def chance(probability: float) -> bool:
        return rng.random() < probability

    source: Source = rng.choice(["dataset", "dataset", "dataset", "augmented", "iterable", "sized", "epilogue"])
    precision = rng.choice(["32-true", *PRECISIONS])
    if exactly_shared:
        source, precision = "dataset", "64-true"
    manual = chance(0.15)
    # L-BFGS divides by differences of gradients, so a different order of roundings may change the result.
    lbfgs = not manual and not exactly_shared and precision != "16-mixed" and chance(0.08)
    loss: Loss = rng.choice(["tensor", "tensor", "mapping", "sometimes_none", "weighted", "weighted_tensor"])
    if manual or lbfgs or (exactly_shared and loss == "sometimes_none"):
        loss = "tensor"
    if loss in _WEIGHTED and precision.endswith("mixed"):
        precision = "64-true"  # in 16 bits, a different order of roundings would change the result too much
    accumulate = 1 if manual or lbfgs else rng.choice([1, 1, 2, 3, 4])
    if accumulate > 1 and (loss in (*_WEIGHTED, "sometimes_none") or source == "iterable"):
        precision = "64-true"
    batch_size = rng.randint(2, 6)
    samples = rng.randint(batch_size, 26)
    if exactly_shared:
        batch_size, samples = 2 * batch_size, 4 * batch_size * rng.randint(1, 4)
    has_length = source != "iterable"
    drop_last = source in ("dataset", "augmented", "iterable") and chance(0.3)
    batches = samples // batch_size if drop_last else -(-samples // batch_size)
    own_order = source in ("dataset", "augmented")
    workers = rng.choice([1, 2]) if own_order and not exactly_shared and chance(0.04) else 0
    validates = chance(0.6)
    clips = not manual and chance(0.4)
    limit: int | float = rng.choice([1.0, 1.0, rng.randint(1, 8), 0.5 if has_length and batches > 1 else 1.0])
    per_epoch = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    every, every_n_epoch = _random_interval(rng, per_epoch, has_length) if validates else (1.0, 1)
    # Only without workers: they fetch batches ahead, and so have drawn further batches when a hook ends the epoch.
    cuts = has_length and workers == 0 and not exactly_shared and chance(0.08)
    return Program(
        seed=seed,
        samples=samples,
        batch_size=batch_size,
        drop_last=drop_last,
        shuffle=own_order and chance(0.6),
        source=source,
        own_generator=own_order and not exactly_shared and chance(0.4),
        workers=workers,
        persistent=workers > 0 and chance(0.5),
        dropout=0.0 if exactly_shared else rng.choice([0.0, 0.0, 0.3]),
        batch_norm=batches * batch_size == samples and batch_size > 1 and not exactly_shared and chance(0.25),
        optimizer="lbfgs" if lbfgs else rng.choice(["sgd", "momentum", "adam", "adamw", "rmsprop"]),
        schedules=() if manual else _random_schedules(rng, validates),
        precision=precision,
        loss=loss,
        zero_weights=loss in _WEIGHTED and not exactly_shared,
        accumulate=accumulate,
        clip_val=rng.choice([0.01, 0.3, 1.0]) if clips else None,
        clip_algorithm=rng.choice(["norm", "value", None]) if clips else None,
        max_epochs=rng.randint(1, 4),
        max_steps=rng.choice([-1, -1, rng.randint(1, 9)]),
        limit_train=limit,
        limit_val=rng.choice([1.0, 1.0, 1, 2]),
        val_samples=rng.randint(1, 10) if validates else 0,
        val_check_interval=every,
        check_val_every_n_epoch=every_n_epoch,
        log_every_n_steps=rng.choice([1, 1, 2, 3, 5]),
        sanity_steps=rng.choice([0, 1, 2]),
        manual=manual,
        manual_every=rng.choice([1, 1, 2]),
        hooks=_random_hooks(rng, not (manual or lbfgs), accumulate, exactly_shared),
        cut=(rng.randint(0, 2), rng.randint(1, 4)) if cuts else None,
        passed=chance(0.7),
    )


def _random_hooks(rng: random.Random, has_plain_steps: bool, accumulate: int, exactly_shared: bool) -> frozenset[str]:
    hooks = frozenset(hook for hook in HOOKS if rng.random() < 0.15)
    if rng.random() < 0.5:
        return frozenset()
    if not has_plain_steps:
        hooks &= {"on_train_epoch_start", "on_train_batch_end", "on_before_optimizer_step"}
    if accumulate > 1:
        # this hook sees partial sums of gradients, and the Trainer may scale these as it likes
        hooks -= {"on_after_backward"}
    if exactly_shared:
        hooks -= {"optimizer_step", "on_train_epoch_start", "on_train_batch_end"}
    return hooks


def _random_interval(rng: random.Random, per_epoch: int, has_length: bool) -> tuple[int | float, int | None]:
    """Return ``val_check_interval`` and ``check_val_every_n_epoch``, for epochs of ``per_epoch`` batches."""
    kind = rng.choice(["epoch", "epoch", "batches", "across epochs", "fraction"])
    if kind == "across epochs":
        return rng.randint(1, 7), None
    every_n_epoch = rng.choice([1, 1, 2])
    if kind == "epoch" or (kind == "fraction" and not has_length):
        return 1.0, every_n_epoch
    return rng.randint(1, per_epoch) if kind == "batches" else rng.choice([0.25, 0.5]), every_n_epoch


def _random_schedules(rng: random.Random, validates: bool) -> tuple[Schedule, ...]:
    kinds = ["exponential", "step", "cosine", "warmup", *(["plateau"] if validates else [])]
    return tuple(
        Schedule(rng.choice(kinds), rng.choice(["step", "epoch"]), rng.choice([1, 1, 2, 3]))
        for _ in range(rng.choice([0, 0, 1, 1, 2]))
    )
