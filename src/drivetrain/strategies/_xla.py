"""The base class of the strategies for XLA devices. The class handles torch_xla's deferred execution, and seeds the
devices.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base.packages import torch_xla
from drivetrain.base.seed import xla_generator
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.checkpoints.xla import XLACheckpointIO
from drivetrain.errors import ConfigurationError, unknown_argument
from drivetrain.precision.precision import Precision
from drivetrain.strategies.familiar import then
from drivetrain.strategies.strategy import Strategy

_NO_QUEUE = "device_ready_queues_"  # part of torch's message if the autograd engine does not know a device
DEBUG = "PT_XLA_DEBUG"  # if this environment variable is set, torch_xla reports compilations and reads of values


class XLAExecution(Strategy):
    """Base of the strategies for XLA devices.

    torch_xla records operations, and executes them when ``torch_xla.sync()`` is called. These strategies call ``sync``
    after each optimizer step, after each batch whose gradients are accumulated, and after each batch of an evaluation
    or prediction. An optimizer step therefore forms one graph with the forward and backward pass before it. torch_xla
    compiles this graph once for each shape of batch.

    At the start of a run, the strategy seeds the device's random generator from the state of torch's generator.

    Attributes:
        debug: whether torch_xla reports, during this run, why it compiles and where the program reads values.
    """

    facts = Strategy.facts.but(
        refuses={
            "compile": "torch_xla compiles what it records by itself.",
            "replica_check_every": "is not tested with it.",
            "replay_every": "is not tested with XLA devices.",
        },
        accelerators=frozenset({"xla"}),
        allows_inference_mode=False,  # torch_xla cannot record an inference tensor together with other tensors
    )

    debug: bool = False

    # ---- life ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        if (xla := xla_generator()) is not None:  # torch.manual_seed does not seed torch_xla's generator
            xla.set_rng_state(_seed())

    def setup(self, trainer: Any) -> None:
        if self.debug:
            os.environ[DEBUG] = "1"
        super().setup(trainer)

    def teardown(self) -> None:
        super().teardown()
        os.environ.pop(DEBUG, None)

    def explain(self, error: BaseException) -> Exception | None:
        """Return an explanation if torch's autograd engine has no thread for XLA devices."""
        if isinstance(error, RuntimeError) and _NO_QUEUE in str(error):
            return ConfigurationError(
                "torch cannot compute gradients on XLA devices in this process, because it computed some on another "
                "device before torch_xla's runtime had started, and counted the devices then. Begin the program with "
                "import torch_xla and torch_xla.device(), or train on the host in another process."
            )
        return super().explain(error)

    # ---- execution on the device ---------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        run_recorded()
        return loss

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        yield
        run_recorded()

    def bind(self, name: str) -> Callable[..., Any]:
        step = super().bind(name)
        return step if name == "training_step" else then(step, run_recorded)


def _seed() -> int:
    """Return a seed that depends on the state of torch's generator. The state does not change."""
    state = bytes(torch.get_rng_state().tolist())
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little")


def run_recorded() -> None:
    """Let the device execute the recorded operations, without waiting for the results."""
    torch_xla.sync(reset_scope=False)  # reset_scope=True would also end a profiler scope that the caller has opened


def checked(
    cls: type, unknown: Mapping[str, Any], checkpoint_io: CheckpointIO | None, precision: Precision | None
) -> CheckpointIO:
    """Check the arguments of a strategy for XLA devices. Return the strategy's checkpoint store.

    Args:
        cls: the strategy's class.
        unknown: arguments that the constructor does not have.
        checkpoint_io, precision: the constructor's arguments ``checkpoint_io`` and ``precision_plugin``.

    Raises:
        UnknownArgumentError: there are unknown arguments. The message names the first unknown argument and a similar
            known argument.
        ModuleNotFoundError: torch_xla is not installed.
        TypeError: ``checkpoint_io`` is not a CheckpointIO, or ``precision_plugin`` is not a Precision.
    """
    owner = cls.__name__
    if unknown:
        known = [name for name in inspect.signature(cls).parameters if name != "unknown"]
        raise unknown_argument(owner, unknown, known)
    if find_spec("torch_xla") is None:
        raise ModuleNotFoundError(
            f"{owner} needs the package torch_xla, which is not installed. Write pip install torch_xla, in the version "
            "that belongs to your torch.",
            name="torch_xla",
        )
    if checkpoint_io is not None and not isinstance(checkpoint_io, CheckpointIO):
        raise TypeError(f"{owner}(checkpoint_io={checkpoint_io!r}): pass a CheckpointIO, such as XLACheckpointIO().")
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(f"{owner}(precision_plugin={precision!r}): pass a Precision, such as XLAPrecision().")
    return XLACheckpointIO() if checkpoint_io is None else checkpoint_io


def device_meant(device: torch.device | str | int) -> torch.device:
    """Return ``device`` as a ``torch.device``. A number is the index of an XLA device of this machine."""
    return torch.device("xla", device) if isinstance(device, int) else torch.device(device)
