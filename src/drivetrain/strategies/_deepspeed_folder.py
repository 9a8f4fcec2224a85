"""Checkpoints in DeepSpeed's own format: folders, for its tools, which other strategies cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies import _deepspeed_optimizers
from drivetrain.strategies.parallel import ParallelStrategy


class OwnFolder(ParallelStrategy):
    """Writes and reads such folders."""

    _engine: Any

    def _trains(self) -> bool:
        """Whether the engine has an optimizer."""
        raise NotImplementedError

    def save_deepspeed_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Write weights and optimizer states as a folder of DeepSpeed's own format; every rank must call it.

        Args:
            folder: for DeepSpeed's tools, such as the ``zero_to_fp32.py`` that it puts there.
            tag: the name of the folder in it; ``None``: DeepSpeed's, which counts steps.
        """
        self._running_engine("save_deepspeed_checkpoint").save_checkpoint(str(folder), tag=tag)

    def load_deepspeed_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Load what :meth:`save_deepspeed_checkpoint` has written; every rank must call it, in ``on_fit_start``.

        Its files are unpickled, which can run code.

        Raises:
            CheckpointError: there is none, or another number of processes has written it.
        """
        engine = self._running_engine("load_deepspeed_checkpoint")
        from drivetrain.strategies import _deepspeed_state  # here, because it is only needed with the package

        _deepspeed_state.load_folder(engine, Path(folder), tag, self.world_size)
        for optimizer in self.optimizers:
            groups = _deepspeed_optimizers.trained_groups(optimizer)
            _deepspeed_optimizers.pass_options(engine.basic_optimizer.param_groups, groups)

    def _running_engine(self, method: str) -> Any:
        if not self._trains() or not dist.is_initialized():
            raise ConfigurationError(
                f"{method} needs DeepSpeed's engine, which exists while fit runs. Call it in a hook of a callback or "
                "of the module, such as on_train_epoch_end."
            )
        return self._engine

    def reads_folder(self, path: str) -> bool:
        latest = Path(path) / "latest"
        if not latest.is_file():
            return False
        own = latest.parent / latest.read_text(encoding="utf-8").strip()
        return any(own.glob("*zero_pp_rank_*_optim_states.pt"))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; of a folder of DeepSpeed's own format, the weights.

        Raises:
            CheckpointError: the folder would be unpickled unasked, or training is to be resumed from it.
        """
        folder = Path(checkpoint_path)
        if not self.reads_folder(str(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only, into)
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None and trainer.progress.fn == "fit":
            raise CheckpointError(
                f"{folder} is a folder of DeepSpeed's own format, which holds no progress of a Trainer. Call "
                "trainer.strategy.load_deepspeed_checkpoint(folder) in on_train_start, which restores weights and "
                "optimizer states, or resume from a file that trainer.save_checkpoint wrote."
            )
        if weights_only is not False:
            raise CheckpointError(
                f"{folder} is a folder of DeepSpeed's own format, whose files are unpickled, which can run code. If "
                "you trust them, pass weights_only=False."
            )
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return {"state_dict": get_fp32_state_dict_from_zero_checkpoint(str(folder))}
