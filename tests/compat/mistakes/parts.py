"""Mistakes with loggers, profilers, plugins, strategies, accelerators, the command line and utility functions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    TorchCheckpointIO,
    TransformerEnginePrecision,
)  # fmt: skip
from lightning.pytorch.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)  # fmt: skip
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities import grad_norm, suggested_max_num_workers
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.parsing import AttributeDict, lightning_getattr, lightning_setattr
from tests.compat.mistakes.common import LONG, Mistakes, fit, loader, make, one
from torch import nn

CPU = torch.device("cpu")


class Lr(BoringModel):
    """A model with hyperparameters."""

    def __init__(self, lr: float = 0.1, needed: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Data(BoringDataModule):
    """A data module with a hyperparameter of the same name."""

    def __init__(self, lr: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()


def cli(*arguments: str, model: Any = Lr, **options: Any) -> None:
    sys.argv = ["program.py"]
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
               "enable_model_summary": False, "fast_dev_run": True}  # fmt: skip
    LightningCLI(model, trainer_defaults=trainer, args=list(arguments), **options)


def config_exists() -> None:
    Path("config.yaml").write_text("kept: 1\n")
    arguments = ["fit", "--trainer.fast_dev_run=false", "--trainer.max_steps=1", "--trainer.default_root_dir=."]
    cli(*arguments)


def two_optimizers() -> None:
    class Two(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, "one")
            parser.add_optimizer_args(torch.optim.SGD, "two")

        add_arguments = add_arguments_to_parser

    Two(Lr, run=False, args=[], auto_configure_optimizers=False).add_configure_optimizers_method_to_model(None)


def torchelastic() -> None:
    os.environ["WORLD_SIZE"] = "3"
    try:
        TorchElasticEnvironment().validate_settings(num_devices=2, num_nodes=1)
    finally:
        del os.environ["WORLD_SIZE"]


def seed_variable() -> None:
    before = os.environ.get("PL_GLOBAL_SEED")
    os.environ["PL_GLOBAL_SEED"] = "nonsense"
    try:
        pl.seed_everything()
    finally:
        del os.environ["PL_GLOBAL_SEED"]
        if before is not None:
            os.environ["PL_GLOBAL_SEED"] = before


def registered_twice(registry: Any, first: Any, second: Any) -> None:
    registry.register("twice", first)
    try:
        registry.register("twice", second)
    finally:
        registry.remove("twice")


def nested_forever() -> Any:
    batch: list[Any] = []
    batch.append(batch)
    return batch


def profiled(schedule: Any) -> None:
    make(**LONG, profiler=PyTorchProfiler(schedule=schedule)).fit(BoringModel())


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters())


def started_twice() -> None:
    profiler = SimpleProfiler()
    profiler.start("a")
    profiler.start("a")


MISTAKES: Mistakes = {
    # ---- loggers ----
    "csv_without_folder": lambda: CSVLogger(),
    "csv_metrics": lambda: CSVLogger(".").log_metrics(3),
    "csv_flush": lambda: CSVLogger(".", flush_logs_every_n_steps="nonsense").log_metrics({"a": 1.0}),
    "csv_hyperparameters": lambda: CSVLogger(".").log_hyperparams(3),
    "tensorboard_words": lambda: TensorBoardLogger(".").log_metrics({"a": "words"}),
    "tensorboard_without_folder": lambda: TensorBoardLogger(),
    "tensorboard_hyperparameters": lambda: TensorBoardLogger(".").log_hyperparams(3),
    "tensorboard_graph": lambda: TensorBoardLogger(".", log_graph=True).log_graph(BoringModel(), 3),
    "wandb_not_installed": lambda: WandbLogger(),
    "mlflow_not_installed": lambda: MLFlowLogger(),
    "comet_not_installed": lambda: CometLogger(),
    "hyperparameters_differ": lambda: make(**LONG | {"logger": CSVLogger(".")}).fit(Lr(0.1), datamodule=Data(0.2)),
    # ---- profilers ----
    "simple_started_twice": started_twice,
    "simple_not_started": lambda: SimpleProfiler().stop("a"),
    "advanced_not_started": lambda: AdvancedProfiler().stop("a"),
    "pytorch_sort_key": lambda: PyTorchProfiler(sort_by_key="nonsense"),
    "pytorch_table_key": lambda: PyTorchProfiler(table_kwargs={"nonsense": 1}),
    "pytorch_table_argument": lambda: PyTorchProfiler(table_kwargs={"row_limit": 1}),
    "pytorch_schedule": lambda: profiled(3),
    "pytorch_schedule_result": lambda: profiled(lambda step: 3),
    "pytorch_unknown": lambda: profiled_with(nonsense=1),
    # ---- plugins ----
    "mixed_precision": lambda: MixedPrecision("nonsense", "cpu"),
    "mixed_scaler": lambda: MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu")),
    "mixed_lbfgs": lambda: fit(one(configure_optimizers=lbfgs), precision="16-mixed"),
    "half_precision": lambda: HalfPrecision("nonsense"),
    "fsdp_precision": lambda: FSDPPrecision("nonsense"),
    "deepspeed_precision": lambda: DeepSpeedPrecision("nonsense"),
    "double_argument": lambda: DoublePrecision(3),
    "bitsandbytes": lambda: BitsandbytesPrecision("nf4"),
    "transformer_engine": lambda: TransformerEnginePrecision(weights_dtype=torch.half),
    "store_options": lambda: TorchCheckpointIO().save_checkpoint({}, "a.ckpt", storage_options={"a": 1}),
    "store_missing": lambda: TorchCheckpointIO().load_checkpoint("nonexistent.ckpt"),
    "store_async_missing": lambda: AsyncCheckpointIO(TorchCheckpointIO()).load_checkpoint("nonexistent.ckpt"),
    "cpu_device": lambda: CPUAccelerator().setup_device(torch.device("meta")),
    "cpu_count": lambda: CPUAccelerator.parse_devices(0),
    "cpu_words": lambda: CPUAccelerator.parse_devices("nonsense"),
    "cuda_text_in_list": lambda: CUDAAccelerator.parse_devices(["0"]),
    "cuda_mixed_list": lambda: CUDAAccelerator.parse_devices([0, "1"]),
    "cuda_false_in_list": lambda: CUDAAccelerator.parse_devices([False]),
    "cuda_nested_list": lambda: CUDAAccelerator.parse_devices([[0]]),
    "mps_text_in_list": lambda: MPSAccelerator.parse_devices(["0"]),
    "mps_nested_list": lambda: MPSAccelerator.parse_devices([0, [1]]),
    "kubeflow": lambda: KubeflowEnvironment.detect(),
    "torchelastic_size": torchelastic,
    "lightning_environment": lambda: LightningEnvironment(nonsense=1),
    "slurm_environment": lambda: SLURMEnvironment(nonsense=1),
    # ---- strategies and registries ----
    "ddp_start_method": lambda: make(strategy=DDPStrategy(start_method="nonsense"), devices=2),
    "ddp_unknown": lambda: make(strategy=DDPStrategy(nonsense=1), devices=1).fit(BoringModel()),
    "single_device_missing": lambda: SingleDeviceStrategy(nonsense=1),
    "model_parallel_mesh": lambda: ModelParallelStrategy().device_mesh,
    "fsdp_checkpointing_twice": lambda: FSDPStrategy(
        activation_checkpointing=nn.Linear, activation_checkpointing_policy={nn.Linear}
    ),
    "strategy_name_twice": lambda: registered_twice(
        StrategyRegistry, type("A", (DDPStrategy,), {}), type("B", (DDPStrategy,), {})
    ),
    "strategy_registered_again": lambda: registered_twice(StrategyRegistry, DDPStrategy, DDPStrategy),
    "strategy_name_type": lambda: StrategyRegistry.register(3, DDPStrategy),
    "strategy_name_unknown": lambda: StrategyRegistry.get("nonsense"),
    "accelerator_name_twice": lambda: registered_twice(
        AcceleratorRegistry, type("A", (CPUAccelerator,), {}), type("B", (CPUAccelerator,), {})
    ),
    "accelerator_name_type": lambda: AcceleratorRegistry.register(3, CPUAccelerator),
    "accelerator_name_unknown": lambda: AcceleratorRegistry.get("nonsense"),
    # ---- the command line ----
    "cli_option": lambda: cli("fit", "--nonsense=1"),
    "cli_model_type": lambda: cli("fit", model=3),
    "cli_config_exists": config_exists,
    "cli_save_config": lambda: SaveConfigCallback(LightningArgumentParser(), {}, save_to_log_dir=False),
    "cli_class": lambda: LightningArgumentParser().add_lightning_class_args(int, "a"),
    "cli_two_optimizers": two_optimizers,
    # ---- utilities ----
    "seed": lambda: pl.seed_everything(-1),
    "seed_large": lambda: pl.seed_everything(2**40),
    "seed_text": lambda: pl.seed_everything("nonsense"),
    "seed_variable": seed_variable,
    "grad_norm": lambda: grad_norm(BoringModel(), norm_type=-1),
    "grad_norm_text": lambda: grad_norm(BoringModel(), norm_type="nonsense"),
    "workers": lambda: suggested_max_num_workers(0),
    "batch_size": lambda: extract_batch_size(object()),
    "batch_size_forever": lambda: extract_batch_size(nested_forever()),
    "summary_depth_text": lambda: ModelSummary(BoringModel(), max_depth="nonsense"),
    "summary_depth": lambda: ModelSummary(BoringModel(), max_depth=-2),
    "attribute_dict": lambda: AttributeDict(a=1).b,
    "attribute_dict_delete": lambda: delattr(AttributeDict(a=1), "b"),
    "lightning_getattr": lambda: lightning_getattr(BoringModel(), "nonsense"),
    "lightning_setattr": lambda: lightning_setattr(BoringModel(), "nonsense", 1),
}


def profiled_with(**options: Any) -> None:
    make(**LONG, profiler=PyTorchProfiler(**options)).fit(BoringModel(), loader())
