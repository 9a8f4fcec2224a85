"""What a checkpoint says about the restart point of a fit is checked before the loop relies on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.base.seed import rng_state
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.kept import worker_state
from drivetrain.data.passes import passes_over
from drivetrain.errors import CheckpointError
from drivetrain.loops.progress import Progress
from drivetrain.loops.restart import capture
from drivetrain.loops.restart_checks import check_position, check_progress, check_restart

State = dict[str, Any]


class Sums(nn.Module):
    """A metric object as torchmetrics makes them."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "counts": torch.zeros(3), "seen": []}
        self.device = torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.total, self.counts, self.seen = torch.zeros(()), torch.zeros(3), list[torch.Tensor]()
        self._update_count = 0

    def compute(self) -> torch.Tensor:
        return self.total


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.sums, self.others = Sums(), [Sums()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.sums.total = self.sums.total + 1
        self.log("sums", self.sums, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(6.0)[:, None], shuffle=True, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captured() -> dict[str, State]:
    """What is saved in the middle of a window, and in the middle of the validation that follows the epoch."""
    found: dict[str, State] = {}

    class Capturing(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                found["window"] = copy.deepcopy(capture(trainer.current_run))

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                found["validation"] = copy.deepcopy(capture(trainer.current_run))

        def state_dict(self) -> State:
            return {"a": 1}

    trainer = Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Capturing()],
    )  # fmt: skip
    trainer.fit(Net(), loader(), loader())
    return found


def changed(state: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """A copy of ``state`` with another value at ``keys``; ``...`` removes it."""
    state = copy.deepcopy(state)
    holder = state
    for key in keys[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    return state


# ---- the restart point -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["window", "validation"])
def test_what_a_fit_captures_passes(captured: dict[str, State], when: str) -> None:
    state = captured[when]
    assert ("window" in state, "ahead" in state) == (when == "window", when == "validation")  # the control
    check_restart(state, Net(), complete=True)
    check_progress(state["progress"])


def test_a_file_of_another_make_may_hold_less(captured: dict[str, State]) -> None:
    check_restart({}, Net())
    check_restart({"callback_metrics": {"loss": torch.ones(())}, "rng": None}, Net())
    with pytest.raises(CheckpointError, match=r"the restart point .*\['data'\] is missing"):
        check_restart({}, Net(), complete=True)


COMPLEX = torch.ones(1, 1, dtype=torch.complex64)
REFUSED: list[tuple[tuple[Any, ...], Any, str]] = [
    (("data",), 3, r"the restart point .*\['data'\] is 3"),
    (("data",), ..., r"the restart point .*\['data'\] is missing"),
    (("exact",), "x", r"the restart point .*\['exact'\] is 'x', and bool is expected"),
    (("settled",), torch.ones(3), r"the restart point .*\['settled'\] is tensor"),
    (("cut_off",), torch.ones(3), r"the restart point .*\['cut_off'\] is tensor"),
    (("ahead",), 3, r"the restart point .*\['ahead'\] is 3"),
    (("ahead",), [None], r"the restart point .*\['ahead'\]\[0\] is None, and str is expected"),
    (("loaders",), [], r"the restart point .*\['loaders'\] is \[\]"),
    (("loaders", "fit"), -1, r"the restart point .*\['loaders'\]\['fit'\] is -1, and a count is expected"),
    (("loaders", 3), 0, r"the restart point .*\['loaders'\] is 3, and str is expected"),
    (("callback_metrics",), None, r"the restart point .*\['callback_metrics'\] is None"),
    (("callback_metrics", 7), 1.0, r"the restart point .*\['callback_metrics'\] is 7, and str is expected"),
    (("callback_metrics", "x"), torch.ones(2), r"the restart point .*\['x'\] is tensor.*a number is expected"),
    (("val_loaders",), True, "the validation loaders .*it is True"),
    (("val_loaders", 0, "generators"), ..., r"the validation loaders .*\[0\]\['generators'\] is missing"),
    (("val_loaders", 0, "workers", 0), None, r"the validation loaders .*\[0\]\['workers'\]\[0\] is None"),
    (("rng",), 3, "the random state .*it is 3"),
    (("rng", "torch"), torch.ones(2), r"the random state .*\['torch'\] is not the state of a generator"),
    (("rng", "python"), ..., r"the random state .*\['python'\] is missing"),
    (("rng", "numpy"), (1, 2), r"the random state .*\['numpy'\] is not the state of a generator"),
    (("logged",), {}, "the logged values .*it is {}"),
    (("logged", 0), 3, r"the logged values .*\[0\] is 3"),
    (("logged", 0, "name"), ..., r"the logged values .*\[0\]\['name'\] is missing"),
    (("logged", 0, "hook"), "setup", r"\[0\]\['hook'\] is 'setup', in which nothing can be logged"),
    (("logged", 0, "dataloader_idx"), "x", r"\[0\]\['dataloader_idx'\] is 'x'"),
    (("logged", 0, "options"), 3, r"\[0\]\['options'\] is 3"),
    (("logged", 0, "options", "reduce_fx"), "median", r"\['reduce_fx'\] is 'median', which is no reduction"),
    (("logged", 0, "options", "colour"), 1, r"\[0\]\['options'\] has the unknown entry 'colour'"),
    (("logged", 0, "options", "prog_bar"), None, r"\['options'\]\['prog_bar'\] is None, and bool is expected"),
    (("logged", 0, "options", "logger"), 3, r"\['options'\]\['logger'\] is 3"),
    (("logged", 0, "total"), torch.ones(2), r"\[0\]\['total'\] is tensor.*a number is expected"),
    (("logged", 0, "last"), "x", r"\[0\]\['last'\] is 'x'"),
    (("logged", 0, "weight"), None, r"\[0\]\['weight'\] is None"),
    (("logged", 0, "fresh"), 2, r"\[0\]\['fresh'\] is 2, and bool is expected"),
    (("logged", 0, "metric"), 3, r"\[0\]\['metric'\] is 3"),
    (("logged", 0, "metric"), "net", r"\[0\]\['metric'\] is 'net', a Linear and no metric object"),
    (("logged", 0, "last_weight"), "x", r"\[0\]\['last_weight'\] is 'x'"),
    (("logged", 0, "pending"), 3, r"\[0\]\['pending'\] is 3"),
    (("logged", 0, "pending"), COMPLEX, r"\[0\]\['pending'\] has the shape \(1, 1\)"),
    (("logged", 0, "pending_weight"), ..., r"\[0\]\['pending_weight'\] is missing"),
    (("metrics",), 3, "the metric objects .*it is 3"),
    (("metrics", 7), {}, "the metric objects .*it is 7, and str is expected"),
    (("metrics", "sums", "updates"), -1, r"\['sums'\]\['updates'\] is -1, and a count is expected"),
    (("metrics", "sums", "states"), [], r"\['sums'\]\['states'\] is \[\]"),
    (("metrics", "sums", "states", "compute"), 1, r"\['sums'\]\['states'\]\['compute'\] is no state of this metric"),
    (("metrics", "sums", "states", "seen"), 1, r"\['sums'\]\['states'\]\['seen'\] is 1, and list"),
    (("metrics", "sums", "states", "total"), "x", r"\['sums'\]\['states'\]\['total'\] is 'x'"),
    (("metrics", "sums", "states", "counts"), torch.ones(2), r"\['counts'\] has the shape \(2,\), and \(3,\) is exp"),
    (("metrics", "others[0]", "states", "total"), None, r"\['others\[0\]'\]\['states'\]\['total'\] is None"),
    (("window",), 3, r"the gradients of a window .*\['window'\] is 3"),
    (("window", "expected"), 0, r"\['window'\]\['expected'\] is 0, and a window has at least one batch"),
    (("window", "graded"), -1, r"\['window'\]\['graded'\] is -1, and a count is expected"),
    (("window", "position"), True, r"\['window'\]\['position'\] is True, and a count is expected"),
    (("window", "total"), None, r"\['window'\]\['total'\] is None"),
    (("window", "reference"), torch.ones(2), r"\['window'\]\['reference'\] is tensor"),
    (("gradients",), ..., r"the gradients of a window .*\['gradients'\] is missing"),
    (("gradients", "net.weight"), 3, r"\['gradients'\]\['net.weight'\] is 3, and Tensor is expected"),
    (("gradients", "net.weight"), torch.ones(2), r"\['net.weight'\] is a gradient of shape \(2,\), of no such param"),
    (("gradients", "other"), torch.ones(2), r"\['other'\] is a gradient of shape \(2,\), of no such parameter"),
    (("gradients", "net.weight"), COMPLEX, r"\['net.weight'\] is a complex gradient of a real parameter"),
]


@pytest.mark.parametrize(("keys", "value", "message"), REFUSED)
def test_an_entry_of_another_form_is_refused_with_its_part_and_place(
    captured: dict[str, State], keys: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)The checkpoint's entry for .*{message}"):
        check_restart(changed(captured["window"], keys, value), Net(), complete=True)


def test_states_of_a_metric_that_the_module_has_no_more_are_not_looked_at(captured: dict[str, State]) -> None:
    state = changed(captured["window"], ("metrics", "gone"), {"updates": 1, "states": {"anything": object()}})
    check_restart(state, Net())


def test_a_state_that_began_as_one_number_may_have_grown(captured: dict[str, State]) -> None:
    check_restart(changed(captured["window"], ("metrics", "sums", "states", "total"), torch.ones(4)), Net())


# ---- progress --------------------------------------------------------------------------------------------------------


def test_fresh_counters_and_those_of_older_files_pass() -> None:
    fresh = Progress().state_dict()
    check_progress(fresh)
    names = ("current_epoch", "batches_done", "earlier_batches", "global_step", "stepped_batches")
    check_progress({name: fresh[name] for name in names})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (3, "it is 3, and Mapping is expected"),
        ({"global_step": ...}, r"\['global_step'\] is missing"),
        ({"current_epoch": "x"}, r"\['current_epoch'\] is 'x'"),
        ({"earlier_batches": -1}, r"\['earlier_batches'\] is -1, and a count is expected"),
        ({"batches_done": 2**64}, r"\['batches_done'\] is 18446744073709551616, and a count is expected"),
        ({"is_last_batch": 1}, r"\['is_last_batch'\] is 1, and bool is expected"),
        ({"should_stop": "x"}, r"\['should_stop'\] is 'x', and bool is expected"),
        ({"validation": "over"}, r"\['validation'\] is 'over', and '', 'running' or 'done' is expected"),
        ({"eval_steps": []}, r"\['eval_steps'\] is \[\]"),
        ({"eval_steps": {3: []}}, r"\['eval_steps'\] is 3, and str is expected"),
        ({"eval_steps": {"validate": 3}}, r"\['eval_steps'\]\['validate'\] is 3, and list is expected"),
        ({"eval_steps": {"validate": [-1]}}, r"\['eval_steps'\]\['validate'\]\[0\] is -1, and a count is expected"),
        ({"held": 2, "divisor": 2}, r"\['held'\] is 2, of a window of 2 batches that is not complete"),
        ({"held": 0, "divisor": 0}, r"\['held'\] is 0, of a window of 0 batches"),
        ({"epoch_cut": True}, r"\['current_epoch'\] is 0, and at least 1 is expected"),
        (
            {"epoch_cut": True, "current_epoch": 1, "earlier_batches": 2, "cut_batches": 3},
            r"\['earlier_batches'\] is 2, and at least 3 is expected",
        ),
    ],
)
def test_counters_of_another_form_are_refused(changes: Any, message: str) -> None:
    state: Any = changes
    if isinstance(changes, dict):
        state = {key: value for key, value in {**Progress().state_dict(), **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"the progress of the fit is damaged, .*: {message}"):
        check_progress(state)


# ---- the position in the training data -------------------------------------------------------------------------------


def begun() -> Any:
    passes = passes_over(loader())
    batches = iter(passes)
    next(batches), next(batches)
    return passes


def workers_of(position: State, state: Any) -> State:
    return {**position, "workers": {0: state}}


def test_own_positions_pass() -> None:
    passes = begun()
    position = passes.position()
    check_position(position, passes)
    check_position({**workers_of(position, worker_state()), "workers_after": {0: None}, "rng": rng_state()}, passes)
    combined = passes_over(CombinedLoader([loader(), loader()]))
    check_position(combined.position(), combined)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: 3, "it is 3, and Mapping is expected"),
        (lambda p: {}, r"\['given'\] is missing"),
        (lambda p: {**p, "given": -1}, r"\['given'\] is -1, and a count is expected"),
        (lambda p: {**p, "begun": True}, r"\['begun'\] is True, and a count is expected"),
        (lambda p: {**p, "ended": None}, r"\['ended'\] is None, and bool is expected"),
        (lambda p: changed(p, ("generators",), ...), r"\['generators'\] is missing"),
        (lambda p: {**p, "generators": [3]}, r"\['generators'\]\[0\] is 3, and Tensor is expected"),
        (lambda p: changed(p, ("before",), ...), r"\['before'\] is missing"),
        (lambda p: {**p, "before": {}}, r"\['before'\] is empty, although 2 batches were fetched"),
        (lambda p: {**p, "drawing": {}}, r"\['drawing'\] is empty, although 2 batches were fetched"),
        (lambda p: changed(p, ("before", "generators"), ...), r"\['before'\]\['generators'\] is missing"),
        (
            lambda p: changed(p, ("before", "generators"), []),
            r"\['generators'\] has 0 items, and 1 are expected",
        ),
        (lambda p: changed(p, ("drawing", "python"), 3), r"\['drawing'\]\['python'\] is 3"),
        (lambda p: {**p, "rng": 3}, r"\['rng'\] is 3|it is 3"),
        (lambda p: {**p, "workers": []}, r"\['workers'\] is \[\]"),
        (lambda p: {**p, "workers": {"x": None}}, r"\['workers'\] is 'x', and a count is expected"),
        (lambda p: workers_of(p, (1, 2)), r"\['workers'\]\[0\] has 2 items, and 3 are expected"),
        (
            lambda p: {**p, "workers_after": {1: (None, b"x", None)}},
            r"\['workers_after'\]\[1\]\['python'\]",
        ),
        (lambda p: {"parts": 3}, r"\['parts'\] is 3"),
    ],
)
def test_a_position_of_another_form_is_refused(damage: Callable[[State], Any], message: str) -> None:
    passes = begun()
    with pytest.raises(CheckpointError, match=f"the position in the training data is damaged, .*{message}"):
        check_position(damage(passes.position()), passes)


def test_the_place_in_a_combined_position_is_named() -> None:
    combined = passes_over(CombinedLoader([loader(), loader()]))
    position = changed(combined.position(), ("parts", 1, "begun"), "x")
    with pytest.raises(CheckpointError, match=r"\['parts'\]\[1\]\['begun'\] is 'x'"):
        check_position(position, combined)


# ---- in a fit --------------------------------------------------------------------------------------------------------


class Saving(Callback):
    """Saves one checkpoint in the middle of the first epoch, and one at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self.folder / "middle.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt")


@pytest.fixture
def resumed(make_trainer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Save, change the file, and resume from it."""

    def run(
        name: str, change: Callable[[Any], Any], module: type[Net] = Net, train: Any = None, saved_with: Any = None
    ) -> Any:
        first = make_trainer(accumulate_grad_batches=2, callbacks=Saving(tmp_path))
        first.fit(Either(), saved_with or loader(), loader())
        store, path = TorchCheckpointIO(), tmp_path / f"{name}.ckpt"
        checkpoint = dict(store.load_checkpoint(path))
        change(checkpoint)
        store.save_checkpoint(checkpoint, path)
        second = make_trainer(accumulate_grad_batches=2, max_epochs=2)
        second.fit(module(), train or loader(), loader(), ckpt_path=path)
        return second

    return run


def at(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(checkpoint: Any) -> None:
        holder = checkpoint
        for key in keys[:-1]:
            holder = holder[key]
        if value is ...:
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = value

    return change


@pytest.mark.parametrize("name", ["middle", "end"])
def test_an_unchanged_file_is_resumed(resumed: Any, name: str) -> None:  # the control of those below
    assert resumed(name, lambda checkpoint: None).current_epoch == 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("middle", at("restart", "val_loaders", value=True), "the validation loaders .*it is True"),
        ("end", at("restart", "val_loaders", 0, "workers", 0, value=torch.ones(3)), "the validation loaders"),
        ("end", at("restart", "cut_off", value=torch.ones(3)), "the restart point .*'cut_off'"),
        ("end", at("restart", "ahead", value=[3]), "the restart point .*'ahead'"),
        ("middle", at("restart", "settled", value=torch.ones(3)), "the restart point .*'settled'"),
        ("middle", at("restart", "data", "before", "generators", value=...), "the position in the training data"),
        ("end", at("restart", "data", "generators", value=...), "the position in the training data"),
        ("end", at("restart", "data", "given", value=...), "the position in the training data"),
        ("middle", at("restart", "metrics", "sums", "states", "counts", value=torch.ones(1)), "the metric objects"),
    ],
)
def test_a_fit_names_the_file_the_part_and_the_place(resumed: Any, name: str, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){name}.ckpt: The checkpoint's entry for .*{message}"):
        resumed(name, change)


def test_a_loader_hook_of_the_users_keeps_its_own_error(make_trainer: Any, resumed: Any, tmp_path: Path) -> None:
    resumed("middle", lambda checkpoint: None)

    class Broken(Net):
        def val_dataloader(self) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_trainer(max_epochs=2).fit(Broken(), loader(), ckpt_path=tmp_path / "middle.ckpt")


class OtherOptions(Net):
    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value, **{**options, "prog_bar": name == "loss"})


def test_a_value_that_is_logged_with_other_options_than_before_is_explained(resumed: Any) -> None:
    with pytest.raises(CheckpointError, match=r"middle.ckpt: self.log\('loss', ...\) in training_step has other.*True"):
        resumed("middle", lambda checkpoint: None, OtherOptions)


def test_at_the_end_of_an_epoch_the_options_may_change(resumed: Any) -> None:
    assert resumed("end", lambda checkpoint: None, OtherOptions).current_epoch == 2


class Either(Net):
    """Trains on one loader or on several."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "one, then several": (loader, lambda: [loader(), loader()]),
    "several, then one": (lambda: [loader(), loader()], loader),
    "none, then a generator": (lambda: DataLoader(torch.arange(6.0)[:, None]), loader),  # type: ignore[arg-type]
    "a list, then a sampler": (lambda: Batches(), loader),
}


class Batches:
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(torch.arange(6.0)[:, None, None])


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.filterwarnings("ignore:The validation loader shuffles")
def test_other_loaders_go_on_after_an_epoch_and_are_refused_in_its_middle(resumed: Any, case: str) -> None:
    before, now = OTHERS[case]
    arguments = {"train": now(), "saved_with": before(), "module": Either}
    assert resumed("end", lambda checkpoint: None, **arguments).current_epoch == 2
    with pytest.raises(
        CheckpointError, match="middle.ckpt: The checkpoint was saved (with|in the middle of an epoch whose samples)"
    ):
        resumed("middle", lambda checkpoint: None, **arguments)


def test_a_mapping_is_expected_everywhere(captured: dict[str, State]) -> None:
    assert isinstance(captured["window"], Mapping)
    for wrong in (None, 3, "x", []):
        with pytest.raises(CheckpointError, match="the restart point"):
            check_restart(wrong, Net())
