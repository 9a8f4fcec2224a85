"""Compiles the device once, and finds it again.

A vendor ships compiled wheels. This example compiles where it runs, so that it can be changed and tried.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_SOURCES = [_HERE / "device.cpp", _HERE / "operators.cpp"]
_HEADERS = [_HERE / "device.h"]
# Without optimization it compiles in half the time, and there is nothing in it that optimization would make faster.
_FLAGS = ["-std=c++20", "-O0", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


class BuildError(RuntimeError):
    """There is no compiler, or it did not take the sources; or the folder for the result is not safe."""


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of ``c++``, ``g++`` and ``clang++``; ``None`` if there is none."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "c++", "g++", "clang++"])), None)


def library() -> Path:
    """The compiled device for these sources and this torch; compiled now (some 15 s) if that was never done.

    It lies in ``$LAB_CACHE``, or in ``drivetrain-lab`` in the user's cache folder, under a name made of everything that
    went into it: what is there is right, and nothing has to be compared or locked.

    Raises:
        BuildError: see there.
    """
    made_of = [torch.__version__, str(torch.version.git_version), platform.machine(), *_FLAGS]
    made_of += [path.read_text() for path in [*_HEADERS, *_SOURCES]]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    result = _cache() / f"lab-{digest}.so"
    if not result.exists():
        with tempfile.TemporaryDirectory(dir=result.parent) as folder:
            # Several processes may be here at once, and each may be killed: only whole files get the name.
            os.replace(_compile(Path(folder)), result)
    return result


def _cache() -> Path:
    """A folder that only this user can write, because what lies in it is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("LAB_CACHE") or base / "drivetrain-lab")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"Others may write to {folder}, and the device that lies there would be run. Run chmod 700 on it, or set "
            "LAB_CACHE to a folder of your own."
        )
    return folder


def _compile(folder: Path) -> Path:
    cxx = compiler()
    if cxx is None:
        raise BuildError("The device is written in C++, and there is no compiler. Install g++, or set CXX.")
    root = Path(torch.__file__).parent
    includes = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    objects = [folder / f"{source.stem}.o" for source in _SOURCES]
    _run_all(
        [cxx, *_FLAGS, *includes, "-c", str(source), "-o", str(target)]
        for source, target in zip(_SOURCES, objects, strict=True)
    )
    result = folder / "lab.so"
    _run_all([[cxx, "-shared", *map(str, objects), "-o", str(result), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]])
    return result


def _run_all(commands: Iterable[list[str]]) -> None:
    """All at once. If one fails, the error tells what it said."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise BuildError(
                f"The C++ compiler ended with {process.returncode}, and the device was not built. Mend what it says:\n"
                f"{text.decode(errors='replace')}"
            )
