"""``drivetrain checkpoint inspect``: describe a checkpoint without reading its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from drivetrain.cli.checkpoint_kinds import KINDS, WEIGHTS_ONLY, Opened, leaves, open_checkpoint, size_of
from drivetrain.errors import number_of
from drivetrain.strategies.rank_files import saved_by
from drivetrain.trainer.other_ranks import why_as_many
from drivetrain.trainer.rank_parts import is_inside

_SHOWN = frozenset({
    "state_dict", "optimizer_states", "optimizers", "lr_schedulers", "callbacks", "loops", "restart", "rng", "ranks",
    "rank_files", "rank_state", "hyper_parameters", "datamodule_hyper_parameters", "hparams_name",
    "datamodule_hparams_name", "epoch", "global_step", "pytorch-lightning_version", "drivetrain_version",
    "torch_version", "program",
})  # fmt: skip


def inspect(path: str, tensors: bool = False) -> dict[str, Any]:
    """Return a description of the checkpoint at ``path`` as plain data. With ``tensors``, the description lists all
    tensors.

    Raises:
        CheckpointError: the checkpoint does not exist, is of no known kind, or is damaged.
    """
    found = open_checkpoint(path)
    tree = found.tree
    weights = [(name, each) for name, each in leaves(tree["state_dict"]) if isinstance(each, Tensor)]
    others = [
        (name, each)
        for key, part in tree.items()
        if key != "state_dict"
        for name, each in leaves(part, str(key))
        if isinstance(each, Tensor)
    ]
    position = (tree.get("loops") or {}).get("drivetrain") or {}
    described: dict[str, Any] = {
        "path": path,
        "kind": found.kind,
        "format": KINDS[found.kind],
        "bytes": size_of(found),
        "files": len(found.files) + len(found.rank_files),
        "written_by": {
            name: str(tree[key])
            for name, key in (
                ("drivetrain", "drivetrain_version"), ("torch", "torch_version"),
                ("lightning_layout", "pytorch-lightning_version"),
            )
            if key in tree
        },
        "epoch": tree.get("epoch"),
        "global_step": tree.get("global_step"),
        "batches_done_in_epoch": position.get("batches_done"),
        "samples_done_in_epoch": (tree.get("restart") or {}).get("samples"),
        "processes": _processes(found),
        "resume": _resume(found),
        "weights": _summary(each for _, each in weights),
        "other_tensors": _summary(each for _, each in others),
        "optimizers": list(_optimizers(tree)),
        "lr_schedulers": len(tree.get("lr_schedulers") or ()),
        "callbacks": [str(key) for key in tree.get("callbacks") or ()],
        "hyper_parameters": [str(key) for key in _names(tree.get("hyper_parameters"))],
        "other_entries": sorted(str(key) for key in tree.keys() - _SHOWN),
        "notes": found.notes,
    }  # fmt: skip
    if tensors:
        described["tensors"] = [
            {"name": name, "shape": list(each.shape), "dtype": _dtype(each), "bytes": _bytes(each)}
            for name, each in [*((f"state_dict/{name}", each) for name, each in weights), *others]
        ]
    return described


def _names(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Mapping) else ()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a sparse tensor, which has no `nbytes`, counts as a dense tensor


def _summary(tensors: Iterable[Tensor]) -> dict[str, Any]:
    count = elements = size = 0
    types: dict[str, int] = {}
    for tensor in tensors:
        count, elements, size = count + 1, elements + tensor.numel(), size + _bytes(tensor)
        types[_dtype(tensor)] = types.get(_dtype(tensor), 0) + tensor.numel()
    return {"tensors": count, "elements": elements, "bytes": size, "elements_by_dtype": dict(sorted(types.items()))}


def _processes(found: Opened) -> int | None:
    """Return how many processes saved the checkpoint, or ``None`` if this is unknown."""
    if "drivetrain_version" not in found.tree or "loops" not in found.tree:
        return None
    return len(found.tree["ranks"]) if "ranks" in found.tree else saved_by(found.rank_files)


def _resume(found: Opened) -> dict[str, Any]:
    """Return whether a fit can resume from the checkpoint and with how many processes, and why."""
    tree, inside, processes = found.tree, False, _processes(found)
    if found.kind in WEIGHTS_ONLY or not {"optimizer_states", "loops"} <= tree.keys():
        has_others = found.kind in ("torch", "dcp") and len(tree) > 1 and "drivetrain_version" not in tree
        why = "no Trainer has saved it" if has_others else "it holds only weights"
    elif found.kind not in ("drivetrain", "drivetrain-sharded", "lightning"):
        why = "a Trainer reads no such folder: convert it with `drivetrain checkpoint convert`"
    elif "drivetrain" not in (tree["loops"] or {}):
        why = "its loops hold no position"
    elif (inside := is_inside(tree)) and "drivetrain_version" not in tree:
        why = "it was saved inside an epoch, and Lightning does not save which samples were done"
    else:
        why = why_as_many(tree, (processes or 0) + 1) if inside else ""
        return {"possible": True, "inside_epoch": inside, "processes": processes if why else "any", "reason": why}
    return {"possible": False, "inside_epoch": inside, "processes": None, "reason": why}


def _optimizers(tree: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    described = list(tree.get("optimizers") or ())
    for index, state in enumerate(tree.get("optimizer_states") or ()):
        if not isinstance(state, Mapping):
            continue
        about = described[index] if index < len(described) else {}
        entries = {str(key) for each in dict(state.get("state") or {}).values() for key in _names(each)}
        groups = [len(group.get("params", ())) for group in state.get("param_groups", ())]
        yield {"class": about.get("class"), "parameters_by_group": groups, "state": sorted(entries)}


def text(described: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a description for the terminal."""
    count = number_of(described["files"], "file")
    yield f"{described['path']}: {described['format']}, {size(described['bytes'])} in {count}"
    rows: dict[str, str] = {
        "written by": ", ".join(f"{name} {version}" for name, version in described["written_by"].items()),
        "position": _position(described),
        "processes": "" if described["processes"] is None else str(described["processes"]),
        "resume": _resume_line(described["resume"]),
        "weights": _summary_line(described["weights"]),
        "other tensors": _summary_line(described["other_tensors"]) if described["other_tensors"]["tensors"] else "",
        "optimizers": "; ".join(map(_optimizer_line, described["optimizers"])),
        "schedulers": str(described["lr_schedulers"] or ""),
        "callbacks": ", ".join(described["callbacks"]),
        "hyperparameters": ", ".join(described["hyper_parameters"]),
        "other entries": ", ".join(described["other_entries"]),
        "note": "; ".join(described["notes"]),
    }
    for name, value in rows.items():
        if value:
            yield f"  {name:<16}{value}"
    for each in described.get("tensors", ()):
        yield f"  {each['name']}  {each['dtype']} {each['shape']}  {size(each['bytes'])}"


def size(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _position(described: Mapping[str, Any]) -> str:
    if described["epoch"] is None:
        return ""
    parts = [f"epoch {described['epoch']}"]
    if described["global_step"] is not None:
        parts[0] += f", step {described['global_step']}"
    if described["resume"]["inside_epoch"]:
        parts.append(f"{number_of(described['batches_done_in_epoch'] or 0, 'batch')} of the epoch done")
    if described["samples_done_in_epoch"]:
        parts.append(f"{number_of(described['samples_done_in_epoch'], 'sample')} of the epoch done")
    return ", ".join(parts)


def _resume_line(resume: Mapping[str, Any]) -> str:
    if not resume["possible"]:
        return f"no: {resume['reason']}"
    where = "inside an epoch" if resume["inside_epoch"] else "at the end of an epoch"
    if resume["processes"] == "any":
        return f"{where}, with any number of processes"
    return f"{where}, with {_exactly(resume['processes'])}: {resume['reason']}"


def _exactly(processes: int | None) -> str:
    return "one process" if processes == 1 else f"{processes or 'as many'} processes"


def _summary_line(summary: Mapping[str, Any]) -> str:
    types = ", ".join(f"{name} {count:,}" for name, count in summary["elements_by_dtype"].items())
    return f"{number_of(summary['tensors'], 'tensor')}, {size(summary['bytes'])}; elements: {types or 'none'}"


def _optimizer_line(optimizer: Mapping[str, Any]) -> str:
    parameters = " + ".join(map(str, optimizer["parameters_by_group"]))
    state = f", state {', '.join(optimizer['state'])}" if optimizer["state"] else ", no state yet"
    return f"{optimizer['class'] or 'unknown class'} of {parameters} parameters{state}"
