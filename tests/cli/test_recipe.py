"""The files that ``drivetrain recipe`` prints: read by readers of their languages, run with stand-ins for commands."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from drivetrain.cli import command
from drivetrain.cli import recipe as recipe_command
from drivetrain.settings import Settings

CLUSTERS = ["slurm", "trainjob", "ray", "sky", "dstack", "k8s", "docker"]
ODD = ["--note=it's", "a b", "", "$HOME", "$(touch pwned)", "`touch pwned`", "\\", "*", "--", "ü", '"', "$$x", "#", ";"]


def recipe(capsys: pytest.CaptureFixture[str], cluster: str, *words: str, program: str = "train.py") -> str:
    options = ["--image=me/train:1", "--volume=runs-of-me", "--nodes=2", "--devices=8"]
    assert command.main(["recipe", cluster, program, *options, *words]) == 0
    return capsys.readouterr().out


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def pod_of(cluster: str, text: str) -> dict[str, Any]:
    if cluster == "k8s":
        found: dict[str, Any] = documents(text)[1]["spec"]["template"]["spec"]
        return found
    [patch] = documents(text)[0]["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    found = job["template"]["spec"]["template"]["spec"]
    return found


# ---- what they say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_each_resumes_runs_in_the_shared_folder_and_names_what_the_program_needs(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    text = recipe(capsys, cluster, "--folder=/mnt/runs", "--stop-timeout=300")
    assert "DRIVETRAIN_RESUME" in text
    assert "/mnt/runs" in text
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert any(line.startswith("# Submit it with: ") for line in comments)
    assert any(line.startswith("# The program needs: Trainer(") and "stop_timeout_s=300)" in line for line in comments)


def test_the_time_for_stopping_is_the_trainers() -> None:
    assert Settings.stop_timeout_s == recipe_command._STOP_TIMEOUT_S


def test_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    lines = recipe(capsys, "slurm", "--time=12:00:00").splitlines()
    assert lines[0] == "#!/bin/bash"
    options = {line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")}
    assert options >= {
        "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=12:00:00", "--signal=USR1@600", "--requeue",
    }  # fmt: skip
    assert "# The program needs: Trainer(num_nodes=2, devices=8, stop_timeout_s=600)" in lines
    assert "--gpus" not in recipe(capsys, "slurm", "--cpu")


@pytest.mark.parametrize("time", ["11", "10:01", "0:10:01", "0-1", "0-0:11", "0-0:10:01", "0"])
def test_slurm_with_more_time_than_a_stop_takes(capsys: pytest.CaptureFixture[str], time: str) -> None:
    assert f"#SBATCH --time={time}\n" in recipe(capsys, "slurm", f"--time={time}")


def test_k8s(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = documents(recipe(capsys, "k8s", "--name=digits", "--stop-timeout=300"))
    assert (service["kind"], service["spec"]["clusterIP"], service["spec"]["selector"]) == (
        "Service", "None", {"job-name": "digits"},
    )  # fmt: skip
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == ("digits", 300, "Never")
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables == {
        "DRIVETRAIN_RESUME": "auto", "DRIVETRAIN_JOB_NODES": "2", "MASTER_ADDR": "digits-0.digits",
        "MASTER_PORT": "12910",
    }  # fmt: skip


def test_the_environment_of_the_k8s_recipe_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    from drivetrain.clusters import KubernetesEnvironment, detect

    [container] = pod_of("k8s", recipe(capsys, "k8s"))["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    found, _ = detect({"PATH": "", "JOB_COMPLETION_INDEX": "1", **variables})
    assert isinstance(found, KubernetesEnvironment)
    assert (found.num_nodes(), found.node_rank(), found.main_address) == (2, 1, "train-0.train")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="this user may not make process namespaces",
)
def test_a_program_that_has_not_begun_its_fit_ends_when_its_pod_is_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pod = pod_of("k8s", recipe(capsys, "k8s"))
    (tmp_path / "train.py").write_text("import os\nprint(os.readlink('/proc/self'), flush=True)\nprint(input())")

    def stopped(shared: bool) -> tuple[int, str]:
        """Exit code, and what the program prints after SIGTERM; in a shared namespace another process is the first."""
        first = ["sh", "-c", '"$@"; exit $?', "pause"] if shared else []
        words = ["unshare", "--pid", "--fork", "--kill-child", *first, *pod["containers"][0]["command"]]
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        with subprocess.Popen(
            words, cwd=tmp_path, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as started:
            assert started.stdout is not None
            os.kill(int(started.stdout.readline()), signal.SIGTERM)
            rest, _ = started.communicate("trains on", timeout=60)
        return started.returncode, rest

    assert stopped(pod.get("shareProcessNamespace", False)) == (128 + signal.SIGTERM, "")
    assert stopped(shared=False) == (0, "trains on\n")


def test_trainjob(capsys: pytest.CaptureFixture[str]) -> None:
    text = recipe(capsys, "trainjob", "--stop-timeout=300")
    [job] = documents(text)
    trainer = job["spec"]["trainer"]
    assert (job["kind"], trainer["numNodes"], trainer["numProcPerNode"]) == ("TrainJob", 2, 8)
    assert "torchrun --shutdown-timeout=300 " in trainer["command"][2]
    assert pod_of("trainjob", text)["terminationGracePeriodSeconds"] == 300


def test_sky_and_dstack(capsys: pytest.CaptureFixture[str]) -> None:
    [sky] = documents(recipe(capsys, "sky", "--gpu=A100-80GB"))
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (2, "A100-80GB:8")
    assert sky["file_mounts"] == {"/shared": {"name": "runs-of-me", "mode": "MOUNT"}}
    assert sky["resources"]["job_recovery"] == {"max_restarts_on_errors": 10}
    [dstack] = documents(recipe(capsys, "dstack", "--stop-timeout=300"))
    assert (dstack["nodes"], dstack["resources"], dstack["stop_duration"]) == (2, {"gpu": 8}, "300s")
    assert dstack["volumes"] == ["/shared:/shared"]


def test_ray(capsys: pytest.CaptureFixture[str]) -> None:
    text = recipe(capsys, "ray", "--stop-timeout=300")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    [submit] = [call for call in calls if ast.unparse(call.func) == "client.submit_job"]
    given = {word.arg: ast.literal_eval(word.value) for word in submit.keywords}
    assert given["entrypoint"] == "cd -- /shared && exec python train.py"
    assert given["runtime_env"]["env_vars"] == {
        "DRIVETRAIN_RESUME": "auto", "RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": "300",
    }  # fmt: skip


def test_docker(capsys: pytest.CaptureFixture[str]) -> None:
    lines = recipe(capsys, "docker", "--stop-timeout=300", "--folder=/a;b").splitlines()
    assert "# Build it with: docker build --tag=me/train:1 --file=FILE ." in lines
    [run] = [line.removeprefix("# Submit it with: ") for line in lines if line.startswith("# Submit it with: ")]
    assert {"--gpus=8", "--stop-timeout=300", "--restart=on-failure:10", "--volume=/a;b:/a;b"} <= set(shlex.split(run))
    assert '# The program needs: Trainer(devices="auto", stop_timeout_s=300)' in lines
    own, torch_version = f"{sys.version_info[0]}.{sys.version_info[1]}", version("torch").partition("+")[0]
    assert f"FROM python:{own}-slim" in lines
    [created] = [line for line in lines if line.startswith("RUN useradd ")]
    assert shlex.split(created)[-2:] == ["--", "/a;b"]
    instructions = [line.split(maxsplit=1)[0] for line in lines if line[0] not in "# "]
    last_root = max(index for index, name in enumerate(instructions) if name in ("RUN", "COPY"))
    assert instructions.index("USER") > last_root
    pinned = [line for line in lines if "pip install" in line]
    assert [line.split("pip install ")[1].split()[0] for line in pinned] == [f"torch=={torch_version}"] * 2
    assert "--cpus=8" in (text := recipe(capsys, "docker", "--cpu"))
    assert f"torch=={torch_version} --index-url=https://download.pytorch.org/whl/cpu\n" in text


PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"
SHOWN = re.findall(
    r"^```\ndrivetrain (recipe [^\n>]*)\n```\n\n```\w*\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize(("words", "shown"), SHOWN, ids=[words.split()[1] for words, _ in SHOWN])
def test_the_page_of_platforms_shows_each_file_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, shown: str
) -> None:
    monkeypatch.setattr(recipe_command, "_METADATA", SimpleNamespace(version={"torch": "2.13.0"}.get))
    monkeypatch.setattr(recipe_command, "sys", SimpleNamespace(version_info=(3, 12)))
    assert command.main(shlex.split(words)) == 0
    assert capsys.readouterr().out == shown


def test_the_page_of_platforms_shows_them_all() -> None:
    assert [words.split()[1] for words, _ in SHOWN] == CLUSTERS


# ---- words of the program's command ----------------------------------------------------------------------------------


def shell_of(cluster: str, text: str) -> str:
    """The code that a shell of the cluster runs."""
    if cluster == "slurm":
        return text
    if cluster == "docker":
        [command] = re.findall("^CMD (.*)$", text, re.MULTILINE)
        return shlex.join(json.loads(command))
    if cluster == "ray":
        return next(
            ast.literal_eval(word.value)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
            for word in node.keywords
            if word.arg == "entrypoint"
        )
    [job] = documents(text)[-1:]
    if cluster == "sky":
        return str(job["run"])
    if cluster == "dstack":
        return str(job["commands"][0])
    words = (
        job["spec"]["trainer"]["command"]
        if cluster == "trainjob"
        else pod_of(cluster, text)["containers"][0]["command"]
    )
    words = [word.replace("$$", "$") for word in words]  # as Kubernetes does
    return words[2] if cluster == "trainjob" else shlex.join(words)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_odd_words_reach_the_program_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cluster: str
) -> None:
    programs, shared = tmp_path / "bin", tmp_path / "shared"
    programs.mkdir()
    shared.mkdir()
    for name, code in {
        "python": 'printf "%s\\0" "$@"',
        "srun": 'shift; exec "$@"',
        "torchrun": 'shift 2; exec python "$@"',
        "tini": 'exec "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{code}\n")
        (programs / name).chmod(0o755)
    text = recipe(capsys, cluster, f"--folder={shared}", "--", *ODD, program="my train.py")
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/home/me"}
    done = subprocess.run(
        ["bash", "-u", "-c", shell_of(cluster, text)], env=variables, cwd=shared, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    program, *words = done.stdout.decode().split("\0")[:-1]
    where = {"sky": "/home/me/sky_workdir/", "docker": "/app/"}
    assert program == f"{where.get(cluster, '')}my train.py"
    assert words == ODD
    assert [path.name for path in tmp_path.rglob("pwned")] == []


# ---- wrong usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lsf", "train.py"], "invalid choice: 'lsf'"),
        (["slurm"], "required: PROGRAM"),
        (
            ["slurm", "train.py", "--lr", "0.1"],
            "unrecognized arguments: --lr 0.1. Arguments of the program come after --",
        ),
        (["slurm", "train.py", "--nodes=0"], "'0' is not a whole number of at least 1"),
        (["slurm", "train.py", "--devices=two"], "'two' is not a whole number"),
        (["slurm", "train.py", "--name=a\nb"], "is not a name of a-z, 0-9 and -"),
        (["slurm", "train.py", "--name=x; rm"], "is not a name of a-z, 0-9 and -"),
        (["slurm", "train.py", "--time=1h"], "'1h' is not a time of SLURM"),
        (["slurm", ""], "'' is not the path of a program"),
        (["slurm", "train.py", "--folder=runs"], "'runs' is not an absolute path"),
        (["dstack", "train.py", "--folder=/a:/b"], "is not an absolute path without blanks"),
        (["k8s", "train.py"], "k8s runs containers. Pass --image"),
        (["k8s", "train.py", "--image=a b"], "'a b' is not a word"),
        (["k8s", "train.py", "--image=--privileged"], "'--privileged' is not a word"),
        (["k8s", "train.py", "--image=x", "--folder=/"], "'/' is not an absolute path"),
        (["slurm", "train.py", "--time=10"], "stop when it starts: --time=10 is no more than --stop-timeout"),
        (["slurm", "train.py", "--time=1-0", "--stop-timeout=86400"], "--time=1-0 is no more than --stop-timeout"),
        (["slurm", "train.py", "--time=0", "--stop-timeout=70000"], "at most 65535 s before the end"),
        (["docker", "../train.py"], "docker copies this folder, in which '../train.py' is not"),
        (["sky", "a/../../train.py", "--volume=x"], "sky copies this folder"),
        (["docker", "train.py", "--folder=/app/"], "the image has the program in /app, which a shared folder there"),
        (["sky", "train.py"], "Pass its name, unique in the cloud: --volume"),
        (["slurm", "train.py", "--", "a\nb"], "the argument 'a\\nb' holds control characters"),
        (["dstack", "train.py", "--", "${{ secrets.x }}"], "holds control characters or ${{"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["recipe", *words])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
