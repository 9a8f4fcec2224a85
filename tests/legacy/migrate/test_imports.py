"""Imports of Lightning become imports of drivetrain, and so do the expressions that use them."""

from __future__ import annotations

import ast
import re
from random import Random

import pytest

from drivetrain.compat.missing import MISSING
from drivetrain.legacy.migrate.program import migrate


def migrated(text: str) -> str:
    return migrate("train.py", text.encode()).result()


def left(text: str) -> list[str]:
    return [remark.text for remark in migrate("train.py", text.encode()).remarks if remark.is_left]


REWRITTEN = {
    "import lightning.pytorch as pl\npl.Trainer()": "import drivetrain as pl\npl.Trainer()",
    "import lightning as L\nL.Fabric(); L.pytorch.Trainer()": "import drivetrain as L\nL.Engine(); L.Trainer()",
    "import pytorch_lightning\npytorch_lightning.Trainer": "import drivetrain\ndrivetrain.Trainer",
    "import pytorch_lightning.callbacks\npytorch_lightning.callbacks.Timer()":
        "import drivetrain\ndrivetrain.callbacks.Timer()",
    "import os, pytorch_lightning as pl, sys": "import os, drivetrain as pl, sys",
    "from pytorch_lightning import Trainer as T, Callback": "from drivetrain import Trainer as T, Callback",
    "from pytorch_lightning import callbacks as c\nc.Timer": "from drivetrain import callbacks as c\nc.Timer",
    "from lightning import pytorch as pl": "import drivetrain as pl",
    "from lightning.fabric import Fabric": "from drivetrain import Engine as Fabric",
    "from lightning.fabric.utilities.exceptions import MisconfigurationException":
        "from drivetrain.errors import DrivetrainError as MisconfigurationException",
    "from pytorch_lightning.callbacks import (\n    EarlyStopping,  # stops\n    Timer,\n)\n":
        "from drivetrain.callbacks import (\n    EarlyStopping,  # stops\n    Timer,\n)\n",
    "from lightning.pytorch.callbacks.early_stopping import EarlyStopping":
        "from drivetrain.callbacks import EarlyStopping",
    "from pytorch_lightning.utilities import rank_zero_only, CombinedLoader as C":
        "from drivetrain.data import CombinedLoader as C\nfrom drivetrain.compat.rank_zero import rank_zero_only",
    "if True: from pytorch_lightning.utilities import rank_zero_only, CombinedLoader":
        "if True: from drivetrain.data import CombinedLoader; from drivetrain.compat.rank_zero import rank_zero_only",
    "import pytorch_lightning as pl\n\n@pl.utilities.rank_zero_only\ndef f(): ...":
        "from drivetrain.compat.rank_zero import rank_zero_only\nimport drivetrain as pl\n\n@rank_zero_only\n"
        "def f(): ...",
    "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    import pytorch_lightning as pl\n":
        "try:\n    import drivetrain as pl\nexcept ImportError:\n    import drivetrain as pl\n",
    "from \\\n  pytorch_lightning \\\n  import Trainer": "from \\\n  drivetrain \\\n  import Trainer",
    "from pytorch_lightning.core.lightning import LightningModule": "from drivetrain import LightningModule",
    "from pytorch_lightning.callbacks import GPUStatsMonitor":
        "from drivetrain.callbacks import DeviceStatsMonitor as GPUStatsMonitor",
}  # fmt: skip


@pytest.mark.parametrize("before", REWRITTEN, ids=range(len(REWRITTEN)))
def test_an_import_is_rewritten_once(before: str) -> None:
    assert migrated(before) == REWRITTEN[before]
    assert migrated(REWRITTEN[before]) == REWRITTEN[before]
    assert left(before) == []


def test_a_name_that_is_missing_stays_in_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MISSING, "drivetrain.callbacks", {"Coming": ""})
    before = "from lightning.pytorch.callbacks import (\n    Timer,\n    Coming,  # later\n)\n"
    after = before.replace("from ", "from drivetrain.callbacks import Timer\nfrom ").replace("    Timer,\n", "")
    assert migrated(before) == after
    assert left(before) == [
        "left: lightning.pytorch.callbacks.Coming: this version of drivetrain does not have it yet."
    ]


def test_a_name_that_is_to_come_is_reported_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MISSING, "drivetrain.callbacks", {"Coming": ""})
    assert left("from pytorch_lightning.callbacks.coming import Coming") == [
        "left: pytorch_lightning.callbacks.coming.Coming: this version of drivetrain does not have it yet."
    ]


def test_a_class_in_a_module_that_no_table_has_is_found_by_its_name() -> None:
    assert migrated("from pytorch_lightning.place_of_1_6 import EarlyStopping, Nothing, seed_everything\n") == (
        "from drivetrain.callbacks import EarlyStopping\n"
        "from pytorch_lightning.place_of_1_6 import Nothing, seed_everything\n"
    )


def test_a_star_import_names_what_it_binds() -> None:
    after = migrated("from pytorch_lightning import *\nTrainer()\n")
    assert after.startswith("from drivetrain import Callback, LightningDataModule, LightningModule, Trainer, seed")
    assert "*" not in after


@pytest.mark.parametrize(
    "text",
    [
        "from .lightning import Net\n", "from my.pytorch_lightning import Net\n", "import lightning_bolts\n",
        '"""Uses pytorch_lightning."""\nx = "import pytorch_lightning as pl"\n',
        "def f(pl):\n    return pl.callbacks.ProgressBar\n", "# import pytorch_lightning as pl\n",
    ],
)  # fmt: skip
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert migrated(text) == text
    assert left(text) == []


def test_a_name_with_two_meanings_is_reported_and_its_uses_stay() -> None:
    before = "import lightning as L\nfor L in [1]:\n    print(L.Fabric)\n"
    assert migrated(before) == before
    assert left(before) == ["left: L is also bound to something else in this file: look at each use of it"]


def test_a_string_that_names_a_module_is_reported_with_its_line() -> None:
    before = 'import lightning.pytorch as pl\nmock.patch("lightning.pytorch.Trainer")\n'
    found = migrate("train.py", before.encode())
    assert 'mock.patch("lightning.pytorch.Trainer")' in found.result()
    assert [(each.line, each.text) for each in found.remarks if each.is_left] == [
        (2, 'left: the string "lightning.pytorch.Trainer" names a module or a logger of Lightning')
    ]


def test_the_meaning_of_a_name_is_that_of_the_generation() -> None:
    text = b"from pytorch_lightning.callbacks import ProgressBar\n"
    assert migrate("a.py", text).result() == "from drivetrain.callbacks import ProgressBar\n"
    earlier = "from drivetrain.callbacks import TQDMProgressBar as ProgressBar\n"
    assert migrate("a.py", text, "1.3").result() == earlier
    with_flag = text + b"from pytorch_lightning import Trainer\nTrainer(gpus=1)\n"  # tells which it is
    assert migrate("a.py", with_flag).result().startswith(earlier)


def test_plugins_of_their_time_come_from_the_legacy_package() -> None:
    source = migrate("train.py", b"from pytorch_lightning.plugins import DDPPlugin\n")
    assert source.result() == "from drivetrain.legacy.v1_3 import DDPPlugin\n"
    assert [each.text for each in source.remarks] == [
        "from pytorch_lightning.plugins import DDPPlugin -> from drivetrain.legacy.v1_3 import DDPPlugin",
        "differs: drivetrain.legacy.v1_3 keeps DDPPlugin for programs of its time: see docs/legacy.md",
    ]


def test_a_function_of_their_time_is_that_of_today() -> None:
    text = "from pytorch_lightning.utilities.imports import _TORCHVISION_AVAILABLE"
    found = migrate("train.py", text.encode(), "1.3")
    assert found.result() == "from drivetrain.compat.versions import _TORCHVISION_AVAILABLE"


def test_a_name_that_is_none_where_the_import_fails_is_rewritten() -> None:
    before = "try:\n    import lightning as L\nexcept ImportError:\n    L = None\nL.Fabric\n"
    assert migrated(before) == before.replace("lightning", "drivetrain").replace("Fabric", "Engine")


def test_an_expression_in_an_f_string_is_reported() -> None:
    before = 'import lightning as L\nx = f"""\n{L.Trainer} {L.Fabric}"""\n'
    assert migrated(before) == before.replace("lightning", "drivetrain")
    assert left(before) == ["left: L.Fabric in an f-string: write L.Engine"]


def test_random_programs_are_rewritten_once_and_keep_their_comments() -> None:
    """Imports in any order and place, in any mixture."""
    random = Random(3)
    imports = [text.splitlines() for text in REWRITTEN if "\\" not in text and not text.startswith("if")]
    for _ in range(40):
        lines = []
        for number in range(random.randint(1, 6)):
            indent = random.choice(["", "    ", "\t"])
            lines += [f"if {number}:  # {number}"] if indent else []
            lines += [f"{indent}{line}" for line in random.choice(imports)] + [f"{indent}pass  # comment {number}"]
        text = random.choice(["\n", "\r\n"]).join(lines)
        after = migrated(text)
        ast.parse(after)
        assert migrated(after) == after
        for comment in re.findall(r"#.*", text):
            assert after.count(comment) >= text.count(comment)
