"""make docs: which pages the site has, its llms.txt, and what its checks find. No site is built here."""

from __future__ import annotations

import importlib
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.base.lazy import public_modules

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    """The files of tools/site, which import each other by their short names; Griffe is not installed here."""
    names = ("chromium", "pages", "reference_text", "check", "docstrings")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools" / "site"))
        patch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object))
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a package, two pages and an example."""
    texts = {
        "mkdocs.yml": "nav: [README.md, {Start: [docs/README.md, docs/a.md]}, {Names: [reference/drivetrain.md]}]",
        "README.md": "# drivetrain\n\nIt trains [models](docs/a.md). It is small.\n",
        "docs/README.md": "# Pages\n\nAll pages.\n\n- [a.md](a.md): how to begin,\n  in [one](../README.md) line.\n",
        "docs/a.md": "# Begin\n\n```text\n[no link](gone.md)\n```\n\nSee [the example](../examples/a.py#L3).\n",
        "docs/site.css": "",
        "examples/a.py": "",
        "src/drivetrain/__init__.pyi": "from drivetrain.trainer import Trainer as Trainer\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# ---- the repository's pages ------------------------------------------------------------------------------------------


def test_each_page_is_in_the_order_of_the_site_and_each_link_leads_to_a_file(tools: Any) -> None:
    pages, files = tools.pages.sources()
    assert {"docs/start.md", "benchmarks/RESULTS.md"} <= pages
    assert "examples/plain_loop.py" in files


def test_the_reference_has_each_public_name_of_the_package(tools: Any) -> None:
    for module in tools.pages.modules():
        offered = getattr(importlib.import_module(tools.pages.full(module)), "__all__", None)
        if offered is not None:
            assert {each.name for each in tools.pages.public(module)} == set(offered), module
    assert set(tools.pages.modules()[1:]) == set(public_modules("drivetrain"))
    assert "ConfigurationError" in {each.name for each in tools.pages.public("errors")}


def test_the_order_has_a_page_for_each_public_module(tools: Any) -> None:
    named = {page.path for page in tools.pages.order() if page.path.startswith("reference/")}
    assert named == set(tools.pages.reference())


def test_a_name_of_two_modules_is_described_once(tools: Any) -> None:
    written = tools.pages.reference()
    assert "::: drivetrain.LightningModule" in written["reference/drivetrain.md"]
    assert "`LightningModule` is [`drivetrain.LightningModule`]" in written["reference/module.md"]
    assert "[drivetrain.precision.Precision]" in written["reference/plugins.md"]


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_the_pages_and_what_they_link_to_are_copied_with_their_paths(tools: Any, repository: Path) -> None:
    (repository / "out").mkdir()
    (repository / "out" / "old.md").touch()
    tools.pages.stage(repository / "out", repository)
    found = {path.relative_to(repository / "out").as_posix() for path in (repository / "out").rglob("*.*")}
    assert found == {
        "README.md", "docs/README.md", "docs/a.md", "docs/site.css", "examples/a.py", "reference/drivetrain.md",
    }  # fmt: skip
    assert "::: drivetrain.Trainer" in (repository / "out" / "reference" / "drivetrain.md").read_text()


@pytest.mark.parametrize("name", ["docs/new.md", "NOTES.md"], ids=["a page of docs", "a page that is linked to"])
def test_a_page_in_no_section_is_refused_with_the_line_to_add(tools: Any, repository: Path, name: str) -> None:
    (repository / name).write_text("# New\n")
    (repository / "README.md").write_text(f"# drivetrain\n\n[new]({name})\n")
    with pytest.raises(tools.pages.Failed, match=f"Add each under nav.*\n      - {name}"):
        tools.pages.sources(repository)


def test_a_page_that_is_gone_and_a_link_to_nothing_are_refused(tools: Any, repository: Path) -> None:
    (repository / "examples" / "a.py").unlink()
    with pytest.raises(tools.pages.Failed, match=r"docs/a.md links to ../examples/a.py, which is no file"):
        tools.pages.sources(repository)
    (repository / "docs" / "a.md").unlink()
    with pytest.raises(tools.pages.Failed, match=r"do not exist: docs/a.md. Remove"):
        tools.pages.sources(repository)


def test_a_public_module_without_a_page_is_refused(tools: Any, repository: Path) -> None:
    (repository / "src" / "drivetrain" / "__init__.pyi").write_text("from drivetrain import data as data\n")
    (repository / "src" / "drivetrain" / "data.py").write_text("class Loader: ...\n")
    with pytest.raises(tools.pages.Failed, match=r"reference/data.md"):
        tools.pages.stage(repository / "out", repository)


# ---- the built site --------------------------------------------------------------------------------------------------


def test_llms_txt_lists_each_page_with_a_sentence_and_llms_full_has_their_texts(tools: Any, repository: Path) -> None:
    site = repository / "site"
    tools.check.write_llms(site, {"reference/drivetrain.md": "# drivetrain\n\n## drivetrain.Trainer\n"}, repository)
    assert (site / "llms.txt").read_text() == (
        "# drivetrain\n\n> It trains models.\n\n- [drivetrain](README.md): It trains models.\n"
        "\n## Start\n\n- [Pages](docs/README.md): All pages.\n- [Begin](docs/a.md): how to begin, in one line.\n"
        "\n## Names\n\n- [drivetrain](reference/drivetrain.md): Trainer\n"
    )
    assert "<!-- docs/a.md -->\n\n# Begin\n" in (site / "llms-full.txt").read_text()
    assert (site / "docs" / "a.md").read_text() == (repository / "docs" / "a.md").read_text()
    assert "## drivetrain.Trainer\n" in (site / "llms-full.txt").read_text()
    assert (site / "reference" / "drivetrain.md").is_file()


def read(name: str, docstring: str = "", signature: str = "", **members: Any) -> Any:
    """What Griffe reads of a function, a class with members, or, without both, an attribute."""
    said = types.SimpleNamespace(value=docstring) if docstring else None
    return types.SimpleNamespace(
        name=name, docstring=said, members=members, is_class=bool(members), is_function=bool(signature),
        is_module=False, signature=lambda: signature, all_members={**members, "old": read("old", "Of the base.")}
        if members else {},
    )  # fmt: skip


def test_the_reference_as_text_has_signatures_and_docstrings_of_what_is_public(tools: Any) -> None:
    members = {
        "__init__": read("__init__", "", "__init__(self, to: int = 3)"),
        "go": read("go", "Go.\n\nArgs:\n    far: how far.", "go(self, far: bool) -> None"),
        "far": read("far", "How far it went."),
        "_own": read("_own", "Not shown.", "_own(self)"),
        "bare": read("bare"),
    }
    walk = read("Walk", "Walks to ``to``.", **members)
    text = tools.reference_text.filled("# drivetrain\n\n::: drivetrain.Walk\n", {"Walk": walk})
    assert text == (
        "# drivetrain\n\n## drivetrain.Walk\n\n```python\nclass Walk(to: int = 3)\n```\n\nWalks to ``to``.\n\n"
        "- `go(far: bool) -> None`: Go.\n\n  Args:\n      far: how far.\n- `far`: How far it went.\n"
    )
    inherited = tools.reference_text.filled(
        "::: drivetrain.Walk\n    options:\n      inherited_members: true\n", {"Walk": walk}
    )
    assert inherited.endswith("- `old`: Of the base.\n")
    run = read("run", "Run.", "run(speed)")
    assert "```python\nrun(speed)\n```\n\nRun.\n" in tools.reference_text.described("drivetrain.run", run, False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages without an error."""
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top"><a href="b/#part">b</a><img src="x.svg"></h1>')
    (tmp_path / "b" / "index.html").write_text('<h2 id="part"><a href="..">up</a> <a href="https://pytorch.org">t</a>')
    (tmp_path / "x.svg").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("html", "wrong"),
    [
        ("", []),
        ('<a href="../c/">', ["b/ links to ../c/, which is not there"]),
        ('<a href="../#end">', ["b/ links to ../#end, a section that is not there"]),
        ('<img src="y.svg">', ["b/ links to y.svg, which is not there"]),
        ('<script src="https://cdn.test/a.js">', ["b/ fetches https://cdn.test/a.js"]),
        ('<link href="//cdn.test/a.css">', ["b/ fetches //cdn.test/a.css"]),
        ("<h1>One</h1><h1>Two</h1>", ["b/ has 2 titles: write ## for all but the first"]),
    ],
    ids=["nothing", "page", "section", "picture", "script", "style", "titles"],
)
def test_broken_links_and_what_is_fetched_from_elsewhere_are_found(
    tools: Any, site: Path, html: str, wrong: list[str]
) -> None:
    with (site / "b" / "index.html").open("a") as page:
        page.write(html)
    assert list(tools.check.broken_links(site)) == wrong


def test_a_public_name_that_objects_inv_lacks_is_found(tools: Any, repository: Path) -> None:
    start = b"# Sphinx inventory version 2\n# Project: drivetrain\n# Version: 0\n# zlib\n"
    for text, lacks in ((b"drivetrain.Trainer py:class 1 reference/#$ -\n", []), (b"", ["drivetrain.Trainer"])):
        (repository / "objects.inv").write_bytes(start + zlib.compress(text))
        assert tools.check.missing_objects(repository, repository) == lacks


def test_without_chromium_the_site_is_still_checked(
    tools: Any, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools.check, "write_llms", lambda site, reference: None)
    monkeypatch.setattr(tools.reference_text, "texts", dict)
    monkeypatch.setattr(tools.check, "missing_objects", lambda site: [])
    monkeypatch.setattr(tools.chromium, "program", lambda: None)
    tools.check.main(site, None)
    assert "Chromium is not installed" in capsys.readouterr().out
    (site / "x.svg").unlink()
    with pytest.raises(SystemExit, match=r"x.svg, which is not there"):
        tools.check.main(site, None)


def test_docstrings_become_markdown(tools: Any) -> None:
    text = "See :class:`~drivetrain.Trainer` and :meth:`fit`, as in::\n\n    a, b: c\n\n"
    arguments = "Args:\n    x, y: the\n      place.\n    z: a, b: c."
    assert tools.docstrings.in_markdown(text + arguments) == (
        "See `Trainer` and `fit`, as in:\n\n    a, b: c\n\n"
        "Args:\n    x: the\n      place.\n    y: the\n      place.\n    z: a, b: c."
    )
    assert tools.docstrings.in_markdown("One.\n\n::\n\n    a = 1\n") == "One.\n\n    a = 1\n"
    assert tools.docstrings.in_markdown("One line.") == "One line."
    assert tools.docstrings.passed_to_reads("reads('engine.plan', 'What was decided.')") == "What was decided."
    assert tools.docstrings.passed_to_reads("reads('engine.plan', writable=True)") is None
    assert tools.docstrings.passed_to_reads("3") is None
