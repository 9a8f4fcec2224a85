"""Replicas of a module run as the module would, and leave nothing behind but what the first of them writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import NotSupportedError
from drivetrain.strategies.replicas import Replicas, replica

CPU = torch.device("cpu")
APART = (torch.device("cpu", 0), torch.device("cpu", 1))  # which the replicas take for different devices


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        found: Tensor = self.other(self.one(self.norm(self.rnn(x.unsqueeze(1))[0].squeeze(1)))) * scale
        return found

    def parts(self, x: Tensor) -> tuple[Tensor, int]:
        return self.one(x), threading.get_ident()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("devices", [(CPU, CPU), (CPU, CPU, CPU), APART], ids=["two", "three", "in threads"])
def test_outputs_and_gradients_are_those_of_the_module(devices: Sequence[torch.device]) -> None:
    x = torch.randn(7, 4)
    plain, module = Tied().eval(), Tied().eval()
    expected = plain(x, scale=2.0)
    expected.square().mean().backward()
    replicas = Replicas(module, devices)
    found = replicas(x, scale=2.0)
    found.square().mean().backward()
    replicas.close()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(module), gradients(plain))


def test_the_first_replica_keeps_what_it_writes_and_the_others_do_not() -> None:
    x = torch.randn(6, 4)
    module, first = Tied(), Tied()
    first(x[:3])
    Replicas(module, (CPU, CPU))(x)
    assert module.calls == 1
    torch.testing.assert_close(dict(module.named_buffers()), dict(first.named_buffers()), rtol=0, atol=0)


def test_a_copy_has_the_parameters_of_the_module_and_buffers_of_its_own() -> None:
    module = Tied()
    copy = replica(module, CPU)
    assert dict(copy.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert copy.one.weight is copy.other.weight
    assert copy.norm.running_mean.data_ptr() != module.norm.running_mean.data_ptr()
    assert copy.rnn is not module.rnn


def test_different_devices_work_in_threads_and_in_the_contexts_of_the_caller() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
            return {"state": [(state, threading.get_ident())] * len(x)}

    replicas = Replicas(Asks(), APART)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        (one, first), (other, second) = replicas(torch.zeros(2))["state"]
    assert one == other == (False, True, True)
    assert first == threading.get_ident() != second
    assert replicas(torch.zeros(2))["state"][1][0] == (True, False, False)
    replicas.close()


@pytest.mark.parametrize("devices", [(CPU, CPU), APART], ids=["in turn", "in threads"])
def test_an_error_of_any_replica_reaches_the_caller(devices: Sequence[torch.device]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0] == 1:
                raise ZeroDivisionError
            return x

    replicas = Replicas(Fails(), devices)
    with pytest.raises(ZeroDivisionError):
        replicas(torch.tensor([0.0, 1.0]))
    assert replicas(torch.tensor([0.0, 2.0])).tolist() == [0.0, 2.0]
    replicas.close()


def test_a_compiled_call_is_that_of_the_first_replica_only() -> None:
    module = nn.Linear(2, 1)
    module.compile(backend="eager")
    assert "_compiled_call_impl" not in replica(module, CPU).__dict__
    torch.testing.assert_close(Replicas(module, (CPU, CPU))(torch.ones(4, 2)), module(torch.ones(4, 2)))


def test_a_submodule_that_was_compiled_runs_uncompiled_in_a_copy() -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module = nn.Sequential(torch.compile(plain, backend="eager"))
    copy = replica(module, CPU)
    assert type(copy[0]) is nn.Sequential
    copy(torch.ones(4, 2))
    assert plain[1].num_batches_tracked == 0
    module(torch.ones(4, 2))
    assert plain[1].num_batches_tracked == 1


def test_metric_objects_are_shared_on_one_device_and_refused_on_several() -> None:
    class Counts(nn.Module):
        seen = 0

        def update(self, x: Tensor) -> None:
            self.seen += len(x)

        def compute(self) -> int:
            return self.seen

        def reset(self) -> None:
            self.seen = 0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counts()

        def forward(self, x: Tensor) -> Tensor:
            self.counts.update(x)
            return x

    model = Model()
    Replicas(model, (CPU, CPU))(torch.zeros(5))
    assert model.counts.compute() == 5
    replicas = Replicas(model, APART)
    with pytest.raises(NotSupportedError, match="used the metric object Counts.*update it in training_step_end"):
        replicas(torch.zeros(5))
    replicas.close()
