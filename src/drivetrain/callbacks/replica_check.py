"""Compare the replicas of a model during training. If replicas differ, stop, or copy the majority's values to the other
replicas.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.base.fingerprint import fingerprints
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.torch_private import names_ignored_by_ddp
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, DrivetrainError, check_choice, check_count
from drivetrain.strategies.copies import named_state, ranks_with_copies
from drivetrain.strategies.peers import some
from drivetrain.strategies.sharded_state import is_dtensor, local_shard
from drivetrain.trainer.last import newest_of_fit

Ranks = tuple[int, ...]


class ReplicaMismatchError(DrivetrainError, RuntimeError):
    """Parameters, buffers or optimizer states differ between ranks that should have equal values.

    Attributes:
        resume_from: the checkpoint from which the Trainer resumes the fit; ``None`` ends the fit.
    """

    resume_from: str | None = None


class ReplicaCheck(Callback):
    """Compares the parameters, the buffers and the optimizer state of all replicas of the model, bit by bit.

    Each rank computes a 64-bit fingerprint of each tensor, and the ranks exchange the fingerprints as one tensor. The
    ranks compare when training starts and ends, after the first optimizer step, every ``every_n_steps`` steps, and
    before each checkpoint. See docs/replicas.md for the tensors that are compared.

    Args:
        every_n_steps: compare after every n optimizer steps; ``Trainer(replica_check_every=n)`` does the same.
        on_mismatch: "stop" raises an error on all ranks. "heal" logs a warning, and copies the values of the majority
            (more than half of the replicas) to the other replicas. Without a majority, the fit resumes from its newest
            checkpoint. If there is no checkpoint, or if the replicas differ again at the same step, the callback raises
            the error of "stop".
        ignore: names of parameters and buffers that may differ between ranks, with wildcards: ``["codebook.*"]``.

    Raises:
        ConfigurationError: an argument has a wrong value, or the strategy does not keep the values of the ranks equal.
        ReplicaMismatchError: during training, the replicas differ and were not healed. All ranks raise the error.
    """

    needs_every_rank = True
    changes_in_validation = False

    def __init__(
        self, every_n_steps: int = 100, on_mismatch: Literal["stop", "heal"] = "stop", ignore: Sequence[str] = ()
    ) -> None:
        super().__init__()
        check_count("ReplicaCheck", "every_n_steps", every_n_steps, lowest=1)
        check_choice("ReplicaCheck", "on_mismatch", on_mismatch, ["stop", "heal"])
        self.every_n_steps, self.on_mismatch, self.ignore = every_n_steps, on_mismatch, tuple(ignore)
        self._resumed_at_step = -1  # the step of the last difference that was not healed
        self._begin()

    def _begin(self) -> None:
        self._groups: list[Ranks] = []  # groups of ranks that should have equal tensors
        self._own: set[str] = set()  # names of local buffers, which each rank fills from its own batches
        self._buffers: dict[str, int] = {}  # fingerprints of the other buffers at the last comparison
        # names of buffers that have changed in the same way on all ranks
        self._agreed: set[str] = set()
        self._next_step, self._equal_at_step = 0, -1
        self._failure = ""

    @property
    def state_key(self) -> str:
        """The key of the callback's state. The key contains the options, so the Trainer notices if the ranks' options
        differ.
        """
        options = {"every_n_steps": self.every_n_steps, "on_mismatch": self.on_mismatch, "ignore": self.ignore}
        return self._generate_state_key(**options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._begin()
        refused = trainer.strategy.facts.refuses.get("replica_check_every")
        if stage == "fit" and refused and trainer.world_size > 1:
            raise ConfigurationError(
                f"Trainer(replica_check_every={self.every_n_steps}) compares the tensors of all ranks, and "
                f"{type(trainer.strategy).__name__} {refused} Leave replica_check_every out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        groups = {ranks_with_copies(strategy, parameter) for parameter in pl_module.parameters()}
        if groups := {ranks for ranks in groups if len(ranks) > 1}:
            groups.add(tuple(strategy.data.ranks))  # the ranks that should have the same buffers
        self._groups = sorted({ranks for theirs in strategy.world.gather_objects(groups) for ranks in theirs})
        self.idle_hooks = frozenset() if self._groups else frozenset({"on_train_batch_end", "on_train_end"})
        if not self._groups:
            rank_zero_warn(
                f"replica_check_every={self.every_n_steps} has no effect in this run: {type(strategy).__name__} on "
                f"{trainer.world_size} device(s) holds each parameter once, so there is no replica to compare."
            )
            return
        trainer.hooks.observers.append(
            SimpleNamespace(
                before_save=lambda: self._before_save(trainer), state_alone=lambda: self._state_alone(trainer)
            )
        )
        # Compare after the first step already, to find the local buffers.
        self._next_step = trainer.global_step + 1
        self._check(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (step := trainer.global_step) >= self._next_step:
            self._next_step = (step // self.every_n_steps + 1) * self.every_n_steps
            self._check(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    def _before_save(self, trainer: Trainer) -> None:
        if self._failure:
            raise ReplicaMismatchError(f"Nothing is saved, because the replicas differ. {self._failure}")
        # After an exception each rank saves alone, in a world of size 1, because other ranks may be dead.
        if trainer.strategy.world.size > 1:
            self._check(trainer)

    def _state_alone(self, trainer: Trainer) -> list[int]:
        """Return fingerprints of the tensors that should be equal on all ranks. The ranks do not communicate.

        Shards are left out. Buffers are left out, too, because one rank alone cannot tell which buffers the ranks fill
        from their own batches.
        """
        if tuple(range(trainer.world_size)) not in self._groups:
            return []
        buffers = {id(buffer) for buffer in trainer.lightning_module.buffers()}
        whole = (
            tensor for _, tensor in self._compared(trainer) if not is_dtensor(tensor) and id(tensor) not in buffers
        )
        found: list[int] = fingerprints(whole).tolist()
        return found

    # ---- one comparison ------------------------------------------------------------------------------------------

    def _check(self, trainer: Trainer, heals: bool = True) -> None:
        """Compare the replicas. The host waits for the device only once.

        Raises:
            ReplicaMismatchError: the replicas differ, and were not healed.
        """
        world = trainer.strategy.world
        prints = self._prints(trainer)
        none = torch.empty(0, dtype=torch.int64)
        sums = fingerprints(prints[ranks].values if ranks in prints else none for ranks in self._groups)
        gathered = world.all_gather(sums)
        buffers = {name: value for each in prints.values() for name, value in each.of_buffers()}
        here = [value.to(gathered.device, non_blocking=True) for value in buffers.values()]
        read = torch.cat([gathered.flatten(), *here]).tolist()
        width, groups = len(self._groups), enumerate(self._groups)
        differ = [ranks for place, ranks in groups if len({read[rank * width + place] for rank in ranks}) > 1]
        if differ:
            self._resolve(trainer, prints, differ, heals)
            return
        now = dict(zip(buffers, read[gathered.numel() :], strict=True))
        self._agreed |= {name for name, value in now.items() if value != self._buffers.get(name, value)}
        self._buffers, self._equal_at_step = now, trainer.global_step

    def _prints(self, trainer: Trainer) -> dict[Ranks, _Prints]:
        """Return the tensors of this rank to compare. The keys are groups of ranks, which should have the same values
        of these tensors.
        """
        buffers = {id(buffer) for buffer in trainer.lightning_module.buffers()}
        found: dict[Ranks, _Prints] = {}
        for name, tensor in self._compared(trainer):
            of = found.setdefault(ranks_with_copies(trainer.strategy, tensor), _Prints({}, []))
            of.tensors[name] = tensor
            of.buffers += [name] if id(tensor) in buffers else []
        return {ranks: each for ranks, each in found.items() if len(ranks) > 1}

    def _compared(self, trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
        module = trainer.lightning_module
        ignored = (*self.ignore, *names_ignored_by_ddp(module))
        for name, owner, tensor in named_state(module, trainer.strategy.optimizers):
            if owner and name not in self._own and not any(fnmatchcase(owner, pattern) for pattern in ignored):
                yield name, tensor

    def _details(self, prints: _Prints) -> dict[str, tuple[int, bool]]:
        """Return the fingerprint of each tensor, and whether the tensor may be a local buffer. Each rank fills its
        local buffers from its own batches. A buffer may be local if it has changed on this rank since the last
        comparison, and has never changed in the same way on all ranks.
        """
        own = {name for name in prints.buffers if name not in self._agreed}
        return {
            name: (value, name in own and value != self._buffers.get(name))
            for name, value in zip(prints.tensors, prints.values.tolist(), strict=True)
        }

    def _resolve(self, trainer: Trainer, prints: Mapping[Ranks, _Prints], differ: list[Ranks], heals: bool) -> None:
        """Find the tensors that differ. Leave local buffers out of later comparisons, and heal or report all other
        tensors. All ranks make the same decisions.
        """
        world = trainer.strategy.world
        own = {ranks: self._details(prints[ranks]) for ranks in differ if ranks in prints}
        place = f"{platform.node()}, {trainer.strategy.root_device}"
        everyones, places = zip(*world.gather_objects((own, place)), strict=True)
        wrong: list[_Difference] = []
        local: list[str] = []
        for ranks in differ:
            members = {rank: everyones[rank].get(ranks, {}) for rank in ranks}
            for name in dict.fromkeys(name for details in members.values() for name in details):
                details = [each.get(name) for each in members.values()]
                values = {rank: detail and detail[0] for rank, detail in zip(ranks, details, strict=True)}
                if len(set(values.values())) > 1:
                    difference = _Difference(name, ranks, values)
                    is_local = not difference.right and all(detail is not None and detail[1] for detail in details)
                    local += [name] if is_local else []
                    wrong += [] if is_local else [difference]
        if local:
            self._own.update(local)
            rank_zero_info(
                f"The replicas are compared without {some(local)}: each rank computes these buffers from its batches."
            )
        if not wrong:
            if local:
                self._check(trainer, heals)
            return
        step, text = trainer.global_step, _text(wrong, places)
        start = f"After optimizer step {step}, the replicas of the model differ: {text}"
        if not (heals and self.on_mismatch == "heal" and all(each.curable for each in wrong)):
            newest, run = newest_of_fit(trainer), trainer.current_run
            is_stopping = trainer.strategy.broadcast(trainer.should_stop or (run is not None and run.stop is not None))
            advice = (
                f'Run the program again with ckpt_path="{newest}": this checkpoint was saved before the difference.'
                if newest
                else "This fit has no checkpoint to resume from, so run the program again from its start."
            )
            equal = f" They were equal after step {self._equal_at_step}." if self._equal_at_step >= 0 else ""
            why = _why_not_healed(wrong, tried=not heals) if self.on_mismatch == "heal" else ""
            self._failure = (
                f"{start}{equal}{why} {advice} If the same rank differs again, replace its device. If each rank is to "
                f"have its own values there, write ReplicaCheck(ignore=[{wrong[0].owner!r}])."
            )
            resume_from = None
            if heals and self.on_mismatch == "heal" and step > self._resumed_at_step:
                resume_from, self._resumed_at_step = None if is_stopping else newest, step
            error = ReplicaMismatchError(self._failure if resume_from is None else f"{start}{equal}")
            error.resume_from = resume_from
            raise error
        for each in wrong:
            each.heal(world, prints)
        self._check(trainer, heals=False)
        rank_zero_warn(f"{start} ReplicaCheck has copied the values of most ranks to the others. Training continues.")


@dataclass
class _Prints:
    """Tensors that should be equal on a group of ranks, and their fingerprints on this rank.

    Attributes:
        tensors: the tensors by name. The buffers are consecutive entries.
        buffers: the names of those tensors that are buffers.
    """

    tensors: dict[str, Tensor]
    buffers: list[str]

    @cached_property
    def values(self) -> Tensor:
        """The fingerprints, in the order of ``tensors``."""
        return fingerprints(self.tensors.values())

    def of_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the fingerprint of each buffer."""
        if self.buffers:
            start = list(self.tensors).index(self.buffers[0])
            end = start + len(self.buffers)
            yield from zip(self.buffers, self.values[start:end].view(-1, 1).unbind(), strict=True)


@dataclass(frozen=True)
class _Difference:
    """A tensor that differs between ranks. ``values`` has each rank's fingerprint, or ``None`` if the rank lacks the
    tensor.
    """

    name: str
    ranks: Ranks
    values: Mapping[int, int | None]

    @property
    def owner(self) -> str:
        """The name of the parameter or buffer to which the tensor belongs. For example, optimizer states belong to a
        parameter.
        """
        return self.name.split(" of ")[-1].split(" in ")[0]

    @cached_property
    def right(self) -> Ranks:
        """The ranks with the majority's value; empty if no value is on more than half of the ranks."""
        everyones = list(self.values.values())
        common = max(set(everyones), key=everyones.count)
        has_most = common is not None and 2 * everyones.count(common) > len(everyones)
        return tuple(rank for rank, value in self.values.items() if value == common) if has_most else ()

    @property
    def curable(self) -> bool:
        """Whether a majority has equal values, and every rank has the tensor."""
        return bool(self.right) and None not in self.values.values()

    @property
    def wrong(self) -> Ranks:
        """The ranks that are not in :attr:`right`; all ranks if there is no majority."""
        return tuple(rank for rank in self.ranks if rank not in self.right)

    @torch.no_grad()
    def heal(self, world: Any, prints: Mapping[Ranks, _Prints]) -> None:
        """Copy the tensor from a rank in :attr:`right` to all ranks in :attr:`wrong`. All ranks call this method."""
        mine = prints[self.ranks].tensors[self.name] if world.rank in self.ranks else None
        source = self.right[0]
        value = world.broadcast(None if mine is None or world.rank != source else local_shard(mine).cpu(), source)
        if mine is not None and world.rank in self.wrong:
            local_shard(mine).copy_(value)


def _why_not_healed(wrong: Sequence[_Difference], tried: bool) -> str:
    """Return a sentence that says why the replicas were not healed. ``tried``: whether ReplicaCheck has tried to heal
    them.
    """
    if tried:
        return " The values of most replicas were copied to the others, which then differed again."
    if all(each.right for each in wrong):
        lacking = next(each for each in wrong if None in each.values.values())
        without = tuple(rank for rank, value in lacking.values.items() if value is None)
        return f" {_ranks(without).capitalize()} cannot be healed without a tensor to copy to: {lacking.name!r}."
    return " More than half of the replicas must agree to heal the others."


def _text(wrong: Sequence[_Difference], places: Sequence[str]) -> str:
    """Return sentences that name the ranks and the tensors that differ."""
    names: dict[tuple[Ranks, Ranks], list[str]] = {}
    for each in wrong:
        names.setdefault((each.wrong, each.right), []).append(each.name)
    return " ".join(
        f"{_ranks(bad)} ({'; '.join(places[rank] for rank in bad)}) "
        f"differ{'s' if len(bad) == 1 else ''}{f' from {_ranks(good)}' if good else ''} in {some(each)}."
        for (bad, good), each in names.items()
    )


def _ranks(ranks: Ranks) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
