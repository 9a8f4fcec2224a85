"""Install torch_xla and the torch that it fits into this interpreter's environment, without CUDA's libraries.

The wheel of torch wants gigabytes of them to be importable. Stubs stand in: a library for each missing one, with every
symbol that torch asks for. Each function returns 100, CUDA's code for "no device", so torch sees no GPU.

If something cannot be installed, this program says so and ends without an error: the suite is then skipped.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
DEPENDENCIES = (
    "filelock", "typing_extensions", "sympy", "networkx", "Jinja2", "fsspec", "numpy", "absl-py", "PyYAML", "requests",
    "rich", "psutil", "pytest", "pytest-timeout",
)  # fmt: skip
NO_DEVICE = 100
CUDAS = re.compile(r"lib(cu|nv|nccl)")
CUDAS_SYMBOLS = re.compile(r"(cu|nv|nccl|__cuda)")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def constraints() -> Path:
    """The project's pins without the one of torch, in a file of the environment."""
    pins = (HERE.parents[1] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    file = Path(sys.prefix) / "constraints.txt"
    file.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")) + "\n", encoding="utf-8")
    return file


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_stubs(folder: Path) -> None:
    """Compile the libraries that torch's own in ``folder`` need and that are not there."""
    libraries = sorted(folder.glob("lib*.so"))
    needed: set[str] = set()
    defined: set[str] = set()
    undefined: set[str] = set()
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", output_of("readelf", "-dW", str(library))))
        for line in output_of("nm", "-D", str(library)).splitlines():
            *_, kind, symbol = line.split()
            if kind == "U":
                undefined.add(symbol)
            else:
                defined.add(symbol.partition("@")[0])
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol in sorted(undefined):
        name, _, version = symbol.partition("@")
        if name not in defined and CUDAS_SYMBOLS.match(name):
            versions[version.strip("@")].append(name)
    source, script = Path(sys.prefix) / "stubs.c", Path(sys.prefix) / "stubs.map"
    functions = (f"long long {name}(void) {{ return {NO_DEVICE}; }}" for names in versions.values() for name in names)
    source.write_text("\n".join(functions), encoding="utf-8")
    nodes = (f"{version} {{ global: {'; '.join(names)}; }};" for version, names in versions.items() if version)
    script.write_text("\n".join(nodes), encoding="utf-8")
    there = {library.name for library in libraries}
    for name in sorted(needed - there):
        if CUDAS.match(name):
            target = folder / name
            options = ["-w", "-O0", "-fno-builtin", "-shared", "-fPIC", f"-Wl,--version-script={script}"]
            subprocess.run(["gcc", *options, "-o", str(target), str(source), f"-Wl,-soname,{name}"], check=True)


def is_installed() -> bool:
    """Whether there is something to test; if not, it is said. The suite itself could not start without a torch."""
    found = all(importlib.util.find_spec(name) for name in ("torch", "torch_xla", "pytest"))
    if not found:
        print("SKIPPED: torch_xla is not installed, so none of its tests ran. Remove .venv-xla to try again.")
    return found


def install() -> None:
    pinned = ["-c", str(constraints())]
    try:
        pip(*pinned, *DEPENDENCIES)
        pip("--no-deps", "-e", str(HERE.parents[1]))
        pip("--no-deps", "-r", str(HERE / "requirements.txt"))
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        assert torch.origin is not None
        make_stubs(Path(torch.origin).parent / "lib")
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"Not installed: torch_xla: {error}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--is-installed"]:
        sys.exit(not is_installed())
    install()
