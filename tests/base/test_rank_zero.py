"""The rank before any cluster is known (trap T30), and what is said once per job."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import runpy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info, rank_zero_only, rank_zero_warn

VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        *(({name: "3"}, 3) for name in VARIABLES),
        ({"RANK": "5", "LOCAL_RANK": "1", "SLURM_PROCID": "9"}, 5),
        ({"LOCAL_RANK": "1", "JSM_NAMESPACE_RANK": "9"}, 1),
        ({"RANK": "", "LOCAL_RANK": "2"}, 2),
        ({"RANK": "none"}, 0),
        ({"RANK": "-1"}, 0),
    ],
)
def test_t30_rank_from_environ(environ: dict[str, str], rank: int) -> None:
    assert rank_from_environ(environ) == rank


@pytest.mark.parametrize(("rank", "result"), [(None, 3), ("0", 3), ("1", None)])
def test_rank_zero_only(rank: str | None, result: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    @rank_zero_only
    def add(a: int, b: int) -> int:
        """Add."""
        calls.append((a, b))
        return a + b

    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert add(1, b=2) == result
    assert calls == ([] if result is None else [(1, 2)])
    assert (add.__name__, add.__doc__) == ("add", "Add.")


@contextlib.contextmanager
def no_handlers() -> Iterator[logging.Logger]:
    """A program that has not set up logging: without the handlers that pytest adds to each test."""
    log, root = logging.getLogger("drivetrain"), logging.getLogger()
    before = log.handlers, log.level, root.handlers
    log.handlers, root.handlers = [], []
    log.setLevel(logging.NOTSET)
    try:
        yield log
    finally:
        logging.disable(logging.NOTSET)
        log.disabled = False
        log.handlers, level, root.handlers = before
        log.setLevel(level)


def test_without_a_set_up_info_is_a_line_on_stderr(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_handlers() as log:
        rank_zero_info("from rank 0")
        monkeypatch.setenv("RANK", "1")
        rank_zero_info("from rank 1")
        assert log.handlers == []
    assert tuple(capsys.readouterr()) == ("", "from rank 0\n")


@pytest.mark.parametrize(
    "silence",
    [
        lambda log: log.setLevel(logging.WARNING),
        lambda log: logging.disable(logging.INFO),
        lambda log: setattr(log, "disabled", True),
        lambda log: log.addHandler(logging.NullHandler()),
        lambda log: logging.getLogger().addHandler(logging.NullHandler()),
    ],
)
def test_the_standard_module_silences_it(capsys: Any, silence: Any) -> None:
    with no_handlers() as log:
        silence(log)
        rank_zero_info("not seen")
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_standard_module_redirects_it(capsys: Any) -> None:
    stream = io.StringIO()
    with no_handlers() as log:
        log.addHandler(logging.StreamHandler(stream))
        log.setLevel(logging.INFO)
        rank_zero_info("to the stream")
    assert stream.getvalue() == "to the stream\n"
    assert tuple(capsys.readouterr()) == ("", "")


def test_info_goes_to_the_logger_on_rank_zero_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
    rank_zero_info("from rank 0")
    monkeypatch.setenv("RANK", "1")
    rank_zero_info("from rank 1")
    assert [(record.name, record.message) for record in caplog.records] == [("drivetrain", "from rank 0")]


def test_a_warning_points_at_the_innermost_line_outside_of_drivetrain(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("use the other one", DeprecationWarning)  # this very line
        monkeypatch.setenv("RANK", "1")
        rank_zero_warn("use the other one", DeprecationWarning)
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert str(warning.message) == "use the other one"
    assert warning.filename == __file__
    assert source_of(warning).endswith("# this very line")


def source_of(warning: warnings.WarningMessage) -> str:
    """The line that a warning points at."""
    return Path(warning.filename).read_text().splitlines()[warning.lineno - 1].strip()


class Defined:
    def method(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("about", "line"),
    [
        (Defined, "class Defined:"), (Defined.method, "def method(self) -> None:"),
        (Defined().method, "def method(self) -> None:"), (len, "rank_zero_warn("), (dict, "rank_zero_warn("),
        (type("Made", (), {"__module__": "nowhere"}), "rank_zero_warn("),
    ],
    ids=["class", "function", "method", "builtin", "builtin class", "class without a source"],
)  # fmt: skip
def test_a_warning_about_a_class_or_a_method_points_at_its_definition(about: Any, line: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("misspelt", about=about)
    (warning,) = caught
    assert source_of(warning).startswith(line)


def test_a_warning_of_a_thread_without_a_line_of_the_users_points_somewhere() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=rank_zero_warn, args=("alone",))
        thread.start()
        thread.join()
    (warning,) = caught
    assert Path(warning.filename).name == "threading.py"


def test_a_warning_is_shown_once_for_each_line_and_obeys_the_users_filters() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            rank_zero_warn("once here")
        rank_zero_warn("once here")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        rank_zero_warn("not seen")
    assert [str(warning.message) for warning in caught] == ["once here"] * 2


PROGRAM = """
import torch
from torch.utils.data import DataLoader
import drivetrain
from drivetrain.callbacks import ModelCheckpoint

class Net(drivetrain.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.save_hyperparameters({"net": self.net})  # an nn.Module

    def training_step(self, batch, batch_idx):
        self.log("score", 1.0)
        return self.net(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx): ...

    def on_train_epoch_ends(self): ...  # is never called by the Trainer

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "nothing", "strict": False}}

class Mine(drivetrain.Callback):
    def on_batch_start(self, trainer, module): ...  # this hook no longer exists

    def on_fit_start(self, trainer, module):
        Net().log("score", 1.0)  # called without a Trainer

class Short:
    def __len__(self):
        return 3
    def __iter__(self):
        return iter([1, 2])

def trainer(**arguments):
    return drivetrain.Trainer(
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, default_root_dir=FOLDER,
        enable_model_summary=False, enable_checkpointing=False, **arguments
    )

net = Net()
trainer(overfit_batches=1, callbacks=[Mine()]).fit(net, DataLoader([1, 2], shuffle=True))  # drawn; no loader; unlogged
trainer(logger=False).fit(net, Short(), Short())  # fewer batches
"""

POINTED_AT = [
    ("is an nn.Module", "# an nn.Module"),
    ("Did you mean on_train_epoch_end", "# is never called by the Trainer"),
    ("this hook no longer exists", "# this hook no longer exists"),
    ("called without a Trainer", "# called without a Trainer"),
    ("has a validation_step but", "# drawn; no loader; unlogged"),
    ("They are drawn in order instead", "# drawn; no loader; unlogged"),
    ("no logger has seen", "# drawn; no loader; unlogged"),
    ("watches 'nothing'", "# drawn; no loader; unlogged"),
    ("batches", "# fewer batches"),
]


@pytest.fixture(scope="module")
def of_a_program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[warnings.WarningMessage]]:
    """The warnings of a user's program."""
    folder = tmp_path_factory.mktemp("program")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(program), {"FOLDER": folder}, run_name="train")
    return program, caught


@pytest.mark.parametrize(("words", "line"), POINTED_AT, ids=[line for line, _ in POINTED_AT])
def test_warnings_point_at_the_users_line(
    of_a_program: tuple[Path, list[warnings.WarningMessage]], words: str, line: str
) -> None:
    program, caught = of_a_program
    found = [warning for warning in caught if words in str(warning.message)]
    assert found, [str(warning.message) for warning in caught]
    assert {warning.filename for warning in found} == {str(program)}
    assert line in {"#" + source_of(warning).partition("#")[2] for warning in found}


def test_no_warning_of_a_program_points_into_drivetrain(
    of_a_program: tuple[Path, list[warnings.WarningMessage]],
) -> None:
    package = str(Path(drivetrain.__file__).parent)
    assert not [str(warning.message) for warning in of_a_program[1] if warning.filename.startswith(package)]


def test_every_warning_is_issued_by_this_one_function() -> None:
    package = Path(drivetrain.__file__).parent
    issuing = re.compile(r"warnings\.(warn|warn_explicit)\(|^from warnings import", re.MULTILINE)
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if issuing.search(file.read_text())}
    assert found == {str(Path("base", "rank_zero.py"))}
