"""State: the methods with which a strategy saves and loads checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.compiled import own_names, plain_names
from drivetrain.base.lazy import on_first_use
from drivetrain.base.restoring import check_optimizer_state, load_states
from drivetrain.checkpoints.io import reading, wait_for
from drivetrain.strategies.facts import Shared

with on_first_use:
    from drivetrain.strategies import alone, rank_files, sharded_state


class State(Shared):
    """The state of modules, optimizers and this rank, as data that a file can contain.

    A Trainer and an Engine call the same methods. Modules and optimizers are arguments of these methods, because an
    Engine may have several modules.
    """

    _convert: Any
    _rank_files_written: dict[str, str]  # by checkpoint path: the last rank file of this rank (rank_files.py)

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of ``module``. The names are the same as without ``torch.compile``. Every rank must call
        this method.

        Only rank 0's result is written. The results of the other ranks may be empty.

        Raises:
            CheckpointError: the module has DTensors, and this strategy does not override the method.
        """
        state = plain_names(module.state_dict())
        self._refuse_dtensors(state, "module_state", module)
        return state

    def _refuse_dtensors(
        self, state: Mapping[str, Any], method: str, module: nn.Module | None = None, optimizer: Any = None
    ) -> None:
        if "torch.distributed.tensor" in sys.modules:  # a program that uses DTensors has imported this module
            sharded_state.refuse_dtensors(state, f"{type(self).__name__}.{method}", module, optimizer)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``state`` into ``module``. ``state`` is a result of :meth:`module_state` of any strategy."""
        if module is self.lightning_module:
            self._convert(module)  # before loading, because float64 values would lose precision in float32 parameters
        module.load_state_dict(own_names(module, state), strict=strict)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        """Load one state into each optimizer, in order. ``module_state`` is the state of the optimizers' module in the
        same checkpoint.

        Raises:
            CheckpointError: the number of states differs, or a state does not fit its optimizer.
        """
        load_states("optimizer", optimizers, states, check_optimizer_state)

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the part of the state that only this rank has. The part is needed to resume the training of
        ``module``.

        The result may contain plain data and tensors. An empty dictionary stores nothing.
        """
        return {}

    def load_rank_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`rank_state` on this rank. Not called if the rank has stored nothing."""

    def alone(self) -> AbstractContextManager[Literal["whole", "shards", ""]]:
        """Context in which this rank saves after an exception. The ranks do not communicate, because another rank may
        be dead.

        The context yields a word for the state that this rank can save: "whole" for the complete states of module and
        optimizers, "shards" for this rank's shards of these states, or "" for no state.
        """
        strategy: Any = self
        return alone.alone(strategy, alone.whole_here(strategy))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` on global rank 0. Every rank must call this method with its own checkpoint.

        Raises:
            CheckpointError: the checkpoint holds DTensors, and this strategy does not override the method.
        """
        self._refuse_dtensors(checkpoint, "save_checkpoint")
        if self.global_rank == 0:
            wait_for(self.checkpoint_io, filepath)  # an earlier save to this path may still be running
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into host memory.

        Args:
            checkpoint_path: the checkpoint.
            weights_only: with ``None`` or True, only plain data is read. With False, the complete file is unpickled,
                which can run code.
            into: modules, optimizers and tensors by name, for a strategy that reads directly into these objects. The
                default implementation ignores ``into``, and returns all data of the file. The caller then loads the
                data.
        """
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **reading(weights_only))

    def reads_folder(self, path: str) -> bool:
        """Return whether :meth:`load_checkpoint` can read this folder of another library."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer for a checkpoint. Every rank must call this method.

        Raises:
            CheckpointError: the state holds DTensors, and this strategy does not override the method.
        """
        state = optimizer.state_dict()
        self._refuse_dtensors(state, "optimizer_state", self.lightning_module, optimizer)
        return state

    def whole_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer`` in a form that a process outside the job can use. Every rank must call this method."""
        return optimizer

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """On global rank 0, delete the checkpoint and all rank files beside the checkpoint. On any other rank, delete
        only the rank file of this rank.
        """
        if self.global_rank == 0:
            self.checkpoint_io.remove_checkpoint(filepath)

        rank_files.remove(self, filepath)  # type: ignore[arg-type]  # a Strategy is one
