"""Tests on real cluster managers, run by ``make test-clusters``; see :class:`Network` for what a node is here.

All that is started lives in network namespaces with names of their own, and ends with the test or the session: no
service of the machine, no port, no file in /etc is left.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.packages import below

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAIN = HERE / "train.py"
DIGITS = ROOT / "examples" / "digits.py"
PACKAGES = Path(sys.prefix) / "debian"  # where install.sh has unpacked what the system has not
RUN_S = 90  # a job that takes longer hangs
WAIT_S = 60  # so does what is waited for so long
_NUMBERS = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if below(HERE, item):
            item.add_marker(pytest.mark.timeout(300))


def environment(**more: str) -> dict[str, str]:
    """This process's variables and what finds the unpacked packages; one thread per process on few cores."""
    libraries = PACKAGES / "usr/lib/x86_64-linux-gnu"
    found = dict(os.environ)
    found["OMP_NUM_THREADS"] = "1"
    if (PACKAGES / "usr/bin/mpirun").exists():
        found["OPAL_PREFIX"] = f"{PACKAGES}/usr"  # it is not where it was built for
    if PACKAGES.exists():
        found["PATH"] = os.pathsep.join([f"{PACKAGES}/usr/bin", f"{PACKAGES}/usr/sbin", found.get("PATH", "")])
        found["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [libraries, libraries / "slurm-wlm", PACKAGES / "lib"]))
    return {**found, **more}


def need(*programs: str) -> None:
    """Skip the test where one of ``programs`` is not installed."""
    path = environment()["PATH"]
    if missing := [program for program in programs if shutil.which(program, path=path) is None]:
        pytest.skip(f"{', '.join(missing)} cannot be installed here; install.sh says why")


def wait_for(what: str, found: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """What ``found`` returns, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} seconds in vain for {what}"
        time.sleep(0.05)
    return result


@pytest.fixture(name="wait_for", scope="session")
def _wait_for() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(name="need", scope="session")
def _need() -> Callable[..., None]:
    return need


# ---- machines --------------------------------------------------------------------------------------------------------


class Node:
    """A machine of a :class:`Network`: its own network stack and host name; files and processors are everybody's."""

    def __init__(self, name: str, address: str, namespace: str, hosts: Path) -> None:
        self.name, self.address, self.namespace, self.hosts = name, address, namespace, hosts
        self._started: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: Any) -> list[str]:
        """The command that runs ``arguments`` on this node.

        ``ip netns exec`` would do nearly the same, but hides control groups, without which slurmd does not start.
        """
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return [*enter, "sh", "-c", become, self.name, str(self.hosts), *map(str, arguments)]

    def start(self, *arguments: Any, output: Path, **environ: str) -> subprocess.Popen[bytes]:
        """Start a program whose output goes to the end of a file."""
        with output.open("ab") as file:
            return self._start(arguments, file, environ)

    def _start(self, arguments: Sequence[Any], output: Any, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment(**environ), start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *arguments: Any, seconds: float = RUN_S, **environ: str) -> tuple[int, str]:
        """Run a program to its end: its exit code and what it wrote."""
        process = self._start(arguments, subprocess.PIPE, environ)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            text = output.decode(errors="replace")
            pytest.fail(f"still running after {seconds:.0f} seconds: {arguments}\n{text}", pytrace=False)
        return process.returncode, output.decode(errors="replace")

    def expect(self, *arguments: Any, seconds: float = RUN_S, **environ: str) -> str:
        """What a program wrote that must succeed."""
        code, text = self.run(*arguments, seconds=seconds, **environ)
        if code:
            pytest.fail(f"ended with {code}: {' '.join(map(str, arguments))}\n{text}", pytrace=False)
        return text

    def plug(self, is_in: bool) -> None:
        """Pull the cable out of this machine, or put it in again; what runs here goes on."""
        _ip("-n", self.namespace, "link", "set", "cable", "up" if is_in else "down")

    def kill(self) -> None:
        """End all that runs here at once, as if the power had failed."""

        def none_left() -> bool:
            pids = _ip("netns", "pids", self.namespace).split()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            return not pids

        wait_for(f"the end of all on {self.name}", none_left)
        for process in self._started:
            process.kill()
            process.wait()


class Network:
    """Nodes n1, n2, ... with a cable each to one switch; every node finds the others by name.

    They are network namespaces joined by veth, so that addresses, names and broken connections are as between
    machines, and no port of this machine is used.
    """

    def __init__(self, size: int) -> None:
        self._own = ExitStack()
        prefix = f"drivetrain-{os.getpid()}-{next(_NUMBERS)}"
        try:
            hosts = Path(self._own.enter_context(tempfile.TemporaryDirectory())) / "hosts"
            switch = self._namespace(f"{prefix}-switch")
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            self.nodes = [self._join(f"{prefix}-n{number}", switch, number, hosts) for number in range(1, size + 1)]
            names = [f"{node.address} {node.name}" for node in self.nodes]
            hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        except BaseException:
            self.close()
            raise

    def _namespace(self, name: str) -> str:
        _ip("netns", "add", name)
        self._own.callback(_ip, "netns", "delete", name)
        return name

    def _join(self, namespace: str, switch: str, number: int, hosts: Path) -> Node:
        self._namespace(namespace)
        node, port = Node(f"n{number}", f"10.77.0.{number}", namespace, hosts), f"port{number}"
        self._own.callback(node.kill)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", namespace)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{node.address}/24", "dev", "cable")
        for link in ("lo", "cable"):
            _ip("-n", namespace, "link", "set", link, "up")
        return node

    def __enter__(self) -> list[Node]:
        return self.nodes

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the nodes, and take everything away."""
        self._own.close()


def sweep() -> None:
    """Take away what test runs have left that were killed."""
    for name in _ip("netns", "list").split():
        if (parts := name.split("-"))[0] == "drivetrain" and not Path("/proc", parts[1]).exists():
            Node(name, "", name, Path()).kill()
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], env=environment(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="session")
def network() -> Callable[[int], Network]:
    """Makes networks of so many nodes: ``with network(2) as nodes:``."""
    need("ip", "nsenter", "unshare")
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces are Linux's, and only root can make them")
    sweep()

    def make(size: int) -> Network:
        try:
            return Network(size)
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")

    return make


@pytest.fixture(scope="session")
def nodes(network: Callable[[int], Network]) -> Iterator[list[Node]]:
    """Two machines that tests share; none of them breaks anything."""
    with network(2) as nodes:
        yield nodes


# ---- SLURM -----------------------------------------------------------------------------------------------------------

SLURM_CONF = """
ClusterName=test
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# An expired credential is what a requeued job waits for; by default that takes two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
KillWait=3
JobRequeue=1
NodeName=n[1-2] CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=10 OverSubscribe=YES
"""


class Slurm:
    """SLURM on two nodes: the controller on the first, ``slurmd`` on both, munge with a key of its own.

    Root's, and without systemd and control groups. The daemons stay in the foreground, so they are this process's
    children and end when it says so.
    """

    def __init__(self, nodes: list[Node], folder: Path) -> None:
        self.node, self.folder, self.configuration = nodes[0], folder, folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        plugins = PACKAGES / "usr/lib/x86_64-linux-gnu/slurm-wlm"
        own = f"PluginDir={plugins}\n" if plugins.exists() else ""
        self.configuration.write_text(SLURM_CONF.format(folder=folder).lstrip() + own)
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        try:
            self._start(nodes)
        except BaseException:
            self.close()
            print(*(path.read_text(errors="replace") for path in folder.glob("*.log")), sep="\n")
            raise

    def _start(self, nodes: list[Node]) -> None:
        folder = self.folder
        own = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in own.items()]
        self._daemon(nodes[0], "munged", "--foreground", "--force", f"--log-file={folder}/munge.log", *options)
        wait_for("munged", (folder / "munge.socket").exists)
        self._daemon(nodes[0], "slurmctld", "-D")
        stepd = shutil.which("slurmstepd", path=environment()["PATH"])
        for node in nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name, "-d", stepd)
        wait_for("idle nodes", lambda: self.run("sinfo", "-h", "-N", "-o", "%T")[1].split() == ["idle", "idle"])

    def _daemon(self, node: Node, program: str, *options: Any) -> None:
        log = self.folder / f"{program}.{node.name}.log"
        variables = {"SLURM_CONF": str(self.configuration)}
        self._daemons.append(node.start(program, *options, output=log, **variables))

    def run(self, *arguments: Any, **options: Any) -> tuple[int, str]:
        """Run a program on the first node, which knows the cluster: its exit code and what it wrote."""
        return self.node.run(*arguments, SLURM_CONF=str(self.configuration), **options)

    def expect(self, *arguments: Any, **options: Any) -> str:
        """What a program wrote that must succeed."""
        return self.node.expect(*arguments, SLURM_CONF=str(self.configuration), **options)

    def submit(self, job: Job, options: Sequence[str], *command: Any) -> str:
        """Submit a script that runs ``command``; its number, or the array's. It and job.log lie in the job's folder."""
        script = job.folder / "job.sh"
        lines = [f"--output={job.folder}/job.log", "--open-mode=append", "--time=5", *options]
        header = ["#!/bin/sh", *(f"#SBATCH {line}" for line in lines)]
        script.write_text("\n".join([*header, shlex.join(map(str, command))]))
        return self.expect("sbatch", "--parsable", script).strip()

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` knows of it."""
        words = self.expect("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str) -> dict[str, str]:
        """What is known of a job when it has ended."""

        def ended() -> dict[str, str] | None:
            found = self.show(job)
            return found if found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") else None

        found: dict[str, str] = wait_for(f"the end of job {job}", ended, RUN_S)
        return found

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()


@pytest.fixture(scope="session")
def slurm(network: Callable[[int], Network]) -> Iterator[Slurm]:
    need("munged", "slurmctld", "slurmd", "srun", "sbatch")
    # A short path, for a socket's is limited, and one that is open to all, for munge insists.
    with tempfile.TemporaryDirectory(prefix="drivetrain-slurm-", dir="/tmp") as folder, network(2) as nodes:
        Path(folder).chmod(0o755)
        with closing(Slurm(nodes, Path(folder))) as cluster:
            yield cluster


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Job:
    """The folder that a job of train.py writes into, and what can be read in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *options: Any) -> list[str]:
        """The program that trains."""
        return [sys.executable, str(TRAIN), str(self.folder), *map(str, options)]

    def log(self, number: int) -> Path:
        """Where a launcher may write; it is shown with a test that fails."""
        return self.folder / f"launcher{number}.log"

    def facts(self) -> list[dict[str, Any]]:
        """What each process of a finished job has left, by rank."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("rank*.json")]
        return sorted(found, key=lambda facts: facts["global_rank"])

    def events(self, host: str) -> list[dict[str, Any]]:
        """What the processes on ``host`` have noted so far: each start, and each step."""
        path = self.folder / f"{host}.events"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def starts(self, host: str) -> list[dict[str, Any]]:
        return [event for event in self.events(host) if event["event"] == "start"]

    def hurry(self) -> None:
        """End the pauses of ``--pause``."""
        (self.folder / "hurry").touch()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield Job(tmp_path)
    for path in sorted(tmp_path.glob("*.log")):  # pytest shows it with what has failed
        print(f"---- {path.name}\n{path.read_text(errors='replace')}")


@pytest.fixture(scope="session")
def new_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Job]:
    """Makes jobs that are not one test's."""
    return lambda: Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def alone(new_job: Callable[[], Job]) -> Callable[..., list[float]]:
    """The weights after train.py with the same options in one process, without any cluster."""

    @cache
    def weights(*options: str) -> list[float]:
        job = new_job()
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # and no srun on the PATH, of which there would be a warning
        subprocess.run(job.command(*options), env=variables, timeout=RUN_S, check=True)
        [facts] = job.facts()
        assert facts["environment"] == "LocalEnvironment"
        found: list[float] = facts["weights"]
        return found

    return weights


@pytest.fixture(scope="session")
def digits_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Runs the demo with two devices on a node or on SLURM, by a launcher, and sees that it has learnt what it must."""

    def run(where: Node | Slurm, *launcher: Any, **environ: str) -> None:
        folder = tmp_path_factory.mktemp("digits")
        text = where.expect(*launcher, DIGITS, "--devices", 2, "--output", folder, seconds=180, **environ)
        assert text.count("Test accuracy:") == 1  # of rank 0, and below what is required the program fails
        assert (folder / "digits.png").exists()

    return run


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """Where Ray keeps the files of a test: a short path, for its sockets, and a token of its own."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        own = {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "OMP_NUM_THREADS": "1",
        }
        yield {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **own}
