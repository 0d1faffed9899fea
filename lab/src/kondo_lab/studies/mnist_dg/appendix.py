"""The sweeps of the DG paper's appendix: learning rate, eta, batch and width.

Only what was swept is known, and that the gain persists, from a third party's notes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.comparison import finals
from kondo_lab.evidence.study import Estimate, Headline, headline, ordering
from kondo_lab.studies.mnist_dg.run import BATCHES, ETA, METHODS, RATES, WIDTHS, part_name, series
from kondo_lab.studies.mnist_dg.settings import Settings

FIGURE = "DG App B"
ONLINE = "online error"
SWEPT = {RATES: "learning rate", BATCHES: "batch", WIDTHS: "width"}
"""Part -> what its setting is."""
PART_OF_ETA = RATES

Errors = dict[str, dict[float, Estimate]]
"""Series -> {setting: online error over the last tenth of the steps}."""


def there(records: pd.DataFrame) -> list[str]:
    """Return the parts of the appendix that were run."""
    return [part for part in SWEPT if part in set(records["part"])]


def swept(records: pd.DataFrame, settings: Settings, part: str) -> Errors:
    """Return the errors of PG and DG, those of the main runs among them where there are any."""
    main = partial(_main, records, settings)
    return {
        method: _in_order(finals(records, part, method), main_setting(settings, part), main(method))
        for method in METHODS
    }


def main_setting(settings: Settings, part: str) -> float:
    """Return what the main runs have where a part sweeps."""
    mains = {RATES: settings.learning_rate, BATCHES: settings.batch, WIDTHS: settings.width}
    return float(mains[part])


def by_eta(records: pd.DataFrame, settings: Settings) -> Errors:
    """Return the errors of DG by eta."""
    found = finals(records, PART_OF_ETA, ETA)
    return {"DG": _in_order(found, 1.0, _main(records, settings, "DG"))}


def _main(records: pd.DataFrame, settings: Settings, method: str) -> Estimate | None:
    """Return the error of the main run with one sample per image and the same baseline."""
    part, name = part_name(1), series(method, "expected")
    if part not in set(records["part"]):
        return None
    chosen = statistics.select(records, part, name, ONLINE)
    late = chosen[chosen["step"] > 0.9 * settings.num_steps]
    return statistics.estimate(late.groupby("seed")["value"].mean().tolist())


def _in_order(
    found: Mapping[float, Estimate], main: float, of_main: Estimate | None
) -> dict[float, Estimate]:
    every = dict(found) if of_main is None else {**found, main: of_main}
    return {setting: every[setting] for setting in sorted(every)}


def lines(records: pd.DataFrame, settings: Settings, parts: Sequence[str]) -> list[Headline]:
    """Return every error, and whether DG is below PG there; of the main runs Figure 3 says it."""
    found = []
    for part in parts:
        errors = swept(records, settings, part)
        line = partial(headline, FIGURE, metric=f"{ONLINE} by {SWEPT[part]}")
        for setting in errors["PG"]:
            pair = {method: errors[method][setting] for method in errors}
            found += [line(method, x=setting, ours=ours) for method, ours in pair.items()]
            if setting == main_setting(settings, part):
                continue
            at = (FIGURE, f"{ONLINE} by {SWEPT[part]}", setting)
            found.append(ordering(*at, order=["DG", "PG"], ours=pair, against="third party"))
    if PART_OF_ETA in parts:
        for eta, ours in by_eta(records, settings)["DG"].items():
            found.append(headline(FIGURE, "DG", f"{ONLINE} by eta", eta, ours))
    return found


def figure(records: pd.DataFrame, settings: Settings, parts: Sequence[str]) -> Figure:
    """Draw one panel per sweep."""
    panels = {SWEPT[part]: swept(records, settings, part) for part in parts}
    if PART_OF_ETA in parts:
        panels["temperature eta"] = by_eta(records, settings)
    drawn, axes = plotting.grid(1, len(panels), width=3.4)
    for ax, (name, errors) in zip(axes[0], panels.items(), strict=True):
        for method, found in errors.items():
            plotting.by_setting(ax, found, method, colour=plotting.method_colour(method))
        ax.set(xscale="log", xlabel=f"{name} (log scale)")
        plotting.log_percent(ax, f"{ONLINE}, last tenth")
        plotting.label_ends(ax)
    says = "MNIST: error over the last tenth of the steps, lower is better"
    note = plotting.seeds_note(records[records["part"].isin(parts)], "bars: one standard error")
    plotting.head(drawn, says, f"{note} The setting of the main runs: {settings.num_seeds} seeds.")
    return drawn
