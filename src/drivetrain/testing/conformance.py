"""A test suite for a user's accelerator.

In a test file::

    from drivetrain.testing.conformance import AcceleratorConformance


    class TestMine(AcceleratorConformance):
        accelerator = MyAccelerator

Each method is a test. A test is skipped if the accelerator does not claim to have the tested feature, or if the
hardware is missing. ``pytest -rs`` prints the reasons for skipped tests.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.tree import move
from drivetrain.engine.engine import Engine
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.module.module import LightningModule
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.testing._regression import QUIET
from drivetrain.trainer.trainer import Trainer

try:
    import pytest
except ImportError as error:
    raise ImportError("The conformance suite runs under pytest. Write pip install pytest.") from error

_MEBI = 2**20
_NONSENSE: tuple[Any, ...] = ("x", "0;1", "1.5", 1.5, -7, 0, [], None, True, "10000,")


class AcceleratorConformance:
    """The test suite: define a subclass that sets ``accelerator`` and whose name begins with ``Test``.

    Attributes:
        accelerator: the class to test. Its constructor must work without arguments.
        tolerance: the allowed relative difference between the losses of a small fit on the device and on the host.
    """

    accelerator: ClassVar[type[Accelerator]]
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture(autouse=True)
    def _here(self) -> None:
        self.skip_unless_available()

    def skip_unless_available(self) -> None:
        """Skip the running test if the hardware is missing."""
        if not self.accelerator.is_available():
            pytest.skip(f"{self.accelerator.__name__} is not available here: {self.accelerator.why_unavailable()}")

    def claimed(self, claim: str) -> None:
        """Skip the running test if the accelerator's attribute ``claim`` is False."""
        if not getattr(self.accelerator(), claim):
            pytest.skip(f"not claimed: {self.accelerator.__name__}.{claim} is False")

    @property
    def device(self) -> torch.device:
        """The accelerator's first device, set up as the current device."""
        accelerator = self.accelerator()
        device = accelerator.get_parallel_devices([0])[0]
        accelerator.setup_device(device)
        return device

    # ---- declarations --------------------------------------------------------------------------------------------

    def test_it_is_made_without_arguments(self) -> None:
        """``Accelerator()`` works, has a name, and can be set up and torn down twice."""
        for _ in range(2):
            accelerator = self.accelerator()
            assert isinstance(accelerator.name, str)
            assert accelerator.name
            accelerator.setup_device(accelerator.get_parallel_devices([0])[0])
            accelerator.setup(None)
            accelerator.teardown()

    def test_it_says_whether_it_is_there(self) -> None:
        """``is_available()`` returns a bool, and ``why_unavailable()`` returns a str. Neither needs an instance."""
        assert self.accelerator.is_available() is True
        assert isinstance(self.accelerator.why_unavailable(), str)

    def test_it_counts_its_devices(self) -> None:
        """``auto_device_count()`` is an int of at least 1."""
        count = self.accelerator.auto_device_count()
        assert type(count) is int
        assert count >= 1

    def test_device_numbers_are_parsed(self) -> None:
        """``devices=1`` and ``"1"`` select the first device, and ``"auto"`` selects devices from the first device on. A
        value that selects no device raises a ConfigurationError.
        """
        for devices in (1, "1"):
            assert list(self.plan_of(devices).devices) == [self.accelerator.get_parallel_devices([0])[0]]
        assert self.plan_of("auto").devices[0] == self.accelerator.get_parallel_devices([0])[0]
        for devices in _NONSENSE:
            with pytest.raises(ConfigurationError) as caught:
                self.plan_of(devices)
            assert not isinstance(caught.value, NotSupportedError), f"devices={devices!r} was understood"

    def plan_of(self, devices: Any) -> Any:
        """Return the plan for this accelerator with ``devices``."""
        return Engine(accelerator=self.accelerator(), devices=devices).plan

    def test_no_more_devices_than_there_are(self) -> None:
        """If ``device_count_is_limit`` is True, ``devices=auto_device_count() + 1`` raises a ConfigurationError."""
        self.claimed("device_count_is_limit")
        with pytest.raises(ConfigurationError):
            self.plan_of(self.accelerator.auto_device_count() + 1)

    def test_numbers_become_devices(self) -> None:
        """``get_parallel_devices`` returns one ``torch.device`` per number, in the order of the numbers. All devices
        have one type.
        """
        count = self.accelerator.auto_device_count()
        devices = list(self.accelerator.get_parallel_devices(list(range(count))))
        assert len(devices) == count
        assert {type(device) for device in devices} == {torch.device}
        assert len({device.type for device in devices}) == 1
        if devices[0].index is not None:
            assert [device.index for device in devices] == list(range(count))
            assert self.accelerator.get_parallel_devices([count - 1])[0].index == count - 1

    def test_a_run_is_on_its_device(self) -> None:
        """The root device of a run is the accelerator's first device, and ``autocast_device_type`` is its type."""
        engine = Engine(accelerator=self.accelerator(), devices=1)
        assert engine.device == self.accelerator.get_parallel_devices([0])[0]
        context = torch.autocast(engine.accelerator.autocast_device_type, dtype=torch.bfloat16)
        assert context.device == engine.device.type

    def test_its_figures_are_plain_numbers(self) -> None:
        """``get_device_stats`` returns a dictionary of finite floats."""
        stats = self.accelerator().get_device_stats(self.device)
        assert isinstance(stats, dict)
        for name, value in stats.items():
            assert isinstance(name, str)
            assert type(value) is float
            assert math.isfinite(value)

    # ---- tensors -------------------------------------------------------------------------------------------------

    def test_trees_of_tensors_move_there_and_back(self) -> None:
        """A nested batch can be moved to the device and back, and is then unchanged. This is checked for each dtype
        that the accelerator claims.
        """
        accelerator, device = self.accelerator(), self.device
        dtypes = [torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool]
        claims = {"supports_float16": torch.float16, "supports_bfloat16": torch.bfloat16,
                  "supports_float64": torch.float64}  # fmt: skip
        dtypes += [dtype for claim, dtype in claims.items() if getattr(accelerator, claim)]
        numbers = torch.arange(6).reshape(2, 3)
        tree: dict[str, Any] = {"all": [numbers.to(dtype) for dtype in dtypes], "scalar": torch.tensor(3), "n": 1}
        there = move(tree, device)
        assert {leaf.device.type for leaf in [*there["all"], there["scalar"]]} == {device.type}
        back = move(there, HOST)
        assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(tree["all"], back["all"], strict=True))
        assert back["n"] == 1
        strided = torch.arange(6.0).reshape(2, 3).t()
        assert torch.equal(move(strided, device).cpu(), strided)

    def test_copies_are_exact_although_their_source_is_freed(self) -> None:
        """Batches arrive on the device unchanged, even if a batch's host memory is freed immediately after the copy was
        requested.
        """
        accelerator, device = self.accelerator(), self.device
        for pins in sorted({False, accelerator.supports_pinned_memory}):
            there: list[Tensor] = []
            for number in range(32):
                batch = torch.empty(2**16, pin_memory=pins).fill_(number)
                assert batch.is_pinned() == pins
                there.append(batch.to(device, non_blocking=accelerator.supports_non_blocking))
                del batch
            assert all(bool((each.cpu() == number).all()) for number, each in enumerate(there))

    def test_random_state_is_saved_and_restored(self) -> None:
        """After the random states of a checkpoint are restored, the device draws the same numbers again."""
        device = self.device
        torch.manual_seed(3)
        state = copy.deepcopy(rng_state())
        first = torch.rand(100, device=device).cpu()
        second = torch.rand(100, device=device).cpu()
        assert not torch.equal(first, second)
        set_rng_state(state)
        assert torch.equal(torch.rand(100, device=device).cpu(), first)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(100, device=device).cpu(), first)

    def test_autocast_computes_in_bfloat16(self) -> None:
        """Under autocast with the accelerator's device type, matrix products are computed in bfloat16, and parameters
        stay in 32 bits.
        """
        self.claimed("supports_bfloat16")
        model = Engine(accelerator=self.accelerator(), devices=1, precision="bf16-mixed").setup_module(nn.Linear(4, 4))
        with torch.no_grad():
            with torch.autocast(self.accelerator().autocast_device_type, dtype=torch.bfloat16):
                assert model.module(torch.ones(2, 4, device=self.device)).dtype is torch.bfloat16
            assert model.module(torch.ones(2, 4, device=self.device)).dtype is torch.float32

    def test_streams_and_events_order_work(self) -> None:
        """``torch.Stream`` and ``torch.Event`` of the device can be made, recorded and waited for."""
        self.claimed("supports_streams")
        stream, event = torch.Stream(device=self.device), torch.Event(device=self.device)
        event.record(stream)
        stream.wait_event(event)
        event.synchronize()
        assert event.query()

    def test_memory_is_counted(self) -> None:
        """The allocated bytes rise when a tensor is created and fall when the tensor is freed, and the peak does not
        fall. An accelerator without these numbers returns ``None``.
        """
        accelerator, device = self.accelerator(), self.device
        if accelerator.memory_allocated(device) is None:
            pytest.skip(f"not claimed: {type(accelerator).__name__}.memory_allocated gives None")
        before = accelerator.memory_allocated(device) or 0
        accelerator.reset_peak_memory(device)
        tensor = torch.zeros(4 * _MEBI, dtype=torch.uint8, device=device)
        accelerator.synchronize(device)
        assert (accelerator.memory_allocated(device) or 0) - before >= 4 * _MEBI
        del tensor
        assert (accelerator.memory_allocated(device) or 0) - before < 4 * _MEBI
        if (peak := accelerator.max_memory_allocated(device)) is not None:
            assert peak - before >= 4 * _MEBI
            accelerator.reset_peak_memory(device)
            assert (accelerator.max_memory_allocated(device) or 0) - before < 4 * _MEBI
        total = accelerator.total_memory(device)
        assert total is None or total > 0

    # ---- training ------------------------------------------------------------------------------------------------

    def test_a_fit_gives_the_hosts_losses(self, tmp_path: Path) -> None:
        """Training without dropout gives the same losses as on the host, within ``tolerance``."""
        ours = fit(self.accelerator(), tmp_path / "device", dropout=0.0)
        host = fit("cpu", tmp_path / "host", dropout=0.0)
        torch.testing.assert_close(ours.losses, host.losses, rtol=self.tolerance, atol=self.tolerance)
        assert ours.losses[-1] < ours.losses[0]
        assert ours.seen_on == {self.accelerator.get_parallel_devices([0])[0].type}
        assert {p.device.type for p in ours.parameters()} == {HOST.type}

    def test_a_stopped_fit_goes_on_exactly(self, tmp_path: Path) -> None:
        """One fit of two epochs gives the same weights, bit for bit, as a fit of one epoch and a resumed fit of the
        second epoch. The module has dropout on the device.
        """
        whole = fit(self.accelerator(), tmp_path / "whole", epochs=2)
        fit(self.accelerator(), tmp_path / "parts", epochs=1)
        rest = fit(self.accelerator(), tmp_path / "parts", epochs=2, resume=True)
        assert torch.equal(rest.losses, whole.losses[len(rest.losses) :])
        assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))

    def test_16_bit_precisions_train(self, tmp_path: Path) -> None:
        """In each 16-bit precision that the accelerator claims, the losses of a fit are finite and fall."""
        claims = {"supports_bfloat16": "bf16-mixed", "supports_float16": "16-mixed"}
        wanted = [precision for claim, precision in claims.items() if getattr(self.accelerator(), claim)]
        if not wanted:
            pytest.skip("not claimed: neither supports_bfloat16 nor supports_float16")
        for precision in wanted:
            losses = fit(self.accelerator(), tmp_path / precision, dropout=0.0, precision=precision).losses
            assert torch.isfinite(losses).all()
            assert losses[-1] < losses[0]

    def test_tied_weights_stay_tied(self) -> None:
        """Two layers that share a weight still share it after the move to the device."""
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        module[1].weight = module[0].weight
        Engine(accelerator=self.accelerator(), devices=1).setup(module)
        assert module[1].weight is module[0].weight

    # ---- several devices -----------------------------------------------------------------------------------------

    def test_two_processes_train_as_one(self, tmp_path: Path) -> None:
        """DDP over two devices, each in its own process, trains to the same weights as one device."""
        self.claimed("supports_several_devices")
        self.two_devices()
        one = fit(self.accelerator(), tmp_path / "one", dropout=0.0)
        two = fit(self.accelerator(), tmp_path / "two", dropout=0.0, devices=2, strategy="ddp_spawn", batch_size=4)
        torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=1e-4, atol=1e-5)

    def test_a_sharded_model_trains(self, tmp_path: Path) -> None:
        """FSDP2 over two devices, each in its own process, trains to the same weights as one device."""
        self.claimed("supports_several_devices")
        self.two_devices()
        kind = self.accelerator.get_parallel_devices([0])[0].type
        if not hasattr(torch, kind):
            pytest.skip(f"there is no module torch.{kind}, which fully_shard needs")
        one = fit(self.accelerator(), tmp_path / "one", dropout=0.0)
        strategy = FSDPStrategy(start_method="spawn")
        two = fit(self.accelerator(), tmp_path / "two", dropout=0.0, devices=2, strategy=strategy, batch_size=4)
        torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=1e-4, atol=1e-5)

    def two_devices(self) -> None:
        """Skip the running test if there is only one device. If the device is the CPU, several processes can share it,
        and the test runs.
        """
        first = self.accelerator.get_parallel_devices([0])[0]
        if self.accelerator.auto_device_count() < 2 and first.index is not None:  # the CPU's device has no index
            pytest.skip("there is one device here")


class Small(LightningModule):
    """The module that the suite trains.

    Args:
        dropout: the probability of dropout.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.kept: list[Tensor] = []
        self.seen_on: set[str] = set()

    @property
    def losses(self) -> Tensor:
        """Return the loss of each step, on the host."""
        return torch.stack([loss.cpu() for loss in self.kept])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen_on |= {x.device.type, self.device.type}
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.kept.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(
    accelerator: Accelerator | str,
    folder: Path,
    epochs: int = 2,
    dropout: float = 0.5,
    resume: bool = False,
    batch_size: int = 8,
    **arguments: Any,
) -> Small:
    """Train a small regression, save a checkpoint in ``folder``, and return the module. The data and the initial
    weights are always the same.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
    torch.manual_seed(1)
    module = Small(dropout)
    trainer = Trainer(
        accelerator=accelerator, max_epochs=epochs, default_root_dir=folder, **{"devices": 1, **QUIET, **arguments}
    )
    checkpoint = folder / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=checkpoint if resume else None)
    trainer.save_checkpoint(checkpoint)
    return module
