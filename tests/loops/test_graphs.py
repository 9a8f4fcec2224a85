"""``Trainer(cuda_graphs=...)`` on the CPU, with a recorder of graphs that replays the operations of torch alone.

The reference is the same Trainer that never gets to recording: it runs each step as always.
"""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops.recording import FakeRecorder, RecordingAccelerator
from torch import nn

from drivetrain import Callback, LightningModule, Trainer, WeightedLoss
from drivetrain.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint, WeightAveraging
from drivetrain.errors import ConfigurationError, RunError
from drivetrain.loops import graph_parts, graphs
from drivetrain.strategies import SingleDeviceStrategy


class Ready:
    """Batches that lie in a list, and are not taken for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def batches(*sizes: int, seed: int = 0) -> Ready:
    generator = torch.Generator().manual_seed(seed)
    return Ready([(torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes])


class Net(LightningModule):
    """Batch norm and dropout, values that are logged in every way, and an attribute that its loss depends on."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.factor = 1.0
        self.momentum = momentum

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y) * self.factor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"mean": loss, "size": len(batch[0])}, on_step=False, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Values(Callback):
    """Keeps what each batch has returned and what ``callback_metrics`` showed after it, as they were handed out."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.metrics: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.metrics.append(dict(trainer.callback_metrics))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Fit = Callable[..., tuple[Trainer, Any]]


@pytest.fixture
def fit(make_trainer: Any) -> Fit:
    def run(module: Any, loader: Any, *callbacks: Any, seed: int = 3, **arguments: Any) -> tuple[Trainer, Any]:
        torch.manual_seed(seed)
        ckpt_path, val = arguments.pop("ckpt_path", None), arguments.pop("val", None)
        defaults = {"cuda_graphs": True, "max_epochs": 3, "log_every_n_steps": 3, "limit_val_batches": 1.0 * bool(val)}
        trainer = make_trainer(
            **{"accelerator": RecordingAccelerator(), "callbacks": list(callbacks), **defaults, **arguments}
        )
        trainer.fit(module, loader, val, ckpt_path=ckpt_path)
        recorders = trainer.accelerator.recorders
        return trainer, recorders[-1] if recorders else FakeRecorder()

    return run


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function while no step gets to recording."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "WARM_UPS", 10**9)
            return function()

    return call


def state(module: nn.Module) -> list[Any]:
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


def equal(ours: Any, theirs: Any) -> bool:
    return graph_parts.same_bits(ours, theirs)


def both(
    fit: Fit, never: Any, make: Callable[[], Any], loader: Any, *parties: Callable[[], Any], **arguments: Any
) -> Any:
    """Train with graphs and without; return the recorder, and whether parameters, logs and outputs were equal."""

    def once() -> Any:
        module, values = make(), Values()
        trainer, recorder = fit(module, loader, values, *(party() for party in parties), **arguments)
        results = [state(module), values.outputs, values.metrics, dict(trainer.logged_metrics), trainer.global_step]
        return results, recorder

    ours, recorder = once()
    theirs, idle = never(once)
    assert idle.recorded == 0
    return recorder, equal(ours, theirs)


# ---- what is replayed equals what is not -----------------------------------------------------------------------------


def test_replayed_steps_equal_the_same_steps_without_a_graph(fit: Fit, never: Any) -> None:
    recorder, same = both(fit, never, Net, batches(*[8] * 9, 5), max_epochs=4, gradient_clip_val=0.5)
    assert same
    assert recorder.recorded == 2  # the smaller batch comes once an epoch, and is recorded in the fourth one
    assert recorder.replayed == 4 * 9 - graphs.WARM_UPS + 1


def capturable_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adam", "rmsprop", "nadam"):
        here = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(here, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_optimizers_that_read_their_state_from_the_device(
    kind: Any, fit: Fit, never: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturable_on_cpu(monkeypatch)

    class ByKind(Net):
        def configure_optimizers(self) -> Any:
            optimizer = kind(self.parameters(), lr=0.01, foreach=True)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    recorder, same = both(fit, never, ByKind, batches(*[8] * 6))
    assert same
    assert recorder.replayed >= 12


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"foreach": True}, False), ({"foreach": False}, False), ({"fused": True}, False)],
)
def test_adam_takes_torchs_fused_kernel_unless_the_user_has_chosen_one(
    options: dict[str, bool], fused: bool, fit: Fit, never: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturable_on_cpu(monkeypatch)
    seen: list[Any] = []

    class ByAdam(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, **options)
            taken = optimizer.step
            optimizer.step = lambda *given: (seen.append(optimizer.param_groups[0]["fused"]), taken(*given))[1]
            return optimizer

    both(fit, never, ByAdam, batches(*[8] * 6))
    assert set(seen) == {True if fused else options.get("fused")}


def test_the_optimizer_is_as_the_user_made_it_after_the_fit(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    capturable_on_cpu(monkeypatch)

    class ByAdam(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.25)

    trainer, _ = fit(ByAdam(), batches(8, 8, 8, 8, 8))
    [group] = trainer.optimizers[0].param_groups
    assert (group["lr"], group["capturable"], group["fused"]) == (0.25, False, None)


@pytest.mark.parametrize("form", ["dictionary", "nested", "several types", "weighted", "constant text"])
def test_batches_and_outputs_of_all_forms(form: str, fit: Fit, never: Any) -> None:
    def shaped(x: Any, y: Any) -> Any:
        if form == "dictionary":
            return {"x": x, "y": y}
        if form == "nested":
            return [{"x": (x, None)}, [y, 3]]
        if form == "several types":
            return {"x": x.double(), "y": (y > 0).long(), "flag": y > 1}
        return {"x": x, "y": y, "source": "a"} if form == "constant text" else (x, y)

    class Formed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if form == "nested":
                x, y = batch[0]["x"][0], batch[1][0]
            elif form == "weighted":
                x, y = batch
            else:
                x, y = batch["x"].float(), batch["y"].float()
            loss = self.loss((x, y))
            self.log("loss", loss)
            return WeightedLoss(loss, len(x)) if form == "weighted" else loss

    loader = Ready([shaped(x, y) for x, y in batches(*[8] * 8).batches])
    recorder, same = both(fit, never, Formed, loader)
    assert same
    assert recorder.replayed > 15


# ---- 200 random sequences --------------------------------------------------------------------------------------------


class Events(Callback):
    """Changes something between two batches, as a user's code may."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.at = {draw.randrange(4, 22): draw.choice(self.KINDS) for _ in range(3)}

    KINDS = (
        "attribute",
        "rate",
        "group",
        "freeze",
        "load",
        "mode",
        "swap",
        "dropout",
        "momentum",
        "gradients",
        "state",
    )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        event = self.at.get(trainer.global_step)
        optimizer, net = trainer.optimizers[0], pl_module.net
        if event == "attribute":
            pl_module.factor *= 0.5
        elif event == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
        elif event == "group" and len(optimizer.param_groups) == 1:
            pl_module.extra = nn.Linear(1, 1)
            optimizer.add_param_group({"params": pl_module.extra.parameters(), "lr": 0.1})
        elif event == "freeze":
            net[0].weight.requires_grad_(not net[0].weight.requires_grad)
        elif event == "load":
            pl_module.load_state_dict({key: value * 0.9 for key, value in pl_module.state_dict().items()})
        elif event == "mode":
            net[1].train(not net[1].training)
        elif event == "swap":
            net[4].weight.data = net[4].weight.data * 1.1
        elif event == "dropout":
            net[2].p = 0.5 - net[2].p
        elif event == "momentum":
            optimizer.param_groups[0]["weight_decay"] = 0.1
        elif event == "gradients":
            pl_module.zero_grad()
        elif event == "state":
            optimizer.load_state_dict(optimizer.state_dict())


class Random(Net):
    """Uses the layer that an event has added."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return self.extra(loss.reshape(1, 1)).sum() + loss if hasattr(self, "extra") else loss


def sequence(seed: int) -> Ready:
    draw = random.Random(seed)
    sizes = [draw.choice([3, 5, 8]) for _ in range(3)]
    return batches(*(draw.choice(sizes) for _ in range(draw.randrange(10, 16))), seed=seed)


def compare(seed: int, fit: Fit, never: Any) -> tuple[int, bool]:
    draw = random.Random(seed)
    loader, momentum = sequence(seed), draw.choice([0.0, 0.9])
    arguments = {"gradient_clip_val": draw.choice([None, 0.3]), "log_every_n_steps": draw.choice([1, 2, 5])}
    if draw.random() < 0.3:
        arguments |= {"val": batches(4, 4), "val_check_interval": draw.randrange(2, 6)}
    events = [lambda: Events(seed)] if draw.random() < 0.8 else []
    recorder, same = both(
        fit, never, lambda: Random(momentum), loader, *events, max_epochs=2, seed=seed, **arguments
    )  # fmt: skip
    return recorder.replayed, same


QUIET = pytest.mark.filterwarnings("ignore:Modules in eval mode", "ignore:.*logged as nan")


@QUIET
@pytest.mark.parametrize("block", range(0, 10, 1 if os.environ.get("DRIVETRAIN_FAULTS") == "long" else 3))
def test_no_replay_is_wrong_in_200_random_sequences(block: int, fit: Fit, never: Any) -> None:
    found = [compare(seed, fit, never) for seed in range(20 * block, 20 * block + 20)]
    assert [20 * block + index for index, (_, same) in enumerate(found) if not same] == []
    assert sum(replayed for replayed, _ in found) > 100


@QUIET
def test_sequences_find_replays_of_what_has_changed(fit: Fit, never: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without a look at what has changed, sequences differ."""
    monkeypatch.setattr(graph_parts.Watched, "changed", lambda _: "")

    def is_wrong(seed: int) -> bool:
        try:
            return not compare(seed, fit, never)[1]
        except RunError:  # found while it was recorded
            return False

    assert sum(map(is_wrong, range(20))) >= 5


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replayed", [1.0, 1.9, 1.99, 3.0])
def test_auto_keeps_a_graph_only_where_its_fastest_replay_is_faster(
    replayed: float, fit: Fit, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    """A step without a graph takes 2 s; the first replay takes long, because it also loads the graph."""
    caplog.set_level("INFO", "drivetrain")
    ticks, faster = iter(range(100)), replayed <= 1.9
    times = iter([0.0, 2.0, 2.0, 9.0, *[0.0, 2.0, 2.0, 2.0 + replayed] * 2])
    monkeypatch.setattr(graphs, "_clock", lambda: next(times) + 10 * (next(ticks) // 4))
    _, recorder = fit(Net(), batches(*[8] * 10), cuda_graphs="auto")
    assert recorder.replayed == (30 - graphs.WARM_UPS if faster else graphs.TRIALS)
    said = [each.message for each in caplog.records if "cuda_graphs" in each.message]
    assert len(said) == 1
    what = "are replayed" if faster else "run without a graph"
    assert f"{what}: {replayed * 1000:.3f} ms replayed, 2000.000 ms" in said[0]


def test_a_graph_that_does_something_else_is_not_kept(fit: Fit, never: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FakeRecorder.record

    def wrong(self: Any, work: Any) -> Any:
        result, replay = record(self, work)

        def replay_wrongly() -> None:
            replay()
            result["twice"].add_(1)

        return result, replay_wrongly

    monkeypatch.setattr(FakeRecorder, "record", wrong)
    with pytest.raises(RunError, match="differs from the same step without a graph in what it returns"):
        fit(Net(), batches(*[8] * 10))
    recorder, same = both(fit, never, Net, batches(*[8] * 10), cuda_graphs="auto")
    assert same
    assert recorder.replayed == 1


def test_few_signatures_are_recorded_and_the_others_run_without(fit: Fit, never: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")
    loader = batches(*range(2, 2 + graphs.MOST_GRAPHS + 4))
    recorder, same = both(fit, never, Net, loader, max_epochs=5)
    assert same
    assert recorder.recorded == graphs.MOST_GRAPHS
    assert sum("more than 8 signatures" in each.message for each in caplog.records) == 2  # one for each fit


def test_a_change_in_each_step_ends_in_steps_without_graphs(fit: Fit) -> None:
    class Counts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.factor += 0.1

    with pytest.raises(RunError, match=r"Net\.factor has changed, after 8 earlier changes"):
        fit(Net(), batches(*[8] * 60), Counts())
    fit(Net(), batches(*[8] * 60), Counts(), cuda_graphs="auto")


# ---- what cannot be recorded -----------------------------------------------------------------------------------------


class ReadsIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 if batch_idx < 100 else 2)


class ReadsEpoch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.current_epoch)


class ReadsRate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


class Catches(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            step = self.trainer.global_step
        except Exception:
            step = 0
        return self.loss(batch) * (1 + step)


class CountsItself(Net):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.loss(batch)


class Appends(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(loss := self.loss(batch))
        return loss


class Waits(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if loss.item() > -1 else None


class DrawsOnHost(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * random.random()


class InPlace(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        return self.loss(batch)


class LogsMetric(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from torchmetrics import MeanMetric

        if not hasattr(self, "metric"):
            self.metric = MeanMetric()
        loss = self.loss(batch)
        self.metric(loss.detach())
        self.log("metric", self.metric)
        return loss


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReadsIndex, "training_step reads batch_idx"), (ReadsEpoch, "reads current_epoch of the Trainer"),
        (ReadsRate, "reads current_run of the Trainer"), (Catches, "reads global_step of the Trainer"),
        (CountsItself, "the step changes CountsItself.count"), (Appends, "the step changes Appends.kept"),
        (Waits, "operation not permitted"), (DrawsOnHost, "draws random numbers on the host"),
        (InPlace, "changes its batch in place"), (LogsMetric, "the step changes metric"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_a_step_that_a_replay_would_not_repeat_is_found(kind: Any, why: str, fit: Fit, never: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")
    with pytest.raises(RunError, match="cannot record the training step") as error:
        fit(kind(), Ready([(x.clone(), y) for x, y in batches(*[8] * 10).batches]))
    assert why in str(error.value)

    def trained() -> Any:
        random.seed(0)
        module = kind()
        trainer, recorder = fit(
            module, Ready([(x.clone(), y) for x, y in batches(*[8] * 10).batches]), cuda_graphs="auto"
        )
        assert recorder.replayed == 0
        return [state(module), dict(trainer.callback_metrics), getattr(module, "count", 0)]

    ours, theirs = trained(), never(trained)
    assert any(why in each.message for each in caplog.records if "'auto'): steps run without" in each.message)
    assert equal(ours, theirs)


def hooked(name: str) -> Any:
    return type("Hooked", (Callback,), {name: lambda *_: None})()


@pytest.mark.parametrize(
    "name", ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
)
def test_hooks_inside_of_the_step_are_refused_by_name(name: str, fit: Fit, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")
    with pytest.raises(ConfigurationError, match=f"Hooked overrides {name}, which runs inside of it"):
        fit(Net(), batches(8), hooked(name))
    _, recorder = fit(Net(), batches(*[8] * 10), hooked(name), cuda_graphs="auto")
    assert recorder.recorded == 0
    said = [each.message for each in caplog.records if "cuda_graphs" in each.message]
    assert [text.partition("without graphs: ")[2] for text in said] == [
        f"Hooked overrides {name}, which runs inside of it."
    ]


@pytest.mark.parametrize("name", ["optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad", "backward"])
def test_methods_of_the_module_inside_of_the_step_are_refused_by_name(name: str, fit: Fit) -> None:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Own", (Net,), {name: method})
    with pytest.raises(ConfigurationError, match=f"Own overrides {name}"):
        fit(kind(), batches(8))


def forward_hook(module: Any) -> None:
    module.net[0].register_forward_hook(lambda *_: None)


def gradient_hook(module: Any) -> None:
    module.net[0].weight.register_hook(lambda gradient: gradient)


def accumulated_hook(module: Any) -> None:
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("register", "why"),
    [
        (forward_hook, "the module 'net.0' has a hook"), (gradient_hook, "the parameter 'net.0.weight' has a hook"),
        (accumulated_hook, "the parameter 'net.0.weight' has a hook"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_hooks_of_torch_are_refused_also_where_they_come_later(register: Any, why: str, fit: Fit, never: Any) -> None:
    module = Net()
    register(module)
    with pytest.raises(ConfigurationError, match=why):
        fit(module, batches(8))

    class Later(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 12:
                pl_module.seen = 0
                pl_module.net[0].register_forward_hook(lambda module, *_: None)

    _, same = both(fit, never, Net, batches(*[8] * 10), Later, cuda_graphs="auto")
    assert same


class StepHook(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class ByAdagrad(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())


class ByOwn(Net):
    def configure_optimizers(self) -> Any:
        return type("OwnSGD", (torch.optim.SGD,), {"__module__": "mine"})(self.parameters(), lr=0.1)


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        (StepHook, {}, "SGD has a hook around its step"), (ByAdagrad, {}, "Adagrad has no capturable=True"),
        (ByOwn, {}, "OwnSGD is no optimizer of torch's"), (ByHand, {}, "ByHand optimizes manually"),
        (Net, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Net, {"precision": "16-mixed"}, "its scaled loss"), (Net, {"detect_anomaly": True}, "detect_anomaly"),
        (Net, {"profiler": "simple"}, "a profiler measures"), (Net, {"split_on_oom": True}, "split_on_oom=True"),
        (Net, {"accelerator": "cpu"}, "the accelerator 'cpu' has no graphs"),
        (Net, {"strategy": "ddp"}, "DDPStrategy trains on several devices"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_training(kind: Any, arguments: Any, why: str, fit: Fit) -> None:
    with pytest.raises(ConfigurationError) as error:
        fit(kind(), batches(8, 8), **arguments)
    assert f"Trainer(cuda_graphs=True) cannot record the training step: {why}" in str(error.value)


def test_a_strategy_with_a_step_of_its_own_is_refused(fit: Fit) -> None:
    class Own(SingleDeviceStrategy):
        def backward(self, *args: Any, **kwargs: Any) -> Any:
            return super().backward(*args, **kwargs)

    with pytest.raises(ConfigurationError, match="Own has a backward of its own"):
        fit(Net(), batches(8), strategy=Own())


def test_batches_that_no_signature_describes_run_without_graphs(fit: Fit, never: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")

    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[0])

    loader = Ready([(batch, object()) for batch in batches(*[8] * 6).batches])
    recorder, same = both(fit, never, Strange, loader, cuda_graphs="auto")
    assert (recorder.recorded, same) == (0, True)
    assert any("the batch holds a object" in each.message for each in caplog.records)
    texts = Ready([(batch, f"{index}.png") for index, batch in enumerate(batches(*[8] * 20).batches)])
    recorder, same = both(fit, never, Strange, texts, max_epochs=1)
    assert (recorder.recorded, same) == (0, True)
    assert any("leave out values that differ from batch to batch" in each.message for each in caplog.records)


def test_without_an_accelerator_that_has_graphs_one_line_says_so(make_trainer: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")
    make_trainer(cuda_graphs="auto", max_epochs=3, limit_val_batches=0).fit(Net(), batches(8, 8))
    said = [each.message for each in caplog.records if "cuda_graphs" in each.message]
    assert said == ["Trainer(cuda_graphs='auto'): steps run without graphs: the accelerator 'cpu' has no graphs."]


# ---- within a run ----------------------------------------------------------------------------------------------------


def test_accumulation_by_epoch_and_averages_of_weights(fit: Fit, never: Any) -> None:
    recorder, same = both(
        fit, never, Net, batches(*[8] * 9), lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 1}),
        WeightAveraging, max_epochs=4, cuda_graphs="auto", val=batches(4), val_check_interval=4,
    )  # fmt: skip
    assert same
    assert recorder.replayed > 0


def test_a_fit_resumed_in_the_middle_of_an_epoch_is_bit_equal(fit: Fit, tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 14:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, resumed = Net(), Net()
    trainer, recorder = fit(whole, batches(*[8] * 10), Saves())
    assert recorder.replayed == 27
    again, recorder = fit(resumed, batches(*[8] * 10), seed=99, ckpt_path=tmp_path / "middle.ckpt")
    assert recorder.replayed == 13
    assert equal(state(whole), state(resumed))
    assert equal(dict(trainer.callback_metrics), dict(again.callback_metrics))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [2, 4, 5, 12], ids=["warm-up", "recording", "trial", "replayed"])
def test_a_checkpoint_after_an_exception_resumes_bit_equal(at: int, error: Any, fit: Fit, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == at:
                raise error("now")

    whole, resumed = Net(), Net()
    fit(whole, batches(*[8] * 10))
    saves = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
        fit(Net(), batches(*[8] * 10), saves, Fails(), enable_checkpointing=None)
    fit(resumed, batches(*[8] * 10), seed=99, ckpt_path=tmp_path / "failed.ckpt")
    assert equal(state(whole), state(resumed))


def test_an_interrupted_trial_leaves_the_state_after_the_step(fit: Fit, never: Any, monkeypatch: Any) -> None:
    class Interrupts(FakeRecorder):
        def record(self, work: Any) -> Any:
            result, replay = super().record(work)

            def interrupted() -> None:
                replay()
                raise KeyboardInterrupt

            return result, interrupted

    monkeypatch.setattr("tests.loops.recording.FakeRecorder", Interrupts, raising=False)
    module, reference = Net(), Net()
    accelerator = RecordingAccelerator()
    monkeypatch.setattr(accelerator, "graph_recorder", lambda device: Interrupts())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(module, batches(*[8] * 10), accelerator=accelerator)
    never(lambda: fit(reference, batches(*[8] * 4), max_epochs=1))
    assert equal(state(module), state(reference))


def test_an_exception_of_the_step_is_the_users(fit: Fit) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 7:
                raise ValueError("a batch of seven")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="a batch of seven"):
        fit(Fails(), batches(*[8] * 10, 7))


def test_gradients_are_those_of_the_last_step(fit: Fit, never: Any) -> None:
    class Gradients(Callback):
        def __init__(self, found: list[Any]) -> None:
            self.found = found

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.found.append([each.grad.clone() for each in pl_module.parameters()])
            if trainer.global_step % 5 == 0:
                pl_module.zero_grad()

    def trained() -> Any:
        found: list[Any] = []
        fit(Net(), batches(*[8, 8, 6] * 6), Gradients(found))
        return found

    ours = trained()
    assert equal(ours, never(trained))


def test_values_are_copied_on_logging_steps_only(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.logbook.entry import Entry

    lent: list[str] = []
    lend = Entry.lend
    monkeypatch.setattr(Entry, "lend", lambda self, value: (lent.append(self.name), lend(self, value))[1])

    class Alone(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    _, recorder = fit(Alone(), batches(*[8] * 24), max_epochs=1, log_every_n_steps=6)
    kept = recorder.replayed - graphs.TRIALS
    assert kept == 18
    assert len(lent) == kept - 3  # the steps 12, 18 and 24 are logged
