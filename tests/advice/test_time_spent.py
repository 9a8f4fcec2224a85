"""The table of where the time of a fit went."""

from __future__ import annotations

import re

from drivetrain.advice.time_spent import PARTS, TimeSpent, Verdict


def test_the_table_has_the_verdict_first_and_a_row_for_each_part() -> None:
    seconds = {**dict.fromkeys(PARTS, 0.0), "fetch": 30.0, "backward": 10.0}
    verdict = Verdict("dataset", "The fit waits.", "Write num_workers=2.")
    lines = str(TimeSpent(seconds, 40.0, verdict)).splitlines()
    assert lines[0] == "The fit waits. Write num_workers=2."
    assert lines[3] == "fetch             30.0 s   75.0%"
    assert [line.split()[0] for line in lines[1:]] == list(PARTS)


def test_a_notebook_shows_the_verdict_and_a_table() -> None:
    spent = TimeSpent({"fetch": 30.0, "backward": 10.0}, 40.0, Verdict("dataset", "a < b.", "Write c."))
    html = spent._repr_html_()
    assert "a &lt; b. Write c." in html
    assert re.findall(r">([^<>]+)</td>", html)[1:] == ["fetch", "30.0 s", "75.0%", "backward", "10.0 s", "25.0%"]


def test_without_a_verdict_there_is_only_the_table() -> None:
    lines = str(TimeSpent(dict.fromkeys(PARTS, 0.0), 0.0)).splitlines()
    assert lines[0] == "start              0.0 s    0.0%"
