"""Fetch the official examples of earlier generations from the package index, and unpack them beside this interpreter.

They become the packages ``examples_1_0``, ``examples_1_1`` and ``examples_1_3``, each with a folder ``pl_examples``.
If a wheel cannot be fetched, this program says so and ends without an error: its examples are then skipped.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

VERSIONS = {"examples_1_0": "1.0.8", "examples_1_1": "1.1.0", "examples_1_3": "1.3.8"}
"""By package, the version of Lightning whose wheel contains the examples."""


def folder_of(package: str) -> Path:
    return Path(sysconfig.get_path("purelib")) / package


def fetch(package: str, version: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--dest", folder, f"pytorch-lightning=={version}"], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith("pl_examples/")]
            archive.extractall(folder_of(package), members)


if __name__ == "__main__":
    for _package, _version in VERSIONS.items():
        try:
            fetch(_package, _version)
        except (subprocess.CalledProcessError, ValueError, OSError) as error:
            print(f"Not installed: the examples of Lightning {_version}: {error}")
