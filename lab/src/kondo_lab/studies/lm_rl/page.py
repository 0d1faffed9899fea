"""The tables of docs/results/studies/lm-rl.md; a test compares the two."""

import pandas as pd

from kondo_lab.evidence.table import markdown
from kondo_lab.studies.lm_rl.settings import Settings
from kondo_lab.training.language_arms import named

REWARD = "held-out reward at temperature 1, at the end"
ENTROPY = "entropy at the last evaluation, nats a token"
SELECTIONS = ("|advantage|", "variance", "gradient norm", "random", "delight")
VARIANTS = (
    ("noise 1.5", "GRPO"),
    ("price 0", "PG"),
    ("delight tokens", "PG"),
    ("unbiased", "GRPO"),
    ("random tokens", "PG"),
    ("answer delight", "PG"),
    ("mean delight", "PG"),
    ("Bernoulli", "PG"),
    ("sigmoid within kept", "PG"),
    ("working delight", "PG"),
)


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by what is in it, every table of numbers of the page that a run made, in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    found = {"crossed": _crossed(headline, settings), "variants": _variants(headline, settings)}
    for plane in settings.planes:
        if headline["x"].str.startswith(f"{plane.name}, tuning seed").any():
            found[f"points, {plane.name}"] = _points(headline, plane.name)
    return found


def _crossed(headline: pd.DataFrame, settings: Settings) -> str:
    columns = ["selection, 10% of the rows"]
    for loss in ("PG", "GRPO"):
        columns += [f"{loss}: reward at the end", f"less dense {loss}'s", "entropy"]
    rows = []
    for selection in ("", *SELECTIONS):
        row = [selection.replace("|", "\\|") or "dense, all rows"]
        for loss in ("PG", "GRPO"):
            row += _of_arm(headline, settings, selection, loss)
        rows.append(row)
    return markdown(columns, rows)


def _variants(headline: pd.DataFrame, settings: Settings) -> str:
    columns = ["variant", "loss", "rows with a kept token"]
    columns += ["reward at the end", "less dense's", "entropy"]
    rows = []
    for selection, loss in VARIANTS:
        name = named(selection, loss)
        share, _ = _number(headline, settings, name, "share of rows with a kept token")
        own = _of_arm(headline, settings, selection, loss)
        rows.append([selection, loss, f"{100 * share:.0f}%", *own])
    return markdown(columns, rows)


def _of_arm(
    headline: pd.DataFrame, settings: Settings, selection: str, loss: str
) -> tuple[str, str, str]:
    """Return reward, difference to dense and entropy of an arm; dense has no difference."""
    name = named(selection, loss) if selection else loss
    mean, error = _number(headline, settings, name, REWARD)
    entropy, _ = _number(headline, settings, name, ENTROPY)
    apart = ""
    if selection:
        metric = f"reward at the end less that of dense {loss}, seed by seed"
        less, less_error = _number(headline, settings, name, metric)
        apart = f"{less:+.3f} ± {less_error:.3f}"
    return f"{mean:.3f} ± {error:.3f}", apart, f"{entropy:.2f}"


def _number(
    headline: pd.DataFrame, settings: Settings, series: str, metric: str
) -> tuple[float, float]:
    here = (headline["x"] == settings.main.name) & (headline["metric"] == metric)
    own = headline[here & (headline["series"] == series)].iloc[0]
    return float(own["ours"]), float(own["se"])


def _points(headline: pd.DataFrame, field: str) -> str:
    own = headline[headline["x"].str.startswith(f"{field}, tuning seed")]
    rows = []
    for (series, place), lines in own.groupby(["series", "x"], sort=False):
        numbers = dict(zip(lines["metric"], lines["ours"], strict=True))
        seconds = [
            f"{'not in ' if 'never' in metric else ''}{value:.2f}"
            for kind in ("loop", "learner")
            for metric, value in numbers.items()
            if metric.startswith(kind)
        ]
        ended = f"{numbers['smoothed reward where the run ended']:.3f}"
        rows.append([series, place.rpartition(" ")[2], *seconds, ended])
    columns = ["point", "learning rate", "loop seconds to 0.92", "learner seconds"]
    return markdown([*columns, "reward where it ended"], rows)
