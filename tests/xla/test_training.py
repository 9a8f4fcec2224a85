"""Training on one of torch_xla's devices: numbers, precisions, checkpoints."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.rows import TOLERANCES, Model, loader, near, trained, trainer, written_elsewhere

from drivetrain import Engine
from drivetrain.accelerators import XLAAccelerator
from drivetrain.checkpoints import XLACheckpointIO
from drivetrain.precision import XLAPrecision
from drivetrain.strategies import SingleDeviceXLAStrategy

STRATEGIES = pytest.mark.parametrize("strategy", ["single_xla", "xla"])


@STRATEGIES
def test_it_trains_to_the_numbers_of_64_bits_on_the_host(strategy: str) -> None:
    near(trained(strategy, precision="32-true"), TOLERANCES["32-true"])


@STRATEGIES
def test_it_resumes_from_a_file_that_was_written_elsewhere(strategy: str, tmp_path: Path) -> None:
    near(trained(strategy, written_elsewhere(tmp_path), precision="32-true"), TOLERANCES["32-true"])


@STRATEGIES
@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_it_trains_in_each_precision(strategy: str, precision: str) -> None:
    found = trained(strategy, precision=precision)
    near(found, TOLERANCES[precision])
    types = {weight.dtype for weight in found.values()}
    assert types == {{"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)}


def test_the_precision_of_the_field_is_the_same() -> None:
    strategy = SingleDeviceXLAStrategy(precision_plugin=XLAPrecision("bf16-true"))
    one, other = trained(strategy), trained("single_xla", precision="bf16-true")
    for name, weight in one.items():
        assert torch.equal(weight, other[name])


@STRATEGIES
def test_a_file_that_it_wrote_is_read_on_the_host_and_resumed_there(strategy: str, tmp_path: Path) -> None:
    first = trainer(strategy, precision="32-true", max_epochs=1)
    first.fit(Model(), loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    read = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert {tensor.device.type for tensor in read["state_dict"].values()} == {"cpu"}
    near(trained("single_device", tmp_path / "one.ckpt", accelerator="cpu", devices=1), TOLERANCES["32-true"])


def test_the_store_moves_tensors_to_the_host(tmp_path: Path) -> None:
    device = XLAAccelerator().get_parallel_devices([0])[0]
    XLACheckpointIO().save_checkpoint({"a": [torch.ones(2, device=device)], "b": (1, "x")}, tmp_path / "a.ckpt")
    read = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert read == {"a": [read["a"][0]], "b": (1, "x")}
    assert read["a"][0].device.type == "cpu"


@STRATEGIES
def test_one_batch_is_one_execution_of_a_graph_that_was_compiled_before(strategy: str) -> None:
    from torch_xla.core import xla_model
    from torch_xla.debug import metrics

    counted: list[tuple[int, int]] = []

    class Counting(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            xla_model.wait_device_ops()  # an execution is counted when it ends
            counted.append(tuple((metrics.metric_data(name) or (0,))[0] for name in ("ExecuteTime", "CompileTime")))

    trainer(strategy, precision="32-true").fit(Counting(), loader())
    executed = [after[0] - before[0] for before, after in pairwise(counted[6:])]
    assert executed == [1] * len(executed)
    assert counted[-1][1] == counted[6][1]  # the second epoch compiles nothing


@STRATEGIES
def test_a_loop_of_ones_own_on_an_engine(strategy: str) -> None:
    engine = Engine(accelerator="xla", devices=1, strategy=strategy, precision="32-true")
    engine.launch()
    model = Model()
    own: Any = model.configure_optimizers()  # on the host's parameters, which the device replaces
    net, optimizer = engine.setup(model.net, own)
    batches = engine.setup_dataloaders(loader())
    for _ in range(2):
        for x, y, _tokens in batches:
            optimizer.zero_grad()
            engine.backward(torch.nn.functional.mse_loss(net(x), y))
            optimizer.step()
    engine.teardown()
    near({name: weight.detach() for name, weight in model.named_parameters()}, TOLERANCES["32-true"])
