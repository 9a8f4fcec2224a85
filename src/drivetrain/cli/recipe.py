"""The command ``drivetrain recipe``: the file with which a program is submitted to a cluster, and its Dockerfile."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from drivetrain.base import yaml_text
from drivetrain.base.lazy import Later
from drivetrain.cli.program import positive

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # pods are called <name>-<index>, in at most 63 characters
_FOLDER = re.compile(r"/[^\s:,\"'$`\\#\x00-\x1f]+")  # also a part of dstack's "path:path"
_WORD = re.compile(r"\w[\w./:@-]*")
_GPU = re.compile(r"\w[\w.-]*")  # before the colon in SkyPilot's "H100:8"
_TIME = re.compile(r"\d+(-\d+)?(:\d+){0,2}")
_METADATA = Later("importlib.metadata")  # slow to import, and no help of a command needs it
_APP = "/app"  # the program's folder in an image
_RESTARTS = 10
_PORT = 12910
_LONGEST_SIGNAL_S = 65_535  # that SLURM can send before a job's end
_STOP_TIMEOUT_S = 600  # the Trainer's default, whose import would take seconds


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Print the file that submits PROGRAM to a cluster. Its first comment says how to submit it, "
        "and what the Trainer of the program must be given. Arguments of the program come after --."
    )  # fmt: skip
    made.add_argument("cluster", choices=_RECIPES, metavar="CLUSTER", help=", ".join(_RECIPES))
    made.add_argument(
        "program", metavar="PROGRAM", type=_matching(re.compile(r"(?s).+"), "the path of a program"),
        help="the program: a path in the shared folder, or an absolute one",
    )  # fmt: skip
    made.add_argument("--nodes", type=positive, default=1, help="machines (1)")
    made.add_argument("--devices", type=positive, default=1, help="GPUs, or with --cpu processes, of each machine (1)")
    made.add_argument("--cpu", action="store_true", help="machines without GPUs")
    made.add_argument(
        "--gpu", type=_matching(_GPU, "a kind of GPU"), default="H100", help="sky: the kind of GPU (H100)"
    )
    made.add_argument(
        "--name", type=_matching(_NAME, "a name of a-z, 0-9 and -"), default="train", help="the job's name (train)"
    )
    made.add_argument(
        "--folder", type=_matching(_FOLDER, "an absolute path without blanks and special characters"),
        default="/shared", help="the folder that all machines share, in which the program runs (/shared)",
    )  # fmt: skip
    made.add_argument(
        "--volume", type=_matching(_WORD, "a word"),
        help="trainjob, k8s: the volume claim of that folder (shared); sky: its bucket",
    )  # fmt: skip
    made.add_argument(
        "--image", type=_matching(_WORD, "a word"), help="trainjob, k8s, dstack, docker: the container's image"
    )
    made.add_argument(
        "--time",
        type=_matching(_TIME, "a time of SLURM, such as 1-00:00:00 or 30:00"),
        default="1-00:00:00",
        help="slurm: the time limit (1 day)",
    )
    made.add_argument(
        "--stop-timeout", type=positive, default=_STOP_TIMEOUT_S, metavar="SECONDS",
        help="how long the processes have to save and end: the Trainer's stop_timeout_s (600)",
    )  # fmt: skip
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain recipe") -> int:
    """Print the file for a cluster; wrong usage ends in ``SystemExit(2)``."""
    arguments, own = _split(list(arguments))
    made = parser(prog)
    given, unknown = made.parse_known_args(arguments)
    if unknown:
        made.error(f"unrecognized arguments: {shlex.join(unknown)}. Arguments of the program come after --")
    if given.image is None and given.cluster in ("trainjob", "k8s"):
        made.error(f"{given.cluster} runs containers. Pass --image, an image with python, torch and drivetrain.")
    if given.volume is None and given.cluster == "sky":
        made.error("sky keeps the shared folder in a bucket. Pass its name, unique in the cloud: --volume.")
    for word in (given.program, *own):
        if not word.isprintable() or "${{" in word:  # dstack replaces ${{ }}
            made.error(f"the argument {word!r} holds control characters or ${{{{. Let the program read it from a file.")
    if problem := _problem(given):
        made.error(problem)
    given.command = ["python", given.program, *own]
    print(_RECIPES[given.cluster](given), end="")
    return 0


def _problem(given: argparse.Namespace) -> str:
    """Return why the file would not work on its platform; "" if it works."""
    if given.cluster == "slurm" and not given.stop_timeout < (_seconds(given.time) or math.inf):
        return f"SLURM would ask the job to stop when it starts: --time={given.time} is no more than --stop-timeout."
    if given.cluster == "slurm" and given.stop_timeout > _LONGEST_SIGNAL_S:
        return f"SLURM sends a signal at most {_LONGEST_SIGNAL_S} s before the end: --stop-timeout={_LONGEST_SIGNAL_S}."
    if given.cluster in ("docker", "sky") and os.path.normpath(given.program).startswith(".."):
        return f"{given.cluster} copies this folder, in which {given.program!r} is not. Start the command beside it."
    if given.cluster == "docker" and os.path.normpath(given.folder) == _APP:
        return f"the image has the program in {_APP}, which a shared folder there would hide. Pass another --folder."
    return ""


def _seconds(time: str) -> int:
    """Return the seconds of a time limit in one of SLURM's forms; 0 is no limit."""
    days, _, rest = time.rpartition("-")
    parts = rest.split(":")
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and those after it."""
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return check


def _top(given: argparse.Namespace, submit: str, trainer: str, *notes: str) -> list[str]:
    """Return the comment at the top of a file."""
    kind = 'accelerator="cpu", ' if given.cpu else ""
    timeout = f", stop_timeout_s={given.stop_timeout}"
    lines = [f"Submit it with: {submit}", f"The program needs: Trainer({kind}{trainer}{timeout})"]
    return [f"# {line}" for line in (*lines, *notes)]


def _in_folder(given: argparse.Namespace, command: Sequence[str], run: str = "exec") -> str:
    """Return shell code that runs ``command`` in the shared folder, in place of the shell."""
    return f"cd -- {shlex.quote(given.folder)} && {run} {shlex.join(command)}"


def _slurm(given: argparse.Namespace) -> str:
    processes = f"num_nodes={given.nodes}, devices={given.devices}"
    gpus = [] if given.cpu else [f"--gpus-per-node={given.devices}"]
    options = [
        f"--job-name={given.name}", f"--nodes={given.nodes}", f"--ntasks-per-node={given.devices}", *gpus,
        f"--time={given.time}", f"--signal=USR1@{given.stop_timeout}", "--requeue", "--open-mode=append",
        "--output=%x-%j.log",
    ]  # fmt: skip
    notes = (
        f"{given.stop_timeout} s before its time is over, the job gets USR1: it saves, and goes back into the queue.",
        "After the failure of a machine, SLURM queues it again. Each start resumes from the newest checkpoint.",
    )
    return "\n".join([
        "#!/bin/bash", *(f"#SBATCH {option}" for option in options),
        *_top(given, "sbatch FILE", processes, *notes),
        "export DRIVETRAIN_RESUME=auto",
        _in_folder(given, ["srun", "--kill-on-bad-exit=1", *given.command]), "",
    ])  # fmt: skip


def _from_template(name: str, top: list[str], **words: object) -> str:
    template = Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")
    return Template(template).substitute(words, top="\n".join(top))


def _docker(given: argparse.Namespace) -> str:
    image, folder = given.image or given.name, shlex.quote(given.folder)
    devices = f"--cpus={given.devices}" if given.cpu else f"--gpus={given.devices}"
    run = ["docker run --detach", f"--name={given.name}", devices, f"--stop-timeout={given.stop_timeout}",
           f"--restart=on-failure:{_RESTARTS}", "--ipc=host", f"--volume={folder}:{folder}", image]  # fmt: skip
    notes = (
        "This folder needs the wheel of drivetrain, and requirements.txt with the program's other packages. The rest",
        f"of it is copied to {_APP}, but for what .dockerignore names: write .git, .env and folders of runs there.",
        f"The program runs as user 1000, who must be able to write in {given.folder}.",
    )
    top = [f"# Build it with: docker build --tag={image} --file=FILE .", *_top(given, " ".join(run), _devices(given))]
    return _from_template(
        "docker.txt", [*top, *(f"# {note}" for note in notes)], folder=folder, app=_APP,
        python=".".join(map(str, sys.version_info[:2])), torch=_METADATA.version("torch").partition("+")[0],
        index=" --index-url=https://download.pytorch.org/whl/cpu" if given.cpu else "",
        command=json.dumps(["python", str(Path(_APP, given.program)), *given.command[2:]], ensure_ascii=False),
    )  # fmt: skip


def _ray(given: argparse.Namespace) -> str:
    variables = {"DRIVETRAIN_RESUME": "auto", "RAY_JOB_STOP_SIGNAL": "SIGTERM",
                 "RAY_JOB_STOP_WAIT_TIME_S": str(given.stop_timeout)}  # fmt: skip
    trainer = f'strategy="ddp_ray", num_nodes={given.nodes}, devices={given.devices}'
    notes = (f"The job is started again after a failure, up to {_RESTARTS} times, and resumes each time.",)
    top = _top(given, "RAY_API_SERVER_ADDRESS=http://HEAD:8265 python FILE", trainer, *notes)
    return _from_template(
        "ray.txt", top, starts=_RESTARTS + 1, entrypoint=repr(_in_folder(given, given.command)),
        variables="\n".join(f"            {name!r}: {value!r}," for name, value in variables.items()),
    )  # fmt: skip


def _yaml(top: list[str], *documents: dict[str, Any]) -> str:
    return "\n".join([*top, "---\n".join(map(yaml_text.dump, documents))])


def _sky(given: argparse.Namespace) -> str:
    devices = {"cpus": f"{given.devices}+"} if given.cpu else {"accelerators": f"{given.gpu}:{given.devices}"}
    program = given.command[1]
    where = program if program.startswith("/") else f"sky_workdir/{program}"
    path = shlex.quote(where) if program.startswith("/") else f'"$HOME"/{shlex.quote(where)}'
    notes = (
        "The program is copied from this folder. SkyPilot sets no time for stopping: a machine that is taken away may",
        "end sooner than the Trainer's limit. The job starts again then, and resumes from the newest checkpoint.",
    )
    task = {
        "name": given.name, "num_nodes": given.nodes, "workdir": ".",
        "resources": {**devices, "job_recovery": {"max_restarts_on_errors": _RESTARTS}},
        "file_mounts": {given.folder: {"name": given.volume, "mode": "MOUNT"}},
        "envs": {"DRIVETRAIN_RESUME": "auto"},
        "run": f"cd -- {shlex.quote(given.folder)} && exec python {path} {shlex.join(given.command[2:])}\n",
    }  # fmt: skip
    return _yaml(_top(given, "sky jobs launch FILE", _devices(given), *notes), task)


def _devices(given: argparse.Namespace) -> str:
    """Return the Trainer's argument for the devices of a machine, where the cluster sets the number of machines."""
    return f"devices={given.devices}" if given.cpu else 'devices="auto"'


def _dstack(given: argparse.Namespace) -> str:
    notes = ("The shared folder is one of the machines of the fleet, such as a network file system.",)
    task = {
        "type": "task", "name": given.name, "nodes": given.nodes,
        **({"image": given.image} if given.image else {"python": "3.12"}),
        "env": {"DRIVETRAIN_RESUME": "auto"},
        "commands": [_in_folder(given, given.command)],
        "resources": {"cpu": f"{given.devices}.."} if given.cpu else {"gpu": given.devices},
        "volumes": [f"{given.folder}:{given.folder}"],
        "stop_duration": f"{given.stop_timeout}s",
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
    }  # fmt: skip
    return _yaml(_top(given, "dstack apply -f FILE", _devices(given), *notes), task)


def _container(given: argparse.Namespace, **variables: str) -> dict[str, Any]:
    """Return the parts of a container that the manifests of Job and TrainJob share."""
    limits = {"cpu": str(given.devices)} if given.cpu else {"nvidia.com/gpu": str(given.devices)}
    variables = {"DRIVETRAIN_RESUME": "auto", **variables}
    return {
        "image": given.image,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "shared", "mountPath": given.folder}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _literal(command: list[str]) -> list[str]:
    """Escape a container's command, because Kubernetes replaces ``$(NAME)`` in it."""
    return [word.replace("$", "$$") for word in command]


def _volumes(given: argparse.Namespace) -> list[dict[str, Any]]:
    claim = {"claimName": given.volume or "shared"}
    return [{"name": "shared", "persistentVolumeClaim": claim}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]


def _k8s(given: argparse.Namespace) -> str:
    name = given.name
    first = {"DRIVETRAIN_JOB_NODES": str(given.nodes), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(_PORT)}
    container = {
        "name": "train", "command": _literal(given.command), "workingDir": given.folder, **_container(given, **first)
    }  # fmt: skip
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }  # fmt: skip
    pod = {
        "subdomain": name, "restartPolicy": "Never", "terminationGracePeriodSeconds": given.stop_timeout,
        "shareProcessNamespace": True,  # as process 1, Python would ignore SIGTERM until its fit begins
        "automountServiceAccountToken": False, "containers": [container], "volumes": _volumes(given),
    }  # fmt: skip
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed", "completions": given.nodes, "parallelism": given.nodes,
            "backoffLimit": _RESTARTS * given.nodes, "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": [evicted]}, "template": {"spec": pod},
        },
    }  # fmt: skip
    notes = ("Pods that end by a failure or an eviction are replaced, and the job resumes from the newest checkpoint.",)
    return _yaml(_top(given, "kubectl apply -f FILE", _devices(given), *notes), service, job)


def _trainjob(given: argparse.Namespace) -> str:
    launch = ["torchrun", f"--shutdown-timeout={given.stop_timeout}", f"--max-restarts={_RESTARTS}", *given.command[1:]]
    container = _container(given)
    pod = {
        "terminationGracePeriodSeconds": given.stop_timeout, "volumes": _volumes(given),
        "containers": [{"name": "node", "volumeMounts": container.pop("volumeMounts")}],
    }  # fmt: skip
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": given.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": given.nodes, "numProcPerNode": given.devices,
                "command": _literal(["bash", "-c", _in_folder(given, launch, "exec $(command -v tini)")]),
                "resourcesPerNode": container.pop("resources"), **container,
            },
            "runtimePatches": [
                {"manager": "drivetrain.recipe/user", "trainingRuntimeSpec": {"template": {"spec": patch}}}
            ],
        },
    }  # fmt: skip
    notes = (
        "It uses the runtime torch-distributed, which says how often pods are replaced.",
        "Without tini in the image, a pod that waits for others ends only when the time for stopping is over.",
    )
    processes = f"num_nodes={given.nodes}, devices={given.devices}"
    return _yaml(_top(given, "kubectl apply -f FILE", processes, *notes), job)


_RECIPES: dict[str, Callable[[argparse.Namespace], str]] = {
    "slurm": _slurm, "trainjob": _trainjob, "ray": _ray, "sky": _sky, "dstack": _dstack, "k8s": _k8s,
    "docker": _docker,
}  # fmt: skip
