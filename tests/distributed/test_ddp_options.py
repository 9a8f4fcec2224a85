"""What DDPStrategy takes reaches torch, works with every way to train, and fails with its cure."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy

STEPS = 6


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * STEPS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(8 * STEPS, 1, generator=generator, dtype=torch.float64))


class Net(LightningModule):
    """Two layers; ``sometimes``: the second one is used in every other batch only."""

    def __init__(self, by_hand: bool = False, sometimes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.double()
        self.automatic_optimization = not by_hand
        self.sometimes = sometimes

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = torch.tanh(self.first(x))
        if not (self.sometimes and batch_idx % 2):
            hidden = torch.tanh(self.second(hidden))
        return F.mse_loss(self.last(hidden), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": -1, "max_steps": STEPS,
    }  # fmt: skip
    return Trainer(strategy=strategy, **{**quiet, **arguments})


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def fitted(
    strategy: Any, batch_size: int = 4, accumulate: int = 1, by_hand: bool = False, sometimes: bool = False
) -> Tensor:
    if isinstance(strategy, dict):
        strategy = DDPStrategy(**strategy)
    elif callable(strategy):
        strategy = strategy()
    module = Net(by_hand, sometimes)
    loader: Any = DataLoader(data(), batch_size=batch_size)
    trainer(strategy, accumulate_grad_batches=accumulate).fit(module, loader)
    return weights(module)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---- how gradients are exchanged -------------------------------------------------------------------------------------


def average(calls, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and not at their text
    calls.append(bucket.buffer().numel())
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def doubled(hook: Callable[..., Any]) -> Callable[..., Any]:
    def twice(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket).then(lambda done: done.value() * 2)

    return twice


def hooked(accumulate: int, wrapper: Any = None) -> tuple[list[int], Tensor]:
    calls: list[int] = []
    strategy = DDPStrategy(ddp_comm_state=calls, ddp_comm_hook=average, ddp_comm_wrapper=wrapper)
    return calls, fitted(strategy, 4 // accumulate, accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_hook_exchanges_the_gradients_of_each_step(pool: Any, accumulate: int) -> None:
    plain = pool.run(fitted, "ddp", group=False)
    for calls, after in pool.run(hooked, accumulate, group=False):
        assert sum(calls) == STEPS * plain[0].numel()
        close(after, plain[0])


def test_a_wrapper_is_around_the_hook(pool: Any) -> None:
    plain = pool.run(fitted, "ddp", group=False)
    for calls, after in pool.run(hooked, 1, doubled, group=False):
        assert sum(calls) == STEPS * plain[0].numel()
        assert not torch.allclose(after, plain[0])


def half() -> DDPStrategy:
    return DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)


def half_wrapped() -> DDPStrategy:
    wrapper = default_hooks.fp16_compress_wrapper
    return DDPStrategy(ddp_comm_state=[], ddp_comm_hook=average, ddp_comm_wrapper=wrapper)


def low_rank() -> DDPStrategy:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    return DDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook)


@pytest.mark.parametrize("make", [half, half_wrapped, low_rank])
def test_torchs_hooks_work(pool: Any, make: Callable[[], DDPStrategy]) -> None:
    """Compressed gradients are other gradients, the same on every rank."""
    first, second = pool.run(fitted, make, group=False)
    plain, _ = pool.run(fitted, "ddp", group=False)
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    torch.testing.assert_close(first, plain, rtol=0.3, atol=0.1)


def views() -> list[bool]:
    found: list[bool] = []

    class Looked(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.extend(parameter.grad._base is not None for parameter in self.parameters())  # type: ignore[union-attr]

    trainer(DDPStrategy(gradient_as_bucket_view=True)).fit(Looked(), DataLoader(data(), batch_size=4))
    return found


def test_gradients_may_be_views_of_what_travels(pool: Any) -> None:
    assert pool.run(views, group=False) == [[True] * 6 * STEPS] * 2
    plain = pool.run(fitted, "ddp", group=False)
    close(pool.run(fitted, {"gradient_as_bucket_view": True}, group=False), plain)


# ---- graphs that are the same every time, and others -----------------------------------------------------------------


@pytest.mark.parametrize(("by_hand", "accumulate"), [(False, 1), (False, 2), (False, 3), (True, 1)])
def test_t19_a_static_graph_trains_the_same(pool: Any, by_hand: bool, accumulate: int) -> None:
    plain = pool.run(fitted, "ddp", 2, accumulate, group=False)
    close(pool.run(fitted, {"static_graph": True}, 2, accumulate, by_hand, group=False), plain)


class Unused(Net):
    """One layer is never used, and with ``turns`` the two others each by a backward pass of its own."""

    def __init__(self, by_hand: bool, turns: bool = False) -> None:
        super().__init__(by_hand)
        self.never = nn.Linear(2, 2).double()
        self.turns = turns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.turns:
            return super().training_step(batch, batch_idx)
        self.manual_backward(self.first(batch[0]).sum())
        self.manual_backward(self.last(self.first(batch[0]).detach()).sum())
        return None


def with_unused(by_hand: bool, turns: bool = False) -> Any:
    module = Unused(by_hand, turns)
    try:
        trainer(DDPStrategy(static_graph=True)).fit(module, DataLoader(data(), batch_size=2))
    except RuntimeError as error:
        return str(error)
    return weights(module)[:-6]


@pytest.mark.parametrize("by_hand", [False, True])
def test_t19_a_static_graph_may_lack_a_layer(pool: Any, by_hand: bool) -> None:
    close(pool.run(with_unused, by_hand, group=False), pool.run(fitted, "ddp", 2, group=False))


def test_t19_a_graph_that_is_not_static_is_an_error(pool: Any) -> None:
    for message in pool.run(with_unused, True, True, group=False):
        assert "Your training graph has changed" in message


def with_the_engine(static: bool) -> Tensor:
    engine = Engine(accelerator="cpu", strategy=DDPStrategy(static_graph=static))
    engine.launch()
    plain = Net()
    model, optimizer = engine.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model.mark_forward_method("loss")
    for number, batch in enumerate(engine.setup_dataloaders(DataLoader(data(), batch_size=2))):
        with engine.no_backward_sync(model, enabled=number % 3 != 2):
            engine.backward(model.loss(batch, number))
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(plain)


def test_a_static_graph_in_a_loop_of_ones_own(pool: Any) -> None:
    plain = pool.run(with_the_engine, False, group=False)
    close(pool.run(with_the_engine, True, group=False), plain)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "strategy",
    ["ddp_find_unused_parameters_true", {"find_unused_parameters": True}, "ddp_spawn_find_unused_parameters_true"],
)
def test_t43_layers_that_are_not_always_used(pool: Any, strategy: Any, by_hand: bool) -> None:
    [alone] = pool.run(fitted, "single_device", 8, 1, False, True, world_size=1, group=False)
    for after in pool.run(fitted, strategy, 4, 1, by_hand, True, group=False):
        close(after, alone)


def cured(strategy: Any, by_hand: bool) -> tuple[str, str, str]:
    try:
        fitted(strategy, 4, 1, by_hand, True)
    except ConfigurationError as error:
        return str(error), type(error.__context__).__name__, str(error.__context__)
    return "", "", ""


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_false", {"start_method": "forkserver"}])
def test_t43_the_error_names_the_parameters_and_ends_with_the_cure(pool: Any, strategy: Any, by_hand: bool) -> None:
    for message, kind, cause in pool.run(cured, strategy, by_hand, group=False):
        assert "did not depend on 'second.weight', 'second.bias'" in message
        name = "ddp" if isinstance(strategy, str) else "ddp_forkserver"
        assert message.endswith(f'write strategy="{name}_find_unused_parameters_true". [DT1042]')
        assert kind == "RuntimeError"
        assert "Expected to have finished reduction" in cause


def test_t43_the_cure_starts_processes_as_before(pool: Any) -> None:
    [(message, *_), _] = pool.run(cured, "ddp_spawn", False, group=False)
    assert message.endswith('write strategy="ddp_spawn_find_unused_parameters_true". [DT1042]')


def ends_without(strategy: str, by_hand: bool) -> Any:
    module = Net(by_hand, sometimes=True)
    try:
        trainer(strategy, max_steps=2).fit(module, DataLoader(data(), batch_size=4))
    except ConfigurationError as error:
        return str(error)
    return weights(module)


@pytest.mark.parametrize("by_hand", [False, True])
def test_t43_the_last_pass_may_be_the_one_that_misses_parameters(pool: Any, by_hand: bool) -> None:
    """Torch sees it in the next pass; without one, each rank would have gone its own way in silence."""
    for message in pool.run(ends_without, "ddp", by_hand, group=False):
        assert "did not depend on 'second.weight', 'second.bias'" in message
    first, second = pool.run(ends_without, "ddp_find_unused_parameters_true", by_hand, group=False)
    assert torch.equal(first, second)


def other_error() -> str:
    class Wrong(Net):
        def loss(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("of the user")

    try:
        trainer("ddp").fit(Wrong(), DataLoader(data(), batch_size=4))
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_errors_stay_what_they_are(pool: Any) -> None:
    assert pool.run(other_error, group=False) == ["of the user"] * 2


# ---- the process group -----------------------------------------------------------------------------------------------


def group_made() -> tuple[Any, Any]:
    made: list[Any] = []
    original = dist.init_process_group

    def recorded(*args: Any, **kwargs: Any) -> None:
        made.append((args[0], kwargs["timeout"]))
        original(*args, **kwargs)

    dist.init_process_group = recorded
    try:
        fitted({"process_group_backend": "cpu:gloo", "timeout": timedelta(seconds=77)})
    finally:
        dist.init_process_group = original
    return made, dist.get_backend()


def test_backend_and_timeout_reach_the_process_group(pool: Any) -> None:
    made, backend = pool.run(group_made, group=False)[0]
    assert made == [("cpu:gloo", timedelta(seconds=77))]
    assert backend == "cpu:gloo"


def second_group(changes: dict[str, Any]) -> str:
    options = {"process_group_backend": "gloo", "timeout": timedelta(seconds=77)}
    fitted(options)
    try:
        fitted({**options, **changes})
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"timeout": timedelta(seconds=5)},
            "DDPStrategy(timeout=datetime.timedelta(seconds=5)): the processes",
        ),
        ({"process_group_backend": "cpu:gloo"}, "with process_group_backend='gloo', and all Trainers of a program use"),
        ({}, ""),
        ({"process_group_backend": None}, ""),
    ],
)
def test_a_second_trainer_has_the_same_process_group_or_is_refused(
    pool: Any, changes: dict[str, Any], message: str
) -> None:
    for found in pool.run(second_group, changes, group=False):
        assert message in found
        assert bool(found) == bool(message)


class Stopped(Exception):
    """The rank that stays away ends its own run."""


def waited(folder: Path, timeout_s: float, late_s: float) -> Any:
    """Rank 1 stays away in the third batch until rank 0 has failed, or for ``late_s`` seconds at most."""
    store = dist.FileStore(str(folder / "store"), 2)

    class Late(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 2:
                try:
                    store.wait(["failed"], timedelta(seconds=late_s))
                except RuntimeError:  # nothing was said: late, and not too late
                    return super().training_step(batch, batch_idx)
                raise Stopped
            return super().training_step(batch, batch_idx)

    ours = trainer(DDPStrategy(timeout=timedelta(seconds=timeout_s)))
    began = time.monotonic()
    try:
        ours.fit(Late(), DataLoader(data(), batch_size=4))
    except (RuntimeError, Stopped) as error:
        store.set("failed", "")
        return type(error).__name__, time.monotonic() - began, ours.global_step
    return "", time.monotonic() - began, ours.global_step


def test_a_rank_that_stays_away_is_waited_for_so_long(pool: Any, tmp_path: Path) -> None:
    (first, seconds, steps), (second, *_) = pool.run(waited, tmp_path, 1.0, 50.0, group=False)
    assert (first, second, steps) == ("RuntimeError", "Stopped", 2)
    assert 1 <= seconds < 20


def test_a_rank_that_is_late_is_not_given_up(pool: Any, tmp_path: Path) -> None:
    """The control: the other rank was as long away as before, and its patience was longer."""
    for error, seconds, steps in pool.run(waited, tmp_path, 50.0, 2.0, group=False):
        assert (error, steps) == ("", STEPS)
        assert seconds >= 2


# ---- what is chosen by default ---------------------------------------------------------------------------------------

BATCHED = "batched_grad_copy"
has_batched = pytest.mark.skipif(
    BATCHED not in inspect.signature(nn.parallel.DistributedDataParallel).parameters, reason="this torch lacks it"
)


class Deep(Net):
    """Twelve layers; ``sometimes``: every other batch leaves one out. It keeps its losses and DDP's choice."""

    def __init__(
        self, by_hand: bool = False, sometimes: bool = False, layers: int = 12, width: int = 8, sparse: bool = False
    ) -> None:
        super().__init__(by_hand, sometimes)
        inner = [nn.Linear(width, width) for _ in range(layers - 4)]
        self.second = nn.Sequential(nn.Linear(8, width), *inner, nn.Linear(width, 8))  # type: ignore[assignment]
        self.rows = nn.Embedding(5, 1, sparse=True) if sparse else None
        self.float()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([each.float() for each in batch], batch_idx)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().loss(batch, batch_idx)
        if self.rows is not None:
            loss = loss + self.rows(torch.tensor([batch_idx % 5, 1])).square().sum()
        self.losses.append(loss.detach())
        return loss


def deep(strategy: dict[str, Any], accumulate: int = 1, **options: Any) -> tuple[Any, list[Tensor]]:
    module, chosen = Deep(**options), []

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            chosen.append(getattr(trainer.strategy.model, BATCHED, None))

    fit = trainer(DDPStrategy(**strategy), accumulate_grad_batches=accumulate, callbacks=[Look()])
    fit.fit(module, DataLoader(data(), batch_size=2))
    return chosen[0], [*module.losses, *(each.detach() for each in module.parameters())]


@has_batched
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {}),
        ({}, {"accumulate": 2}),
        ({}, {"by_hand": True}),
        ({}, {"sparse": True}),
        ({"find_unused_parameters": True}, {"sometimes": True}),
        ({"find_unused_parameters": True}, {"sometimes": True, "by_hand": True}),
    ],
    ids=["plain", "accumulating", "by hand", "sparse", "unused", "unused by hand"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_copied_a_bucket_at_a_time_with_the_same_bits(
    pool: Any, strategy: dict[str, Any], options: dict[str, Any], ranks: int
) -> None:
    separate = pool.run(deep_on, {**strategy, BATCHED: False}, options, world_size=ranks, group=False)
    together = pool.run(deep_on, strategy, options, world_size=ranks, group=False)
    for (asked, before), (chosen, after) in zip(separate, together, strict=True):
        assert (asked, chosen) == (False, True)
        assert len(before) == len(after) > 2 * STEPS
        assert all(map(torch.equal, before, after))


def deep_on(strategy: dict[str, Any], options: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    return deep(strategy, **options)


@has_batched
@pytest.mark.parametrize(
    ("strategy", "options", "ranks"),
    [
        ({}, {}, 3),
        ({}, {"layers": 5}, 2),
        ({}, {"width": 200}, 2),
        ({"gradient_as_bucket_view": True}, {}, 2),
        ({"static_graph": True}, {}, 2),
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, {}, 2),
    ],
    ids=["three ranks", "few parameters", "many numbers", "views", "static graph", "hook"],
)
def test_elsewhere_gradients_are_copied_one_by_one(
    pool: Any, strategy: dict[str, Any], options: dict[str, Any], ranks: int
) -> None:
    found = pool.run(deep_on, strategy, options, world_size=ranks, group=False)
    assert [chosen for chosen, _ in found] == [False] * ranks


def broadcasts(has_buffer: bool) -> int:
    """The broadcasts of a fit's forward passes."""
    calls: list[None] = []
    module = Net()
    if has_buffer:
        module.register_buffer("mine", torch.zeros(1))

    class Count(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            model = trainer.strategy.model
            share = model._sync_buffers
            model._sync_buffers = lambda: calls.append(None) or share()

    trainer(DDPStrategy(), callbacks=[Count()]).fit(module, DataLoader(data(), batch_size=4))
    return len(calls)


@pytest.mark.parametrize(("has_buffer", "count"), [(False, 0), (True, STEPS)])
def test_buffers_are_broadcast_where_there_are_buffers(pool: Any, has_buffer: bool, count: int) -> None:
    assert pool.run(broadcasts, has_buffer, group=False) == [count, count]


@pytest.mark.parametrize(
    ("name", "meant"), [("find_unsed_parameters", "find_unused_parameters"), ("timout", "timeout"), ("module", "")]
)
def test_an_argument_that_neither_the_strategy_nor_ddp_has_is_refused_at_once(name: str, meant: str) -> None:
    arguments: Any = {name: True}
    with pytest.raises(TypeError, match=f"has no argument {name}=True.*{meant}") as caught:
        DDPStrategy(**arguments)
    assert isinstance(caught.value, ConfigurationError)


newer = pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters,
    reason="DistributedDataParallel of this torch has no forward_sync_buffers",
)


@pytest.mark.parametrize(
    ("arguments", "has_own"),
    [
        ({}, False),
        ({"broadcast_buffers": True}, False),
        ({"broadcast_buffers": False}, True),
        pytest.param({"forward_sync_buffers": False}, True, marks=newer),
        pytest.param({"forward_sync_buffers": True, "broadcast_buffers": False}, False, marks=newer),
    ],
)
def test_a_checkpoint_holds_each_ranks_buffers_where_none_are_broadcast(
    arguments: dict[str, Any], has_own: bool
) -> None:
    strategy, module = DDPStrategy(**arguments), nn.BatchNorm1d(2)
    strategy.global_rank = 1
    assert bool(strategy.rank_state(module)) is has_own
