"""Finds the git commit of the program's code, and the uncommitted changes."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

DIFF_LIMIT = 100_000
"""A longer diff is cut to this number of bytes."""

_PIECE = 1 << 16  # bytes to read at a time
_TIMEOUT_S = 2.0
_FRESH_S = 60  # how long to use an answer of git again, because a program may fit many models

# With these options, git takes no locks, and starts no program that a repository's configuration names.
_GIT = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")


def version_of() -> tuple[dict[str, Any], str]:
    """Return the version of the running program's code, and the diff of tracked files against the commit.

    The version is a dictionary. "folder" is the program's folder, or the working folder if the program was installed or
    has no file. In a git repository, there are also "commit", "branch", "dirty" and, if there is a diff, "diff" (its
    digest). If the first three are missing, "note" has the reason.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    installed = main is None or os.path.abspath(main).startswith((sys.prefix, sys.base_prefix))
    folder = os.getcwd() if main is None or installed else os.path.dirname(os.path.abspath(main))
    return _version(folder, int(time.monotonic() // _FRESH_S))


@functools.lru_cache(maxsize=1)
def _version(folder: str, minute: int) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {"folder": folder}
    if (git := shutil.which("git")) is None:
        return {**found, "note": "git is not installed"}, ""
    try:
        unfiltered = _without_filters(git, folder)
        lines = _run(git, folder, unfiltered, *_STATUS)[0].decode(errors="replace").splitlines()
        heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
        dirty = any(not line.startswith("#") for line in lines)
        found.update(commit=heads.get("branch.oid"), branch=heads.get("branch.head"), dirty=dirty)
        has_commit = found["commit"] != "(initial)"
        start, size, digest = _run(git, folder, unfiltered, *_DIFF) if dirty and has_commit else (b"", 0, "")
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip().partition("\n")[0]
        none = "not a git repository" in why
        return {**found, "note": "the folder is in no git repository" if none else f"git failed: {why}"}, ""
    except (OSError, subprocess.SubprocessError) as error:
        return {**found, "note": f"git failed: {error}"}, ""
    if not size:
        return found, ""
    text = start.decode(errors="replace")
    if size > DIFF_LIMIT:
        text += f"\n... cut here: the diff has {size} bytes, and {DIFF_LIMIT} are stored\n"
    return {**found, "diff": digest[:16]}, text


def _without_filters(git: str, folder: str) -> dict[str, str]:
    """Return environment variables that switch off git's clean filters, such as Git LFS and nbstripout.

    git may then report a filtered file as modified although only its time has changed.
    """
    listed = _run(git, folder, {}, "config", "--list", "--null", "--name-only")[0].decode(errors="replace")
    ends = (".clean", ".process", ".required")
    names = {name for name in listed.split("\0") if name.startswith("filter.") and name.endswith(ends)}
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    variables = {"GIT_CONFIG_COUNT": str(first + len(names))}
    for at, name in enumerate(names, first):
        variables[f"GIT_CONFIG_KEY_{at}"] = name
        variables[f"GIT_CONFIG_VALUE_{at}"] = "false" if name.endswith(".required") else ""
    return variables


def _run(git: str, folder: str, variables: dict[str, str], *words: str) -> tuple[bytes, int, str]:
    """Run a git command, with messages in English.

    Returns:
        The first :data:`DIFF_LIMIT` bytes of the output, and the length and the digest of the whole output.
    """
    command, start, size, digest, began_s = [git, *_GIT, *words], b"", 0, hashlib.sha256(), time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **variables, "LC_ALL": "C"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        limit = threading.Timer(_TIMEOUT_S, process.kill)
        limit.start()
        while piece := process.stdout.read(_PIECE):
            start, size = start + piece[: DIFF_LIMIT - len(start)], size + len(piece)
            digest.update(piece)
        said = process.stderr.read()
    limit.cancel()
    if process.returncode and time.monotonic() - began_s >= _TIMEOUT_S:
        raise subprocess.TimeoutExpired(command, _TIMEOUT_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
    return start, size, digest.hexdigest()
