"""The pages of the site: copy them into one folder, write those of the reference, and check the order in mkdocs.yml.

``make docs`` runs it before the build. Pages keep their paths in the repository, so a link works on the site as it does
in the repository. The files that pages link to, such as examples, are copied with them.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "drivetrain"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCED = re.compile(r"^( *)(```+).*?^\1\2$", re.DOTALL | re.MULTILINE)

INTRODUCTION = """\
    options:
      members: false
      show_root_heading: false
      show_root_toc_entry: false
"""
INHERITED = "    options:\n      inherited_members: true\n"


class Failed(Exception):
    """The pages and mkdocs.yml do not fit; the text says what to write."""


class Page(NamedTuple):
    """A page in the order of mkdocs.yml.

    Attributes:
        section: the section's title, or "" for a page outside of sections.
        path: the page, relative to the repository.
    """

    section: str
    path: str


class Public(NamedTuple):
    """A public name of a module.

    Attributes:
        name: the name.
        source: the module that it is imported from.
    """

    name: str
    source: str


def order(root: Path = ROOT) -> list[Page]:
    """Return the pages in the order of mkdocs.yml."""

    def entries(section: str, nav: list[Any]) -> Iterator[Page]:
        for entry in nav:
            if isinstance(entry, str):
                yield Page(section, entry)
            else:
                [(title, below)] = entry.items()
                yield from entries(title, below) if isinstance(below, list) else [Page(section, below)]

    return list(entries("", yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def full(module: str) -> str:
    """Return the name by which a program imports a public module; "" is the package itself."""
    return f"{PACKAGE}.{module}" if module else PACKAGE


def modules(root: Path = ROOT) -> list[str]:
    """Return the public modules of the package, by its stub, `__init__.pyi`; "" is the package itself."""
    stub = ast.parse((root / "src" / PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module == PACKAGE]
    return ["", *(alias.name for node in imports for alias in node.names)]


def public(module: str, root: Path = ROOT) -> list[Public]:
    """Return the public names of a module, read from its text: the environment of the site has no torch.

    For a package, they are the imports of its stub, of the form ``from x import Y as Y``. For a file, they are its
    classes and functions; the functions in errors.py are the package's own.
    """
    path = root / "src" / PACKAGE / module
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".py")
    kinds = (ast.ClassDef, ast.FunctionDef) if path.stem not in ("__init__", "errors") else ()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        Public(node.name, full(module))
        for node in tree.body
        if isinstance(node, kinds) or (isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Exception")))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module not in (PACKAGE, full(module)):
            found += [Public(each.name, str(node.module)) for each in node.names if each.asname == each.name]
    return sorted(each for each in found if each.name[0] != "_")


def reference(root: Path = ROOT) -> dict[str, str]:
    """Return the pages of the reference, by path. A name that several modules offer is described in one of them."""
    described: dict[Public, str] = {}
    pages = {}
    for module in modules(root):
        here = full(module)
        blocks = [f"# {here}\n\n::: {here}\n{INTRODUCTION}"]
        for each in public(module, root):
            elsewhere = each.source != here and each.source in map(full, modules(root))
            at = f"{each.source}.{each.name}" if elsewhere else described.get(each)
            if at is None:
                described[each] = f"{here}.{each.name}"
                blocks.append(f"::: {here}.{each.name}\n{INHERITED if module == '' else ''}")
            else:
                blocks.append(f"`{each.name}` is [`{at}`][{at}].\n")
        pages[f"reference/{module or PACKAGE}.md"] = "\n".join(blocks)
    return pages


def linked(page: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to, outside of its code."""
    for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if not re.match(r"\w+:", target):
            path = (page.parent / target).resolve()
            if not path.is_file():
                raise Failed(f"{page.relative_to(root)} links to {target}, which is no file")
            yield path


def sources(root: Path = ROOT) -> tuple[set[str], set[str]]:
    """Return the pages outside of the reference, and the other files that they link to.

    Raises:
        Failed: a page of docs/, or one that another page links to, is in no section of mkdocs.yml; a page in mkdocs.yml
            does not exist; or a link leads to no file.
    """
    ordered = {page.path for page in order(root) if not page.path.startswith("reference/")}
    if missing := sorted(path for path in ordered if not (root / path).is_file()):
        raise Failed(f"mkdocs.yml names pages that do not exist: {', '.join(missing)}. Remove their lines under nav.")
    pages, files = ordered | {f"docs/{path.name}" for path in (root / "docs").glob("*.md")}, set()
    left = sorted(pages)
    while left:
        for path in linked(root / left.pop(), root):
            name = path.relative_to(root).as_posix()
            if path.suffix != ".md":
                files.add(name)
            elif name not in pages:
                pages.add(name)
                left.append(name)
    if unordered := sorted(pages - ordered):
        lines = "\n".join(f"      - {path}" for path in unordered)
        raise Failed(
            f"mkdocs.yml has these pages in no section. Add each under nav, where a reader looks for it:\n{lines}"
        )
    return pages, files


def stage(target: Path, root: Path = ROOT) -> None:
    """Write all pages, and the files that they link to, into the folder ``target``, which is emptied before."""
    pages, files = sources(root)
    written = reference(root)
    named = {page.path for page in order(root) if page.path.startswith("reference/")}
    if differ := sorted(named ^ set(written)):
        raise Failed(f"the pages under reference/ in mkdocs.yml are not those of the public modules: {differ}")
    shutil.rmtree(target, ignore_errors=True)
    for name in {*pages, *files, "docs/site.css"}:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)
    for page in pages:  # in code in a table, GitHub needs the backslash before a pipe, and Zensical shows it
        text = (root / page).read_text(encoding="utf-8")
        without = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), text)
        (target / page).write_text(without, encoding="utf-8")
    for name, text in written.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        stage(ROOT / "build" / "pages")
    except Failed as error:
        sys.exit(f"make docs: {error}")
