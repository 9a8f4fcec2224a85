"""The page of a report: what it shows, what it escapes, how large it is, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import CHROMIUM, Browser
from tests.report.conftest import ATTEMPT

from drivetrain.report.page import comparison, page
from drivetrain.report.reading import read

Make = Callable[..., Path]

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'><b>&amp;\udc80\x00"


def texts(content: str) -> list[str]:
    """The texts of a page that a person reads, in order."""
    found: list[str] = []

    class Texts(HTMLParser):
        skips = False

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.skips = tag == "style"

        def handle_data(self, data: str) -> None:
            if data.strip() and not self.skips:
                found.append(data.strip())

    Texts().feed(content)
    return found


def test_the_verdict_comes_first_and_all_sections_follow(make_run: Make) -> None:
    killed = {"status": "running", "last_step": None}
    content = texts(page(read(str(make_run("run", killed, {"first_step": 500, "resumed_from": "checkpoints/l.ckpt"})))))
    start = content.index("Finished after 2 epochs, 1000 steps in 3 min 20 s of 2 fits: max_epochs=2 is reached.")
    assert content[start + 1 : start + 3] == [
        "Best val_loss: 0.25, in checkpoints/b.ckpt", "75 % was waiting for data. Write num_workers=2.",
    ]  # fmt: skip
    headings = ["Curves", "Values", "Where the time went", "Fits", "Checkpoints", "Plan", "Environment", "Code"]
    assert [each for each in content if each in headings] == headings
    assert {"75.0%", "there is no other", "abcdef", "+lr = 2", "2023-11-14 22:13:20 UTC"} <= {*content}
    assert "killed: max_epochs=2 is reached" in content
    assert "Resumed from checkpoints/l.ckpt. finished: max_epochs=2 is reached" in content


@pytest.mark.parametrize(("value", "shown"), [(-1.0, False), (0.5, True)])
def test_tensorboard_s_hp_metric_is_shown_if_the_program_gave_it_a_value(
    make_run: Make, value: float, shown: bool
) -> None:
    content = texts(page(read(str(make_run(rows={"hp_metric": [value], "loss": [1.0]})))))
    assert ("hp_metric" in content, "loss" in content) == (shown, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "running"}, "Has not ended, or was killed; it began at step 0."),
        ({"status": "failed", "why": "Error: no"}, "Failed after 2 epochs, 1000 steps in 1 min 40 s: Error: no."),
        ({"status": "stopped", "why": "Ctrl-C"}, "Stopped after 2 epochs, 1000 steps in 1 min 40 s: Ctrl-C."),
    ],
)  # fmt: skip
def test_the_headline_tells_how_the_run_ended(make_run: Make, change: dict[str, Any], said: str) -> None:
    assert said in texts(page(read(str(make_run("run", change)))))


def evil(value: Any) -> Any:
    """The same data with every text replaced by markup, as a hostile record would have it."""
    if isinstance(value, dict):
        return {f"{name}": evil(each) for name, each in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [evil(each) for each in value]
    return EVIL if isinstance(value, str) else value


def test_everything_from_files_is_escaped(make_run: Make) -> None:
    folder = make_run("run", evil(ATTEMPT), rows={'"<script>"': [1.0, 2.0], "x": [1.0, 2.0]})
    (folder / "hparams.yaml").write_text("a: <script>alert(1)</script>\n")
    record = json.loads((folder / "run.json").read_text())
    record["diffs"] = {EVIL: f"+{EVIL}"}
    (folder / "run.json").write_text(json.dumps(record))
    run = read(str(folder))
    for content in (page(run), comparison(run, run)):
        tags = {tag.lower() for tag in re.findall(r"<([a-zA-Z]+)", content)}
        assert not tags & {"script", "img"}
        assert "&lt;script&gt;" in content


@pytest.mark.parametrize("wrong", [None, 3, "x", [], ["x"], {"a": 1}, [{"what": 1}], float("nan")])
def test_a_record_with_values_of_other_types_makes_a_page(make_run: Make, wrong: Any) -> None:
    run = read(str(make_run("run", dict.fromkeys(ATTEMPT, wrong))))
    assert "<h1>" in page(run)
    assert "<h1>" in comparison(run, run)


def test_the_page_of_a_huge_run_stays_below_500_kb(make_run: Make) -> None:
    rows = {f"metric_{name}<&": [at % 97 + name / 7 for at in range(60)] for name in range(700)}
    change = {
        "settings": {f"setting_{at}": "<" * 4000 for at in range(300)}, "why": "&" * 100_000,
        "plan": [{"what": str(at), "choice": "<" * 900, "why": "<" * 900} for at in range(300)],
        "environment": {f"name_{at}": "<" * 900 for at in range(300)},
        "checkpoints": [{"monitor": "m", "kept": {f"{'<' * 400}{at}": 1.0 for at in range(300)}}],
    }  # fmt: skip
    folder = make_run("run", *[{"why": "&" * 4000}] * 200, change, rows=rows)
    (folder / "hparams.yaml").write_text("<" * 1_000_000)
    run = read(str(folder))
    run.diffs["d"] = "+<\n" * 100_000
    assert len(page(run).encode()) < 500_000
    assert len(comparison(run, run).encode()) < 500_000


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_a_browser_without_scripts_and_network_shows_the_page_at_any_width(
    browser: Browser, make_run: Make, tmp_path: Path, several: bool
) -> None:
    long = "a_name_without_any_space_in_it_" * 8
    rows = {"train_loss": [1.0, 2.0], long: [1.0, 2.0], "lr": [1e-9, 1.0]}
    run = read(
        str(
            make_run(
                "run", {"settings": {long: long}, "why": long, "plan": [{"what": long, "choice": long}]}, {}, rows=rows
            )
        )
    )
    run.diffs["d"] = f"+{long * 10}\n"
    run.hparams = long * 10
    path = tmp_path / "page.html"
    path.write_text(comparison(run, run) if several else page(run))
    browser.complaints.clear()
    browser.requests.clear()
    for width in (320, 390, 1280):
        for scheme in ("light", "dark"):
            assert browser.open(path, width, scheme) <= width
    assert browser.complaints == []
    assert set(browser.requests) == {path.as_uri()}


def test_the_browser_finds_a_page_that_is_too_wide_fetches_and_complains(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<meta name=viewport content="width=device-width"><div style="width:900px"><img src="gone.png">')
    browser.complaints.clear()
    browser.requests.clear()
    assert browser.open(path, 390, "light") > 390
    assert (tmp_path / "gone.png").as_uri() in browser.requests
    assert browser.complaints


def test_dark_and_light_screens_get_other_colours(browser: Browser, make_run: Make, tmp_path: Path) -> None:
    path, pictures = tmp_path / "page.html", []
    path.write_text(page(read(str(make_run()))))
    for scheme in ("light", "dark"):
        browser.open(path, 390, scheme)
        browser.screenshot(tmp_path / f"{scheme}.png")
        pictures.append((tmp_path / f"{scheme}.png").read_bytes())
    assert pictures[0] != pictures[1]
