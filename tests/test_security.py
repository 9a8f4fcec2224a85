"""What SECURITY.md promises: each promise names a test that exists; what no other file tests is tested here."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import drivetrain
from drivetrain import Callback, Trainer
from drivetrain.base import files, packages
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.clusters.local import LocalEnvironment, free_port
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.meeting import Meeting

ROOT = Path(__file__).parent.parent
PACKAGE = Path(drivetrain.__file__).parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package by its path; read when a test runs, not by each worker that collects tests."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


# ---- the page --------------------------------------------------------------------------------------------------------


def missing_tests(page: str) -> list[str]:
    """The test ids in ``page`` that lead to no test."""
    missing = []
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        path = ROOT / file
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else []
        if name not in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    return missing


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert missing_tests(page) == []
    assert missing_tests("`tests/test_security.py::test_gone`, `tests/gone.py::test_it`") == [
        "tests/test_security.py::test_gone", "tests/gone.py::test_it",
    ]  # fmt: skip


def test_every_promise_of_the_page_names_its_test() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\|(.*)\|$", page, re.MULTILINE) if not row.startswith(("---", " What "))]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row.rpartition("|")[2]] == []


# ---- code ------------------------------------------------------------------------------------------------------------

_CODE = re.compile(
    r"(builtins\.)?(eval|exec|compile)"
    r"|(\w*pickle|marshal|shelve|dill|joblib)\.(load|loads|open|Unpickler)"
    r"|torch\.load|torch\.jit\.load|torch\.hub\.\w+|yaml\.(load|load_all|unsafe_load|full_load)"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)|subprocess\.\w+|runpy\.\w+|start_processes"
)


def calls_that_run_code(tree: ast.AST) -> Counter[str]:
    """How often ``tree`` calls each function that can run code out of data or start a program."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if options.get("shell", "False") != "False":
            found[f"{name}(shell=)"] += 1
        elif _CODE.fullmatch(name) and (name, options.get("weights_only")) != ("torch.load", "True"):
            found[name] += 1
    return found


# Whatever is added here is a promise of SECURITY.md less: it needs a reason, and a line there.
RUNS_CODE = {
    "checkpoints/file.py": {"torch.load": 1},  # restricted unless the caller passes weights_only=False
    "checkpoints/foreign.py": {"torch.load": 1},  # with a reader of its own in place of pickle, which calls nothing
    "cli/program.py": {"compile": 1, "exec": 1, "runpy._run_module_as_main": 2},  # the program that the user names
    "checkpoints/writer.py": {"subprocess.Popen": 1},  # this Python with a file of this package, as a list
    "clusters/slurm.py": {"subprocess.run": 1},  # scontrol requeue, as a list
    "compat/demo_language.py": {"torch.hub.download_url_to_file": 1},  # a text, which is read as words
    "compat/demo_mnist.py": {"torch.hub.download_url_to_file": 1},  # tensors, which are read as plain data only
    "compat/files.py": {"torch.load": 2},  # restricted unless the caller, or the compatibility mode, says otherwise
    "compat/weights.py": {"torch.load": 1},  # the same
    "launchers/child.py": {"pickle.loads": 1, "torch.load": 1},  # a parent and its child, in a folder of their own
    "launchers/folder.py": {"subprocess.Popen": 1},  # a shell with a fixed text, to which the folder is an argument
    "forecast/child.py": {"pickle.loads": 1},  # from the command that has started it, in a folder of their own
    "forecast/check.py": {"pickle.load": 1},  # from the process of which this one is a copy, through a pipe
    "forecast/command.py": {"pickle.loads": 1},  # from its own child, in a folder of their own
    "forecast/tries.py": {"pickle.loads": 1},  # from a copy of this process, through a pipe
    "launchers/_ray_actor.py": {"pickle.loads": 2},  # between actors of one Ray job
    "launchers/failure.py": {"pickle.loads": 2},  # between a rank and the process that watches it, in that folder
    "launchers/ray.py": {"pickle.loads": 1},
    "launchers/script.py": {"subprocess.Popen": 1},  # the program's own command, as a list
    "launchers/watcher.py": {"os.posix_spawn": 1},  # this program's Python, with a line that is written there
    "proof/runs.py": {"subprocess.Popen": 1},  # what the user names or has recorded, and its Python, as a list
    # git, as a list, without the programs of a repository's configuration; and two errors
    "report/code.py": {"subprocess.Popen": 1, "subprocess.TimeoutExpired": 1, "subprocess.CalledProcessError": 1},
    "strategies/peers.py": {"pickle.loads": 1, "torch.load": 1},  # between ranks of one job
    "testing/kits/cluster.py": {"pickle.loads": 1},  # its own copy of a part, inside a check
    "testing/kits/launcher.py": {"pickle.loads": 1, "subprocess.Popen": 1},  # a program of its own, with what it wrote
    "testing/kits/logger.py": {"pickle.loads": 1},
    "testing/kits/precision.py": {"pickle.loads": 1},
    "testing/strategy_conformance.py": {"pickle.loads": 1},  # its own copy of a strategy, inside a test
}


def test_what_can_run_code_is_called_only_where_it_is_listed_with_a_reason() -> None:
    found = {name: dict(calls) for name, tree in trees().items() if (calls := calls_that_run_code(tree))}
    assert found == RUNS_CODE


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pickle.load(file)", "pickle.load"),
        ("cloudpickle.loads(data)", "cloudpickle.loads"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("torch.load(path, weights_only=True)", None),
        ("os.system('ls')", "os.system"),
        ("run(line, shell=True)", "run(shell=)"),
        ("eval(text)", "eval"),
        ("module.eval()", None),
        ("ast.literal_eval(text)", None),
        ("yaml.safe_load(text)", None),
        ("yaml.load(text)", "yaml.load"),
    ],
)
def test_the_scan_finds_what_it_looks_for(line: str, found: str | None) -> None:
    assert list(calls_that_run_code(ast.parse(line))) == ([found] if found else [])


def test_nothing_that_can_run_code_is_imported_under_another_name() -> None:
    """The scan above goes by full names."""
    hidden = [
        f"{name}: from {node.module} import {alias.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "start_processes" and _CODE.fullmatch(f"{node.module}.{alias.name}")
    ]
    assert hidden == []


class Offered:
    """Writes down which of the entry points of installed packages are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, only: str = "") -> None:
        self.loaded: list[str] = []
        loaded = self.loaded
        real = importlib.metadata.entry_points

        class EntryPoint(importlib.metadata.EntryPoint):
            def load(self) -> Any:
                loaded.append(self.group)
                raise ImportError("a package that does not import")

        def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
            return [*real(group=group), *([EntryPoint("offered", "gone:Gone", group)] if only in ("", group) else [])]

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


@pytest.mark.filterwarnings("ignore:The .* 'offered' of an installed package cannot be imported:UserWarning")
def test_installed_packages_are_imported_where_one_is_named_or_one_of_them_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offered = Offered(monkeypatch)
    import drivetrain.accelerators
    import drivetrain.callbacks
    import drivetrain.strategies  # noqa: F401

    assert offered.loaded == []
    Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    assert set(offered.loaded) == {"drivetrain.clusters"}  # each is asked whether it has started this process
    Trainer(accelerator="auto", devices=1, default_root_dir=tmp_path)
    assert set(offered.loaded) == {"drivetrain.clusters", "drivetrain.accelerators"}
    offered.loaded.clear()
    with pytest.raises(ConfigurationError, match="not available here"):  # the message lists those that are
        Trainer(accelerator="hpu", devices=1, default_root_dir=tmp_path)
    assert set(offered.loaded) == {"drivetrain.clusters", "drivetrain.accelerators"}


NAMED: list[tuple[str, dict[str, Any]]] = [
    ("drivetrain.accelerators", {"accelerator": "offered"}),
    ("drivetrain.strategies", {"strategy": "offered"}),
    ("drivetrain.launchers", {"strategy": "ddp_offered", "devices": 2}),
    ("drivetrain.precision", {"precision": "offered"}),
    ("drivetrain.loggers", {"logger": "offered"}),
    ("drivetrain.clusters", {"plugins": ["offered"]}),
    ("drivetrain.checkpoints", {"plugins": ["offered"]}),
    ("drivetrain.layer_syncs", {"plugins": ["offered"]}),
]


@pytest.mark.filterwarnings("ignore:The .* 'offered' of an installed package cannot be imported:UserWarning")
@pytest.mark.parametrize(("group", "arguments"), NAMED, ids=[group for group, _ in NAMED])
def test_a_part_that_an_installed_package_offers_is_imported_when_it_is_named(
    group: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offered = Offered(monkeypatch, only=group)
    Trainer(accelerator="cpu", default_root_dir=tmp_path)
    assert offered.loaded == (["drivetrain.clusters"] if group == "drivetrain.clusters" else [])
    offered.loaded.clear()
    with pytest.raises(ImportError, match="does not import"):
        Trainer(**{"accelerator": "cpu", "default_root_dir": tmp_path, **arguments})
    assert set(offered.loaded) == {group}


# ---- sockets ---------------------------------------------------------------------------------------------------------

_NETWORK = {"socket", "socketserver", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib",
            "smtplib", "xmlrpc", "websockets", "zmq", "asyncio", "fsspec", "huggingface_hub"}  # fmt: skip
USES_THE_NETWORK = {
    "base/remote.py",  # fsspec opens the address that the user passes as a path
    "callbacks/trainjob.py",  # posts to the address in KUBEFLOW_TRAINER_SERVER_URL, if a TrainJob has set it
    "clusters/environment.py",  # looks up the main address before the ranks meet there
    "clusters/htcondor.py",  # tries whether rank 0 listens at the address in the contact file
    "clusters/local.py",  # finds a free port: a socket that is bound and closed, and never listens
    "clusters/lsf.py",  # this machine's name
    "clusters/mpi.py",  # this machine's name
    "compat/files.py",  # fsspec opens the address that the caller passes
    "launchers/ray.py",  # tries whether the Ray cluster that the user named listens
    "loggers/_event_file.py",  # this machine's name, which TensorBoard's file names hold
    "strategies/meeting.py",  # binds the socket on which torch's store listens; tries a main address that is silent
}


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a module imports, at its top or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == packages.__name__:  # imported when they are first used
            yield from (vars(getattr(packages, each.name))["__name__"].partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_modules_of_the_network_are_imported_only_where_they_are_listed_with_a_reason() -> None:
    assert {name for name, tree in trees().items() if _NETWORK & set(imported(tree))} == USES_THE_NETWORK


def sockets(state: str | None = None) -> set[tuple[str, int]]:
    """Addresses and ports of this process's internet sockets, or of those in one state."""
    found = psutil.Process().net_connections("inet")
    return {(each.laddr[0], each.laddr[1]) for each in found if state in (None, each.status)}


class AtEachBatch(Callback):
    """Writes down the sockets that were not there before."""

    def __init__(self, state: str | None = None) -> None:
        self.state = state
        self.before = sockets(state)
        self.new: list[set[tuple[str, int]]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.new.append(sockets(self.state) - self.before)


def test_a_run_of_one_process_opens_no_socket(validated: Any, loader: Any, tmp_path: Path) -> None:
    seen = AtEachBatch()
    Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=seen, default_root_dir=tmp_path,
            enable_progress_bar=False).fit(validated(), loader, loader)  # fmt: skip
    assert seen.new
    assert not set().union(*seen.new)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the control
        assert sockets() - seen.before == {("127.0.0.1", server.getsockname()[1])}


def test_a_job_on_one_machine_listens_on_the_loopback_interface_only(
    regression: Any, loader: Any, tmp_path: Path
) -> None:
    """With two ranks: tests/strategies/test_meeting.py, which also sees that another address would be found."""
    seen = AtEachBatch(psutil.CONN_LISTEN)
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, strategy="ddp", callbacks=seen, logger=False,
                      default_root_dir=tmp_path, enable_progress_bar=False)  # fmt: skip
    environment: Any = trainer.strategy
    port = environment.cluster_environment.main_port
    trainer.fit(regression(), loader)
    assert ("127.0.0.1", port) in seen.new[0]
    assert {ip for ip, _ in seen.new[0]} == {"127.0.0.1"}


def test_ranks_of_several_machines_meet_at_the_main_port_on_every_interface() -> None:
    """What the page warns of; the store is torch's, and so is the interface on which it listens."""
    before, port = sockets(psutil.CONN_LISTEN), free_port()
    store = Meeting("127.0.0.1", port, rank=0, world_size=1, timeout=None).store(own_socket=False)
    assert {ip for ip, number in sockets(psutil.CONN_LISTEN) - before if number == port} <= {"::", "0.0.0.0"}
    del store


def test_without_a_cluster_ranks_meet_on_the_loopback_interface() -> None:
    assert LocalEnvironment({}).main_address == "127.0.0.1"


# ---- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o027, 0o640)])
def test_a_file_has_the_umasks_permissions_also_while_it_is_written(tmp_path: Path, mask: int, expected: int) -> None:
    target = tmp_path / "a.txt"
    with umask(mask):
        with files.replacing(target) as stream:
            stream.write(b"new")
            [temporary] = tmp_path.iterdir()
            assert mode(temporary) == expected
        TorchCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert mode(target) == mode(tmp_path / "a.ckpt") == expected


def temporary_files(tree: ast.AST) -> set[str]:
    """What ``tree`` calls to make temporary files and folders."""
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {call for call in calls if call.startswith("tempfile.")}


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_temporary_folders_are_open_to_their_user_alone() -> None:
    """Processes that belong together exchange files in folders that Python makes with mode 0700, whatever the umask."""
    used = set().union(*map(temporary_files, trees().values()))
    # TemporaryFile makes a file with mode 0600 and without a name. gettempdir is called in job_folder, which has a
    # test, and to look for folders that watchers have made.
    safe = {"tempfile.mkdtemp", "tempfile.TemporaryDirectory", "tempfile.TemporaryFile"}
    assert used == {*safe, "tempfile.gettempdir"}
    assert temporary_files(ast.parse("tempfile.mktemp()")) == {"tempfile.mktemp"}  # the control
    with umask(0), tempfile.TemporaryDirectory() as folder:
        assert mode(Path(folder)) == 0o700
