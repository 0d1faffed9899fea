"""Closed forms beside samples; what holds of the propositions in this set-up, and what does not."""

import math
from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import run, theory
from kondo_lab.studies.contamination.claims import claims
from kondo_lab.studies.contamination.run import IS, PG, at, dg
from kondo_lab.studies.contamination.settings import Settings
from kondo_lab.studies.contamination.theory import Source
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline, ordering

ROUNDING = 1e-5
"""Records hold six digits."""

beyond = partial(headline, "beyond the paper")


class _Numbers:
    """What was recorded, by place, for these settings."""

    def __init__(self, records: pd.DataFrame, settings: Settings):
        self.records, self.settings = records, settings
        self.series = [PG, IS, *(dg(eta) for eta in settings.etas)]
        self.where = at("one arm", settings.share)
        self.last = settings.errors[-1]
        # There is one seed of what was summed exactly.
        own = records[records["part"] != "sampled"]
        deltas = own["setting"].map("{:.6g}".format)
        places = zip(own["part"], own["series"], own["metric"], deltas, strict=True)
        self._exact: dict[tuple[str, ...], float] = dict(
            zip(places, own["value"].tolist(), strict=True)
        )
        self.worlds = sorted(set(own[own["part"] == "worlds"]["series"]))

    def exact(self, part: str, series: str, metric: str, error: float) -> float:
        """Return a number that was summed exactly, at delta = error."""
        return self._exact[part, series, metric, f"{error:.6g}"]

    def expected(self, series: str, metric: str, error: float) -> float:
        """Return a number of the mean gradient, all contamination on one arm."""
        return self.exact("expected", series, f"{metric}, {self.where}", error)

    def over_pg(self, series: str, metric: str, error: float) -> float:
        """Return the same over PG's."""
        return self.expected(series, metric, error) / self.expected(PG, metric, error)

    def slope(self, series: str) -> float:
        """Return d log / d log delta of signal over contamination at the best policies.

        Of PG itself, or of a method over PG.
        """
        value = self.expected if series == PG else self.over_pg
        low, high = self.last, self.settings.errors[-3]
        below, above = (value(series, run.STRENGTH, error) for error in (low, high))
        return math.log(above / below) / math.log(high / low)

    def world(self, series: str, metric: str) -> float:
        """Return a number of one of the two worlds."""
        return self.exact("worlds", series, metric, self.settings.rare_error)

    def context(self, series: str, metric: str, share: float, error: float) -> float:
        """Return a number of many contexts, that share of them solved."""
        return self.exact("contexts", series, f"{metric}, {share:g} solved", error)

    def sampled(self, series: str, metric: str, kind: str, error: float) -> Estimate:
        """Return the mean over seeds of what was sampled."""
        where = f"{metric}, {at(kind, self.settings.share)}"
        return statistics.final(self.records, "sampled", series, where, setting=error)

    def moment_ratio(self, eta: float, error: float) -> Estimate:
        """Return the sampled second moment of failures, DG over PG."""
        metric = f"{run.MOMENT}, {self.where}"
        own, pg = (
            statistics.select(self.records, "sampled", name, metric, setting=error)
            for name in (dg(eta), PG)
        )
        ratios = own.set_index("seed")["value"] / pg.set_index("seed")["value"]
        return statistics.estimate(ratios.tolist())

    def drawn(self, error: float, kind: Source) -> tuple[Tensor, Tensor]:
        """Return pi and mu, [K] each."""
        probs = bandit.peaked(1 - error, self.settings.arms)
        nu = theory.source(kind, self.settings.arms)
        return probs, theory.mixture(probs, nu, self.settings.share)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    numbers = _Numbers(records, settings)
    found = Analysis(headline=[], figures={}, findings=[])
    lines, figures, findings = found.headline, found.figures, found.findings
    there = set(records["part"])
    if "expected" in there:
        lines += [*_gate_lines(numbers), *_corollary_lines(numbers)]
        figures["cosine-and-signal"] = _expected_figure(numbers)
        findings += [_cosine_finding(numbers), _strength_finding(numbers)]
    if "sampled" in there:
        lines += [*_sampled_lines(numbers), *_moment_lines(numbers)]
        figures["samples-and-second-moment"] = _sampled_figure(numbers)
    if "worlds" in there:
        lines += _world_lines(numbers)
        figures["sign-blind-weights"] = _world_figure(numbers)
        findings.append(_world_finding(numbers))
    if "contexts" in there:
        lines += _context_lines(numbers)
        figures["many-contexts"] = _context_figure(numbers)
        findings.append(_context_finding(numbers))
    found.claims.extend(claims(found.headline))
    return found


# Headline.


def _gate_lines(numbers: _Numbers) -> Iterator[Headline]:
    """Lemma 1: the gate is below its bound, and next to it where the action is rare."""
    what = "policies whose gate is above pi(a)^(1/(2 eta))"
    for name in map(dg, numbers.settings.etas):
        gates, bounds = (_over_errors(numbers, name, metric) for metric in (run.GATE, run.BOUND))
        ratios = [gate / bound for gate, bound in zip(gates, bounds, strict=True)]
        above = float(sum(ratio > 1 + ROUNDING for ratio in ratios))
        yield headline(
            "Distributed Lemma 1", name, what, "", above, expected=0.0, against="formula"
        )
        yield beyond(name, "gate over its bound, delta", numbers.last, ratios[-1])


def _over_errors(
    numbers: _Numbers, series: str, metric: str, part: str = "expected"
) -> list[float]:
    return [numbers.exact(part, series, metric, error) for error in numbers.settings.errors]


def _corollary_lines(numbers: _Numbers) -> Iterator[Headline]:
    """Corollary 1 as a cosine and as signal over contamination, and the exponents of the latter."""
    where, last, errors = numbers.where, numbers.last, numbers.settings.errors
    corollary = partial(headline, "Distributed Cor 1", against="formula")
    limit = theory.limit_cosine(numbers.settings.arms)
    what = f"cosine as delta falls, sqrt(K / (2K - 2)), {where}"
    yield beyond(
        PG, what, last, numbers.expected(PG, run.COSINE, last), expected=limit, against="formula"
    )
    exponent = "exponent of delta, signal over contamination"
    for eta in numbers.settings.etas:
        name = f"{dg(eta)} / PG"
        for metric in (run.COSINE, run.STRENGTH):
            # As delta falls the ratio should rise: the series are the errors, the smallest last.
            ratios = {f"{e:g}": numbers.over_pg(dg(eta), metric, e) for e in errors}
            order = f"{metric}, {name}, as delta falls"
            yield beyond(name, f"{metric}, {where}", last, ratios[f"{last:g}"])
            yield ordering(
                "Distributed Cor 1",
                order,
                where,
                order=list(ratios),
                ours=ratios,
                against="formula",
            )
        yield corollary(name, exponent, where, numbers.slope(dg(eta)), expected=-1 / (2 * eta))
    yield corollary(PG, exponent, where, numbers.slope(PG), expected=1.0)
    yield beyond(
        IS,
        f"cosine, {where}",
        last,
        numbers.expected(IS, run.COSINE, last),
        expected=1.0,
        against="formula",
    )


def _closed(numbers: _Numbers, name: str, error: float, kind: Source) -> float:
    """Return the closed cosine of a method; exact importance weights have 1."""
    if name == IS:
        return 1.0
    settings = numbers.settings
    success, failure, *_ = run.weights(settings, *numbers.drawn(error, kind))[name].tolist()
    weights = {"success": success, "failure": failure}
    return theory.closed_cosine(error, settings.share, settings.arms, kind=kind, **weights)


def _sampled_lines(numbers: _Numbers) -> Iterator[Headline]:
    """Cosines of a seed's pooled samples beside the closed form, and of single batches."""
    batch, samples = numbers.settings.batch, numbers.settings.batch * numbers.settings.batches
    for kind in run.SOURCES:
        where = at(kind, numbers.settings.share)
        for name in numbers.series:
            for error in numbers.settings.sampled_errors:
                pooled = numbers.sampled(name, run.COSINE, kind, error)
                single = numbers.sampled(name, run.BATCH_COSINE, kind, error)
                closed = _closed(numbers, name, error, kind)
                what = f"cosine, {samples:,} samples, {where}"
                yield headline(
                    "Distributed section 4",
                    name,
                    what,
                    error,
                    pooled,
                    expected=closed,
                    against="formula",
                )
                yield beyond(name, f"cosine, {batch} samples, {where}", error, single)


def _moment_lines(numbers: _Numbers) -> Iterator[Headline]:
    """Version 2: failures' second moment off the true gradient, and the factor that bounds it."""
    figure, settings = "Distributed v2, second moment", numbers.settings
    what = "perpendicular second moment of failures"
    over_bound = "second moment over sum_a nu(a) pi(a)^(1/eta), at most 1"
    for eta in settings.etas:
        for error in settings.sampled_errors:
            probs, drawn = numbers.drawn(error, "one arm")
            weights = run.weights(settings, probs, drawn)
            own, pg = (
                theory.failure_second_moment(probs, drawn, weights[name]) for name in (dg(eta), PG)
            )
            found, bound = numbers.moment_ratio(eta, error), _overlap(numbers, eta, error)
            share = Estimate(found.mean / bound, found.se / bound, found.seeds)
            name = f"{dg(eta)} / PG"
            yield headline(figure, name, what, error, found, expected=own / pg, against="formula")
            yield headline(f"{figure} (inferred)", name, over_bound, error, share)


def _overlap(numbers: _Numbers, eta: float, error: float) -> float:
    arms = numbers.settings.arms
    return theory.overlap(bandit.peaked(1 - error, arms), theory.source("one arm", arms), eta)


def _world_lines(numbers: _Numbers) -> Iterator[Headline]:
    """Proposition 3: weights of a rare success and of a rare failure."""
    settings, error = numbers.settings, numbers.settings.rare_error
    what = "weight of a rare success over that of a rare failure"
    proposition = partial(headline, "Distributed Prop 3", against="formula")
    for name in numbers.worlds:
        for metric in (run.FAILURE, run.SUCCESS):
            yield beyond(name, metric, error, numbers.world(name, metric))
        kept, passed = (numbers.world(name, m) for m in (run.KEPT_SUCCESS, run.KEPT_FAILURE))
        if name in run.sign_blind(settings) and passed > 0:
            yield proposition(name, what, error, kept / passed, expected=1.0)
    probs, values = bandit.peaked(1 - error, settings.arms), theory.advantages(settings.arms)
    for eta in settings.etas:
        success, failure = (theory.dg_weight(probs, u, eta)[1] for u in (-values, values))
        expected = (error / (settings.arms - 1)) ** (-1 / (2 * eta))
        yield proposition(dg(eta), what, error, float(success / failure), expected=expected)


def _context_lines(numbers: _Numbers) -> Iterator[Headline]:
    for share in numbers.settings.solved:
        for name in numbers.series:
            for error in (numbers.settings.errors[2], numbers.last):
                for metric in (run.COSINE, run.CLEAN_COSINE):
                    if (name, metric) != (IS, run.CLEAN_COSINE):
                        ours = numbers.context(name, metric, share, error)
                        yield beyond(
                            name, f"{metric}, {share:g} of the contexts solved", error, ours
                        )


# Findings.


def _cosine_finding(numbers: _Numbers) -> str:
    first, last = numbers.settings.errors[2], numbers.last
    told = [
        f"{name} {numbers.expected(name, run.COSINE, first):.3f} and "
        f"{numbers.expected(name, run.COSINE, last):.3f}"
        for name in numbers.series
    ]
    return (
        f"Cosine to the true gradient at delta = {first:g} and {last:g} ({numbers.where}): "
        f"{'; '.join(told)}. PG's does not fall to zero, since a failure pushed down lifts the "
        f"right arm: as delta falls no cosine can be more than "
        f"{1 / theory.limit_cosine(numbers.settings.arms):.2f} times PG's. DG's rises to 1 for "
        f"eta < 1/2 alone; exact importance weights have 1."
    )


def _strength_finding(numbers: _Numbers) -> str:
    told = [
        f"{numbers.over_pg(dg(eta), run.STRENGTH, numbers.last):,.3g} (eta = {eta:g})"
        for eta in numbers.settings.etas
    ]
    return (
        f"Signal over contamination, DG over PG at delta = {numbers.last:g}: {', '.join(told)}; "
        f"it grows as delta^(-1/(2 eta)) without bound."
    )


def _world_finding(numbers: _Numbers) -> str:
    def over_pg(name: str, metric: str) -> float:
        return numbers.world(name, metric) / numbers.world(PG, metric)

    # The sign-blind weight that drops failures as well as DG does, at the least loss.
    needed = over_pg(dg(1.0), run.FAILURE)
    as_good = [
        name for name in run.sign_blind(numbers.settings) if over_pg(name, run.FAILURE) >= needed
    ]
    best = max(as_good, key=lambda name: over_pg(name, run.SUCCESS))
    told = [
        f"{name}: {over_pg(name, run.FAILURE):,.3g} times PG's signal over contamination, "
        f"{over_pg(name, run.SUCCESS):.3g} times its progress on a rare success"
        for name in (dg(1.0), IS, best)
    ]
    return (
        f"delta = {numbers.settings.rare_error:g}, rho = {numbers.settings.share:g}. "
        f"{'; '.join(told)}, the best sign-blind weight that drops failures as well as DG."
    )


def _context_finding(numbers: _Numbers) -> str:
    share, last = numbers.settings.solved[-1], numbers.last
    told = ", ".join(
        f"{name} {numbers.context(name, run.COSINE, share, last):.3f}" for name in numbers.series
    )
    return (
        f"Many contexts, {100 * share:g}% of them solved to delta = {last:g}, the others at 1/2, "
        f"rho = {numbers.settings.share:g}: cosine {told}. Here the true gradient is that of the "
        f"unsolved contexts, and what contaminates the solved ones stands at right angles to it."
    )


# Figures.


def _delta_axis(ax: Axes, label: str = "delta", **options: str) -> None:
    """Draw better policies to the right."""
    ax.set(xscale="log", **options)
    ax.invert_xaxis()
    ax.set_xlabel(label)


def _draw_exact(ax: Axes, numbers: _Numbers, part: str, metric: str) -> None:
    for name, colour in zip(numbers.series, plotting.WHEEL, strict=False):
        values = _over_errors(numbers, name, metric, part)
        ax.plot(numbers.settings.errors, values, "o-", color=colour, markersize=3, label=name)
    _delta_axis(ax, "delta = 1 - pi(y*), better policies to the right")


def _expected_figure(numbers: _Numbers) -> Figure:
    figure, ((cosine, strength, gate),) = plotting.grid(1, 3)
    settings = numbers.settings
    _draw_exact(cosine, numbers, "expected", f"{run.COSINE}, {numbers.where}")
    limit = theory.limit_cosine(settings.arms)
    cosine.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    cosine.set(title="cosine (dots: PG's limit)", ylabel="cosine to the true gradient")
    cosine.legend(fontsize=8)
    _draw_exact(strength, numbers, "expected", f"{run.STRENGTH}, {numbers.where}")
    strength.set(yscale="log", title=run.STRENGTH, ylabel="|own part| / |contaminated part|")
    for eta, colour in zip(settings.etas, plotting.WHEEL[2:], strict=False):
        gates, bounds = (_over_errors(numbers, dg(eta), m) for m in (run.GATE, run.BOUND))
        gate.plot(settings.errors, gates, "o", color=colour, markersize=3.5, label=f"eta = {eta:g}")
        gate.plot(settings.errors, bounds, "-", color=colour, linewidth=1)
    _delta_axis(gate, yscale="log", title="gate on a wrong arm (lines: Lemma 1)")
    gate.legend(fontsize=8)
    return figure


def _sampled_figure(numbers: _Numbers) -> Figure:
    figure, (axes,) = plotting.grid(1, 3)
    errors = numbers.settings.sampled_errors
    for ax, kind in zip(axes, run.SOURCES, strict=False):
        for name, colour in zip(numbers.series, plotting.WHEEL, strict=False):
            found = {e: numbers.sampled(name, run.BATCH_COSINE, kind, e) for e in errors}
            plotting.by_setting(ax, found, name, colour=colour)
        _delta_axis(ax, title=f"batches of {numbers.settings.batch}, {kind}")
        ax.set_ylabel("mean cosine to the true gradient")
    axes[0].legend(fontsize=8)
    ax = axes[2]
    for eta, colour in zip(numbers.settings.etas, plotting.WHEEL[2:], strict=False):
        found = {error: numbers.moment_ratio(eta, error) for error in errors}
        plotting.by_setting(ax, found, f"eta = {eta:g}", colour=colour)
        ax.plot(errors, [_overlap(numbers, eta, error) for error in errors], ":", color=colour)
    title = "second moment of failures, DG / PG"
    _delta_axis(ax, "delta (dots: overlap factor)", yscale="log", title=title)
    ax.legend(fontsize=8)
    return figure


def _world_figure(numbers: _Numbers) -> Figure:
    figure, ((ax,),) = plotting.grid(1, 1, width=6.2, height=4.4)
    blind = run.sign_blind(numbers.settings)
    for name in numbers.worlds:
        x, y = (numbers.world(name, metric) for metric in (run.FAILURE, run.SUCCESS))
        if math.isinf(x):
            continue  # a threshold above the rare arms drops them all
        colour = "#5a5a5a" if name in blind else "#d55e00" if name == IS else "#0072b2"
        ax.plot(x, y, "o" if name in blind else "D", color=colour)
        if not name.startswith(("min", "pi >")):
            ax.annotate(name, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
    ax.set(xscale="log", yscale="log", title="grey: weights that see pi(a) alone")
    ax.margins(0.12)
    ax.set(xlabel=run.FAILURE, ylabel=run.SUCCESS)
    return figure


def _context_figure(numbers: _Numbers) -> Figure:
    figure, (axes,) = plotting.grid(1, len(numbers.settings.solved))
    for ax, share in zip(axes, numbers.settings.solved, strict=True):
        _draw_exact(ax, numbers, "contexts", f"{run.COSINE}, {share:g} solved")
        title = f"{100 * share:g}% of the contexts solved"
        ylabel, xlabel = "cosine to the true gradient", "delta of the solved contexts"
        ax.set(ylim=(0, 1.03), title=title, xlabel=xlabel, ylabel=ylabel)
    axes[0].legend(fontsize=8)
    return figure
