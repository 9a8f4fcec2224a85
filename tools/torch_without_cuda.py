"""Install a given torch into this interpreter's environment beside the project's pins, without CUDA's libraries.

PyPI's wheels of torch need gigabytes of these to be importable. Stubs take their place: a library for each missing one,
with every symbol that torch asks for. Each function returns 100, CUDA's code for "no device", so torch sees no GPU. A
wheel for the CPU alone needs no stubs, and gets none.

``make test-torch TORCH=2.14.1`` runs ``python tools/torch_without_cuda.py torch==2.14.1``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_DEVICE = 100
CUDAS = re.compile(r"lib(cu|nv|nccl)")
CUDAS_SYMBOLS = re.compile(r"(cu|nv|nccl|__cuda)")


def pip(*arguments: str) -> None:
    """Run ``pip install`` for this interpreter.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *arguments], check=True)


def pins() -> Path:
    """Write the project's pins without the one of torch into a file of the environment; return its path."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    file = Path(sys.prefix) / "constraints.txt"
    file.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n", encoding="utf-8")
    return file


def output_of(*command: str) -> str:
    """Return what a command prints."""
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
    options = ["-w", "-O0", "-fno-builtin", "-shared", "-fPIC"]
    if any(versions):
        options.append(f"-Wl,--version-script={script}")
    there = {library.name for library in libraries}
    for name in sorted(needed - there):
        if CUDAS.match(name):
            target = folder / name
            subprocess.run(["gcc", *options, "-o", str(target), str(source), f"-Wl,-soname,{name}"], check=True)


def install_torch(*requirements: str) -> None:
    """Install torch, and what else is named, without their dependencies, and make the stubs."""
    pip("--no-deps", *requirements)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    make_stubs(Path(torch.origin).parent / "lib")
    [metadata] = Path(torch.origin).parents[1].glob("torch-*.dist-info/METADATA")
    metadata.write_text(without_cuda(metadata.read_text(encoding="utf-8")), encoding="utf-8")


def without_cuda(metadata: str) -> str:
    """Return a wheel's metadata without the packages that the stubs replace, so that pip does not miss them later."""
    return re.sub(r"^Requires-Dist: (nvidia|cuda|triton)\b.*\n", "", metadata, flags=re.MULTILINE)


def main(*arguments: str) -> None:
    """Install this torch; and unless ``--only`` comes first, all other pinned packages and the project."""
    *only, torch = arguments
    if not only:
        # without dependencies, because torch's are what must not be installed; the pins name all that is needed
        pip("--no-deps", "-r", str(pins()), "setuptools>=77.0.3")  # torch 2.14 needs a newer one than venv installs
        pip("--no-deps", "-e", str(ROOT))
    install_torch(torch)


if __name__ == "__main__":
    main(*sys.argv[1:])
