"""Draw the figures of results/lm-rl-v1, which the study lm-rl of today (version 2) cannot read.

    python benchmarks/plot_lm_rl_v1.py [results/lm-rl-v1] [--out DIR]

In: runs.jsonl.gz and headline.csv of the folder. Out: its PNGs, under the names in its manifest.
"""

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from kondo_lab.evidence import plotting
from kondo_lab.evidence import records as files
from kondo_lab.studies.lm_gates.drawing import family
from kondo_lab.training.tuning import QUALITY, end_reward

ROOT = Path(__file__).resolve().parents[1]
DENSE = ("GRPO plain", "GRPO")
"""Dense GRPO by plain PyTorch, or through the library where a field has no other."""
SHOWN = ("PODS 10%", "DG-K 10%", "DG-K 3%", "random 3%")
"""In colour beside the dense one; all others are grey."""
DASHES = {"DG-K 3%": "--"}
CLOCK = {
    "rollouts": "",
    "tokens differentiated (log scale)": "tokens differentiated",
    "learner seconds (log scale)": "seconds learner",
    "loop seconds (log scale)": "seconds loop",
}
"""Axis -> metric of what had been paid; rollouts are in the records' own column."""
LEARNER, LOOP = plotting.VERMILLION, plotting.BLUE
FAMILIES = (
    "DG-K",
    "PODS",
    "advantage",
    "random",
    "DG-K exact",
    "DG-K tokens",
    "|delight|",
    "surprisal",
)
"""Gates with a panel of their own in the frontier."""


def speed_ups(headline: pd.DataFrame) -> Figure:
    """Draw the speed-up of a step over dense GRPO's, a panel a field."""
    own = headline[headline["metric"].str.fullmatch("(learner|loop) speed-up over GRPO")]
    own = own[~own["series"].isin(DENSE)]
    fields = list(dict.fromkeys(own["x"]))
    figure, axes = plotting.grid(2, 3, width=3.9, height=3.3, sharex=True)
    for ax in axes.flat[len(fields) :]:
        ax.set_axis_off()
    for ax, field in zip(axes.flat, fields, strict=False):
        of_field = own[own["x"] == field]
        by_stage = of_field.assign(stage=of_field["metric"].str.partition(" ")[0])
        table = by_stage.pivot_table(index="series", columns="stage", values="ours")
        table = table.sort_values("learner", ascending=False)
        places = range(len(table))
        ax.hlines(places, table["loop"], table["learner"], color=plotting.FAINT)
        ax.plot(table["learner"], places, "o", color=LEARNER, label="learner")
        ax.plot(table["loop"], places, "s", color=LOOP, label="whole loop")
        plotting.rows_axis(ax, list(table.index))
        _speed_up_axis(ax)
        ax.tick_params(labelbottom=True)
        ax.set_title(field.partition(",")[0])
    says = "Speed-up of one step over dense GRPO's, without learning: right of 1x is faster"
    plotting.head(figure, says, "Ratios of medians. 5m to 300m: parameters.", legend=axes[0, 0])
    return figure


def _speed_up_axis(ax: Axes) -> None:
    ax.axvline(1.0, color=plotting.DARK, linewidth=1)
    ax.set(xscale="log", xlabel="speed-up (log scale)")
    plotting.ratio_ticks(ax.xaxis)


def sizes(headline: pd.DataFrame) -> Figure:
    """Draw the speed-up to 90% of dense GRPO's gain, a panel a size; triangles are bounds."""
    found = headline[headline["x"].fillna("").str.endswith("by the clock")]
    parts = found["metric"].str.extract(
        r"(?P<stage>learner|loop) seconds to (?P<target>[\d.]+), speed-up over GRPO plain"
        r"(?P<bound>, at most)?$"
    )
    found = pd.concat([found, parts], axis=1).dropna(subset=["stage"])
    # Each field has two targets: half of the gain, and 90% of it.
    highest = found.groupby("x")["target"].transform("max")
    found = found[found["target"] == highest]
    fields = list(dict.fromkeys(found["x"]))
    figure, axes = plotting.grid(1, len(fields), width=3.9, height=4.0, sharex=True)
    for ax, field in zip(axes[0], fields, strict=True):
        own = found[found["x"] == field]
        learner = own[own["stage"] == "learner"].set_index("series")["ours"]
        names = list(learner.sort_values(ascending=False).index)
        for line in own.itertuples():
            stage, place = str(line.stage), names.index(line.series)
            style = {"color": LEARNER if stage == "learner" else LOOP}
            if line.seeds == 1:
                style["markerfacecolor"] = "white"
            bar = 0.0 if pd.isna(line.se) else line.se
            marker = "v" if isinstance(line.bound, str) else "o"
            ax.errorbar(line.ours, place, xerr=bar, fmt=marker, **style)
        plotting.rows_axis(ax, names)
        _speed_up_axis(ax)
        ax.set_title(f"{field.partition(',')[0]}, to {own['target'].iloc[0]}")
    for label, colour in (("learner", LEARNER), ("whole loop", LOOP)):
        axes[0, 0].plot([], [], "o", color=colour, label=label)
    plotting.head(
        figure,
        "Speed-up to 90% of dense GRPO's gain: right of 1x is faster",
        "Triangle: a bound, the gate never got there. Empty: one seed. Bars: one standard error.",
        legend=axes[0, 0],
    )
    return figure


def curves(records: pd.DataFrame, start: str, title: str, axes_of: dict[str, str]) -> Figure:
    """Draw the held-out reward of the parts that start so, a panel a cost."""
    own = records[records["part"].str.startswith(start)]
    dense = next((name for name in DENSE if name in set(own["series"])), DENSE[-1])
    columns = 2
    figure, axes = plotting.grid(-(-len(axes_of) // columns), columns, width=4.8, height=3.0)
    for ax, (label, metric) in zip(axes.flat, axes_of.items(), strict=True):
        for series in dict.fromkeys(own["series"]):
            _draw_reward(ax, own[own["series"] == series], series, metric, dense)
        ax.set(xlabel=label, ylabel="held-out reward")
        if metric:
            ax.set_xscale("log")
        ax.xaxis.set_major_formatter(plotting.counts)
        ax.xaxis.set_minor_formatter(NullFormatter())
        plotting.label_ends(ax)
    most = own["seed"].nunique()
    note = f"Mean of up to {most} seeds, band: one standard error." if most > 1 else "One seed."
    says = f"{title}: reward while training, higher and further left is better"
    plotting.head(figure, says, f"{note} Grey: other gates.")
    return figure


def _draw_reward(ax: Axes, own: pd.DataFrame, series: str, metric: str, dense: str) -> None:
    reward = own[(own["metric"] == QUALITY) & (own["value"].notna())]
    by_step = reward.groupby("step")["value"]
    means, errors = by_step.mean(), by_step.sem()
    if metric:
        paid = own[own["metric"] == metric].groupby("step")["value"].mean()
    else:
        paid = reward.groupby("step")["forward"].mean()
    steps = [step for step in means.index if step in paid.index and not (metric and step == 0)]
    if not steps:
        return
    xs, ys = paid.loc[steps], means.loc[steps]
    if series not in (dense, *SHOWN):
        ax.plot(xs, ys, color=plotting.FAINT, linewidth=1, zorder=1)
        return
    colour, name = plotting.method_colour(series), "dense GRPO" if series == dense else series
    ax.plot(xs, ys, color=colour, linestyle=DASHES.get(series, "-"), label=name)
    plotting.band(ax, xs, ys, errors.loc[steps], colour=colour)


def frontier(records: pd.DataFrame, part: str, title: str) -> Figure:
    """Draw reward at the end by tokens differentiated, a panel for each kind of gate."""
    own = records[records["part"] == part]
    ends = end_reward(own).groupby("series").mean()
    tokens = own[own["metric"] == "tokens differentiated"].groupby("series")["value"].max()
    points = pd.DataFrame({"reward": ends, "tokens": tokens}).dropna()
    points["family"] = [family(str(series)) for series in points.index]
    points = points.sort_values("tokens")
    figure, axes = plotting.grid(2, 4, width=2.9, height=2.9, sharex=True, sharey=True)
    for ax, name in zip(axes.flat, FAMILIES, strict=True):
        for other in FAMILIES:
            line = points[points["family"] == other]
            ax.plot(line["tokens"], line["reward"], color=plotting.FAINT, linewidth=1)
        line = points[points["family"] == name]
        ax.plot(line["tokens"], line["reward"], "o-", color=plotting.method_colour(name))
        for series, (reward, paid, _) in line.iterrows():
            rate = str(series).rpartition(" ")[2]
            place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            ax.annotate(rate, (paid, reward), fontsize=plotting.SMALL, **place)
        dense = points.loc["GRPO"]
        ax.plot(dense["tokens"], dense["reward"], "s", color=plotting.BLACK, markersize=4)
        ax.set(xscale="log", title=name)
        ax.xaxis.set_major_formatter(plotting.counts)
    for ax in axes[-1]:
        ax.set_xlabel("tokens differentiated (log)")
    for row in axes:
        row[0].set_ylabel("held-out reward at the end")
    says = f"{title}: reward by tokens differentiated and rate, upper left is better"
    plotting.head(figure, says, "Black square: dense GRPO. Grey: the other gates. 2 to 5 seeds.")
    return figure


def learning_rates(records: pd.DataFrame, headline: pd.DataFrame) -> Figure:
    """Draw reward by learning rate of two fields, and DG-K's best rate by denominator."""
    figure, axes = plotting.grid(1, 3, width=4.0, height=3.5)
    for ax, field in zip(axes[0], ("sorting-3-25m", "sorting-3-5m"), strict=False):
        ends = end_reward(records[records["part"].str.startswith(f"tune-{field}-")])
        means = ends.groupby(["series", "setting"]).mean()
        for series in dict.fromkeys(means.index.get_level_values("series")):
            line = means.loc[series]
            if series in ("GRPO", "DG, eta 1", *SHOWN):
                look = {"color": plotting.method_colour(series), "ls": DASHES.get(series, "-")}
                ax.plot(line.index, line, marker="o", markersize=4, label=series, **look)
            elif family(series) in ("GRPO", "PG", "DG", "PODS", "advantage", "random"):
                ax.plot(line.index, line, color=plotting.FAINT, linewidth=1, zorder=1)
        ax.set(xscale="log", xlabel="learning rate (log scale)", title=field)
        ax.set_ylabel("held-out reward at the end")
        plotting.label_ends(ax)
    best, ax = headline[headline["metric"].str.startswith("best learning rate")], axes[0, 2]
    for (metric, own), style in zip(best.groupby("metric"), ("o-", "s--"), strict=True):
        rates = [float(str(series).rpartition(" ")[2].rstrip("%")) for series in own["series"]]
        ax.plot(rates, own["ours"], style, label=str(metric).partition(", ")[2])
    ax.set(xscale="log", yscale="log", title="sorting-3-5m: DG-K", xlabel="rate, % (log scale)")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("best learning rate (log scale)")
    plotting.label_ends(ax)
    plotting.head(
        figure,
        "Reward by learning rate, and DG-K's best learning rate: higher reward is better",
        "Left, middle: the tuning seeds; grey: other rates of the same gates.",
    )
    return figure


def figures(folder: Path) -> dict[str, Figure]:
    """Return every figure of the folder, by name."""
    records = files.table(files.read(folder / "runs.jsonl.gz"))
    headline = pd.read_csv(folder / "headline.csv")
    few = {label: CLOCK[label] for label in list(CLOCK)[:2]}
    drawn = {
        "speed-ups": speed_ups(headline),
        "sizes": sizes(headline),
        "frontier": frontier(records, "grid-sorting-3-5m-1", "sorting-3-5m"),
        "learning-rates": learning_rates(records, headline),
    }
    for field in ("sorting-3-25m", "sorting-3-85m", "sorting-3-300m"):
        name = f"curves-{field}-by-the-clock"
        drawn[name] = curves(records, f"wall-{field}-", f"{field}, by the clock", CLOCK)
    for field in ("sorting-3-5m", "addition-3-5m"):
        name = f"curves-{field}-populations"
        drawn[name] = curves(records, f"grid-{field}-", f"{field}, populations", few)
    return drawn


def main() -> None:
    """Draw the folder's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results" / "lm-rl-v1")
    parser.add_argument("--out", type=Path, help="where PNGs go (default: the folder)")
    chosen = parser.parse_args()
    out = chosen.out or chosen.folder
    out.mkdir(parents=True, exist_ok=True)
    with plotting.style():
        for name, figure in figures(chosen.folder).items():
            plotting.save(figure, out / f"{name}.png")
            print(f"wrote {out / name}.png")


if __name__ == "__main__":
    main()
