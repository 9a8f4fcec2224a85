"""Install torch_xla and the torch that it fits into this interpreter's environment, without CUDA's libraries.

If something cannot be installed, this program says so and ends without an error: the suite is then skipped.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEPENDENCIES = (
    "filelock", "typing_extensions", "sympy", "networkx", "Jinja2", "fsspec", "numpy", "absl-py", "PyYAML", "requests",
    "rich", "psutil", "pytest", "pytest-timeout",
)  # fmt: skip


def is_installed() -> bool:
    """Whether there is something to test; if not, it is said. The suite itself could not start without a torch."""
    found = all(importlib.util.find_spec(name) for name in ("torch", "torch_xla", "pytest"))
    if not found:
        print("SKIPPED: torch_xla is not installed, so none of its tests ran. Remove .venv-xla to try again.")
    return found


def install() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "torch_without_cuda.py"))
    pip = tool["pip"]
    try:
        pip("-c", str(tool["pins"]()), *DEPENDENCIES)
        pip("--no-deps", "-e", str(ROOT))
        tool["install_torch"]("-r", str(HERE / "requirements.txt"))
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"Not installed: torch_xla: {error}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--is-installed"]:
        sys.exit(not is_installed())
    install()
