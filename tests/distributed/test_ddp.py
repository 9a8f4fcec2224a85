"""Training on several processes gives the numbers of training on one."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from drivetrain import LightningModule, Trainer, WeightedLoss, parity
from drivetrain.data import CombinedLoader
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import DummyLogger
from drivetrain.loops import direct
from drivetrain.parity import Parity
from drivetrain.strategies import DDPStrategy
from drivetrain.trainer import votes


def chain(lists: Any) -> list[Any]:
    return [item for one in lists for item in one]


def trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
             "enable_checkpointing": False, "accelerator": "cpu"}  # fmt: skip
    return Trainer(**{**quiet, "num_sanity_val_steps": 0, **arguments})


def data(count: int = 120) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator),
        torch.randint(1, 9, (count,), generator=generator),
    )  # fmt: skip


class Regression(LightningModule):
    def __init__(self, weighted: bool | str = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.weighted = weighted
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        self.seen.append(x[:, 0].tolist())
        if self.weighted:
            each = F.mse_loss(self.net(x), y, reduction="none").squeeze(1)
            weight = tokens.sum() if self.weighted == "tensor" else int(tokens.sum())
            return WeightedLoss((each * tokens).sum() / tokens.sum(), weight)
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98), "interval": "step"}]


def fitted(
    batch_size: int, accumulate: int, weighted: bool | str, shuffle: bool, count: int, precision: str = "64-true"
) -> dict[str, Any]:
    torch.manual_seed(7)
    module = Regression(weighted)
    loader: Any = DataLoader(data(count), batch_size=batch_size, shuffle=shuffle)
    ours = trainer(max_steps=50, precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=0.5,
                   max_epochs=-1)  # fmt: skip
    ours.fit(module, loader)
    return {
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "seen": module.seen,
        "loss": float(ours.callback_metrics.get("loss", 0)),
        "steps": ours.global_step,
    }


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [120, 113])
def test_the_same_global_batch_trains_the_same_however_it_is_shared(
    pool: Any, weighted: bool, shuffle: bool, count: int
) -> None:
    alone = fitted(12, 1, weighted, shuffle, count)
    assert alone["steps"] == 50
    for world_size, batch_size, accumulate in ((2, 6, 1), (3, 4, 1), (2, 3, 2)):
        if accumulate > 1 and count % 12:
            continue  # the windows of an epoch's end hold other samples then
        ranks = pool.run(fitted, batch_size, accumulate, weighted, shuffle, count, world_size=world_size, group=False)
        for rank in ranks:
            torch.testing.assert_close(rank["weights"], alone["weights"], rtol=1e-9, atol=1e-9)
        assert ranks[0]["loss"] == pytest.approx(alone["loss"], abs=1e-9)
        if accumulate == 1:
            together = [sorted(chain(parts)) for parts in zip(*(rank["seen"] for rank in ranks), strict=True)]
            expected = [sorted(batch) for batch in alone["seen"]]
            assert [sorted(set(batch)) for batch in together] == expected  # a repeated batch adds nothing new


def test_weights_that_the_device_has_counted_are_as_exact_as_numbers(pool: Any) -> None:
    alone = fitted(12, 1, True, False, 120)
    for rank in pool.run(fitted, 2, 3, "tensor", False, 120, group=False):
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_and_in_32_bits_to_five_digits(pool: Any, weighted: bool) -> None:
    alone = fitted(12, 1, weighted, True, 120, "32-true")
    for world_size, batch_size, accumulate in ((2, 6, 1), (3, 4, 1), (2, 3, 2)):
        arguments = (batch_size, accumulate, weighted, True, 120, "32-true")
        for rank in pool.run(fitted, *arguments, world_size=world_size, group=False):
            torch.testing.assert_close(rank["weights"], alone["weights"], rtol=1e-5, atol=1e-5)


def test_a_wrong_rank_count_is_seen(pool: Any) -> None:
    """The control: another global batch trains to other numbers."""
    alone = fitted(12, 1, False, False, 120)
    ranks = pool.run(fitted, 12, 1, False, False, 120, world_size=2, group=False)
    assert not torch.allclose(ranks[0]["weights"], alone["weights"], rtol=1e-3)


# ---- evaluation ------------------------------------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Evaluated(LightningModule):
    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.gathers = gathers
        self.steps = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        warnings.filterwarnings("ignore", "own: logged without sync_dist")  # as it is meant
        self.steps += 1
        if self.gathers:
            assert self.all_gather(torch.ones(3)).numel() == 3 * self.trainer.world_size
        self.log("mean", batch.mean(), sync_dist=True)
        self.log("one", 1.0, sync_dist=True)
        self.log("sum", batch.sum(), sync_dist=True, reduce_fx="sum")
        self.log("most", batch.max(), sync_dist=True, reduce_fx="max")
        self.log("own", float(self.global_rank))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch * 2

    def training_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> None: ...


def validated(count: int, batch_size: int, numbers: Parity | None = None, gathers: bool = False) -> Any:
    before = parity.use(numbers or Parity())
    try:
        module = Evaluated(gathers)
        [metrics] = trainer().validate(module, DataLoader(Numbers(count), batch_size=batch_size), verbose=False)
        return metrics, module.steps
    finally:
        parity.use(before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("count", "batch_size"), [(5, 1), (5, 2), (6, 2), (7, 4), (1, 1)])
def test_t3_every_sample_counts_once(pool: Any, world_size: int, count: int, batch_size: int) -> None:
    ranks = pool.run(validated, count, batch_size, None, True, world_size=world_size, group=False)
    assert len({steps for _, steps in ranks}) == 1  # the same number of collectives on every rank
    for rank, (metrics, _) in enumerate(ranks):
        assert metrics["mean"] == (count - 1) / 2
        assert metrics["one"] == 1.0
        assert metrics["sum"] == count * (count - 1) / 2
        assert metrics["most"] == count - 1
        assert metrics.get("own", rank) == rank  # trap T5; a rank without a sample of its own has logged nothing


def test_t3_padding_is_there_for_those_who_ask(pool: Any) -> None:
    [(metrics, _), _] = pool.run(validated, 5, 1, Parity(padded_evaluation=True), group=False)
    assert metrics["mean"] == pytest.approx((0 + 1 + 2 + 3 + 4 + 0) / 6)


def test_t6_truncated_batch_sizes_are_there_for_those_who_ask(pool: Any) -> None:
    [(metrics, _), _] = pool.run(validated, 3, 2, group=False)
    assert metrics["one"] == 1.0
    [(metrics, _), _] = pool.run(validated, 3, 2, Parity(averaged_batch_sizes=True), group=False)
    assert metrics["one"] == 1.5  # sizes 2 and 1: the mean of the sums by the truncated mean of the sizes


def predicted(count: int, batch_size: int) -> Any:
    module = Evaluated()
    found = trainer().predict(module, DataLoader(Numbers(count), batch_size=batch_size))
    assert found is not None
    return [batch.tolist() for batch in found]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("count", "batch_size"), [(12, 2), (5, 1), (7, 2)])
def test_predictions_come_in_the_order_of_the_data_on_rank_zero(
    pool: Any, world_size: int, count: int, batch_size: int
) -> None:
    first, *others = pool.run(predicted, count, batch_size, world_size=world_size, group=False)
    assert chain(first) == [2.0 * index for index in range(count)]
    assert others == [[]] * (world_size - 1)


# ---- samplers --------------------------------------------------------------------------------------------------------


class Collected(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.batches.append(batch.tolist())


class Odd(BatchSampler):
    """Somebody's own: batches of growing size."""

    def __init__(self) -> None:
        super().__init__(range(10), 1, False)

    def __iter__(self) -> Any:
        return iter([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [5, 5]])

    def __len__(self) -> int:
        return 5


def shared_out(kind: str) -> list[list[float]]:
    torch.manual_seed(int(__import__("os").environ.get("RANK", 0)))  # the ranks' own random states differ
    loaders: dict[str, Any] = {
        "random": lambda: DataLoader(Numbers(8), batch_size=2, sampler=RandomSampler(Numbers(8))),
        "batches": lambda: DataLoader(Numbers(10), batch_sampler=Odd()),
        "unbatched": lambda: DataLoader(Numbers(4), batch_size=None),
        "weighted": lambda: DataLoader(
            Numbers(8), batch_size=2, sampler=torch.utils.data.WeightedRandomSampler(torch.ones(8), 8)
        ),
        "whole": lambda: DataLoader(Numbers(4), batch_size=2),
    }
    module = Collected()
    trainer(use_distributed_sampler=kind != "whole").validate(module, loaders[kind](), verbose=False)
    return module.batches


def test_t1_a_random_sampler_draws_one_order_for_all(pool: Any) -> None:
    [alone] = pool.run(shared_out, "random", world_size=1, group=False)
    ranks = pool.run(shared_out, "random", group=False)
    flat = [sample for pair in zip(*ranks, strict=True) for batch in pair for sample in batch]
    assert flat == chain(alone)
    assert sorted(flat) == list(range(8))
    weighted = pool.run(shared_out, "weighted", group=False)
    [alone] = pool.run(shared_out, "weighted", world_size=1, group=False)
    assert [s for pair in zip(*weighted, strict=True) for batch in pair for s in batch] == chain(alone)


def test_t1_batches_of_ones_own_are_dealt_whole(pool: Any) -> None:
    first, second = pool.run(shared_out, "batches", group=False)
    assert first == [[0], [3, 4, 5], [5, 5]]
    assert second == [[1, 2], [6, 7, 8, 9], [6, 7, 8, 9]]  # the last one is repeated, and counts for nothing
    assert pool.run(shared_out, "unbatched", group=False) == [[0, 2], [1, 3]]
    assert pool.run(shared_out, "whole", group=False) == [[[0, 1], [2, 3]]] * 2


# ---- what must not hang ----------------------------------------------------------------------------------------------


class LogsAlone(Evaluated):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("all", 1.0, sync_dist=True)
        if self.global_rank == 0:
            self.log("alone", 1.0, sync_dist=True)


def logged_alone() -> str:
    try:
        trainer().validate(LogsAlone(), DataLoader(Numbers(4)), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_t8_a_name_that_one_rank_alone_logs_is_an_error_on_all(pool: Any) -> None:
    for message in pool.run(logged_alone, group=False):
        assert "alone" in message


class Uneven(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, shares: list[int]) -> None:
        self.shares = shares

    def __iter__(self) -> Any:
        rank = int(__import__("os").environ["RANK"])
        return iter([torch.tensor(float(10 * rank + i)) for i in range(self.shares[rank])])


def unevenly(shares: list[int]) -> Any:
    module = Evaluated(gathers=True)
    try:
        [metrics] = trainer().validate(module, DataLoader(Uneven(shares), batch_size=1), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return metrics["mean"], module.steps


def test_ranks_with_less_data_wait_for_nobody(pool: Any) -> None:
    expected = (0 + 1 + 2 + 10) / 4
    assert pool.run(unevenly, [3, 1], group=False) == [(expected, 3)] * 2
    for message in pool.run(unevenly, [3, 0], group=False):
        assert "no batch at all on rank 1" in message


class StopsAlone(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stopped() -> tuple[int, int]:
    ours = trainer(max_epochs=5, log_every_n_steps=4)
    module = StopsAlone()
    ours.fit(module, DataLoader(data(64), batch_size=2))
    return ours.global_step, len(module.seen)


def test_one_rank_that_stops_stops_all_at_the_same_batch(pool: Any) -> None:
    first, second = pool.run(stopped, group=False)
    assert first == second == (4, 4)


# ---- resume ----------------------------------------------------------------------------------------------------------


class Dropped(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


def resumed(folder: Any, first: int | None, last: int) -> Tensor:
    """Train to step ``last``: in one go, or stopping at step ``first`` and going on from a checkpoint."""
    loader: Any = DataLoader(data(100), batch_size=5, shuffle=True)
    path = folder / "stopped.ckpt"
    for steps, resumes in ((first, False), (last, first is not None)):
        if steps is None:
            continue
        torch.manual_seed(5)
        module = Dropped()
        torch.manual_seed(int(__import__("os").environ["RANK"]))  # each rank draws its own dropout
        ours = trainer(max_steps=steps, max_epochs=-1, log_every_n_steps=3)
        ours.fit(module, loader, ckpt_path=path if resumes else None)
        ours.save_checkpoint(path)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("first", [10, 13, 20])
def test_t26_a_run_of_two_processes_goes_on_exactly(pool: Any, tmp_path: Any, first: int) -> None:
    whole = pool.run(resumed, tmp_path, None, 27, group=False)
    parts = pool.run(resumed, tmp_path, first, 27, group=False)
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(parts[0], parts[1])


class Shares(Regression):
    """Keeps what its callbacks see, after each batch, of a value that the ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("shared", loss.detach(), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append(float(self.trainer.callback_metrics["shared"]))


def shown(path: Any, first: int | None, last: int) -> list[float]:
    parts: list[list[float]] = []
    for steps in (first, last):
        if steps is not None:
            module, ours = Shares(), trainer(max_steps=steps, max_epochs=-1, log_every_n_steps=3)
            ours.fit(module, DataLoader(data(100), batch_size=5), ckpt_path=path if parts else None)
            ours.save_checkpoint(path)
            parts.append(module.shown)
    return chain(parts)


@pytest.mark.parametrize("first", [2, 4])
def test_t26_callbacks_of_a_resumed_run_see_the_value_on_which_the_ranks_have_agreed(
    pool: Any, tmp_path: Any, first: int
) -> None:
    """The ranks agree when the log is flushed, after each third step; before the first flush each shows its own."""
    path = tmp_path / "stopped.ckpt"
    whole = pool.run(shown, path, None, 7, group=False)
    assert whole[0][:3] != whole[1][:3]
    assert whole[0][3:] == whole[1][3:]
    assert pool.run(shown, path, first, 7, group=False) == whole


# ---- what a review found ---------------------------------------------------------------------------------------------


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Automatic(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0]), batch[1])


def by_hand_or_not(kind: str, count: int, strategy: str) -> Tensor:
    module = {"hand": ByHand, "auto": Automatic}[kind]()
    ours = trainer(max_epochs=2, precision="64-true", strategy=strategy)
    ours.fit(module, DataLoader(data(count), batch_size=2))
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
@pytest.mark.parametrize("count", [16, 13])
def test_t19_manual_optimization_is_the_automatic_one(pool: Any, strategy: str, count: int) -> None:
    automatic = pool.run(by_hand_or_not, "auto", count, strategy, group=False)
    for rank in pool.run(by_hand_or_not, "hand", count, strategy, group=False):
        torch.testing.assert_close(rank, automatic[0], rtol=1e-12, atol=1e-12)


class Steps(Evaluated):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", batch.mean(), on_step=True, on_epoch=True, sync_dist=True)


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def step_values(count: int) -> list[Any]:
    logger = Kept()
    trainer(logger=logger).validate(Steps(), DataLoader(Numbers(count), batch_size=2), verbose=False)
    return [metrics.get("v_step", metrics.get("v_epoch")) for _, metrics in logger.rows]


def test_values_of_each_step_are_shared_too(pool: Any) -> None:
    assert pool.run(step_values, 8, group=False)[0] == [1.5, 5.5, 3.5]
    assert pool.run(step_values, 5, group=False)[0] == [1.5, 4.0, 2.0]  # rank 1 has nothing of the last batch


def every_step(count: int) -> list[Any]:
    logger = Kept()
    ours = trainer(max_epochs=1, log_every_n_steps=1, logger=logger)

    class Logs(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("first", batch[0][:, 0].mean(), sync_dist=True)
            return super().training_step(batch, batch_idx)

    ours.fit(Logs(), DataLoader(data(count), batch_size=2))
    return [metrics["first"] for _, metrics in logger.rows if "first" in metrics]


def test_a_training_value_of_a_batch_that_one_rank_lacks(pool: Any) -> None:
    x = data(5).tensors[0][:, 0]
    logged = pool.run(every_step, 5, group=False)[0]
    assert logged == pytest.approx([x[:4].mean().item(), x[4].item()])


def epoch_saved(folder: Any) -> None:
    ours = trainer(max_epochs=1, default_root_dir=folder, enable_checkpointing=True)
    ours.fit(Automatic(), DataLoader(data(16), batch_size=2))


def taken_up(path: str) -> int:
    ours = trainer(max_epochs=2, enable_checkpointing=True, default_root_dir=Path(path).parents[1])
    ours.fit(Automatic(), DataLoader(data(16), batch_size=2), ckpt_path=path)
    return ours.global_step


def test_the_end_of_an_epoch_is_taken_up_by_any_number(pool: Any, tmp_path: Any) -> None:
    for saving, resuming, steps in ((2, 1, 4 + 8), (1, 2, 8 + 4)):
        folder = tmp_path / str(saving)
        pool.run(epoch_saved, folder, world_size=saving, group=False)
        [path] = folder.rglob("*.ckpt")
        assert pool.run(taken_up, str(path), world_size=resuming, group=False) == [steps] * resuming


def combined_again_and_again() -> list[int]:
    class Both(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    loaders = CombinedLoader({"a": DataLoader(data(16), batch_size=2)}, "max_size_cycle")
    steps = []
    for _ in range(3):
        ours = trainer(max_epochs=1)
        ours.fit(Both(), loaders)
        steps.append(ours.global_step)
    again = trainer(max_epochs=1)
    again.fit(Automatic(), DataLoader(data(16), batch_size=2))
    more = trainer(max_epochs=1)
    more.fit(Automatic(), again.train_dataloader)
    return [*steps, more.global_step]


def test_t1_a_loader_is_shared_out_once(pool: Any) -> None:
    assert pool.run(combined_again_and_again, group=False) == [[4, 4, 4, 4]] * 2


class Unsized(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        rank = int(__import__("os").environ["RANK"])
        return iter([(data().tensors[0][rank], data().tensors[1][rank])] * (3 if rank == 0 else 1))


def gradients() -> list[float]:
    norms: list[float] = []

    class Kept(Automatic):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer(max_epochs=1).fit(Kept(), DataLoader(Unsized(), batch_size=1))
    return norms


class Prepares(Regression):
    """Rank 0 prepares its data for longer than the process group would wait."""

    def prepare_data(self) -> None:
        threading.Event().wait(2.5)


def prepared(patient: bool) -> bool:
    strategy = DDPStrategy(timeout=timedelta(seconds=1))
    module = Prepares()
    with pytest.MonkeyPatch.context() as patch:
        if not patient:
            patch.setattr(votes, "PREPARE_DATA", "no phase")
            patch.setattr(votes, "_PATIENCE_S", 0.0)
        try:
            trainer(max_steps=1, strategy=strategy).fit(module, DataLoader(data(), batch_size=12))
        except Exception:
            return False
    return bool(module.seen)


def test_t41_data_may_be_prepared_for_longer_than_a_timeout(pool: Any) -> None:
    assert pool.run(prepared, True, group=False) == [True, True]
    assert pool.run(prepared, False, group=False)[1] is False  # the control: the group's own barrier gives up


def test_a_rank_without_data_does_not_shrink_the_others_gradients(pool: Any) -> None:
    together, _ = pool.run(gradients, group=False)
    [alone] = pool.run(gradients, world_size=1, group=False)
    assert together[1:] == pytest.approx(alone[1:])
    assert together[0] != pytest.approx(alone[0])


# ---- optimizers that look at the loss --------------------------------------------------------------------------------


class LineSearch(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=8, line_search_fn="strong_wolfe")


def searched(batch_size: int, weighted: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    module = LineSearch(weighted)
    trainer(max_epochs=3, precision="64-true").fit(module, DataLoader(data(25), batch_size=batch_size))
    return module.net.state_dict()


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_search_along_the_loss_of_all(pool: Any, weighted: bool) -> None:
    """L-BFGS decides by the loss how far it goes: with each rank's own, the ranks part or wait for each other."""
    alone = searched(12, weighted)
    for rank in pool.run(searched, 6, weighted, group=False):
        for name, value in rank.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-7, atol=1e-7)


def fit_both_ways(accumulate: int, comm_hook: bool) -> list[tuple[str, Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ways = []
    for switch in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(direct.SWITCH, switch)
            module, strategy = Regression(), DDPStrategy(ddp_comm_hook=allreduce_hook if comm_hook else None)
            own = trainer(devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
            own.fit(module, DataLoader(data(44), 4))
            choice = next(each.choice for each in own.plan.decisions if each.what == "step")
            ways.append((choice, [each.detach() for each in module.parameters()]))
    return ways


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("comm_hook", "choice"), [(False, "direct calls"), (True, "public calls")])
def test_direct_calls_under_ddp_are_equal_bit_for_bit(pool: Any, accumulate: int, comm_hook: bool, choice: str) -> None:
    for ways in pool.run(fit_both_ways, accumulate, comm_hook):
        (public, expected), (chosen, found) = ways
        assert (public, chosen) == ("public calls", choice)
        assert all(map(torch.equal, found, expected))
