"""How often each method ends at the bad arms, what theory says, and what helped."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import beats, ends, finals, means
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.gambling import bandit, rules
from kondo_lab.studies.gambling.captions import captions
from kondo_lab.studies.gambling.claims import claims
from kondo_lab.studies.gambling.rules import Rule
from kondo_lab.studies.gambling.run import FINAL, LUCKY, base_rules, cases, few_rules
from kondo_lab.studies.gambling.settings import Settings

SHOWN = (1.0, 10.0)
"""sigma / Delta of the headline."""
HELD, LOST = 0.1, 0.5
"""A rule held if it never ended above the one, and was lost if it ended above the other."""
PLACES = {"two-arms": "one noisy arm", "equal-noise": "equal noise"}
TRIED = {"mitigations": "noisy arm is worse", "good-gamble": "noisy arm is better"}
FEW = 10
"""A share is not compared where fewer lucky draws are expected in all: none says nothing."""
DASHES = ("-", "--", ":", "-.")

Weight = Callable[[np.ndarray], np.ndarray]


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    lines, figures = found.headline, found.figures
    if "luck" in there:
        lines += _luck_lines(records, settings)
    for part in PLACES:
        if part in there:
            lines += _final_lines(records, part, _names(base_rules(settings)), SHOWN)
    if set(PLACES) <= there:
        lines += _claim_lines(records, settings)
        found.findings.append(_rest_finding(records, settings))
    if {"luck", *PLACES} <= there:
        figures["noise-sweep"] = _sweep_figure(records, settings)
    many = [f"many-arms-{gamblers}" for gamblers in settings.gamblers]
    if set(many) <= there:
        for part in many:
            lines += _final_lines(records, part, _names(few_rules()))
        figures["many-arms"] = _many_figure(records, settings)
    if set(TRIED) <= there:
        for part in TRIED:
            lines += _final_lines(records, part, _names(rules.mitigations()))
        figures["mitigations"] = _mitigation_figure(records, settings)
        found.findings.extend(_mitigation_findings(records, settings))
    if "optimisers" in there:
        names = records[records["part"] == "optimisers"]["series"].unique()
        lines += _final_lines(records, "optimisers", names)
    if "actors" in there:
        lines += _actor_lines(records, settings)
        found.findings.extend(_actor_findings(records, settings))
    found.claims.extend(claims(found.headline))
    told = captions(found.headline, found.claims, SHOWN[-1], settings.gamblers)
    return with_captions(found, told)


def _names(of_rules: Iterable[Rule]) -> list[str]:
    return [rule.name for rule in of_rules]


def _luck_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    for p in settings.luck_probs:
        for ratio in settings.ratios:
            theory = bandit.luck(p, ratio)
            if 0 < theory * settings.luck_samples * settings.seeds < FEW:
                continue
            name, metric = f"p={p:g}", "Pr(U > 0 | bad arm)"
            found = statistics.final(records, "luck", name, LUCKY, setting=ratio)
            lines.append(
                headline(
                    "Kondo Prop 3", name, metric, ratio, found, expected=theory, against="formula"
                )
            )
    return lines


def _final_lines(
    records: pd.DataFrame, part: str, names: Iterable[str], ratios: Iterable[float] = SHOWN[1:]
) -> list[Headline]:
    figure = "Kondo Prop 3" if part in PLACES else "beyond the paper"
    lines = []
    for name in names:
        for ratio in ratios:
            found = statistics.final(records, part, name, FINAL, setting=ratio)
            lines.append(headline(figure, name, f"{FINAL}, {part}", ratio, found))
    return lines


def _actor_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    return [
        line
        for case, (_, _, ratios) in cases(settings).items()
        for rule in few_rules()
        for line in _final_lines(records, "actors", [f"{rule.name}, {case}"], ratios)
    ]


def _actor_findings(records: pd.DataFrame, settings: Settings) -> list[str]:
    """Return a sentence per case: every rule's end, by noise of the landmine or of the sampler."""
    told = []
    for case, (_, _, ratios) in cases(settings).items():
        each = "; ".join(
            f"{rule.name} "
            + ", ".join(f"{end:.3f}" for end in _case_ends(records, rule.name, case, ratios))
            for rule in few_rules()
        )
        noise = f" at sigma / Delta = {', '.join(f'{r:g}' for r in ratios)}" if any(ratios) else ""
        told.append(f"Actors, {case}: {FINAL}{noise}: {each}.")
    return told


def _case_ends(records: pd.DataFrame, rule: str, case: str, ratios: Iterable[float]) -> list[float]:
    return means(records, "actors", f"{rule}, {case}", FINAL, tuple(ratios))


def _claim_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Return the paper's two statements in words, as numbers."""
    top, others = SHOWN[-1], ("DG", rules.priced(0.0).name)
    found = ends(records, "two-arms", ("PG", *others), FINAL, top)
    lines = beats("Kondo Prop 3", f"{FINAL}, two-arms", top, ["PG"], others, found)
    lead = {ratio: _difference(records, "DG", "PG", ratio) for ratio in settings.ratios}
    worst = max(lead, key=lambda ratio: lead[ratio].mean)
    what = f"{FINAL}, equal-noise, largest of the sweep"
    return [*lines, headline("Kondo Prop 3", "DG - PG", what, worst, lead[worst], expected=0.0)]


def _difference(records: pd.DataFrame, one: str, other: str, ratio: float) -> Estimate:
    """Return one less other under equal noise, paired by seed."""
    own, its = (
        statistics.select(records, "equal-noise", name, FINAL, setting=ratio).set_index("seed")[
            "value"
        ]
        for name in (one, other)
    )
    return statistics.estimate((own - its).tolist())


def weights(settings: Settings) -> dict[str, Weight]:
    """Return the weight by delight of every series that has one whatever the batch."""

    def above(price: float) -> Weight:
        return lambda chi: (chi > price).astype(float)

    def logistic(chi: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-np.clip(chi, -500, 500))))  # exp overflows beyond

    gates = {rules.priced(price).name: above(price) for price in settings.prices}
    return {"PG": np.ones_like, "DG": logistic, **gates}


@functools.cache
def rest(settings: Settings, part: str, name: str, ratio: float) -> float:
    """Return where theory expects a series to end."""
    noise = ratio * settings.gap
    good = noise if part == "equal-noise" else 0.0
    return bandit.rest_point(
        weights(settings)[name], settings.gap, bad_noise=noise, good_noise=good
    )


def _rest_finding(records: pd.DataFrame, settings: Settings) -> str:
    distance = {
        (part, name, ratio): abs(
            statistics.final(records, part, name, FINAL, setting=ratio).mean
            - rest(settings, part, name, ratio)
        )
        for part in PLACES
        for name in weights(settings)
        for ratio in settings.ratios
    }
    worst = max(distance, key=lambda place: distance[place])
    median = float(np.median(list(distance.values())))
    part, name, ratio = worst
    return (
        f"PG, DG and the priced gates end where their expected update comes to rest: median "
        f"distance {median:.3f}, largest {distance[worst]:.3f} ({name}, {PLACES[part]}, sigma / "
        f"Delta = {ratio:g}). At price 0 that is the bad arm alone from sigma / Delta = "
        f"{math.sqrt(2 * math.pi):.2f} on."
    )


def _ends(records: pd.DataFrame, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Return rule -> part -> mean final number at each of the few ratios."""
    return {
        name: {part: means(records, part, name, FINAL, settings.few_ratios) for part in TRIED}
        for name in _names(rules.mitigations())
    }


def _mitigation_findings(records: pd.DataFrame, settings: Settings) -> list[str]:
    tried = _ends(records, settings)
    worst = {name: max(max(values) for values in parts.values()) for name, parts in tried.items()}
    at = settings.few_ratios.index(SHOWN[-1])
    held = [f"{name} ({end:.3f})" for name, end in worst.items() if end <= HELD]
    lost = [name for name, parts in tried.items() if parts["mitigations"][at] > LOST]
    top = max(settings.few_ratios)
    return [
        f"At most {100 * HELD:g}% bad arms at every sigma / Delta up to {top:g}, whether the noisy "
        f"arm is the worse or the better (largest in brackets): {'; '.join(held)}.",
        f"More than {100 * LOST:g}% bad arms at sigma / Delta = {SHOWN[-1]:g}: {'; '.join(lost)}.",
    ]


def _style(name: str, settings: Settings, among: Sequence[str]) -> dict[str, Any]:
    """Return a rule's colour, with a shade and a dash where prices or rates are compared."""
    kinds = (
        [rules.priced(price).name for price in settings.prices],
        [rules.rated(rate).name for rate in settings.rates],
    )
    own = next((names for names in kinds if name in names and set(names) <= set(among)), [name])
    colour = plotting.method_colour(name)
    if len(own) == 1:
        return {"color": colour, "linestyle": "-"}
    place = own.index(name)
    dash = DASHES[place % len(DASHES)]
    return {"color": plotting.shade(colour, place / (len(own) - 1)), "linestyle": dash}


def _draw_ends(
    ax: Axes, records: pd.DataFrame, settings: Settings, part: str, names: Sequence[str]
) -> None:
    for name in names:
        found = finals(records, part, name, FINAL)
        shown, errors = [f.mean for f in found.values()], [f.se for f in found.values()]
        drawn = ax.plot(list(found), shown, label=name, **_style(name, settings, names))
        plotting.band(ax, list(found), shown, errors, colour=drawn[0].get_color())
    _noise_axis(ax, FINAL)
    ax.set(ylim=(-0.02, 1.02))
    plotting.label_ends(ax)


def _noise_axis(ax: Axes, label: str) -> None:
    ax.set_xscale("symlog", linthresh=0.1, linscale=0.3)
    ax.set(xlabel="sigma / Delta: noise over the gap", ylabel=label)


def _sweep_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    """Draw lucky draws, and where every rule ends: a row for priced gates, a row for rated ones."""
    figure, axes = plotting.grid(2, 3, width=3.7, height=3.1)
    _draw_luck(axes[0, 0], records, settings)
    axes[1, 0].set_axis_off()
    expected = weights(settings)
    rated = [rules.rated(rate).name for rate in settings.rates]
    priced = [name for name in _names(base_rules(settings)) if name not in rated]
    for row, names in zip(axes, (priced, rated), strict=True):
        for ax, (part, title) in zip(row[1:], PLACES.items(), strict=True):
            _draw_ends(ax, records, settings, part, names)
            for name in (name for name in names if name in expected):
                ends = [rest(settings, part, name, ratio) for ratio in settings.ratios]
                colour = _style(name, settings, names)["color"]
                ax.plot(settings.ratios, ends, "o", color=colour, markersize=3)
            ax.set_title(title)
    plotting.head(
        figure,
        "Bad arms at the end by noise: lower is better",
        f"{plotting.seeds_note(records)} Dots: theory. Upper row: no gate, and gates by price; "
        "lower row: gates by rate.",
    )
    return figure


def _draw_luck(ax: Axes, records: pd.DataFrame, settings: Settings) -> None:
    ratios = np.geomspace(0.1, max(settings.ratios), 100)
    for number, p in enumerate(settings.luck_probs):
        colour = plotting.sequential(number / max(1, len(settings.luck_probs) - 1))
        theory = [bandit.luck(p, ratio) for ratio in ratios]
        found = means(records, "luck", f"p={p:g}", LUCKY, settings.ratios)
        ax.plot(settings.ratios, found, "o", color=colour, markersize=4)
        ax.plot(ratios, theory, color=colour, label=f"p = {p:g}")
    _noise_axis(ax, "Pr(U > 0 | bad arm)")
    ax.set_title("lucky draws of the bad arm")
    plotting.label_ends(ax)


def _many_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, len(settings.gamblers), width=3.7, height=3.2)
    for ax, gamblers in zip(axes[0], settings.gamblers, strict=True):
        _draw_ends(ax, records, settings, f"many-arms-{gamblers}", _names(few_rules()))
        ax.set_title(f"{settings.many_arms} arms, {gamblers} noisy")
    says = "Bad arms at the end by noise, many arms: lower is better"
    plotting.head(figure, says, plotting.seeds_note(records))
    return figure


def _mitigation_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    """Draw every rule's final number as a table of shades, darker is worse."""
    tried = _ends(records, settings)
    figure, axes = plotting.grid(1, 2, width=4.2, height=0.2 * len(tried) + 1.4)
    for ax, (part, title) in zip(axes[0], TRIED.items(), strict=True):
        table = np.array([parts[part] for parts in tried.values()])
        columns = [f"{ratio:g}" for ratio in settings.few_ratios]
        names = list(tried) if part == "mitigations" else [""] * len(tried)
        plotting.table(ax, table, names, columns, cmap="Blues")
        ax.set(title=title, xlabel="sigma / Delta: noise over the gap")
    says = "Share of bad arms at the end, by rule and noise: dark is worse"
    plotting.head(figure, says, f"Mean of {records['seed'].nunique()} seeds.")
    return figure
