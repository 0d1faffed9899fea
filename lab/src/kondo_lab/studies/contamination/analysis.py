"""Closed forms beside samples; what holds of the propositions in this set-up, and what does not."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import theory
from kondo_lab.studies.contamination.run import (
    BATCH_COSINE,
    BOUND,
    CLEAN_COSINE,
    COSINE,
    FAILURE,
    GATE,
    IS,
    KEPT_FAILURE,
    KEPT_SUCCESS,
    MOMENT,
    PG,
    SOURCES,
    STRENGTH,
    SUCCESS,
    at,
    dg,
    sign_blind,
    weights,
)
from kondo_lab.studies.contamination.settings import Settings
from kondo_lab.studies.contamination.theory import Source
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline, ordering

BEYOND = "beyond the paper"
ROUNDING = 1e-5
"""Records hold six digits."""

Exact = dict[tuple[str, str, str, str], float]
"""(part, series, metric, delta with six digits) -> value."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = set(records["part"])
    exact = _look_up(records)
    lines: list[Headline] = []
    figures: dict[str, Figure] = {}
    findings: list[str] = []
    if "expected" in there:
        lines += [*_gate_lines(exact, settings), *_corollary_lines(exact, settings)]
        figures["cosine-and-signal"] = _expected_figure(exact, settings)
        findings += [_cosine_finding(exact, settings), _strength_finding(exact, settings)]
    if "sampled" in there:
        lines += [*_sampled_lines(records, settings), *_moment_lines(records, settings)]
        figures["samples-and-second-moment"] = _sampled_figure(records, settings)
    if "worlds" in there:
        lines += _world_lines(exact, settings)
        figures["sign-blind-weights"] = _world_figure(exact, settings)
        findings.append(_world_finding(exact, settings))
    if "contexts" in there:
        lines += _context_lines(exact, settings)
        figures["many-contexts"] = _context_figure(exact, settings)
        findings.append(_context_finding(exact, settings))
    return Analysis(headline=lines, figures=figures, findings=findings)


def _series(settings: Settings) -> list[str]:
    return [PG, IS, *(dg(eta) for eta in settings.etas)]


def _look_up(records: pd.DataFrame) -> Exact:
    """Return what was summed exactly by its place; there is one seed of it."""
    own = records[records["part"] != "sampled"]
    places = zip(own["part"], own["series"], own["metric"], own["setting"], strict=True)
    return {
        (part, series, metric, f"{error:.6g}"): float(value)
        for (part, series, metric, error), value in zip(places, own["value"], strict=True)
    }


def _exact(exact: Exact, part: str, series: str, metric: str, error: float) -> float:
    return exact[part, series, metric, f"{error:.6g}"]


def _gate_lines(exact: Exact, settings: Settings) -> list[Headline]:
    """Lemma 1: the gate is below its bound, and next to it where the action is rare."""
    lines = []
    for eta in settings.etas:
        ratios = [
            _exact(exact, "expected", dg(eta), GATE, error)
            / _exact(exact, "expected", dg(eta), BOUND, error)
            for error in settings.errors
        ]
        above = sum(ratio > 1 + ROUNDING for ratio in ratios)
        lines += [
            headline(
                "Distributed Lemma 1",
                dg(eta),
                "policies whose gate is above pi(a)^(1/(2 eta))",
                "",
                float(above),
                paper=0.0,
            ),
            headline(
                BEYOND, dg(eta), "gate over its bound, delta", settings.errors[-1], ratios[-1]
            ),
        ]
    return lines


def _corollary_lines(exact: Exact, settings: Settings) -> list[Headline]:
    """Corollary 1 as a cosine and as signal over contamination, and the exponents of the latter."""
    where = at("one arm", settings.share)
    last = settings.errors[-1]
    lines = [
        headline(
            BEYOND,
            PG,
            f"cosine as delta falls, sqrt(K / (2K - 2)), {where}",
            last,
            _exact(exact, "expected", PG, f"{COSINE}, {where}", last),
            paper=theory.limit_cosine(settings.arms),
        )
    ]
    for eta in settings.etas:
        for metric in (COSINE, STRENGTH):
            ratios = {
                error: _over_pg(exact, dg(eta), f"{metric}, {where}", error)
                for error in settings.errors
            }
            lines.append(
                headline(BEYOND, f"{dg(eta)} / PG", f"{metric}, {where}", last, ratios[last])
            )
            # As delta falls the ratio should rise: the series are the errors, the smallest last.
            name = [f"{error:g}" for error in settings.errors]
            lines.append(
                ordering(
                    "Distributed Cor 1",
                    f"{metric}, {dg(eta)} / PG, as delta falls",
                    where,
                    paper=name,
                    ours={n: ratios[e] for n, e in zip(name, settings.errors, strict=True)},
                )
            )
        lines.append(
            headline(
                "Distributed Cor 1",
                f"{dg(eta)} / PG",
                "exponent of delta, signal over contamination",
                where,
                _slope(exact, dg(eta), settings),
                paper=-1 / (2 * eta),
            )
        )
    what = "exponent of delta, signal over contamination"
    ours = _slope(exact, PG, settings)
    lines.append(headline("Distributed Cor 1", PG, what, where, ours, paper=1.0))
    own = _exact(exact, "expected", IS, f"{COSINE}, {where}", last)
    lines.append(headline(BEYOND, IS, f"cosine, {where}", last, own, paper=1.0))
    return lines


def _over_pg(exact: Exact, series: str, metric: str, error: float) -> float:
    own, pg = (_exact(exact, "expected", name, metric, error) for name in (series, PG))
    return own / pg


def _slope(exact: Exact, series: str, settings: Settings) -> float:
    """Return d log / d log delta of signal over contamination at the best policies.

    Of PG itself, or of a method over PG.
    """
    metric = f"{STRENGTH}, {at('one arm', settings.share)}"
    low, high = settings.errors[-1], settings.errors[-3]
    if series == PG:
        values = [_exact(exact, "expected", PG, metric, error) for error in (low, high)]
    else:
        values = [_over_pg(exact, series, metric, error) for error in (low, high)]
    return math.log(values[1] / values[0]) / math.log(high / low)


def _cosine_finding(exact: Exact, settings: Settings) -> str:
    where = at("one arm", settings.share)
    first, last = settings.errors[2], settings.errors[-1]
    told = [
        f"{name} {_exact(exact, 'expected', name, f'{COSINE}, {where}', first):.3f} and "
        f"{_exact(exact, 'expected', name, f'{COSINE}, {where}', last):.3f}"
        for name in _series(settings)
    ]
    return (
        f"Cosine to the true gradient at delta = {first:g} and {last:g} ({where}): "
        f"{'; '.join(told)}. PG's does not fall to zero, since a failure pushed down lifts the "
        f"right arm: as delta falls no cosine can be more than "
        f"{1 / theory.limit_cosine(settings.arms):.2f} times PG's. DG's rises to 1 for eta < 1/2 "
        f"alone; exact importance weights have 1."
    )


def _strength_finding(exact: Exact, settings: Settings) -> str:
    where = at("one arm", settings.share)
    last = settings.errors[-1]
    told = [
        f"{_over_pg(exact, dg(eta), f'{STRENGTH}, {where}', last):,.3g} (eta = {eta:g})"
        for eta in settings.etas
    ]
    return (
        f"Signal over contamination, DG over PG at delta = {last:g}: {', '.join(told)}; it grows "
        f"as delta^(-1/(2 eta)) without bound."
    )


def _closed(settings: Settings, name: str, error: float, kind: Source) -> float | None:
    """Return the closed cosine of a method; None for importance weights, which differ by arm."""
    if name == IS:
        return 1.0
    probs = bandit.peaked(1 - error, settings.arms)
    drawn = theory.mixture(probs, theory.source(kind, settings.arms), settings.share)
    weight = weights(settings, probs, drawn)[name]
    return theory.closed_cosine(
        error,
        settings.share,
        settings.arms,
        success=float(weight[0]),
        failure=float(weight[1]),
        kind=kind,
    )


def _sampled_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Cosines of a seed's pooled samples beside the closed form, and of single batches."""
    lines = []
    for kind in SOURCES:
        where = at(kind, settings.share)
        for name in _series(settings):
            for error in settings.sampled_errors:
                pooled, batch = (
                    statistics.final(records, "sampled", name, f"{metric}, {where}", setting=error)
                    for metric in (COSINE, BATCH_COSINE)
                )
                closed = _closed(settings, name, error, kind)
                samples = settings.batch * settings.batches
                lines.append(
                    headline(
                        "Distributed section 4",
                        name,
                        f"cosine, {samples:,} samples, {where}",
                        error,
                        pooled,
                        paper=closed,
                    )
                )
                lines.append(
                    headline(
                        BEYOND, name, f"cosine, {settings.batch} samples, {where}", error, batch
                    )
                )
    return lines


def _moment_ratio(records: pd.DataFrame, settings: Settings, eta: float, error: float) -> Estimate:
    """Return the sampled second moment of failures, DG over PG."""
    metric = f"{MOMENT}, {at('one arm', settings.share)}"
    by_seed = {
        name: statistics.select(records, "sampled", name, metric, setting=error).set_index("seed")[
            "value"
        ]
        for name in (dg(eta), PG)
    }
    return statistics.estimate((by_seed[dg(eta)] / by_seed[PG]).tolist())


def _moment_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Version 2: failures' second moment off the true gradient, and the factor that bounds it."""
    lines = []
    nu = theory.source("one arm", settings.arms)
    for eta in settings.etas:
        for error in settings.sampled_errors:
            probs = bandit.peaked(1 - error, settings.arms)
            drawn = theory.mixture(probs, nu, settings.share)
            by_name = weights(settings, probs, drawn)
            own, pg = (
                theory.failure_second_moment(probs, drawn, by_name[name]) for name in (dg(eta), PG)
            )
            found = _moment_ratio(records, settings, eta, error)
            bound = theory.overlap(probs, nu, eta)
            lines += [
                headline(
                    "Distributed v2, second moment",
                    f"{dg(eta)} / PG",
                    "perpendicular second moment of failures",
                    error,
                    found,
                    paper=own / pg,
                ),
                headline(
                    "Distributed v2, second moment (inferred)",
                    f"{dg(eta)} / PG",
                    "second moment over sum_a nu(a) pi(a)^(1/eta), at most 1",
                    error,
                    Estimate(found.mean / bound, found.se / bound, found.seeds),
                ),
            ]
    return lines


def _world_names(exact: Exact) -> list[str]:
    return sorted({series for part, series, _, _ in exact if part == "worlds"})


def _world_lines(exact: Exact, settings: Settings) -> list[Headline]:
    error = settings.rare_error
    rare = error / (settings.arms - 1)
    lines = []
    for name in _world_names(exact):
        kept, passed = (
            _exact(exact, "worlds", name, metric, error) for metric in (KEPT_SUCCESS, KEPT_FAILURE)
        )
        lines += [
            headline(BEYOND, name, metric, error, _exact(exact, "worlds", name, metric, error))
            for metric in (FAILURE, SUCCESS)
        ]
        if name in sign_blind(settings) and passed > 0:
            lines.append(
                headline(
                    "Distributed Prop 3",
                    name,
                    "weight of a rare success over that of a rare failure",
                    error,
                    kept / passed,
                    paper=1.0,
                )
            )
    for eta in settings.etas:
        probs = bandit.peaked(1 - error, settings.arms)
        values = theory.advantages(settings.arms)
        success = theory.dg_weight(probs, -values, eta)[1]
        failure = theory.dg_weight(probs, values, eta)[1]
        lines.append(
            headline(
                "Distributed Prop 3",
                dg(eta),
                "weight of a rare success over that of a rare failure",
                error,
                float(success / failure),
                paper=rare ** (-1 / (2 * eta)),
            )
        )
    return lines


def _world_finding(exact: Exact, settings: Settings) -> str:
    error = settings.rare_error

    def over_pg(name: str, metric: str) -> float:
        return _exact(exact, "worlds", name, metric, error) / _exact(
            exact, "worlds", PG, metric, error
        )

    # The sign-blind weight that drops failures as well as DG does, at the least loss.
    as_good = [
        name for name in sign_blind(settings) if over_pg(name, FAILURE) >= over_pg(dg(1.0), FAILURE)
    ]
    best = max(as_good, key=lambda name: over_pg(name, SUCCESS))
    told = [
        f"{name}: {over_pg(name, FAILURE):,.3g} times PG's signal over contamination, "
        f"{over_pg(name, SUCCESS):.3g} times its progress on a rare success"
        for name in (dg(1.0), IS, best)
    ]
    return (
        f"delta = {error:g}, rho = {settings.share:g}. {'; '.join(told)}, the best sign-blind "
        f"weight that drops failures as well as DG."
    )


def _context_lines(exact: Exact, settings: Settings) -> list[Headline]:
    return [
        headline(
            BEYOND,
            name,
            f"{metric}, {share:g} of the contexts solved",
            error,
            _exact(exact, "contexts", name, f"{metric}, {share:g} solved", error),
        )
        for share in settings.solved
        for name in _series(settings)
        for error in (settings.errors[2], settings.errors[-1])
        for metric in (COSINE, CLEAN_COSINE)
        if (name, metric) != (IS, CLEAN_COSINE)
    ]


def _context_finding(exact: Exact, settings: Settings) -> str:
    share, last = settings.solved[-1], settings.errors[-1]
    found = {
        name: _exact(exact, "contexts", name, f"{COSINE}, {share:g} solved", last)
        for name in _series(settings)
    }
    told = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    return (
        f"Many contexts, {100 * share:g}% of them solved to delta = {last:g}, the others at 1/2, "
        f"rho = {settings.share:g}: cosine {told}. Here the true gradient is that of the unsolved "
        f"contexts, and what contaminates the solved ones stands at right angles to it."
    )


def _colours(settings: Settings) -> dict[str, str]:
    return dict(zip(_series(settings), plotting.WHEEL, strict=False))


def _draw_exact(ax: Axes, exact: Exact, settings: Settings, part: str, metric: str) -> None:
    for name, colour in _colours(settings).items():
        values = [_exact(exact, part, name, metric, error) for error in settings.errors]
        ax.plot(settings.errors, values, "o-", color=colour, markersize=3, label=name)
    ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel("delta = 1 - pi(y*), better policies to the right")


def _expected_figure(exact: Exact, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 3)
    where = at("one arm", settings.share)
    _draw_exact(axes[0, 0], exact, settings, "expected", f"{COSINE}, {where}")
    axes[0, 0].axhline(
        theory.limit_cosine(settings.arms), color="black", linewidth=0.8, linestyle=":"
    )
    axes[0, 0].set(title="cosine (dots: PG's limit)", ylabel="cosine to the true gradient")
    _draw_exact(axes[0, 1], exact, settings, "expected", f"{STRENGTH}, {where}")
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_title("signal over contamination")
    axes[0, 1].set_ylabel("|own part| / |contaminated part|")
    axes[0, 0].legend(fontsize=8)
    ax = axes[0, 2]
    for eta, colour in zip(settings.etas, plotting.WHEEL[2:], strict=False):
        gates, bounds = (
            [_exact(exact, "expected", dg(eta), metric, error) for error in settings.errors]
            for metric in (GATE, BOUND)
        )
        ax.plot(settings.errors, gates, "o", color=colour, markersize=3.5, label=f"eta = {eta:g}")
        ax.plot(settings.errors, bounds, "-", color=colour, linewidth=1)
    ax.set(xscale="log", yscale="log")
    ax.invert_xaxis()
    ax.set(title="gate on a wrong arm (lines: Lemma 1)", xlabel="delta")
    ax.legend(fontsize=8)
    return figure


def _sampled_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 3)
    for ax, kind in zip(axes[0], SOURCES, strict=False):
        metric = f"{BATCH_COSINE}, {at(kind, settings.share)}"
        for name, colour in _colours(settings).items():
            found = {
                error: statistics.final(records, "sampled", name, metric, setting=error)
                for error in settings.sampled_errors
            }
            plotting.by_setting(ax, found, name, colour=colour)
        ax.set_xscale("log")
        ax.invert_xaxis()
        ax.set_title(f"batches of {settings.batch}, {kind}")
        ax.set_xlabel("delta")
        ax.set_ylabel("mean cosine to the true gradient")
    axes[0, 0].legend(fontsize=8)
    ax = axes[0, 2]
    nu = theory.source("one arm", settings.arms)
    for eta, colour in zip(settings.etas, plotting.WHEEL[2:], strict=False):
        found = {
            error: _moment_ratio(records, settings, eta, error) for error in settings.sampled_errors
        }
        plotting.by_setting(ax, found, f"eta = {eta:g}", colour=colour)
        bounds = [
            theory.overlap(bandit.peaked(1 - error, settings.arms), nu, eta)
            for error in settings.sampled_errors
        ]
        ax.plot(settings.sampled_errors, bounds, ":", color=colour)
    ax.set(xscale="log", yscale="log")
    ax.invert_xaxis()
    ax.set(title="second moment of failures, DG / PG", xlabel="delta (dots: overlap factor)")
    ax.legend(fontsize=8)
    return figure


def _world_figure(exact: Exact, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=6.2, height=4.4)
    ax = axes[0, 0]
    error = settings.rare_error
    blind = sign_blind(settings)
    for name in _world_names(exact):
        x, y = (_exact(exact, "worlds", name, metric, error) for metric in (FAILURE, SUCCESS))
        if math.isinf(x):
            continue  # a threshold above the rare arms drops them all
        colour = "#5a5a5a" if name in blind else "#d55e00" if name == IS else "#0072b2"
        ax.plot(x, y, "o" if name in blind else "D", color=colour)
        if not name.startswith("min") and not name.startswith("pi >"):
            ax.annotate(name, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
    ax.set(xscale="log", yscale="log")
    ax.margins(0.12)
    ax.set_xlabel("signal over contamination by a rare failure")
    ax.set_ylabel("progress on a rare success")
    ax.set_title("grey: weights that see pi(a) alone")
    return figure


def _context_figure(exact: Exact, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, len(settings.solved))
    for ax, share in zip(axes[0], settings.solved, strict=True):
        _draw_exact(ax, exact, settings, "contexts", f"{COSINE}, {share:g} solved")
        ax.set_ylim(0, 1.03)
        ax.set_title(f"{100 * share:g}% of the contexts solved")
        ax.set_xlabel("delta of the solved contexts")
        ax.set_ylabel("cosine to the true gradient")
    axes[0, 0].legend(fontsize=8)
    return figure
