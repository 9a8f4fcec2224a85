"""The modules that are served: one object under three spellings, and an answer for what is not there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from unittest import mock

import pytest

import drivetrain
from drivetrain.compat import finder, table

pytestmark = pytest.mark.usefixtures("served")


def test_the_three_spellings_name_the_same_objects() -> None:
    import lightning
    import lightning.pytorch as pl
    import pytorch_lightning
    from lightning.fabric.utilities.seed import seed_everything as of_fabric
    from lightning_fabric.utilities.seed import seed_everything as of_lightning_fabric
    from pytorch_lightning.callbacks import EarlyStopping as old
    from pytorch_lightning.callbacks.early_stopping import EarlyStopping as old_file

    assert lightning.Trainer is pl.Trainer is pytorch_lightning.Trainer is drivetrain.Trainer
    assert pl.callbacks.EarlyStopping is old is old_file
    assert of_fabric is of_lightning_fabric is lightning.seed_everything
    assert lightning.Fabric is drivetrain.Engine


def test_one_import_of_the_top_reaches_every_submodule_as_an_attribute() -> None:
    import lightning as L

    assert L.pytorch.callbacks.ModelCheckpoint.__module__ == "drivetrain.callbacks.model_checkpoint"
    assert L.fabric.utilities.rank_zero.rank_zero_only is L.pytorch.utilities.rank_zero_only


def test_modules_and_names_are_loaded_when_they_are_asked_for() -> None:
    import lightning.pytorch.utilities as utilities

    assert "rank_zero_only" not in vars(utilities)
    assert utilities.rank_zero_only is vars(utilities)["rank_zero_only"]


def test_the_versions() -> None:
    import lightning
    import lightning_fabric
    import pytorch_lightning

    assert lightning.__version__ == lightning.pytorch.__version__ == lightning.fabric.__version__ == "2.6.6"
    assert pytorch_lightning.__version__ == lightning_fabric.__version__ == "2.6.6"
    assert not hasattr(lightning.pytorch.callbacks, "__version__")


def test_dir_and_a_star_give_what_is_there() -> None:
    import lightning.pytorch.callbacks as callbacks

    assert {"EarlyStopping", "early_stopping", "progress"} <= set(dir(callbacks))
    names: dict[str, object] = {}
    exec("from lightning.pytorch.callbacks import *", names)
    assert set(callbacks.__all__) <= set(names)
    assert "early_stopping" not in callbacks.__all__
    fabric_logger = importlib.import_module("lightning.fabric.utilities.logger")
    assert fabric_logger.__all__ == []  # all of its names are private, and come only when they are named
    assert fabric_logger._add_prefix({"a": 1}, "b", "/") == {"b/a": 1}


def test_a_name_that_is_not_served_fails_alone() -> None:
    import lightning.pytorch as pl

    with pytest.raises(ImportError) as refused:
        from lightning.pytorch.callbacks import StochasticWeightAveragingg  # noqa: F401
    assert str(refused.value).startswith(
        "drivetrain.compat has no lightning.pytorch.callbacks.StochasticWeightAveragingg (yet)."
    )
    assert isinstance(refused.value, ModuleNotFoundError)  # so that those who look for an optional part see none
    assert "without drivetrain.compat" in str(refused.value)
    assert pl.callbacks.EarlyStopping
    assert not hasattr(pl.callbacks, "StochasticWeightAveragingg")
    with pytest.raises(AttributeError, match=r"Did you mean 'EarlyStopping'\?"):
        _ = pl.callbacks.EarlyStoping


@pytest.mark.parametrize("name", ["lightning.nothing", "pytorch_lightning.nothing.below", "lightning_fabric.nothing"])
def test_a_module_that_is_not_served_cannot_be_imported(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="has no .*nothing"):
        importlib.import_module(name)


def test_from_a_package_import_a_module_that_is_not_served() -> None:
    with pytest.raises(ImportError, match=r"has no lightning\.pytorch\.nothing"):
        from lightning.pytorch import nothing
    with pytest.raises(ImportError, match=r"has no lightning\.pytorch\.core\.module\.nothing"):
        from lightning.pytorch.core.module import nothing  # noqa: F401


def test_find_spec_of_what_is_served_and_of_what_is_not() -> None:
    found = importlib.util.find_spec("lightning.pytorch.callbacks")
    assert found is not None
    assert found.origin == table.__file__
    with pytest.raises(ModuleNotFoundError):
        importlib.util.find_spec("lightning.pytorch.nothing")


def test_other_modules_are_left_to_others() -> None:
    assert importlib.util.find_spec("lightning_utilities") is None or importlib.import_module("lightning_utilities")
    assert importlib.util.find_spec("pytorch_lightning_bolts") is None
    assert finder.CompatFinder().find_spec("lightnings", None) is None


def test_a_served_module_behaves_like_one() -> None:
    import lightning.pytorch.core.module as module

    assert isinstance(module, types.ModuleType)
    assert module.__spec__ is not None
    assert module.__name__ == module.__spec__.name == "lightning.pytorch.core.module"
    assert importlib.reload(module) is module
    assert "served by drivetrain.compat" in str(module.__doc__)
    with pytest.raises(AttributeError):
        _ = module.__warningregistry__


def test_a_test_may_put_something_in_a_names_place() -> None:
    import lightning.pytorch as pl

    with mock.patch("lightning.pytorch.Trainer") as replaced:
        assert pl.Trainer is replaced
    assert pl.Trainer is drivetrain.Trainer


def test_the_table_is_a_tree_without_clashes() -> None:
    for path in table.LATEST.served:
        assert not path or path.rpartition(".")[0] in table.LATEST.served, f"{path} has no parent"
        names = [offered for offered, _, _ in finder.offers(path)]
        assert not set(names) & set(finder.submodules(path)), path
        assert len(names) == len(set(names)), path


@pytest.mark.parametrize("root", table.LATEST.roots)
def test_every_name_of_the_table_is_found_under_every_root(root: str) -> None:
    below = table.LATEST.roots[root]
    for path in table.LATEST.served:
        if path == below or path.startswith(f"{below}.") or not below:
            inner = path if not below else path[len(below) + 1 :]
            module = importlib.import_module(f"{root}.{inner}" if inner else root)
            for offered, home, ours in finder.offers(path):
                assert getattr(module, offered) is getattr(importlib.import_module(home), ours)


def test_a_library_may_ask_for_the_trainers_enumerations(answer: Callable[..., str]) -> None:
    """Names that need no torch load none."""
    code = (
        "from drivetrain import compat; compat.install(); import json, sys; import lightning.pytorch as pl; "
        "from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn; "
        "from lightning.pytorch.utilities.exceptions import MisconfigurationException; "
        "from lightning.pytorch.trainer.states import TrainerFn; print(json.dumps('torch' in sys.modules))"
    )
    assert json.loads(answer("-c", code)) is False


def test_everything_goes_when_it_is_uninstalled() -> None:
    import lightning.pytorch.callbacks  # noqa: F401

    from drivetrain import compat

    compat.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] in table.LATEST.roots]
    if importlib.util.find_spec("lightning") is None:
        with pytest.raises(ModuleNotFoundError, match="No module named 'lightning'"):
            importlib.import_module("lightning")
    compat.uninstall()  # twice is fine
