"""Finish the built site, and check it: llms.txt, links, objects.inv, and each page in headless Chromium.

``make docs`` runs it after the build. Without Chromium the checks in a browser are skipped, with a line that says why.
"""

from __future__ import annotations

import base64
import functools
import re
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import chromium
import pages
import reference_text

HERE = "http://site.test/"
WIDTHS = (390, 1280)
MEASURE = """[
    document.documentElement.scrollWidth - document.documentElement.clientWidth,
    [...document.images].filter(each => each.loading != "lazy" && !each.naturalWidth).map(each => each.src),
]"""
FIELD = """new Promise(resolve => {
    document.querySelector(".md-search__button").click()
    const seen = setInterval(() => {
        const below = [...document.querySelectorAll("*")].find(each => each.shadowRoot?.querySelector("input"))
        if (below) { clearInterval(seen); below.shadowRoot.querySelector("input").focus(); resolve() }
    }, 20)
})"""
FOUND = """new Promise((resolve, reject) => {
    const seen = setInterval(() => {
        const found = [...document.querySelectorAll("*")].flatMap(
            each => [...each.shadowRoot?.querySelectorAll("a[href]") ?? []].map(link => link.href))
        if (found.length) { clearInterval(seen); resolve(found) }
    }, 20)
    setTimeout(() => reject(new Error("no result after 30 seconds")), 30000)
})"""


# ---- llms.txt --------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a paragraph on one line, with the texts of links in place of links."""
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", " ".join(text.split()))


def introduced(text: str) -> tuple[str, str]:
    """Return a page's title, and the first sentence below it."""
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    prose = pages.FENCED.sub("", text[title.end() :] if title else text)
    first = next((each for each in re.split(r"\n\s*\n", prose) if re.match(r"\s*[\w`*\"]", each)), "")
    return title[1] if title else "", re.split(r"(?<=[.!?])\s", plain(first))[0]


def overview(root: Path) -> dict[str, str]:
    """Return what docs/README.md says of each page, by the page's path."""
    text = (root / "docs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^]]+\]\((\w+\.md)\): (.*(?:\n  .*)*)", text, re.MULTILINE)
    return {f"docs/{name}": plain(line) for name, line in listed}


def write_llms(site: Path, reference: dict[str, str], root: Path = pages.ROOT) -> None:
    """Write llms.txt, which lists all pages, llms-full.txt, which is all of them, and each page as Markdown.

    ``reference`` has the texts of the pages below ``reference/``, by their paths.
    """
    said, full, section = overview(root), [], ""
    listed = [f"# {pages.PACKAGE}\n", "> " + introduced((root / "README.md").read_text(encoding="utf-8"))[1] + "\n"]
    for page in pages.order(root):
        if page.section != section:
            section = page.section
            listed.append(f"\n## {section or 'More'}\n")
        if page.path in reference:
            module = Path(page.path).stem.replace(pages.PACKAGE, "")
            text, title = reference[page.path], pages.full(module)
            said[page.path] = ", ".join(each.name for each in pages.public(module, root))
        else:
            text = (root / page.path).read_text(encoding="utf-8")
            title, sentence = introduced(text)
            said.setdefault(page.path, sentence)
        listed.append(f"- [{title}]({page.path}): {said[page.path]}")
        full.append(f"<!-- {page.path} -->\n\n{text.strip()}\n")
        (site / page.path).parent.mkdir(parents=True, exist_ok=True)
        (site / page.path).write_text(text, "utf-8")
    (site / "llms.txt").write_text("\n".join(listed) + "\n", "utf-8")
    (site / "llms-full.txt").write_text("\n".join(full), "utf-8")


# ---- the files -------------------------------------------------------------------------------------------------------


class Document(HTMLParser):
    """What a page links to and fetches, its anchors, and the number of its titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.titles = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.titles += tag == "h1"
        self.anchors |= {found.get("id") or "", found.get("name") or ""}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        self.fetched += [each for each in (found.get("src"), found.get("href") if tag == "link" else None) if each]


def documents(site: Path) -> dict[str, Document]:
    """Return the site's pages by their addresses, relative to the site."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        address = path.relative_to(site).as_posix().removesuffix("index.html")
        found[address] = Document(path.read_text(encoding="utf-8"))
    return found


def broken_links(site: Path) -> Iterator[str]:
    """Yield links to what the site does not have, what a page fetches from elsewhere, and pages with several titles."""
    read = documents(site)
    for address, document in read.items():
        if address == "404.html":
            continue  # its links begin at the address that was not found
        if document.titles > 1:
            yield f"{address} has {document.titles} titles: write ## for all but the first"
        for target in (*document.links, *document.fetched):
            to = urlsplit(urljoin(HERE + address, target))
            if to.netloc != urlsplit(HERE).netloc:
                if target in document.fetched and to.scheme in ("http", "https"):
                    yield f"{address} fetches {target}"
                continue
            path = unquote(to.path.removeprefix("/"))
            file = site / path / "index.html" if path.endswith("/") or not path else site / path
            if not file.is_file():
                yield f"{address} links to {target}, which is not there"
            elif to.fragment and path in read and unquote(to.fragment) not in read[path].anchors:
                yield f"{address} links to {target}, a section that is not there"


def missing_objects(site: Path, root: Path = pages.ROOT) -> list[str]:
    """Return the public names that objects.inv lacks."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    there = {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}
    offered = (
        f"{pages.full(module)}.{each.name}" for module in pages.modules(root) for each in pages.public(module, root)
    )
    return [name for name in offered if name not in there]


# ---- in a browser ----------------------------------------------------------------------------------------------------


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def looked_at(tab: chromium.Tab, base: str, address: str, pictures: Path | None) -> Iterator[str]:
    """Yield what is wrong with a page at each width: it scrolls sideways, fetches from elsewhere, lacks a picture."""
    for width in WIDTHS:
        tab.resize(width)
        if width == WIDTHS[0]:
            tab.open(base + address)
        too_wide, without = tab.run(MEASURE)
        if too_wide > 0:
            yield f"{address} scrolls sideways by {too_wide} pixels at {width}"
        yield from (f"{address} does not show {each}" for each in without)
        if pictures is not None:
            name = f"{address.strip('/').replace('/', '-') or 'index'}-{width}.png"
            (pictures / name).write_bytes(base64.b64decode(tab.call("Page.captureScreenshot")["data"]))
    for each in tab.requested():
        if not each.startswith((base, "data:", "blob:")):
            yield f"{address} asks for {each}"


def colours(tab: chromium.Tab, base: str) -> Iterator[str]:
    """Yield what is wrong with the colours of the first page on a light and on a dark system."""
    for system, scheme in (("dark", "slate"), ("light", "default")):
        tab.prefer(system)
        tab.open(base)
        shown = tab.run('document.body.getAttribute("data-md-color-scheme")')
        if shown != scheme:
            yield f"the colours are {shown!r} on a {system} system, not {scheme!r}"


def search(tab: chromium.Tab, base: str) -> Iterator[str]:
    """Yield what is wrong with the search: it finds the page on prove-resume."""
    tab.open(base)
    try:
        tab.run(FIELD)
        tab.call("Input.insertText", text="prove-resume")
        found = tab.run(FOUND)
    except RuntimeError as error:
        yield f"the search for prove-resume failed: {error}"
    else:
        if not any("docs/prove_resume/" in each for each in found):
            yield f"the search for prove-resume found {found}"


def in_browser(site: Path, executable: str, pictures: Path | None = None) -> Iterator[str]:
    """Yield what is wrong with the pages in Chromium, which finds no address but the site's."""
    with served(site) as base, chromium.browser(executable) as tab:
        yield from search(tab, base)
        yield from colours(tab, base)
        tab.call("Network.setBlockedURLs", urls=["*/search.json"])  # each page would read the index again, for seconds
        for address in documents(site):
            yield from looked_at(tab, base, address, pictures)


def main(site: Path, pictures: Path | None) -> None:
    """Finish and check a site; a problem ends the program with exit code 1."""
    write_llms(site, reference_text.texts())
    wrong = [*broken_links(site), *(f"objects.inv lacks {name}" for name in missing_objects(site))]
    if (executable := chromium.program()) is None:
        print("Not checked in a browser: Chromium is not installed (Debian: apt-get install chromium).")
    else:
        wrong += in_browser(site, executable, pictures)
    if wrong:
        sys.exit("\n".join(["make docs: the site has errors:", *wrong]))
    print(f"The site is in {site}: {len(documents(site))} pages.")


if __name__ == "__main__":
    main(pages.ROOT / "build" / "site", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
