"""The command ``drivetrain recipe``: print the file with which to submit a program to a cluster, or a Dockerfile."""

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

from drivetrain.base.lazy import Later
from drivetrain.base.yaml_text import scalar
from drivetrain.cli.program import positive

# a pod is called <name>-<index>, and this may have at most 63 characters
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_FOLDER = re.compile(r"/[^\s:,\"'$`\\#\x00-\x1f]+")  # no colon, because dstack writes volumes as "path:path"
_WORD = re.compile(r"\w[\w./:@-]*")
_GPU = re.compile(r"\w[\w.-]*")  # without the number that SkyPilot adds, as in "H100:8"
_TIME = re.compile(r"\d+(-\d+)?(:\d+){0,2}")
_METADATA = Later("importlib.metadata")  # importing it is slow, and the help does not need it
_APP = "/app"  # the program's folder in an image
_RESTARTS = 10
_LONGEST_SIGNAL_S = 65_535  # SLURM sends a signal at most this many seconds before a job ends
_STOP_TIMEOUT_S = 600  # the Trainer's default; importing the Trainer for it would take seconds

_CLUSTERS = ("slurm", "trainjob", "ray", "sky", "dstack", "k8s", "docker")
"""The kinds of clusters, each with a file in ``templates/``. k8s.txt sets shareProcessNamespace. Without it, Python
would be process 1, and would ignore SIGTERM until the Trainer handles it.
"""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Print the file that submits PROGRAM to a cluster. Its first comment says how to submit it, "
        "and what the Trainer of the program must be given. Arguments of the program come after --."
    )  # fmt: skip
    made.add_argument("cluster", choices=_CLUSTERS, metavar="CLUSTER", help=", ".join(_CLUSTERS))
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
    """Print the file for a cluster. Wrong usage raises ``SystemExit(2)``."""
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
        if not word.isprintable() or "${{" in word:  # dstack would replace the text in ${{ }}
            made.error(f"the argument {word!r} holds control characters or ${{{{. Let the program read it from a file.")
    if problem := _problem(given):
        made.error(problem)
    print(_file(given, [given.program, *own]), end="")
    return 0


def _problem(given: argparse.Namespace) -> str:
    """Return why the options cannot work on the cluster; "" if they can."""
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
    """Return a time limit of SLURM, such as "1-12:00:00", in seconds. 0 means no limit."""
    days, _, rest = time.rpartition("-")
    parts = rest.split(":")
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and the words after it."""
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return check


def _command(given: argparse.Namespace, program: Sequence[str]) -> str:
    """Return the command that starts the program, in the syntax of the cluster's file."""
    inside = f"cd -- {shlex.quote(given.folder)} && exec "
    if given.cluster == "docker":
        return json.dumps(["python", str(Path(_APP, program[0])), *program[1:]], ensure_ascii=False)
    if given.cluster == "k8s":
        return "\n            ".join(f"- {_literal(word)}" for word in ("python", *program))
    if given.cluster == "trainjob":
        launch = f"torchrun --shutdown-timeout={given.stop_timeout} --max-restarts={_RESTARTS}"
        return _literal(f"{inside}$(command -v tini) {launch} {shlex.join(program)}")
    if given.cluster == "sky":
        is_absolute = program[0].startswith("/")
        path = shlex.quote(program[0]) if is_absolute else '"$HOME"/' + shlex.quote(f"sky_workdir/{program[0]}")
        return scalar(f"{inside}python {path} {shlex.join(program[1:])}\n")
    command = shlex.join(["python", *program])
    if given.cluster == "slurm":
        return f"{inside}srun --kill-on-bad-exit=1 {command}"
    return repr(inside + command) if given.cluster == "ray" else scalar(inside + command)


def _literal(word: str) -> str:
    """Return a word of a container's command as YAML. Double each $, because Kubernetes would replace ``$(NAME)``."""
    return scalar(word.replace("$", "$$"))


def _limit(given: argparse.Namespace) -> str:
    """Return the line of the cluster's file that sets the number of devices per machine."""
    count = given.devices
    by_cluster = {
        "docker": (f"--cpus={count}", f"--gpus={count}"),
        "sky": (f'cpus: "{count}+"', f"accelerators: {scalar(f'{given.gpu}:{count}')}"),
        "dstack": (f'cpu: "{count}.."', f"gpu: {count}"),
    }
    for_cpu, for_gpu = by_cluster.get(given.cluster, (f'cpu: "{count}"', f'nvidia.com/gpu: "{count}"'))
    return for_cpu if given.cpu else for_gpu


def _file(given: argparse.Namespace, program: Sequence[str]) -> str:
    """Return the text of the cluster's file: its template with values filled in. A template uses only some of
    ``words``.
    """
    quote = shlex.quote if given.cluster in ("slurm", "ray", "docker") else scalar
    name, folder, image = given.name, given.folder, scalar(given.image or "")
    words = {
        **vars(given), "name": quote(name), "folder": quote(folder), "image": image, "tag": given.image or name,
        "volume": scalar(given.volume or "shared"), "mount": scalar(f"{folder}:{folder}"), "app": _APP,
        "base": f"image: {image}" if given.image else 'python: "3.12"', "address": f"{name}-0.{name}",
        "command": _command(given, program), "limit": _limit(given),
        "kind": 'accelerator="cpu", ' if given.cpu else "", "counted": given.devices if given.cpu else '"auto"',
        "gpus": "" if given.cpu else f"\n#SBATCH --gpus-per-node={given.devices}",
        "restarts": _RESTARTS, "starts": _RESTARTS + 1, "pods": _RESTARTS * given.nodes,
    }  # fmt: skip
    if given.cluster == "docker":
        words["python"] = ".".join(map(str, sys.version_info[:2]))
        words["torch"] = _METADATA.version("torch").partition("+")[0]
        words["index"] = " --index-url=https://download.pytorch.org/whl/cpu" if given.cpu else ""
    template = Path(__file__).with_name("templates").joinpath(f"{given.cluster}.txt").read_text(encoding="utf-8")
    return Template(template).substitute(words)
