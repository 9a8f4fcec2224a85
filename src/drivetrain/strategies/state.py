"""State: what of a run a strategy gives to a checkpoint, and takes back from one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.compiled import own_names, plain_names
from drivetrain.base.restoring import check_optimizer_state, load_states
from drivetrain.checkpoints.io import wait_for
from drivetrain.strategies.facts import Shared


class State(Shared):
    """The state of modules, optimizers and this rank, each as data that a file can hold.

    A Trainer and an Engine call the same verbs, which get the module and the optimizers that are meant: there may be
    several of each.
    """

    _convert: Any
    _rank_files_written: dict[str, str]  # this rank's last one by checkpoint: see rank_files.py

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of ``module`` under the names that it has without ``torch.compile``; every rank calls it.

        Rank 0 writes what it returns; the result of the other ranks may be empty.

        Raises:
            CheckpointError: the module holds DTensors, and this strategy does not override the method.
        """
        state = plain_names(module.state_dict())
        self._refuse_dtensors(state, "module_state", module)
        return state

    def _refuse_dtensors(
        self, state: Mapping[str, Any], method: str, module: nn.Module | None = None, optimizer: Any = None
    ) -> None:
        if "torch.distributed.tensor" in sys.modules:  # whoever has made one has imported it
            from drivetrain.strategies.sharded_state import refuse_dtensors

            refuse_dtensors(state, f"{type(self).__name__}.{method}", module, optimizer)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load into ``module`` what :meth:`module_state` returned, of this strategy or of another."""
        if module is self.lightning_module:
            self._convert(module)  # or what was saved in 64 bits would pass through 32
        module.load_state_dict(own_names(module, state), strict=strict)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        """Load one state into each optimizer, in their order; ``module_state`` is that of their module beside them.

        Raises:
            CheckpointError: the number of states is another one, or a state does not fit its optimizer.
        """
        load_states("optimizer", optimizers, states, check_optimizer_state)

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        """Return what of this rank must be kept to resume ``module``; every rank stores its own, even if others differ.

        Plain data and tensors. An empty dictionary stores nothing.
        """
        return {}

    def load_rank_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`rank_state` returned on this rank; not called where nothing was stored."""

    def alone(self) -> AbstractContextManager[Literal["whole", "shards", ""]]:
        """Context in which this rank exchanges nothing, to save by itself after an exception: another may be dead.

        It yields what this rank can then save: "whole": the module's and the optimizers' whole states, and its own
        part; "shards": its shards of them; "": nothing without the others.
        """
        from drivetrain.strategies.alone import alone, whole_here  # here, because it knows this file

        strategy: Any = self
        return alone(strategy, whole_here(strategy))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write on global rank 0; every rank calls it, with its own ``checkpoint``.

        Raises:
            CheckpointError: the checkpoint holds DTensors, and this strategy does not override the method.
        """
        self._refuse_dtensors(checkpoint, "save_checkpoint")
        if self.global_rank == 0:
            wait_for(self.checkpoint_io, filepath)  # an earlier save to it may be under way
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into host memory.

        Args:
            checkpoint_path: the checkpoint.
            weights_only: ``None`` or True reads plain data only. False unpickles everything, which can run code.
            into: modules, optimizers and tensors by name, for a strategy that reads straight into them. This one
                ignores it: it returns all that the file holds, and the caller loads that.
        """
        if weights_only is None:
            return self.checkpoint_io.load_checkpoint(checkpoint_path)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def reads_folder(self, path: str) -> bool:
        """Return whether :meth:`load_checkpoint` reads this folder, though it is none that drivetrain writes."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what a checkpoint holds of an optimizer; every rank must call it.

        Raises:
            CheckpointError: the state holds DTensors, and this strategy does not override the method.
        """
        state = optimizer.state_dict()
        self._refuse_dtensors(state, "optimizer_state", self.lightning_module, optimizer)
        return state

    def whole_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer`` as a process that is no rank can use it; every rank must call it."""
        return optimizer

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete on global rank 0, with the files that the ranks wrote beside it; every rank may call it."""
        if self.global_rank == 0:
            self.checkpoint_io.remove_checkpoint(filepath)
        from drivetrain.strategies import rank_files

        rank_files.remove(self, filepath)  # type: ignore[arg-type]  # a Strategy is one
