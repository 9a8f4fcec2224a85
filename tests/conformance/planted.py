"""Parts that keep their contracts, and beside each the same part with one planted defect."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.accelerators import CPUAccelerator
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO
from drivetrain.clusters import TorchElasticEnvironment
from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import CheckpointError
from drivetrain.launchers import LaunchError
from drivetrain.launchers.multiprocessing import MultiProcessingLauncher
from drivetrain.loggers import Logger
from drivetrain.precision import Precision
from drivetrain.strategies import SingleDeviceStrategy

# ---- accelerators ----------------------------------------------------------------------------------------------------


class Device(CPUAccelerator):
    pass


class Countless(Device):
    @staticmethod
    def auto_device_count() -> Any:
        return 1.0


class Infinite(Device):
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {"used": float("nan")}


# ---- strategies ------------------------------------------------------------------------------------------------------


class Alone(SingleDeviceStrategy):
    pass


class StepsTwice(Alone):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        super().optimizer_step(*args, **kwargs)
        return super().optimizer_step(args[0], None)


class LosesOptimizerState(Alone):
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass


# ---- launchers -------------------------------------------------------------------------------------------------------


class Forks(MultiProcessingLauncher):
    def __init__(self, environment: Any, num_processes: int, num_nodes: int = 1) -> None:
        super().__init__(environment, num_processes, num_nodes, start_method="fork")


def twice(function: Any, *args: Any, **kwargs: Any) -> Any:
    function(*args, **kwargs)
    return function(*args, **kwargs)


class CallsTwice(Forks):
    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return super().launch(twice, function, *args, **kwargs)


class LosesTheResult(Forks):
    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return {name: 0 * value for name, value in super().launch(function, *args, **kwargs).items()}


class SwallowsFailures(Forks):
    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)
        except LaunchError:
            return {}


# ---- cluster environments --------------------------------------------------------------------------------------------


class Cluster(TorchElasticEnvironment):
    pass


class CountsFromOne(Cluster):
    def global_rank(self) -> int:
        return super().global_rank() + 1


class OneLocalRank(Cluster):
    def local_rank(self) -> int:
        return 0


class PortOfEachRank(Cluster):
    @property
    def main_port(self) -> int:
        return 20_000 + self.local_rank()


class NeverAsked(Cluster):
    detect_priority = 450


class ReadsTheProcess(Cluster):
    def __init__(self, environ: Any = None) -> None:
        super().__init__(environ)

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 7))


class PortOutOfRange(Cluster):
    @property
    def main_port(self) -> int:
        return 70_000


class OtherAnswers(Cluster):
    asked = 0

    def world_size(self) -> int:
        self.asked += 1
        return super().world_size() + self.asked // 2


class DetectsItselfEverywhere(Cluster):
    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        return True


class AcceptsAnyNumber(Cluster):
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


class TearsDownOnce(Cluster):
    def teardown(self) -> None:
        del self.gone

    gone: Any = property(lambda self: None)


class BelievesTheProgram(Cluster):
    size: int | None = None

    def set_world_size(self, size: int) -> None:
        self.size = size

    def world_size(self) -> int:
        return self.size or super().world_size()


# ---- loggers ---------------------------------------------------------------------------------------------------------


class Lines(Logger):
    """One line of JSON per call, in <save_dir>/<name>/version_<n>.jsonl."""

    numbers_runs = True  # type: ignore[assignment]

    def __init__(self, save_dir: str) -> None:
        self.folder, self.number, self.lines = Path(save_dir), None, []  # type: ignore[var-annotated]

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        if self.number is None:
            self.number = len(list(self.folder.glob("lines/*")))
        return self.number

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        return str(self.folder / "lines" / f"version_{self.version}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.lines.append({"step": step, **metrics})

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        self.lines.append({"hyperparams": dict(params or {})})

    def save(self) -> None:
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lines").open("a") as file:
            file.writelines(json.dumps(line, default=str) + "\n" for line in self.lines)
        self.lines.clear()

    def finalize(self, status: str) -> None:
        self.save()

    def agree_on_run(self, broadcast: Any) -> None:
        self.number = broadcast(self.version)


class MakesItsFolderAtOnce(Lines):
    @property
    def version(self) -> int:
        number = super().version
        (self.folder / "lines" / f"version_{number}").mkdir(parents=True, exist_ok=True)
        (self.folder / "lines" / f"version_{number}" / "new").touch()
        return number


class RenamesItself(Lines):
    @property
    def version(self) -> int:
        return len(list(self.folder.glob("lines/*")))


class LosesTheEnd(Lines):
    def finalize(self, status: str) -> None:
        self.lines.clear()


class DropsEveryThird(Lines):
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is None or step % 3 != 2:
            super().log_metrics(metrics, step)


class RefusesNaN(Lines):
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        json.dumps(metrics, allow_nan=False)
        super().log_metrics(metrics, step)


class KeepsTheDictionary(Lines):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        metrics["step"] = step
        self.lines.append(metrics)


class WantsJSON(Lines):
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        self.lines.append(json.loads(json.dumps(params)))


class ClosesForEver(Lines):
    closed = False

    def save(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        super().save()

    def finalize(self, status: str) -> None:
        self.save()
        self.closed = True


class OneFolder(Lines):
    version = 0  # type: ignore[assignment]

    def agree_on_run(self, broadcast: Any) -> None:
        pass


class RankOfItsOwn(Lines):
    @property
    def version(self) -> int:
        self.number = random.getrandbits(60) if self.number is None else self.number
        return self.number

    def agree_on_run(self, broadcast: Any) -> None:
        pass


class HoldsALock(Lines):
    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir)
        self.lock = threading.Lock()


class Restores(Lines):
    numbers_runs = False  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["version"]


class RestoresNothing(Restores):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Resumes(Restores):
    """Cuts the file to the lines that it had when the checkpoint was saved."""

    end: float = float("inf")

    def save(self) -> None:
        if (path := Path(self.log_dir, "lines")).exists():
            os.truncate(path, min(self.end, path.stat().st_size))  # type: ignore[call-overload]
        super().save()
        self.end = path.stat().st_size

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "end": self.end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number, self.end = state["version"], state["end"]


class KeepsLaterRows(Resumes):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["version"]


class LosesARow(Resumes):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.end -= 40


class WritesTheLastRowAgain(Resumes):
    def save(self) -> None:
        lines = self.lines[-1:]
        super().save()
        self.lines = lines


class FailsAtTheEnd(Lines):
    def finalize(self, status: str) -> None:
        if status == "failed":
            raise OSError("no connection")
        super().finalize(status)


# ---- stores ----------------------------------------------------------------------------------------------------------


class Memory(CheckpointIO):
    """Keeps checkpoints in this process: path -> bytes, in the order in which they were written."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        stream = io.BytesIO()
        torch.save(dict(checkpoint), stream)
        self.remove_checkpoint(path)
        self.kept[str(path)] = stream.getvalue()

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        if not self.exists(path):
            raise CheckpointError(f"There is no checkpoint at {path}. Check the path.")
        stream = io.BytesIO(self.kept[str(path)])
        return torch.load(stream, map_location=map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Any) -> None:
        self.kept.pop(str(path), None)

    def written_at(self, path: Any) -> Any:
        return list(self.kept).index(str(path)) if str(path) in self.kept else None

    def find(self, folder: Any, pattern: str) -> list[str]:
        paths = map(Path, self.kept)
        return [str(path) for path in paths if path.parent == Path(folder) and fnmatch.fnmatch(path.name, pattern)]


class HalvesTensors(Memory):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        weights = checkpoint.get("state_dict", {})
        halved = {key: each.float() if each.dtype is torch.float64 else each for key, each in weights.items()}
        super().save_checkpoint({**checkpoint, "state_dict": halved}, path)


class KeepsReferences(Memory):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.kept.pop(str(path), None)
        self.kept[str(path)] = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        return dict(self.kept[str(path)])  # type: ignore[call-overload]


class NothingIsEmpty(Memory):
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        return super().load_checkpoint(path, map_location, weights_only) if self.exists(path) else {}


class RemovesNothing(Memory):
    def remove_checkpoint(self, path: Any) -> None:
        pass


class FindsAll(Memory):
    def find(self, folder: Any, pattern: str) -> list[str]:
        return list(self.kept)


class SaysNoTime(Memory):
    def written_at(self, path: Any) -> Any:
        return 0 if super().written_at(path) is None else 1


class TouchesNothing(Memory):
    def touch(self, path: Any) -> None:
        pass


class Removes1st(Memory):
    """The previous checkpoint is gone before the new one is complete."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.remove_checkpoint(path)
        super().save_checkpoint(checkpoint, path, storage_options)


class CopiesByName(TorchCheckpointIO):
    def copy(self, source: Any, path: Any, link: bool = False, replaces: bool = True) -> bool:
        return super().copy(source, path, True, replaces)


class RunsCode(Memory):
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        return super().load_checkpoint(path, map_location, False)


class ClosesOnTeardown(Memory):
    def teardown(self) -> None:
        self.kept.clear()


# ---- precisions ------------------------------------------------------------------------------------------------------


class Scaled(Precision):
    """Scales the loss by a power of two, so that nothing is lost."""

    precision = "scaled"
    scales_loss = True
    factor = 1024.0

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(tensor * self.factor, module)

    def unscale_gradients(self, optimizer: Any) -> None:
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad /= self.factor


class NeverUnscales(Scaled):
    def unscale_gradients(self, optimizer: Any) -> None:
        pass


class NeverUnscalesInALoop(NeverUnscales):
    """Clipping by norm hides it."""


class ForgetsACount(Scaled):
    """Counts steps for a later change of its factor."""

    steps = 0

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().optimizer_step(optimizer, *args, **kwargs)

    def state_dict(self, module: Any = None, optimizers: Any = ()) -> dict[str, Any]:
        return {"steps": self.steps}

    def teardown(self) -> None:
        self.steps = 0


class ScalesTwice(Scaled):
    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(tensor * 2, module)


class DoesNotClip(Scaled):
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return None


class RoundsLabels(Scaled):
    def convert_input(self, data: Any) -> Any:
        return map_leaves(lambda leaf: leaf.float() if torch.is_tensor(leaf) else leaf, data)


class UntiesWeights(Scaled):
    def convert_module(self, module: Any) -> Any:
        for child in module.modules():
            for name, value in list(child._parameters.items()):
                if value is not None:
                    child._parameters[name] = torch.nn.Parameter(value.detach().clone(), value.requires_grad)
        return module


class LeavesItsDtype(Scaled):
    @contextlib.contextmanager
    def tensor_init_context(self) -> Iterator[None]:  # type: ignore[override]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)  # an exception leaves it


class Adapts(Scaled):
    """Scales the gradients by a number of its own, which is in its state."""

    used = 0

    def unscale_gradients(self, optimizer: Any) -> None:
        super().unscale_gradients(optimizer)
        self.used += 1
        for parameter in self.main_params(optimizer):
            parameter.grad *= 1 + 1e-6 * self.used

    def state_dict(self, module: Any = None, optimizers: Any = ()) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state_dict: Any, module: Any = None, optimizers: Any = ()) -> None:
        self.used = state_dict["used"]

    def teardown(self) -> None:
        self.used = 0


class ForgetsItsState(Adapts):
    def load_state_dict(self, state_dict: Any, module: Any = None, optimizers: Any = ()) -> None:
        pass


class KeepsItsState(Adapts):
    def teardown(self) -> None:
        pass


# ---- loaders ---------------------------------------------------------------------------------------------------------


class Batches:
    """Shuffled batches, with a state: the seed of the pass and the number of its batches so far."""

    size = 6

    def __init__(self) -> None:
        self.number, self.done, self.resumes = 0, 0, False

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.done = 0
        self.resumes = False
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.number))
        for index in order[self.done :]:
            self.done += 1
            yield index + torch.zeros(2)
        self.number, self.done = self.number + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.done, self.resumes = state["number"], state["done"], True


class OnePass:
    """Its second pass is empty."""

    def __init__(self) -> None:
        self.rest = iter(Batches())

    def __iter__(self) -> Any:
        return self.rest


class TooLong(Batches):
    def __len__(self) -> int:
        return self.size + 1


class ContinuesThePass(Batches):
    def __iter__(self) -> Iterator[Any]:
        self.resumes = True
        return super().__iter__()


class StateMovesIt(Batches):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self.number += 1
        return state


class IgnoresItsState(Batches):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class LiveState(Batches):
    def state_dict(self) -> dict[str, Any]:
        return self.__dict__


DEFECTS: dict[type, tuple[str, type, str]] = {
    Countless: ("accelerator", Device, "it_counts_its_devices"),
    Infinite: ("accelerator", Device, "its_figures_are_plain_numbers"),
    StepsTwice: ("strategy", Alone, "it_trains_like_the_plain_loop"),
    LosesOptimizerState: ("strategy", Alone, "it_resumes_exactly"),
    CallsTwice: ("launcher", Forks, "each_process_runs_the_function_once"),
    LosesTheResult: ("launcher", Forks, "the_first_process_s_result_comes_back"),
    SwallowsFailures: ("launcher", Forks, "an_exception_in_a_rank_ends_the_job"),
    CountsFromOne: ("cluster", Cluster, "each_rank_is_there_once"),
    OneLocalRank: ("cluster", Cluster, "local_ranks_count_from_zero"),
    PortOfEachRank: ("cluster", Cluster, "all_ranks_meet_at_one_place"),
    NeverAsked: ("cluster", Cluster, "it_is_detected_only_where_it_is"),
    ReadsTheProcess: ("cluster", Cluster, "it_reads_its_own_variables"),
    PortOutOfRange: ("cluster", Cluster, "answers_have_their_types"),
    OtherAnswers: ("cluster", Cluster, "answers_stay_the_same"),
    DetectsItselfEverywhere: ("cluster", Cluster, "it_is_detected_only_where_it_is"),
    AcceptsAnyNumber: ("cluster", Cluster, "other_settings_are_refused"),
    TearsDownOnce: ("cluster", Cluster, "it_can_be_torn_down"),
    BelievesTheProgram: ("cluster", Cluster, "the_numbers_of_the_first_process_are_kept"),
    MakesItsFolderAtOnce: ("logger", Lines, "a_run_has_a_name_and_a_version"),
    RenamesItself: ("logger", Lines, "the_name_stays_the_same"),
    LosesTheEnd: ("logger", Lines, "what_was_logged_is_written"),
    DropsEveryThird: ("logger", Lines, "what_was_logged_is_written"),
    RefusesNaN: ("logger", Lines, "any_number_can_be_logged"),
    KeepsTheDictionary: ("logger", Lines, "any_number_can_be_logged"),
    WantsJSON: ("logger", Lines, "hyperparameters_can_be_logged"),
    ClosesForEver: ("logger", Lines, "another_run_may_follow"),
    OneFolder: ("logger", Lines, "runs_do_not_mix"),
    RankOfItsOwn: ("logger", Lines, "all_ranks_have_one_run"),
    RestoresNothing: ("logger", Restores, "a_resumed_fit_continues_the_run"),
    KeepsLaterRows: ("logger", Resumes, "a_resumed_fit_writes_each_row_once"),
    LosesARow: ("logger", Resumes, "a_resumed_fit_writes_each_row_once"),
    WritesTheLastRowAgain: ("logger", Resumes, "a_resumed_fit_writes_each_row_once"),
    HoldsALock: ("logger", Lines, "a_copy_in_another_process_is_the_same"),
    FailsAtTheEnd: ("logger", Lines, "a_fit_logs_with_it"),
    HalvesTensors: ("store", Memory, "what_is_saved_is_loaded"),
    KeepsReferences: ("store", Memory, "tensors_may_change_after_a_save"),
    SaysNoTime: ("store", Memory, "a_saved_checkpoint_is_there"),
    NothingIsEmpty: ("store", Memory, "a_missing_checkpoint_is_an_error"),
    RemovesNothing: ("store", Memory, "a_removed_checkpoint_is_gone"),
    FindsAll: ("store", Memory, "checkpoints_are_found_by_pattern"),
    TouchesNothing: ("store", Memory, "the_newest_checkpoint_is_known"),
    CopiesByName: ("store", TorchCheckpointIO, "a_copy_is_a_checkpoint_of_its_own"),
    Removes1st: ("store", Memory, "a_failed_save_leaves_the_previous_one"),
    RunsCode: ("store", Memory, "loading_runs_no_code"),
    ClosesOnTeardown: ("store", Memory, "it_works_again_after_teardown"),
    NeverUnscales: ("precision", Scaled, "it_trains_near_64_bits"),
    NeverUnscalesInALoop: ("precision", Scaled, "a_loop_of_ones_own_trains_with_it"),
    ForgetsACount: ("precision", Scaled, "it_resumes_exactly"),
    ScalesTwice: ("precision", Scaled, "it_accumulates"),
    DoesNotClip: ("precision", Scaled, "it_clips_unscaled_gradients"),
    RoundsLabels: ("precision", Scaled, "it_converts_only_floats"),
    UntiesWeights: ("precision", Scaled, "a_module_keeps_its_parameters"),
    LeavesItsDtype: ("precision", Scaled, "its_contexts_leave_nothing"),
    ForgetsItsState: ("precision", Adapts, "it_resumes_exactly"),
    KeepsItsState: ("precision", Adapts, "a_second_run_has_the_same_numbers"),
    OnePass: ("loader", Batches, "every_pass_is_complete"),
    TooLong: ("loader", Batches, "its_length_is_right"),
    ContinuesThePass: ("loader", Batches, "a_pass_that_is_left_does_not_shorten_the_next"),
    StateMovesIt: ("loader", Batches, "reading_the_state_changes_nothing"),
    IgnoresItsState: ("loader", Batches, "a_state_continues_its_pass"),
    LiveState: ("loader", Batches, "a_state_is_a_snapshot"),
}
"""For each defect its kind, the part without it, and the check about it."""


def several_loaders() -> CombinedLoader:
    return CombinedLoader({"a": DataLoader(range(12), 3, shuffle=True), "b": [1, 2]}, "max_size_cycle")  # type: ignore[arg-type]
