"""Gather the sharded states of a DeepSpeed engine into complete tensors for a checkpoint. Load complete tensors into
the shards of an engine.

ZeRO keeps float32 master weights and optimizer states as flat shards, one per rank and parameter group. A checkpoint
instead contains complete tensors with the names from the user's module. Any strategy can therefore load the checkpoint
on any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.compiled import own_names, plain_names
from drivetrain.base.packages import deepspeed_zero, ds_utils, zero_to_fp32
from drivetrain.base.restoring import WrongForm, expect
from drivetrain.errors import CheckpointError


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has partitioned this parameter. Each rank then has only a shard of the parameter."""
    return hasattr(parameter, "ds_id")


def whole_weights(module: nn.Module, keep: bool, trained: bool) -> dict[str, Any]:
    """Return the module's state with complete weights in host memory. If ZeRO has a float32 master weight for a
    parameter, the state contains the master weight instead of the parameter.

    Every rank must call this function.

    Args:
        module: the user's module.
        keep: whether this rank needs the result; if not, the result is empty.
        trained: whether an engine trains the module. Without an engine there are no float32 master weights.
    """
    state: dict[str, Any] = dict(module.state_dict()) if keep else {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        whole = ds_utils.safe_get_full_fp32_param(parameter) if trained and parameter.requires_grad else None
        if whole is None and is_partitioned(parameter):
            with deepspeed_zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if keep and whole is not None:
            state[name] = whole.detach().to(HOST).reshape(parameter_shape(parameter))
    return plain_names(state)


def parameter_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the complete parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


def put_together(module: nn.Module) -> None:
    """Gather into host memory each parameter that ZeRO-3 has partitioned, and remove ZeRO's attributes from the
    parameter.
    """
    for parameter in filter(is_partitioned, module.parameters()):
        with deepspeed_zero.GatheredParameters([parameter]):
            whole = parameter.detach().to(HOST, copy=True)
        for name, value in list(vars(parameter).items()):
            module_of = getattr(value, "__module__", None) or type(value).__module__
            if name.startswith(("ds_", "_z3_")) or module_of.partition(".")[0] == "deepspeed":
                delattr(parameter, name)
        parameter.data = whole


def load_partitioned_weights(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load complete weights into a module that ZeRO-3 has partitioned. Every rank must call this function.

    Raises:
        RuntimeError: a shape differs; or ``strict`` is true, and a name is missing or unknown.
    """
    state = dict(own_names(module, state_dict))
    known = module.state_dict().keys()
    wrong = [f"{name} is missing" for name in known - state.keys()] if strict else []
    wrong += [f"{name} is not in the module" for name in state.keys() - known] if strict else []
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in parameters.keys() & state.keys():
        if (shape := parameter_shape(parameters[name])) != state[name].shape:
            wrong.append(f"{name} has the shape {tuple(state[name].shape)}, and the module's is {tuple(shape)}")
    if wrong:
        raise RuntimeError(f"{'; '.join(sorted(wrong))}.")
    for name, parameter in parameters.items():
        if name not in state:
            continue
        with torch.no_grad(), deepspeed_zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(state[name])
    module.load_state_dict({name: value for name, value in state.items() if name not in parameters}, strict=False)


def whole_optimizer_state(engine: Any, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return the state dict that ``optimizer`` would have in a job of one process. Every rank must call this function.

    Args:
        engine: the engine that trains.
        optimizer: the user's optimizer of the module's parameters.
        keep: whether this rank needs the result; if not, the result is empty.
    """
    _link_states(engine)
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for group, pieces in zip(optimizer.param_groups, _pieces(engine, optimizer), strict=True):
        local = engine.basic_optimizer.state.get(pieces[0], {}) if pieces else {}  # {} before the first step
        for parameter in group["params"]:
            if parameter.requires_grad and local:
                entry = state[number] = {}
                for key, value in local.items():
                    if isinstance(value, Tensor) and value.shape == pieces[0].shape:
                        whole = ds_utils.safe_get_full_optimizer_state(parameter, key)
                        entry[key] = whole.detach().to(HOST).reshape(parameter_shape(parameter)) if keep else None
                    else:
                        entry[key] = _copied(value)
            number += 1
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]} if keep else {}


def load_optimizer_state(engine: Any, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer state that :func:`whole_optimizer_state` returned. The number of ranks may have changed since
    then. Every rank must call this function.

    Raises:
        WrongForm: a tensor and its parameter have different shapes.
    """
    for group, then in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in then.items() if key != "params"})
    states: Mapping[int, Mapping[str, Any]] = expect(saved["state"], Mapping, "['state']")
    entries: list[tuple[Tensor, int, Mapping[str, Any]]] = []
    number = 0
    pieces = _pieces(engine, optimizer)
    for group, own in zip(optimizer.param_groups, pieces, strict=True):
        trained = [(each, number + index) for index, each in enumerate(group["params"]) if each.requires_grad]
        number += len(group["params"])
        here = [(parameter, index, states[index]) for parameter, index in trained if index in states]
        entries += here
        for piece in own if here else ():
            _, _, like = here[0]
            shape = parameter_shape(here[0][0])
            engine.basic_optimizer.state[piece] = {
                key: torch.zeros_like(piece) if isinstance(value, Tensor) and value.shape == shape else _copied(value)
                for key, value in like.items()
            }
    _link_states(engine)
    for parameter, index, entry in entries:
        for key, value in entry.items():
            if not isinstance(value, Tensor) or value.dim() == 0 != parameter.dim():
                continue
            if value.shape != parameter_shape(parameter):
                place = f"['state'][{index}][{key!r}]"
                raise WrongForm(
                    place, f"has the shape {tuple(value.shape)}, and {tuple(parameter_shape(parameter))} is expected"
                )
            _set_whole(parameter, value, key)


def _link_states(engine: Any) -> None:
    """Link each parameter to its optimizer states. With ZeRO-1 and ZeRO-2, DeepSpeed finds the states only through
    these links.

    ZeRO itself creates the links only once, after the first step of the first parameter group. At that time the
    parameters of all other groups have no states, so ZeRO does not link these parameters.
    """
    zero = engine.optimizer
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state") and engine.basic_optimizer.state:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def load_master_weights(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load ZeRO's float32 master weights from a checkpoint. The 16-bit parameters are only rounded copies of these
    weights.
    """
    state = own_names(module, state_dict)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in state:
            _set_whole(parameter, state[name])


def _set_whole(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Set the float32 master weights of ``parameter`` to the complete tensor ``value``. If ``key`` is given, set the
    optimizer state with the name ``key`` instead. The ranks do not communicate.
    """
    value = value.to(device=parameter.device, dtype=torch.float32)
    set_weights, set_state = ds_utils.safe_set_full_fp32_param, ds_utils.safe_set_full_optimizer_state
    if is_partitioned(parameter):
        # Set only this rank's shard: DeepSpeed's function for complete tensors fails if the number of elements is not
        # divisible by the number of ranks.
        size = parameter.ds_tensor.ds_numel
        padded = value.new_zeros(size * parameter.ds_zero_partition_world_size)
        padded[: value.numel()] = value.flatten()
        value = padded.narrow(0, size * parameter.ds_zero_partition_rank, size)
        set_weights, set_state = ds_utils.safe_set_local_fp32_param, ds_utils.safe_set_local_optimizer_state
    if key is None:
        set_weights(parameter, value)
    else:
        set_state(parameter, value, key)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _pieces(engine: Any, optimizer: Optimizer) -> list[list[Tensor]]:
    """Return this rank's flat shards, in a list for each parameter group. With ZeRO-3, a group may have several."""
    zero = engine.optimizer
    trained = [any(each.requires_grad for each in group["params"]) for group in optimizer.param_groups]
    found: dict[int, list[Tensor]] = {}
    if hasattr(zero, "single_partition_of_fp32_groups"):
        found = {index: [piece] for index, piece in enumerate(zero.single_partition_of_fp32_groups)}
    else:
        for index, piece in enumerate(zero.fp32_partitioned_groups_flat):
            found.setdefault(zero.sub_group_to_group_id[index], []).append(piece)
    flat = iter([found[group] for group in sorted(found)])
    return [next(flat) if any_trained else [] for any_trained in trained]


# ---- folders of DeepSpeed's own format, for its tools; other strategies cannot read them -----------------------------


def is_folder(path: str) -> bool:
    """Return whether ``path`` is a folder in DeepSpeed's format."""
    return bool(_files_of_pieces(Path(path), _latest(Path(path))))


def _latest(folder: Path) -> str | None:
    """Return the tag of the subfolder that was written last."""
    latest = folder / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def _files_of_pieces(folder: Path, tag: str | None) -> list[Path]:
    """Return the files with the optimizer states. Each process that wrote the folder has written one of the files."""
    return [] if tag is None else list((folder / tag).glob("*zero_pp_rank_*_optim_states.pt"))


def weights_in(folder: Path, resumes: bool, weights_only: bool | None) -> dict[str, Any]:
    """Return the complete weights in a folder of DeepSpeed's format.

    Args:
        folder: a folder that DeepSpeed has written.
        resumes: whether training is to resume from the folder.
        weights_only: False allows unpickling of the folder's files.

    Raises:
        CheckpointError: unpickling is not allowed, or training is to resume from the folder.
    """
    if resumes:
        raise CheckpointError(
            f"{folder} is a folder of DeepSpeed's own format, which holds no progress of a Trainer. Call "
            "trainer.strategy.load_deepspeed_checkpoint(folder) in on_train_start, which restores weights and "
            "optimizer states, or resume from a file that trainer.save_checkpoint wrote."
        )
    if weights_only is not False:
        raise CheckpointError(
            f"{folder} is a folder of DeepSpeed's own format, whose files are unpickled, which can run code. If "
            "you trust them, pass weights_only=False."
        )

    return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))


def load_folder(engine: Any, folder: Path, tag: str | None, world_size: int, **options: Any) -> dict[str, Any]:
    """Load a folder of DeepSpeed's own format into the engine. Return the ``client_state`` in the folder. Every rank
    must call this function.

    Args:
        engine: DeepSpeed's engine.
        folder: a folder that an engine's ``save_checkpoint`` has written.
        tag: the name of the subfolder; ``None``: the subfolder that was written last.
        world_size: the number of processes.
        options: further arguments of the engine's ``load_checkpoint``.

    Raises:
        CheckpointError: the folder has no checkpoint with this tag, or a different number of processes has written the
            folder.
    """
    tag = _latest(folder) if tag is None else tag
    pieces = _files_of_pieces(folder, tag)
    if not pieces:
        raise CheckpointError(
            f"There is no checkpoint of DeepSpeed in {folder}"
            f"{'' if tag is None else f' with the tag {tag!r}'}. Pass the folder that save_deepspeed_checkpoint got."
        )
    if len(pieces) != world_size and not engine.load_universal_checkpoint():
        raise CheckpointError(
            f"{folder} holds the pieces of {len(pieces)} processes, and there are {world_size}. Start {len(pieces)} "
            "processes, load it and call trainer.save_checkpoint(path), which any number of processes resumes from; or "
            "convert it with python -m deepspeed.checkpoint.ds_to_universal, and pass "
            'config={"checkpoint": {"load_universal": True}}.'
        )
    _, besides = engine.load_checkpoint(str(folder), tag=tag, **options)
    return besides or {}
