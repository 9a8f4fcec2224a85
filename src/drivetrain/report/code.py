"""The version of the program's code: its git commit, and what was changed since."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
from typing import Any

DIFF_LIMIT = 100_000
"""The longest diff that is stored, in bytes."""

_TIMEOUT_S = 2.0
_FRESH_S = 60  # a program that fits many models asks git once a minute

# Without locks, and without the programs that a repository's configuration may name.
_GIT = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")


def version_of() -> tuple[dict[str, Any], str]:
    """Return the version of the running program's code, and the diff of tracked files to its commit.

    The version has "folder", and if it is in a git repository, "commit", "branch", "dirty" and the digest of the diff
    as "diff". "note" says what is missing, and why. The repository is that of the program's folder, or of the working
    folder if the program is a module or was installed.
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
        lines = _run(git, folder, *_STATUS).decode(errors="replace").splitlines()
        heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
        dirty = any(not line.startswith("#") for line in lines)
        found.update(commit=heads.get("branch.oid"), branch=heads.get("branch.head"), dirty=dirty)
        has_commit = found["commit"] != "(initial)"
        diff = _run(git, folder, *_DIFF) if dirty and has_commit else b""
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip().partition("\n")[0]
        none = "not a git repository" in why
        return {**found, "note": "the folder is in no git repository" if none else f"git failed: {why}"}, ""
    except (OSError, subprocess.SubprocessError) as error:
        return {**found, "note": f"git failed: {error}"}, ""
    if not diff:
        return found, ""
    text = diff[:DIFF_LIMIT].decode(errors="replace")
    if len(diff) > DIFF_LIMIT:
        text += f"\n... cut here: the diff has {len(diff)} bytes, and {DIFF_LIMIT} are stored\n"
    return {**found, "diff": hashlib.sha256(diff).hexdigest()[:16]}, text


def _run(git: str, folder: str, *words: str) -> bytes:
    """Return the output of a git command, whose messages are in English."""
    done = subprocess.run(
        [git, *_GIT, *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    return done.stdout
