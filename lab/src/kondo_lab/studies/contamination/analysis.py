"""Closed forms beside samples; what holds of the propositions in this set-up, and what does not."""

from collections.abc import Iterator
from functools import partial

import pandas as pd

from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline, ordering
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import drawing, run, theory
from kondo_lab.studies.contamination.captions import captions
from kondo_lab.studies.contamination.claims import claims
from kondo_lab.studies.contamination.numbers import Numbers
from kondo_lab.studies.contamination.run import IS, PG, at, dg
from kondo_lab.studies.contamination.settings import Settings
from kondo_lab.studies.contamination.theory import Source

ROUNDING = 1e-5
"""Records hold six digits."""

beyond = partial(headline, "beyond the paper")


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    numbers = Numbers(records, settings)
    found = Analysis(headline=[], figures={}, findings=[])
    lines, figures, findings = found.headline, found.figures, found.findings
    there = set(records["part"])
    if "expected" in there:
        lines += [*_gate_lines(numbers), *_corollary_lines(numbers)]
        figures["cosine-and-signal"] = drawing.expected(numbers)
        findings += [_cosine_finding(numbers), _strength_finding(numbers)]
    if "sampled" in there:
        lines += [*_sampled_lines(numbers), *_moment_lines(numbers)]
        figures["samples-and-second-moment"] = drawing.sampled(numbers)
    if "worlds" in there:
        lines += _world_lines(numbers)
        figures["sign-blind-weights"] = drawing.sign_blind(numbers)
        findings.append(_world_finding(numbers))
    if "contexts" in there:
        lines += _context_lines(numbers)
        figures["many-contexts"] = drawing.contexts(numbers)
        findings.append(_context_finding(numbers))
    found.claims.extend(claims(found.headline))
    return with_captions(found, captions(found.headline, found.claims))


# Headline.


def _gate_lines(numbers: Numbers) -> Iterator[Headline]:
    """Lemma 1: the gate is below its bound, and next to it where the action is rare."""
    what = "policies whose gate is above pi(a)^(1/(2 eta))"
    for name in map(dg, numbers.settings.etas):
        gates, bounds = (numbers.over_errors(name, metric) for metric in (run.GATE, run.BOUND))
        ratios = [gate / bound for gate, bound in zip(gates, bounds, strict=True)]
        above = float(sum(ratio > 1 + ROUNDING for ratio in ratios))
        yield headline(
            "Distributed Lemma 1", name, what, "", above, expected=0.0, against="formula"
        )
        yield beyond(name, "gate over its bound, delta", numbers.last, ratios[-1])


def _corollary_lines(numbers: Numbers) -> Iterator[Headline]:
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


def _closed(numbers: Numbers, name: str, error: float, kind: Source) -> float:
    """Return the closed cosine of a method; exact importance weights have 1."""
    if name == IS:
        return 1.0
    settings = numbers.settings
    success, failure, *_ = run.weights(settings, *numbers.drawn(error, kind))[name].tolist()
    weights = {"success": success, "failure": failure}
    return theory.closed_cosine(error, settings.share, settings.arms, kind=kind, **weights)


def _sampled_lines(numbers: Numbers) -> Iterator[Headline]:
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


def _moment_lines(numbers: Numbers) -> Iterator[Headline]:
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
            found, bound = numbers.moment_ratio(eta, error), numbers.overlap(eta, error)
            share = Estimate(found.mean / bound, found.se / bound, found.seeds)
            name = f"{dg(eta)} / PG"
            yield headline(figure, name, what, error, found, expected=own / pg, against="formula")
            yield headline(f"{figure} (inferred)", name, over_bound, error, share)


def _world_lines(numbers: Numbers) -> Iterator[Headline]:
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


def _context_lines(numbers: Numbers) -> Iterator[Headline]:
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


def _cosine_finding(numbers: Numbers) -> str:
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


def _strength_finding(numbers: Numbers) -> str:
    told = [
        f"{numbers.over_pg(dg(eta), run.STRENGTH, numbers.last):,.3g} (eta = {eta:g})"
        for eta in numbers.settings.etas
    ]
    return (
        f"Signal over contamination, DG over PG at delta = {numbers.last:g}: {', '.join(told)}; "
        f"it grows as delta^(-1/(2 eta)) without bound."
    )


def _world_finding(numbers: Numbers) -> str:
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


def _context_finding(numbers: Numbers) -> str:
    share, last = numbers.settings.solved[-1], numbers.last
    told = ", ".join(
        f"{name} {numbers.context(name, run.COSINE, share, last):.3f}" for name in numbers.series
    )
    return (
        f"Many contexts, {100 * share:g}% of them solved to delta = {last:g}, the others at 1/2, "
        f"rho = {numbers.settings.share:g}: cosine {told}. Here the true gradient is that of the "
        f"unsolved contexts, and what contaminates the solved ones stands at right angles to it."
    )
