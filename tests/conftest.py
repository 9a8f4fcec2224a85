"""Shared by the suite: small models and data, and parties that write down every hook that is called on them."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningDataModule, LightningModule, Trainer
from drivetrain.module.hooks import DataHooks, ModelHooks
from drivetrain.strategies import SingleDeviceStrategy


def regression_data(samples: int = 32, features: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Regression(LightningModule):
    """A small net with dropout; logs nothing."""

    def __init__(self, dropout: float = 0.0, features: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Validated(Regression):
    """The same with a validation and a test step that log their loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


@pytest.fixture
def data() -> TensorDataset:
    return regression_data()


@pytest.fixture
def loader(data: TensorDataset) -> DataLoader[Any]:
    """Four batches of eight."""
    return DataLoader(data, batch_size=8)


class Ready:
    """Batches that lie in a list, and are not taken for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.fixture
def ready() -> type[Ready]:
    return Ready


@pytest.fixture
def make_trainer(tmp_path: Path) -> Any:
    """A Trainer that is quiet unless told otherwise, and writes below a temporary folder."""

    def make(**arguments: Any) -> Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
        }  # fmt: skip
        return Trainer(**{**quiet, **arguments})

    return make


@pytest.fixture
def regression() -> type[Regression]:
    return Regression


@pytest.fixture
def validated() -> type[Validated]:
    return Validated


# ---- parties that write down every hook ------------------------------------------------------------------------------

_MODULE_HOOKS = [
    *(name for base in (DataHooks, ModelHooks) for name, value in vars(base).items()
      if callable(value) and not name.startswith("_") and not name.endswith("_dataloader")),
    "configure_callbacks", "configure_model", "configure_optimizers", "configure_gradient_clipping", "clip_gradients",
    "optimizer_zero_grad", "backward", "lr_scheduler_step", "zero_grad",
    "on_validation_model_zero_grad", "on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval",
    "manual_backward",
]  # fmt: skip
_NOT_RECORDED = {"on_validation_model_train", "on_test_model_train"}  # overriding them changes what the loop does
_CALLBACK_HOOKS = [
    name for name, value in vars(Callback).items()
    if callable(value) and not name.startswith("_") and name not in ("state_dict", "load_state_dict")
]  # fmt: skip
_STRATEGY_HOOKS = [
    "connect", "setup_environment", "setup", "teardown", "on_train_start", "on_train_end", "on_validation_start",
    "on_validation_end", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end", "on_exception",
]  # fmt: skip
_DATA_HOOKS = ["prepare_data", "setup", "teardown", "on_exception"]


def _recording(base: type, names: list[str], prefix: str, calls: list[str]) -> type:
    def recorder(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{prefix}{name}")
            return getattr(super(recorded, self), name)(*args, **kwargs)

        return hook

    recorded = type(f"Recording{base.__name__}", (base,), {name: recorder(name) for name in names})
    return recorded


class Recorded:
    """The four parties of a run, and the list of what was called on them, in order.

    A callback's hook is written ``cb.``, the datamodule's ``dm.``, the strategy's ``strategy.``, the module's bare.
    """

    def __init__(self, module: type[LightningModule], samples: int = 32) -> None:
        self.calls: list[str] = []
        steps = [
            name for name in ("training_step", "validation_step", "test_step", "predict_step") if hasattr(module, name)
        ]
        hooks = [name for name in [*_MODULE_HOOKS, *steps] if name not in _NOT_RECORDED]
        self.module: LightningModule = _recording(module, hooks, "", self.calls)()
        self.callback: Callback = _recording(Callback, _CALLBACK_HOOKS, "cb.", self.calls)()
        self.strategy = _recording(SingleDeviceStrategy, _STRATEGY_HOOKS, "strategy.", self.calls)()
        calls, data = self.calls, regression_data(samples)

        class Data(LightningDataModule):
            def _loader(self, name: str) -> DataLoader[Any]:
                calls.append(f"dm.{name}")
                return DataLoader(data, batch_size=8)

            def train_dataloader(self) -> DataLoader[Any]:
                return self._loader("train_dataloader")

            def val_dataloader(self) -> DataLoader[Any]:
                return self._loader("val_dataloader")

            def test_dataloader(self) -> DataLoader[Any]:
                return self._loader("test_dataloader")

            def predict_dataloader(self) -> list[DataLoader[Any]]:
                return [self._loader("predict_dataloader")] * 2

        self.datamodule: LightningDataModule = _recording(Data, _DATA_HOOKS, "dm.", self.calls)()


@pytest.fixture
def recorded() -> Iterator[type[Recorded]]:
    return Recorded


# ---- parallel workers ------------------------------------------------------------------------------------------------

if "PYTEST_XDIST_WORKER" in os.environ:  # `make test`: a thread per worker, also in the programs that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# `--dist loadgroup`: what starts processes is in two groups, each of which one worker runs, one test after the other;
# so programs never compete with each other for the cores, nor do jobs of the pool. Both groups begin at once, their
# longest files first, then the files that stand alone, and then all others, each a group of its own.
GROUPS = {
    "programs": (
        "test_examples.py", "distributed/test_started_here.py", "launchers", "conformance", "vendor_device", "cli",
        "test_docs_code.py", "accelerators/test_accelerator.py", "faults", "compat/test_children.py",
        "compat/test_command.py", "compat/test_pickles.py", "clusters/test_torchelastic.py", "strategies/test_xla.py",
        "accelerators/test_xla.py", "legacy/v1_1/test_started.py", "legacy/v1_3/test_started.py",
        "callbacks/test_on_exception_checkpoint.py", "test_torch_names.py",
    ),
    "ranks": (
        "distributed", "trainer/test_rank_parts.py", "trainer/test_other_ranks.py", "trainer/test_comparison.py",
        "strategies", "callbacks/test_requeue.py", "loops/test_stop.py", "testing/test_fake.py",
        "compat/test_fabric_strategies.py", "compat/test_fabric_sharded.py", "clusters/test_environment.py",
        "legacy/v1_1/test_ranks.py",
        "legacy/v1_3/test_ranks.py", "familiar/test_training_on_ranks.py", "familiar/test_engine_on_ranks.py",
    ),
    "alone": ("trainer/test_resume.py", "test_wheel.py", "budget", "loops/test_restart_points.py", "test_sweep.py"),
}  # fmt: skip


def _group(path: str) -> tuple[int, int, str]:
    """Where a file, by its path below the tests, is in the order of groups, and in its group; the group's name."""
    above = [path, *map(str, Path(path).parents)]
    for number, (name, places) in enumerate(GROUPS.items()):
        for place, each in enumerate(places):
            if each in above:
                return number, place, path if name == "alone" else name
    return len(GROUPS), 0, path


def _below_tests(nodeid: str) -> str:
    return nodeid.partition("::")[0].rpartition("tests/")[2]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests by the groups above, instead of by marks."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(_below_tests(nodeid))[2]

    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let parallel workers take the groups in their order; the tests of a file stay in theirs."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _group(_below_tests(item.nodeid))[:2])


@pytest.fixture(autouse=True, scope="module")
def _small_collections() -> None:
    """Garbage collections look at what a file's tests have made, and not at all that the suite has imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _iterators() -> Iterator[Any]:
    """Every iterator with worker processes that is alive."""
    kind: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    init = kind.__init__

    def noted(self: Any, loader: Any) -> None:
        made.add(self)
        init(self, loader)

    kind.__init__ = noted
    yield made
    kind.__init__ = init


@pytest.fixture(autouse=True)
def _workers_end_with_their_test(_iterators: Any) -> Iterator[None]:
    """End persistent workers. When the garbage collector finds their iterator, torch waits five seconds for each."""
    yield
    for iterator in list(_iterators):
        iterator._shutdown_workers()


# ---- several processes -----------------------------------------------------------------------------------------------


def _beside(name: str, *path: str) -> ModuleType:
    """A module of the suite under the name that pytest would give it; it is imported once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.joinpath(*path))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Processes for tests of several ranks: ``pool.run(function, *args, world_size=2)``."""
    shared = _beside("tests.distributed.pool", "distributed", "pool.py").shared()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[Any]:
    """Runs programs as ``python program.py`` would, without a second import of torch: see programs.py."""
    found = _beside("tests.programs", "programs.py").Programs()
    yield found
    found.close()


@pytest.fixture(scope="session")
def own_stores() -> dict[str, Any]:
    """The checkpoint stores that docs/own_store.md shows, by name."""
    page = Path(__file__).parent.parent / "docs" / "own_store.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    tree = ast.parse("\n".join(blocks))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    found: dict[str, Any] = {"__name__": "own_stores"}
    exec(compile(tree, page, "exec"), found)
    return found
