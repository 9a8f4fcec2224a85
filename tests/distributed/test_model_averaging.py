"""Local SGD: ranks that train by themselves and take the mean of their parameters, when they are asked to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy

STEPS = 9


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * STEPS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(4 * STEPS, 1, generator=generator, dtype=torch.float64))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Net(LightningModule):
    """Keeps its parameters after every optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.after: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.after) < self.global_step:
            self.after.append(flat(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def averaging(period: int, start: int = 3, **options: Any) -> DDPStrategy:
    """Without an exchange of gradients after the start, as between machines with one process each."""
    options = {"process_group": None, "subgroup": None, "post_local_gradient_allreduce": False, **options}
    state = PostLocalSGDState(start_localSGD_iter=start, **options)
    return DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=period)


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": -1, "max_steps": STEPS,
    }  # fmt: skip
    return Trainer(strategy=strategy, **{**quiet, **arguments})


def after_each_step(period: int | None, start: int, allreduce: bool = False, accumulate: int = 1) -> Tensor:
    strategy = "ddp" if period is None else averaging(period, start, post_local_gradient_allreduce=allreduce)
    module = Net()
    loader: Any = DataLoader(data(), batch_size=2)
    trainer(strategy, accumulate_grad_batches=accumulate).fit(module, loader)
    return torch.stack(module.after)


def by_hand(period: int, start: int) -> tuple[Tensor, Tensor]:
    """The same on one process: two networks, which take turns with the batches."""
    networks = network(), network()
    batches: list[Any] = list(DataLoader(data(), batch_size=2))
    after: tuple[list[Tensor], list[Tensor]] = [], []
    for step in range(STEPS):
        gradients = []
        for rank, net in enumerate(networks):
            x, y = batches[2 * step + rank]
            gradients.append(torch.autograd.grad(F.mse_loss(net(x), y), list(net.parameters())))
        if step < start:
            gradients = [tuple((one + other) / 2 for one, other in zip(*gradients, strict=True))] * 2
        with torch.no_grad():
            for net, gradient in zip(networks, gradients, strict=True):
                for parameter, change in zip(net.parameters(), gradient, strict=True):
                    parameter -= 0.1 * change
            if step >= start and (step - start) % period == 0:
                for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
        for net, kept in zip(networks, after, strict=True):
            kept.append(flat(net))
    return torch.stack(after[0]), torch.stack(after[1])


@pytest.mark.parametrize(("period", "start"), [(1, 0), (2, 3), (3, 1), (2, 0)])
def test_parameters_are_averaged_after_every_so_many_local_steps(pool: Any, period: int, start: int) -> None:
    ranks = pool.run(after_each_step, period, start, group=False)
    for rank, expected in zip(ranks, by_hand(period, start), strict=True):
        torch.testing.assert_close(rank, expected, rtol=1e-12, atol=1e-12)
    for step in range(STEPS):
        together = step < start or (step - start) % period == 0
        assert torch.equal(ranks[0][step], ranks[1][step]) is together, step


def test_an_average_after_every_step_is_what_averaged_gradients_give(pool: Any) -> None:
    plain = pool.run(after_each_step, None, 0, group=False)
    averaged = pool.run(after_each_step, 1, 3, group=False)
    torch.testing.assert_close(averaged, plain, rtol=1e-12, atol=1e-12)
    rarely = pool.run(after_each_step, 4, 3, group=False)
    assert not torch.allclose(rarely[0][-1], plain[0][-1], rtol=1e-6)  # the control


def test_the_processes_of_a_machine_go_on_sharing_gradients(pool: Any) -> None:
    plain = pool.run(after_each_step, None, 0, group=False)
    shared = pool.run(after_each_step, 4, 3, True, group=False)
    torch.testing.assert_close(shared, plain, rtol=1e-12, atol=1e-12)


def test_optimizer_steps_are_counted_and_not_batches(pool: Any) -> None:
    ranks = pool.run(after_each_step, 2, 3, False, 2, group=False)
    equal = [torch.equal(*pair) for pair in zip(*ranks, strict=True)]
    assert equal == [True, True, True, True, False, True, False, True, False]


# ---- a run that is taken up ------------------------------------------------------------------------------------------


def resumed(folder: Path, stops: list[int], forgets: bool = False) -> list[Tensor]:
    """Stop at each of these steps and go on from the file with everything made anew."""

    class Forgetful(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if forgets:
                for name in [name for name in checkpoint["optimizer_states"][0]["param_groups"][0] if "local" in name]:
                    del checkpoint["optimizer_states"][0]["param_groups"][0][name]

    path: Path | None = None
    after: list[Tensor] = []
    for stop in stops:
        module = Forgetful()
        ours = trainer(averaging(2), max_steps=stop)
        ours.fit(module, DataLoader(data(), batch_size=2), ckpt_path=path)
        path = folder / f"{stop}.ckpt"
        ours.save_checkpoint(path)
        after.append(flat(module))
    return after


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_run_that_is_taken_up_where_ranks_agree_goes_on_exactly(pool: Any, tmp_path: Path, stop: int) -> None:
    whole = pool.run(resumed, tmp_path, [STEPS], group=False)
    parts = pool.run(resumed, tmp_path, [stop, STEPS], group=False)
    for rank, one in zip(parts, whole, strict=True):
        assert torch.equal(rank[-1], one[-1])


def test_the_counters_in_the_checkpoint_matter(pool: Any, tmp_path: Path) -> None:
    """The control: without them the warm-up begins again."""
    whole = pool.run(resumed, tmp_path, [STEPS], group=False)
    parts = pool.run(resumed, tmp_path, [6, STEPS], True, group=False)
    assert not torch.equal(parts[0][-1], whole[0][-1])


def test_in_between_all_ranks_go_on_from_rank_zero_in_step(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(resumed, tmp_path, [5, 6], group=False)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    first, second = pool.run(resumed, tmp_path, [5, 7], group=False)
    assert not torch.equal(first[1], second[1])


# ---- the rest --------------------------------------------------------------------------------------------------------


class Two(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = network()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y) + F.mse_loss(self.other(x), -y)
        one, other = self.optimizers()
        one.zero_grad()
        other.zero_grad()
        self.manual_backward(loss)
        one.step()
        if batch_idx % 2:
            other.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.1)


def both(batches: int) -> tuple[Tensor, Tensor]:
    module = Two()
    trainer(averaging(2, 0), max_steps=-1, max_epochs=1, limit_train_batches=batches).fit(
        module, DataLoader(data(), batch_size=2)
    )
    return flat(module.net), flat(module.other)


def test_each_optimizer_has_a_count_of_its_own(pool: Any) -> None:
    def agree(batches: int) -> list[bool]:
        return [torch.equal(*pair) for pair in zip(*pool.run(both, batches, group=False), strict=True)]

    assert agree(2) == [False, True]  # two steps of one, and the first of the other
    assert agree(3) == [True, True]
    assert agree(4) == [False, False]
    assert agree(6) == [False, True]


def places() -> Any:
    """Where and how a parameter lies before and after a fit."""

    class Picture(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 1)).to(
                dtype=torch.float64,
                memory_format=torch.channels_last,  # type: ignore[call-overload]
            )

        def on_train_start(self) -> None:
            self.began = self.net[0].weight.data_ptr(), self.net[0].weight.stride()  # type: ignore[union-attr, operator]

        def on_train_end(self) -> None:
            self.ended = self.net[0].weight.data_ptr(), self.net[0].weight.stride()  # type: ignore[union-attr, operator]

    pictures = TensorDataset(torch.randn(16, 3, 2, 2, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64))
    module = Picture()
    trainer(averaging(1, 0), max_steps=4).fit(module, DataLoader(pictures, batch_size=2))
    return module.began == module.ended


def test_parameters_stay_where_and_as_they_are(pool: Any) -> None:
    assert pool.run(places, group=False) == [True, True]


def alone_afterwards() -> Tensor:
    module = Net()
    ours = trainer(averaging(1, 0))
    ours.fit(module, DataLoader(data(), batch_size=2))
    if ours.global_rank == 0:  # it waits for nobody
        F.mse_loss(module.net(torch.ones(1, 4, dtype=torch.float64)), torch.ones(1, 1, dtype=torch.float64)).backward()
        ours.strategy.optimizers[0].step()
    return flat(module)


def test_after_the_run_a_step_is_a_step(pool: Any) -> None:
    first, second = pool.run(alone_afterwards, group=False)
    assert not torch.equal(first, second)


def twice() -> list[bool]:
    """Two runs with one strategy: in the second one, the hook has its warm-up behind it, and so has the average."""
    strategy, found = averaging(2), []
    for _ in range(2):
        module = Net()
        trainer(strategy).fit(module, DataLoader(data(), batch_size=2))
        everyones = strategy.world.gather_objects(module.after)
        found.append([torch.equal(*pair) for pair in zip(*everyones, strict=True)])
    return found[1]


def test_a_second_run_is_local_from_its_start(pool: Any) -> None:
    assert pool.run(twice, group=False)[0] == [True, False] * 4 + [True]


def with_the_engine() -> list[Tensor]:
    engine = Engine(accelerator="cpu", strategy=averaging(2, 1))
    engine.launch()
    plain = network()
    model, optimizer = engine.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    after = []
    for x, y in engine.setup_dataloaders(DataLoader(data(), batch_size=2)):
        optimizer.zero_grad()
        engine.backward(F.mse_loss(model(x), y))
        optimizer.step()
        after.append(flat(plain))
    return after


def test_an_engine_averages_too(pool: Any) -> None:
    for rank, expected in zip(pool.run(with_the_engine, group=False), by_hand(2, 1), strict=True):
        torch.testing.assert_close(torch.stack(rank), expected, rtol=1e-12, atol=1e-12)


# ---- what does not go together ---------------------------------------------------------------------------------------


def state() -> PostLocalSGDState:
    return PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=3)


@pytest.mark.parametrize("period", [0, -1, 1.5, True, "2"])
def test_a_period_is_a_number_of_steps(period: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"model_averaging_period=.*at least 1.*Write DDPStrategy\(ddp_comm"):
        DDPStrategy(ddp_comm_state=state(), ddp_comm_hook=post_localSGD_hook, model_averaging_period=period)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_averaging_period": 2}, "ddp_comm_state=None: gradients would be averaged in every step"),
        ({"model_averaging_period": 2, "ddp_comm_state": state()}, "no ddp_comm_hook"),
        ({"model_averaging_period": 2, "ddp_comm_state": object(), "ddp_comm_hook": print}, "an object: <object"),
        ({"ddp_comm_state": state(), "ddp_comm_hook": post_localSGD_hook}, "the ranks would drift apart"),
    ],
)
def test_what_averages_models_comes_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        DDPStrategy(**arguments)
    assert str(caught.value).endswith("model_averaging_period=4).")


def refused(kind: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's import of it says that torch is outdated
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    class Own(Net):
        def configure_optimizers(self) -> Any:
            make: dict[str, Callable[[], Any]] = {
                "ZeroRedundancyOptimizer": lambda: ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1),
                "PostLocalSGDOptimizer": lambda: PostLocalSGDOptimizer(
                    torch.optim.SGD(self.parameters(), lr=0.1), PeriodicModelAverager(2)
                ),
            }
            return make[kind]()

    try:
        trainer(averaging(2)).fit(Own(), DataLoader(data(), batch_size=2))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_optimizers_that_exchange_parameters_themselves_are_refused(pool: Any, kind: str) -> None:
    for message in pool.run(refused, kind, group=False):
        assert message.startswith(f"DDPStrategy(model_averaging_period=2) with a {kind}")
