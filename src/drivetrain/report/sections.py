"""The sections of a report as HTML."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.errors import number_of
from drivetrain.report.comparing import facts, mapping, rows, summary
from drivetrain.report.curves import COLORS, Curve, chart, kind_of, text
from drivetrain.report.reading import Run, number

# all curves together have at most the first number of points; one curve has between the third and the second
_POINTS, _MOST_POINTS, _LEAST_POINTS = 16_000, 400, 12
_ALL_CHARTS, _TABLE, _FILE = 190_000, 22_000, 55_000  # the largest sizes in bytes, so that a page has less than 500 kB
_VALUE, _LINE = 300, 2000  # the longest value and the longest line of a file, in characters

CONFIGURATION = "Configuration"
TITLES = ("Settings", "Plan", "Environment", "Code")


def duration(seconds: Any) -> str:
    """Return seconds as text, such as "2 h 03 min"."""
    value = number(seconds)
    if value is None:
        return "unknown"
    whole = round(value)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{value:.3g} s" if value >= 0.1 or value == 0 else f"{value * 1000:.3g} ms"


def headline(run: Run) -> str:
    """Return one sentence about the end of the run."""
    last = run.last
    if not last:
        return "How this run ended is unknown"
    steps, epochs, why = last.get("last_step"), last.get("epochs"), last.get("why")
    done = f"{number_of(epochs, 'epoch')}, {number_of(steps, 'step')}"
    times = [seconds for each in run.attempts if (seconds := number(each.get("seconds"))) is not None]
    took = f"in {duration(sum(times))}" + (f" of {len(run.attempts)} fits" if len(run.attempts) > 1 else "")
    if (status := last.get("status")) == "running":
        return f"Has not ended, or was killed; it began at step {last.get('first_step')}"
    if status == "finished":
        return f"Finished after {done} {took}: {why}"
    return f"{'Stopped' if status == 'stopped' else 'Failed'} after {done} {took}: {why}"


def best(run: Run) -> str:
    """Return one sentence about the best checkpoint, or "" without checkpoints."""
    for saved in rows(run.last.get("checkpoints")):
        if saved.get("best") and saved.get("monitor"):
            score = number(saved.get("score"))
            value = saved.get("score") if score is None else f"{score:.4g}"
            return f"Best {saved['monitor']}: {value}, in {saved['best']}"
        if saved.get("best"):
            return f"Checkpoint: {saved['best']}"
    return ""


def verdict(run: Run) -> str:
    """Return the top of the report: how the run ended, and why it was slow."""
    why = mapping(mapping(run.last.get("time")).get("verdict"))
    lines = [("headline", f"{headline(run)}."), ("", best(run))]
    lines += [("slow", f"{why.get('text')} {why.get('advice')}")] if why else []
    lines += [("note", note) for note in run.notes]
    parts = [f"<p class={kind or 'plain'}>{text(shortened(line, _LINE))}</p>" for kind, line in lines if line]
    return f'<section class="verdict {text(shortened(run.last.get("status"), 20))}">{"".join(parts)}</section>'


def curves(runs: list[Run]) -> str:
    """Return a chart for each kind of metric, with the curves of all runs."""
    kinds: dict[str, list[tuple[str, int, Any]]] = defaultdict(list)
    for index, run in enumerate(runs):
        for name, points in run.curves.items():
            if name != "epoch":
                kinds[kind_of(name)].append((name, index, points))
    resumed = {number(each.get("first_step")) or 0.0 for run in runs for each in run.attempts[1:]}
    count = sum(len(found) for found in kinds.values())
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, count)))
    charts = []
    ordered = sorted(kinds.items(), key=lambda item: ("loss" not in item[0], -len({name for name, _, _ in item[1]})))
    for kind, found in ordered:
        lines = [
            Curve(shortened(name, _VALUE) + (f" ({'AB'[index]})" if len(runs) > 1 else ""), points, color % COLORS)
            for color, (name, index, points) in enumerate(found[: 4 * COLORS])
        ]
        charts.append(chart(shortened(kind, _VALUE), lines, resumed, most))
    if not charts:
        return ""
    shown, left_out = within(_ALL_CHARTS, charts)
    notes = "<p class=note>Dashed vertical lines: steps at which a fit resumed.</p>" if resumed - {0.0} else ""
    notes += f"<p class=note>{left_out} further charts are left out.</p>" if left_out else ""
    return section("Curves", f"<div class=charts>{shown}</div>{notes}")


def values(run: Run) -> str:
    """Return the table of each curve's last, lowest and highest value."""
    lines = [
        (name, f"{v['last']:.4g}", *(f"{v[which]:.4g} at step {v[f'{which}_at']:g}" for which in ("lowest", "highest")))
        for name, v in summary(run).items()
        if name != "epoch"
    ]
    return section("Values", table(("name", "last", "lowest", "highest"), lines))


def phases(run: Run) -> str:
    """Return the section about the time of the newest fit, and of all runs of the training."""
    spent, ledger = mapping(run.last.get("time")), mapping(run.goodput)
    parts = []
    if seconds := mapping(spent.get("seconds")):
        parts.append(f"<h3>The last fit, {text(duration(spent.get('wall_s')))}</h3>{_bars(seconds)}")
    if ledger:
        runs = f"{number_of(ledger['runs'], 'run')}, {ledger['failures']} failed"
        parts.append(
            f"<h3>The training over its restarts, {text(duration(ledger['wall_s']))}: {runs}</h3>"
            f"<p>{ledger['goodput']:.1%} of the time was training steps that count. Work that was lost and repeated: "
            f"{text(duration(ledger['seconds']['lost']))}.</p>{_bars(ledger['seconds'])}"
        )
        parts += [f"<p class=note>{text(note)}</p>" for note in ledger["notes"]]
    return section("Where the time went", "".join(parts))


def _bars(seconds: Mapping[str, Any]) -> str:
    found = {str(name): value for name, each in seconds.items() if (value := number(each)) is not None and value >= 0}
    total = sum(found.values()) or 1.0
    lines = (
        f"<tr><th>{text(shortened(name, _VALUE))}<td class=n>{text(duration(value))}<td class=n>{value / total:.1%}"
        '<td class=bar><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{value / total * 100:.2f}" height="8"/></svg>'
        for name, value in found.items()
    )
    return f"<table class=bars>{within(_TABLE, lines)[0]}</table>"


def attempts(run: Run) -> str:
    """Return the table of fits. A row shows when the fit began, its steps, its duration and how it ended."""
    lines = []
    for each in reversed(run.attempts):
        is_last = each is run.last
        status = "not ended" if each.get("status") == "running" and is_last else str(each.get("status"))
        status = "killed" if status == "running" else status
        began = number(each.get("began"))
        when = "" if began is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(began, 0), 4e9)))
        steps = f"{each.get('first_step')} to {each.get('last_step', '?')}"
        source = f"Resumed from {each['resumed_from']}. " if each.get("resumed_from") else ""
        lines.append(
            (when, steps, duration(each.get("seconds")), f"{source}{status}: {each.get('why', '')}".rstrip(": "))
        )
    return section("Fits", table(("began", "steps", "duration", "how it went"), lines))


def checkpoints(run: Run) -> str:
    """Return the table of checkpoints that callbacks have kept."""
    lines = []
    for saved in rows(run.last.get("checkpoints")):
        named = {saved.get("best"): "best", saved.get("last"): "last"}
        kept = mapping(saved.get("kept"))
        for path in dict.fromkeys([*kept, saved.get("best"), saved.get("last")]):
            if path:
                score = number(kept.get(path))
                shown = "" if score is None or not saved.get("monitor") else f"{saved['monitor']} {score:.4g}"
                lines.append((path, shown, named.get(path, "")))
    return section("Checkpoints", table(("file", "score", ""), lines))


def described(run: Run) -> str:
    """Return the sections with plan, settings, environment, hyperparameters, and the version and the diff of
    the code.
    """
    known, last = facts(run), run.last
    plan = [(str(row.get("what")), row.get("choice"), row.get("why")) for row in rows(last.get("plan"))]
    parts = [
        section("Plan", table(("what", "choice", "because"), plan)),
        section("Environment", table(("", ""), known["Environment"].items())),
        section("Settings that are not the default", table(("", ""), known["Settings"].items())),
    ]
    if run.hparams:
        parts.append(section(CONFIGURATION, _lines(run.hparams)))
    code = {name: value for name, value in known["Code"].items() if name != "diff"}
    if code:
        diff = run.diffs.get(str(mapping(last.get("code")).get("diff")), "")
        shown = (
            f"<details><summary>The diff to the commit</summary>{_lines(diff, is_diff=True)}</details>" if diff else ""
        )
        parts.append(section("Code", table(("", ""), code.items()) + shown))
    return "".join(parts)


def speed(found: Mapping[str, Any]) -> str:
    """Return a section that compares the speed of two runs. ``found`` is the entry "Speed" of :func:`differences`."""
    first, second = (duration(each) for each in found["seconds_per_step"])
    if (ratio := found["slower"]) is None:
        line = "The time of a step is unknown for at least one of the runs"
    else:
        line = f"A step of B takes {abs(ratio):.1%} {'longer' if ratio > 0 else 'less time'} than one of A"
    note = f"Duration of the fits divided by their steps, all included. A: {first}; B: {second}."
    return f"<section class=verdict><p class=headline>{line}.</p><p class=note>{text(note)}</p></section>"


def compared(found: Mapping[str, Any]) -> str:
    """Return the sections with all other differences between two runs."""
    numbers = [
        (name, *("" if each is None else f"{each['last']:.4g}" for each in pair))
        for name, pair in found["Values"].items()
        if name != "epoch"
    ]
    parts = [section("Last values", table(("name", "A", "B"), numbers))]
    for title in TITLES:
        pairs = [(name, *_or_default(title, pair)) for name, pair in found[title].items()]
        parts.append(section(title, table(("name", "A", "B"), pairs)))
    if lines := found["Hyperparameters"]:
        parts.append(section(CONFIGURATION, _lines("\n".join(lines), is_diff=True)))
    if same := [title for title in (*TITLES, "Hyperparameters") if not found[title]]:
        parts.append(section("No difference", f"<p>{', '.join(same)}</p>"))
    return "".join(parts)


def _or_default(title: str, pair: tuple[str, str]) -> list[str]:
    return [each or ("default" if title == "Settings" else "") for each in pair]


def section(title: str, body: str) -> str:
    """Return a section with a heading and the HTML ``body``, or "" if ``body`` is empty."""
    return "" if not body else f"<section><h2>{text(title)}</h2>{body}</section>"


def table(head: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> str:
    """Return a table, or "" without rows. The first cell of each row is the heading of the row."""
    names = [text(each) for each in head]
    top = f"<tr class=head>{''.join(f'<th>{name}' for name in names)}" if any(head) else ""
    body, left_out = within(_TABLE, (_row(names, line) for line in lines))
    more = f"<p class=note>{left_out} further rows are left out.</p>" if left_out else ""
    return f"<table class={'rows' if top else 'pairs'}>{top}{body}</table>{more}" if body or more else ""


def _row(names: list[str], line: tuple[Any, ...]) -> str:
    first, *cells = (text(shortened(each, _VALUE)) for each in line)
    return f"<tr><th>{first}" + "".join(f'<td data-is="{n}">{cell}' for n, cell in zip(names[1:], cells, strict=True))


def within(most: int, pieces: Iterable[str]) -> tuple[str, int]:
    """Join pieces of HTML up to ``most`` bytes. Also return how many pieces are left out."""
    taken, size, left_out = list[str](), 0, 0
    for piece in pieces:
        size += len(piece.encode())
        if size <= most:
            taken.append(piece)
        else:
            left_out += 1
    return "".join(taken), left_out


def shortened(value: Any, most: int) -> str:
    """Return the first ``most`` characters of ``value``. If it has more, add how many are left out."""
    found = str(value)
    return found if len(found) <= most else f"{found[:most]} ... ({len(found) - most} more characters)"


def _lines(content: str, is_diff: bool = False) -> str:
    """Return the lines of a file as HTML. The lines of a diff are coloured."""
    kinds = {"+": "ins", "-": "del"} if is_diff else {}
    marked = []
    for line in content.splitlines():
        tag, shown = kinds.get(line[:1]), text(shortened(line, _LINE))
        marked.append(f"<{tag}>{shown}</{tag}>\n" if tag else f"{shown}\n")
    found, left_out = within(_FILE, marked)
    return f"<pre>{found}{f'... ({left_out} more lines)' if left_out else ''}</pre>"
