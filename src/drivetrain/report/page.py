"""A report as one HTML page: no script, nothing fetched, for light and dark screens and for phones."""

from __future__ import annotations

import os

from drivetrain.report import sections
from drivetrain.report.comparing import differences
from drivetrain.report.curves import text
from drivetrain.report.reading import Run

_STYLE = """
:root{color-scheme:light dark;--back:#f6f7f8;--card:#fff;--ink:#1b1e23;--soft:#5b6470;--edge:#dfe3e8;--good:#2f8f5b;
--bad:#b93a3a;--warn:#b06f12;--c0:#2a6fbb;--c1:#c8641b;--c2:#2f8f5b;--c3:#9a4a9e;--c4:#b33a3a;--c5:#6b7280}
@media (prefers-color-scheme:dark){:root{--back:#14161a;--card:#1c1f24;--ink:#e7e9ec;--soft:#9ba4ae;--edge:#343a42;
--good:#6fd39a;--bad:#ff8a8a;--warn:#f0b45c;--c0:#6cb0ff;--c1:#ffab5e;--c2:#6fd39a;--c3:#dd92d6;--c4:#ff8a8a;
--c5:#a8b0ba}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:1200px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:0 0 10px}h3{font-size:14px;margin:14px 0 6px}p{margin:6px 0}
.sub,.note,small{color:var(--soft);font-size:13px}.sub{margin:2px 0 14px}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:14px 16px;margin:0 0 14px}
.verdict{border-left:5px solid var(--soft)}.finished{border-left-color:var(--good)}.failed{border-left-color:var(--bad)}
.stopped,.running{border-left-color:var(--warn)}.headline{font-size:17px;font-weight:600;margin:0 0 6px}
.slow{border-left:3px solid var(--warn);padding-left:10px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:18px 24px}
figure{margin:0;min-width:0}figcaption{margin-bottom:6px}
.key{margin-left:12px;font-size:13px;color:var(--soft);display:inline-block}
.key i{display:inline-block;width:18px;border-top:3px solid var(--c);vertical-align:middle;margin-right:5px}
.chart{position:relative;margin-left:56px}.chart svg{display:block;width:100%;height:180px;overflow:visible}
.y span{position:absolute;left:-56px;width:50px;text-align:right;transform:translateY(-50%);margin:0}
.y{position:absolute;inset:0 0 auto;height:180px}.y,.x{font-size:12px;color:var(--soft)}
.x{display:flex;justify-content:space-between;padding-top:4px}
.line{fill:none;stroke:var(--c);stroke-width:1.8;vector-effect:non-scaling-stroke;stroke-linejoin:round;
stroke-linecap:round}
.grid,.resumed{stroke:var(--edge);vector-effect:non-scaling-stroke}.resumed{stroke:var(--soft);stroke-dasharray:4 4}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{padding:4px 10px 4px 0;text-align:left;vertical-align:top;
border-top:1px solid var(--edge)}tr:first-child>*{border-top:0}th{font-weight:500;color:var(--soft)}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}.bars th,.bars .n{width:1%;white-space:nowrap}
.bar svg{display:block;width:100%;height:10px;margin-top:5px}.bar rect{fill:var(--c0)}
pre{font:12.5px/1.45 ui-monospace,monospace;white-space:pre-wrap;margin:6px 0 0}
ins{color:var(--good);text-decoration:none}del{color:var(--bad);text-decoration:none}summary{cursor:pointer;color:var(--soft);margin-top:8px}
.pairs{table-layout:fixed}.pairs>*>*>th{width:34%}
@media (max-width:600px){.rows tr{display:block;border-top:1px solid var(--edge);padding:5px 0}.rows .head{display:none}
.rows td,.rows th{display:block;border:0;padding:0}.rows td::before{content:attr(data-is) " ";color:var(--soft)}
.rows td:empty{display:none}.rows th{color:var(--ink)}.pairs>*>*>th{width:45%}.bars td:last-child{min-width:60px}}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:0 14px}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(run: Run) -> str:
    """Return the report of one run."""
    body = [
        sections.verdict(run), sections.curves([run]), sections.values(run), sections.phases(run),
        sections.attempts(run), sections.checkpoints(run), sections.described(run),
    ]  # fmt: skip
    return _page(_name(run), run.folder, "".join(body))


def comparison(one: Run, other: Run) -> str:
    """Return the report of what differs between two runs."""
    heads = "".join(
        f"<div><h3>{letter}: {text(_name(run))}</h3><p class=sub>{text(run.folder)}</p>{sections.verdict(run)}"
        f"{sections.phases(run)}</div>"
        for letter, run in (("A", one), ("B", other))
    )
    found = differences(one, other)
    body = [
        sections.speed(found["Speed"]), f"<div class=two>{heads}</div>", sections.curves([one, other]),
        sections.compared(found),
    ]  # fmt: skip
    return _page(f"{_name(one)} and {_name(other)}", "what differs between two runs, A and B", "".join(body))


def _name(run: Run) -> str:
    return os.path.basename(os.path.abspath(run.folder))


def _page(title: str, sub: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title><style>{_STYLE}</style></head><body><main>'
        f"<h1>{text(title)}</h1><p class=sub>{text(sub)}</p>{body}</main></body></html>\n"
    )
