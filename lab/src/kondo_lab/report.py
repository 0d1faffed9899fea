"""One HTML page with everything in it: no script, no font, no image from anywhere else."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from kondo_lab import figures
from kondo_lab.findings import findings
from kondo_lab.summary import Row
from kondo_lab.table import HEADERS, MEANINGS, cells

CAVEATS = (
    "Two small models on a CPU. The speed-ups are those of this machine in this run; the fixed "
    "cost of choosing units weighs more here than on a large model.",
    "The screen is free: the sampler already computed the log-probs of the current weights, so "
    "delight is exact and no screening forward is paid. Off-policy training would need one.",
    "Training is far shorter than in the papers, which give each method a million samples; late "
    "differences do not show. Digits are 8 x 8 images from scikit-learn, not MNIST, with a larger "
    "batch and a wider network. Reversal has the papers' task, model and batch, and twice their "
    "learning rate.",
    "Dense methods are charged forward and backward alone. Sampling and Adam are the same work "
    "for every method and are left out of the speed-up.",
    "A standard error over few seeds is itself uncertain. On reversal, runs differ a lot from seed "
    "to seed.",
)

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kondo demo</title>
<style>
:root { color-scheme: light; --line: #d8d8d8; --soft: #f5f5f3; --ink: #1d1d1b; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 68rem; color: var(--ink); background: #fff;
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: .2rem 0; }
h2 { font-size: 1.15rem; margin: 1.8rem 0 .5rem; }
p.lead { margin: 0 0 1rem; color: #555; }
.warning { border-left: .3rem solid #d55e00; padding: .5rem .8rem; background: #fdf1ea; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; white-space: normal; min-width: 4.4rem; font-size: .85rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
tr.task td { font-weight: 600; background: var(--soft); }
tr.gated td { background: #fff6ee; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
figure { margin: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; }
img { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
.facts { display: grid; gap: 0 2.5rem;
         grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
@media (max-width: 34rem) {
  body { padding: .8rem; }
  dl { grid-template-columns: 1fr; }
  dd { margin: 0 0 .4rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 9pt; }
  .panels { grid-template-columns: repeat(3, 1fr); }
  th, td { padding: .15rem .3rem; }
  h2 { break-after: avoid; }
}
</style>
</head>
<body>
<h1>kondo demo</h1>
<p class="lead">The same small policies trained with PG, DG and the Kondo gate, DG-K,
on two tasks. $length</p>
$warning
<p>Delight is advantage times surprisal. PG differentiates every sample alike. DG weights every
sample by the sigmoid of its delight. DG-K keeps the samples of highest delight, trains on them as
PG would, and skips the backward pass of all others.</p>
<h2>What was measured</h2>
$findings
<div class="scroll">$table</div>
<h2>Curves</h2>
<div class="panels">$panels</div>
<p>Lines are means over seeds, bands one standard error. Errors are running means of 1 - reward
over 5% of the run.</p>
<h2>Columns</h2>
<dl>$columns</dl>
<h2>Caveats</h2>
<ul>$caveats</ul>
<div class="facts">
<div><h2>Settings</h2><dl>$settings</dl></div>
<div><h2>Environment</h2><dl>$environment</dl></div>
</div>
</body>
</html>
""")


def page(rows: Sequence[Row], panels: Sequence[figures.Panel], facts: Mapping[str, Any]) -> str:
    """Return the report as one self-contained HTML document.

    Args:
        rows: of the table.
        panels: drawn into the page one by one, so that a phone shows them below each other.
        facts: the manifest: command, seeds, settings, environment, seconds, interrupted.
    """
    run = {"command": facts["command"], "seeds": facts["seeds"], "workers": facts["workers"]}
    return _PAGE.substitute(
        length=f"{facts['seconds']:.0f} seconds in all.",
        warning=_warning(rows) if facts["interrupted"] else "",
        findings="\n".join(f"<p>{escape(sentence)}</p>" for sentence in findings(rows)),
        table=_table(rows),
        panels="\n".join(_panel(panel) for panel in panels),
        columns=_definitions(MEANINGS),
        caveats="\n".join(f"<li>{escape(caveat)}</li>" for caveat in CAVEATS),
        settings=_definitions(run | _flat(facts["settings"])),
        environment=_definitions(facts["environment"]),
    )


def _warning(rows: Sequence[Row]) -> str:
    steps = {row.task: row.num_steps for row in rows}
    made = ", ".join(f"{task} after {count} steps" for task, count in steps.items())
    return f'<p class="warning">Interrupted: {escape(made)}. The numbers are of a partial run.</p>'


def _table(rows: Sequence[Row]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(header)}</th>" for header in HEADERS) + "</tr>"]
    task = None
    for row in rows:
        if row.task != task:
            task = row.task
            empty = "<td></td>" * (len(HEADERS) - 1)
            lines.append(f'<tr class="task"><td>{escape(task)}</td>{empty}</tr>')
        kind = "dense" if row.dense else "gated"
        inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        lines.append(f'<tr class="{kind}">{inside}</tr>')
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _panel(panel: figures.Panel) -> str:
    data = base64.b64encode(figures.png(panel)).decode()
    title = escape(panel.title)
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<img alt="{title}" src="data:image/png;base64,{data}"></figure>'
    )


def _definitions(items: Mapping[str, Any]) -> str:
    return "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>" for name, value in items.items()
    )


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level: "digits batch", ..."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        flat |= _flat(value, f"{label}: ") if isinstance(value, Mapping) else {label: value}
    return flat
