"""Pickled objects cross over: what real Lightning wrote is read as ours, and what is written here needs no compat."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from drivetrain.loops.progress import TrainerFn
from drivetrain.module.hparams import AttributeDict

# Written by Lightning 2.6.6: pickle.dumps(AttributeDict(x=1), 0) and pickle.dumps(TrainerFn.FITTING, 0)
ATTRIBUTE_DICT = (
    b"ccopy_reg\n_reconstructor\np0\n(clightning.pytorch.utilities.parsing\nAttributeDict\np1\n"
    b"c__builtin__\ndict\np2\n(dp3\nVx\np4\nI1\nstp5\nRp6\n."
)
TRAINER_FN = b"clightning.pytorch.trainer.states\nTrainerFn\np0\n(Vfit\np1\ntp2\nRp3\n."


def test_without_compat_they_cannot_be_read() -> None:
    """The control."""
    if importlib.util.find_spec("lightning") is not None:
        pytest.skip("the original is installed here, and would read them itself")
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(ATTRIBUTE_DICT)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_objects_of_lightnings_are_read_as_ours(root: str) -> None:
    found = pickle.loads(ATTRIBUTE_DICT.replace(b"lightning.pytorch", root.encode()))
    assert type(found) is AttributeDict
    assert found.x == 1
    assert pickle.loads(TRAINER_FN.replace(b"lightning.pytorch", root.encode())) is TrainerFn.FITTING


@pytest.mark.usefixtures("served")
def test_a_checkpoint_that_holds_such_an_object_is_read_by_torch(tmp_path: Path) -> None:
    class Lightnings(dict[str, float]):
        """Pickled under the name that the class has in Lightning."""

    Lightnings.__module__, Lightnings.__qualname__ = "lightning.pytorch.utilities.parsing", "AttributeDict"
    module = importlib.import_module("lightning.pytorch.utilities.parsing")
    with mock.patch.object(module, "AttributeDict", Lightnings):
        torch.save({"hyper_parameters": Lightnings(lr=0.5)}, tmp_path / "a.ckpt")
    read = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert type(read["hyper_parameters"]) is AttributeDict
    assert read["hyper_parameters"].lr == 0.5


@pytest.mark.usefixtures("served")
def test_what_is_pickled_here_names_drivetrains_modules() -> None:
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from lightning.pytorch.utilities.enums import GradClipAlgorithmType
    from lightning.pytorch.utilities.parsing import AttributeDict as theirs

    objects = [EarlyStopping("loss"), BoringModel(), RandomDataset(2, 2), GradClipAlgorithmType.NORM, theirs(a=1)]
    written = pickle.dumps(objects, protocol=2)
    modules = {
        arg.split(" ")[0] for op, arg, _ in pickletools.genops(written) if op.name == "GLOBAL" and isinstance(arg, str)
    }
    assert any(module.startswith("drivetrain.compat.") for module in modules)
    assert not any("lightning" in module for module in modules)
    assert type(pickle.load(io.BytesIO(written))[1]) is BoringModel


def test_it_is_read_without_compat(answer: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(
        "import pickle\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "pickle.dump(BoringModel(), open('model.pkl', 'wb'))\n",
        encoding="utf-8",
    )
    answer("-m", "drivetrain.compat", "write.py")
    code = "import pickle; print(sum(p.numel() for p in pickle.load(open('model.pkl', 'rb')).parameters()))"
    assert answer("-c", code) == "66"
