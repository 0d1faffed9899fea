"""The tables of docs/results/studies/reversal-frictions.md; `page_tables` writes them."""

import math

import pandas as pd

from kondo_lab.evidence.page_tables import NOT_RUN
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.reversal_frictions import by_step, claim_lines
from kondo_lab.studies.reversal_frictions.analysis import SHARES
from kondo_lab.studies.reversal_frictions.run import ALL, NONE, cells, methods
from kondo_lab.studies.reversal_frictions.settings import Settings

SIGNS = {"at least": "≥ ", "at most": "≤ ", "either side": "? "}


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by what is in it, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run; a table whose part was not run yet says so.
        settings: of the run.
    """
    headline = headline.assign(x=headline["x"].astype(str))
    there = set(headline["metric"])
    found: dict[str, str] = {}
    for reward in settings.rewards:
        each = claim_lines.error_metric(reward, NONE) in there
        together = claim_lines.error_metric(reward, ALL) in there
        own = claim_lines.error_metric(reward, _honest("bugs")) in there
        made = {
            "each": _each(headline, settings, reward) if each else NOT_RUN,
            "own": _own(headline, settings, reward) if own else NOT_RUN,
            "together": _together(headline, settings, reward) if together else NOT_RUN,
            "samples": _samples(headline, settings, reward) if together else NOT_RUN,
            "steps": _steps(headline, settings, reward) if together else NOT_RUN,
        }
        found |= {f"{name} {reward}": table for name, table in made.items()}
    ran = any(metric.endswith(", why") for metric in there)
    return found | {"why": _why(headline) if ran else NOT_RUN}


def _each(headline: pd.DataFrame, settings: Settings, reward: str) -> str:
    rows = []
    for friction, strength, _ in cells(settings):
        name = friction if friction == NONE else f"{friction} {_strength(strength)}"
        rows.append([name, *_errors(headline, settings, reward, friction, strength)])
    return markdown(["", *methods(settings), f"{claim_lines.BEST} / DG"], rows)


def _together(headline: pd.DataFrame, settings: Settings, reward: str) -> str:
    there = headline[headline["metric"] == claim_lines.error_metric(reward, ALL)]
    lengths = sorted({float(x) for x in there["x"]})
    rows = [[f"{x:g}", *_errors(headline, settings, reward, ALL, x)] for x in lengths]
    metric = claim_lines.lengths_metric(reward)
    longest = [_plain(headline, name, metric) for name in methods(settings)]
    over = [_judged(headline, f"DG / {name}", metric) for name in claim_lines.baselines(settings)]
    blank = [""] * (len(longest) - len(over) + 1)
    rows += [["longest H below 25%", *longest, ""], ["DG's over it", *over, *blank]]
    return markdown(["H", *methods(settings), f"{claim_lines.BEST} / DG"], rows)


def _errors(
    headline: pd.DataFrame, settings: Settings, reward: str, friction: str, x: float
) -> list[str]:
    """Return a row: error in percent ± its standard error (seeds that solve it), and the ratio."""
    at = (
        claim_lines.error_metric(reward, friction),
        claim_lines.solved_metric(reward, friction),
        x,
    )
    cells_of_row = [_error(headline, method, *at) for method in methods(settings)]
    metric = claim_lines.error_metric(reward, friction)
    return [*cells_of_row, _judged(headline, claim_lines.over_dg(claim_lines.BEST), metric, x)]


def _error(headline: pd.DataFrame, method: str, metric: str, solved: str, x: float) -> str:
    own, share = _row(headline, method, metric, x), _row(headline, method, solved, x)
    if own is None or share is None:
        return ""
    seeds = int(own["seeds"])
    return f"{_percent(own)} ({round(share['ours'] * seeds)}/{seeds})"


def _samples(headline: pd.DataFrame, settings: Settings, reward: str) -> str:
    """Return the samples of every baseline over DG's, by length, and how they grow."""
    columns = ["to an error of", "", *(f"H = {x}" for x in settings.lengths), "log10 per token"]
    rows = []
    for target in settings.targets:
        metric = claim_lines.samples_metric(reward, target)
        for method in claim_lines.baselines(settings):
            series = claim_lines.over_dg(method)
            row = [_judged(headline, series, metric, x) for x in settings.lengths]
            grown = _growth(headline, series, claim_lines.growth_metric(reward, target))
            rows.append([f"{100 * target:g}%", series, *row, grown])
        reached = claim_lines.reached_metric(reward, target)
        there = [_reached(headline, "DG", reached, x) for x in settings.lengths]
        rows.append([f"{100 * target:g}%", "seeds of DG that get there", *there, ""])
    return markdown(columns, rows)


def _steps(headline: pd.DataFrame, settings: Settings, reward: str) -> str:
    """Return the errors with all frictions at some steps."""
    own = headline[headline["metric"] == by_step.metric(settings, reward)]
    rows = []
    for x in own["x"].unique():
        found = [
            _row(own, name, by_step.metric(settings, reward), float(x))
            for name in methods(settings)
        ]
        rows.append([f"{float(x):,.0f}", *("" if row is None else _percent(row) for row in found)])
    return markdown(["step", *methods(settings)], rows)


def _own(headline: pd.DataFrame, settings: Settings, reward: str) -> str:
    """Return the errors by what replaced rows report: 1, and the actor's own probability."""
    names = [name for name in methods(settings) if _row_of_own(headline, name, reward) is not None]
    columns = ["", *(f"{name}: {told}" for name in names for told in ("1", "own")), "DG"]
    rows = []
    places = [("bugs", x) for x in settings.bugs] + [(ALL, float(settings.length))]
    for friction, x in places:
        row = [f"bugs {_strength(x)}" if friction == "bugs" else f"{ALL}, H = {x:g}"]
        for name in names:
            for kind in (friction, _honest(friction)):
                at = (
                    claim_lines.error_metric(reward, kind),
                    claim_lines.solved_metric(reward, kind),
                    x,
                )
                row.append(_error(headline, name, *at))
        at = (
            claim_lines.error_metric(reward, friction),
            claim_lines.solved_metric(reward, friction),
            x,
        )
        rows.append([*row, _error(headline, "DG", *at)])
    return markdown(columns, rows)


def _why(headline: pd.DataFrame) -> str:
    own = headline[headline["metric"].str.endswith(", why")]
    rows = []
    for name in own["series"].unique():
        x = float(own["x"].iloc[0])
        numbers = [_row(headline, name, f"{metric}, why", x) for metric in SHARES]
        shares = ["" if row is None else f"{100 * row['ours']:.1f}%" for row in numbers]
        error = _error(headline, name, "learner error, why", "seeds below 5%, why", x)
        rows.append([name, error, *shares])
    return markdown(["", "error (seeds below 5%)", *SHARES], rows)


def _honest(friction: str) -> str:
    return f"{friction}, own probability"


def _row_of_own(headline: pd.DataFrame, name: str, reward: str) -> pd.Series | None:
    return _row(headline, name, claim_lines.error_metric(reward, _honest("bugs")), None)


def _row(
    headline: pd.DataFrame, series: str, metric: str, x: float | None = None
) -> pd.Series | None:
    """Return the line of a series, which may say that it is a bound; None where there is none."""
    names = [series, *(f"{series}, {bound}" for bound in SIGNS)]
    own = headline[headline["series"].isin(names) & (headline["metric"] == metric)]
    if x is not None:
        own = own[[_same(place, x) for place in own["x"]]]
    return None if own.empty else own.iloc[0]


def _same(place: str, x: float) -> bool:
    return math.isclose(float(place), x, rel_tol=1e-5)


def _judged(headline: pd.DataFrame, series: str, metric: str, x: float | None = None) -> str:
    """Return a number ± its standard error, its bound before it and its verdict after it."""
    row = _row(headline, series, metric, x)
    if row is None:
        return ""
    verdict = _word(row)
    told = f"{_sign(row['series'])}{_with_error(row['ours'], row['se'])}"
    return f"{told}, {verdict}" if verdict else told


def _growth(headline: pd.DataFrame, series: str, metric: str) -> str:
    row = _row(headline, series, metric)
    if row is None:
        return ""
    judged = _row(headline, f"{claim_lines.NO_GROWTH} < {series}", f"order of {metric}")
    verdict = "" if judged is None else f", {_word(judged)}"
    error = "" if pd.isna(row["se"]) else f" ± {row['se']:.3f}"
    return f"{_sign(row['series'])}{row['ours']:+.3f}{error}{verdict}"


def _reached(headline: pd.DataFrame, series: str, metric: str, x: float) -> str:
    row = _row(headline, series, metric, x)
    return "" if row is None else f"{round(row['ours'] * row['seeds'])}/{int(row['seeds'])}"


def _plain(headline: pd.DataFrame, series: str, metric: str) -> str:
    row = _row(headline, series, metric)
    return "" if row is None else _with_error(row["ours"], row["se"])


def _word(row: pd.Series) -> str:
    """Return the verdict of a line: met, missed or open; "" where there is none."""
    return next(
        (word for verdict, word in claim_lines.WORDS.items() if verdict == row["verdict"]), ""
    )


def _sign(series: str) -> str:
    return SIGNS.get(series.rpartition(", ")[2], "")


def _with_error(value: float, error: float) -> str:
    told = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    if pd.isna(error):
        return told
    return f"{told} ± {error:.2g}" if error < 100 else f"{told} ± {error:.0f}"


def _percent(row: pd.Series) -> str:
    digits = 1 if row["ours"] >= 0.01 else 2
    error = "" if pd.isna(row["se"]) else f" ± {100 * row['se']:.{digits}f}"
    return f"{100 * row['ours']:.{digits}f}{error}"


def _strength(strength: float) -> str:
    return f"{strength:g}" if strength >= 1 else f"{100 * strength:g}%"
