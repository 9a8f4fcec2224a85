"""Import optional packages, and slow modules of torch, only when the program first uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.base.lazy import Later

if TYPE_CHECKING:
    import fcntl

    import psutil
    import rich
    import rich.console as rich_console
    import rich.progress as rich_progress
    import rich.table as rich_table
    import torch.distributed.checkpoint.filesystem as dcp_files
    import torch.distributed.checkpoint.metadata as dcp
    import torch.distributed.checkpoint.state_dict_saver as dcp_saver
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor as dtensor
    import torch.distributed.tensor.parallel as tensor_parallel
    import tqdm.auto as tqdm_auto

    ipython_display: Any  # for mypy, which checks base/notebook.py before this file

__all__ = [  # only these names have types
    "dcp", "dcp_files", "dcp_saver", "device_mesh", "dtensor", "fcntl", "fsdp", "psutil", "rich", "rich_console",
    "rich_progress", "rich_table", "tensor_parallel", "tqdm_auto",
]  # fmt: skip

_MODULES = {
    "averaging": "torch.distributed.algorithms.model_averaging.utils", "dcp_api": "torch.distributed.checkpoint.api",
    "dcp_files": "torch.distributed.checkpoint.filesystem", "dcp": "torch.distributed.checkpoint.metadata",
    "dcp_saver": "torch.distributed.checkpoint.state_dict_saver", "device_mesh": "torch.distributed.device_mesh",
    "dist_nn": "torch.distributed.nn.functional", "dist_optim": "torch.distributed.optim",
    "dtensor": "torch.distributed.tensor", "ring": "torch.distributed.tensor.experimental",
    "flop_counter": "torch.utils.flop_counter", "fsdp": "torch.distributed.fsdp",
    "fsdp_wrap": "torch.distributed.fsdp.wrap",
    "pipelining": "torch.distributed.pipelining",
    "local_sgd": "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "tensor_parallel": "torch.distributed.tensor.parallel",
    "sharedctypes": "multiprocessing.sharedctypes", "fcntl": "fcntl", "resource": "resource",
    "bnb": "bitsandbytes", "comet_ml": "comet_ml",
    "deepspeed": "deepspeed", "deepspeed_accelerator": "deepspeed.accelerator", "ds_utils": "deepspeed.utils",
    "deepspeed_zero": "deepspeed.runtime.zero",
    "deepspeed_zero_config": "deepspeed.runtime.zero.config", "zero_to_fp32": "deepspeed.utils.zero_to_fp32",
    "ipython_display": "IPython.display", "pandas": "pandas", "pyplot": "matplotlib.pyplot",
    "fsspec": "fsspec", "fsspec_core": "fsspec.core", "fsspec_spec": "fsspec.spec",
    "mlflow_tracking": "mlflow.tracking", "mlflow_context": "mlflow.tracking.context.registry",
    "mlflow_entities": "mlflow.entities", "mpi": "mpi4py.MPI", "neptune": "neptune", "neptune_types": "neptune.types",
    "omegaconf": "omegaconf", "omegaconf_errors": "omegaconf.errors", "psutil": "psutil",
    "ray": "ray", "ray_scheduling": "ray.util.scheduling_strategies", "ray_train": "ray.train", "ray_util": "ray.util",
    "rich": "rich", "rich_console": "rich.console", "rich_progress": "rich.progress", "rich_table": "rich.table",
    "rich_text": "rich.text", "safetensors": "safetensors", "safetensors_torch": "safetensors.torch",
    "tb_events": "tensorboard.backend.event_processing.event_accumulator",
    "te": "transformer_engine.pytorch", "te_recipe": "transformer_engine.common.recipe",
    "torch_xla": "torch_xla", "xla_fsdp": "torch_xla.distributed.fsdp", "xla_model": "torch_xla.core.xla_model",
    "xla_fsdp_wrap": "torch_xla.distributed.fsdp.wrap", "xla_runtime": "torch_xla.runtime",
    "xla_multiprocessing": "torch_xla.distributed.xla_multiprocessing", "xla_profiler": "torch_xla.debug.profiler",
    "xla_parallel_loader": "torch_xla.distributed.parallel_loader", "xla_spmd": "torch_xla.distributed.spmd",
    "xla_tpu": "torch_xla._internal.tpu",
    "torchao_float8": "torchao.float8", "torchao_float8_linear": "torchao.float8.float8_linear",
    "torchvision": "torchvision", "trackio": "trackio", "tqdm_auto": "tqdm.auto", "tqdm_utils": "tqdm.utils",
    "wandb": "wandb", "yaml": "yaml",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(name)
    return Later(_MODULES[name])
