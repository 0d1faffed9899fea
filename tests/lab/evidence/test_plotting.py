"""Figures that can be read: names that do not overlap, one colour a method, small files."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from kondo_lab.evidence import end_labels, plotting


@given(
    st.lists(st.floats(-0.5, 1.5), max_size=12),
    st.floats(0.01, 0.07),
)
def test_labels_keep_their_distance_their_order_and_the_panel(wanted, gap):
    placed = end_labels.spread(wanted, gap, 0.0, 1.0)
    assert len(placed) == len(wanted)
    ordered = sorted(placed)
    assert all(second - first >= gap - 1e-9 for first, second in itertools.pairwise(ordered))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in placed)
    for (one, at), (other, there) in itertools.permutations(
        list(zip(wanted, placed, strict=True)), 2
    ):
        if one < other:
            assert at < there


def test_labels_that_are_apart_stay_where_they_are():
    assert end_labels.spread([0.9, 0.1, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.9, 0.1, 0.5])
    # Three at one place: the middle one stays, the others make way on either side.
    assert sorted(end_labels.spread([0.5] * 3, 0.2, 0.0, 1.0)) == pytest.approx([0.3, 0.5, 0.7])
    assert end_labels.spread([], 0.1, 0.0, 1.0) == []


def bottom(box):
    return box.y0


def drawn(figure):
    """Return the renderer of a figure whose layout is done."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("rows", [1, 3])
def test_names_of_lines_that_end_together_do_not_overlap_in_the_picture(scale, rows):
    with plotting.style():
        figure, axes = plotting.grid(rows, 2, height=2.3)
        for ax in axes.flat:
            for number in range(6):
                ax.plot([1, 2, 3], [1, 2, 3 + 0.001 * number], label=f"series {number}")
            ax.set_yscale(scale)
            plotting.label_ends(ax)
        plotting.head(figure, "title", "note")
        renderer = drawn(figure)
    for ax in axes.flat:
        # Of an annotation with a line to its end, the text's own box alone.
        boxes = sorted((Text.get_window_extent(text, renderer) for text in ax.texts), key=bottom)
        assert len(boxes) == 6
        for lower, upper in itertools.pairwise(boxes):
            assert lower.y1 <= upper.y0 + 1  # a pixel of rounding


def test_a_line_is_named_at_its_right_end_even_where_the_axis_is_inverted():
    _, axes = plotting.grid(1, 1)
    ax = axes[0, 0]
    ax.errorbar([1, 2, 3], [0.1, 0.2, 0.3], [0.01] * 3, color="red", label="bars")
    ax.plot([2, 1], [5.0, 4.0], color="blue", label="backwards")
    ax.plot([1, 2], [np.nan, np.nan], label="nothing")
    found = {label.text: label for label in end_labels.line_ends(ax)}
    assert set(found) == {"bars", "backwards"}
    assert (found["bars"].x, found["bars"].y, found["bars"].colour) == (3, 0.3, "red")
    assert (found["backwards"].x, found["backwards"].y) == (2, 5.0)
    ax.invert_xaxis()
    assert {label.x for label in end_labels.line_ends(ax)} == {1}


def test_a_panel_without_named_lines_has_no_labels():
    figure, axes = plotting.grid(1, 1)
    axes[0, 0].plot([0, 1], [0, 1])
    plotting.label_ends(axes[0, 0])
    assert list(axes[0, 0].texts) == []
    drawn(figure)


def test_a_method_has_one_colour_whatever_its_rate_or_temperature():
    assert plotting.method_colour("DG-K 3%") == plotting.method_colour("DG-K") != plotting.GREY
    assert plotting.method_colour("DG, eta 10") == plotting.method_colour("DG") == plotting.BLUE
    assert plotting.method_colour("DG-K price 0") == plotting.method_colour("price 0.5")
    assert plotting.method_colour("unbiased |delight| 10%") == plotting.METHODS["unbiased"]
    assert plotting.method_colour("dense") == plotting.method_colour("GRPO uncorrected")
    assert plotting.method_colour("PGX") == plotting.method_colour("nobody") == plotting.GREY
    assert len({plotting.METHODS[name] for name in ("PG", "DG", "DG-K", "dense", "unbiased")}) == 5


def test_series_of_a_figure_differ_in_colour_or_dash():
    names = ["PG", "PG by token ratio", "DG, eta 1", "DG, eta 10", "DG-K 3%", "DG-K 10%", "new"]
    looks = [plotting.series_style(name, names) for name in names]
    assert len(set(looks)) == len(names)
    colours = dict(zip(names, looks, strict=True))
    assert colours["new"][0] not in {plotting.METHODS[name] for name in ("PG", "DG", "DG-K")}


def test_the_note_the_legend_and_the_panels_have_places_of_their_own():
    with plotting.style():
        figure, axes = plotting.grid(1, 2)
        for ax in axes.flat:
            ax.plot([0, 1], [0, 1], label="a line")
            ax.set_xlabel("x")
        plotting.head(figure, "What is shown", "How to read it.", legend=axes[0, 0])
        renderer = drawn(figure)
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "How to read it."
    top = legend.get_window_extent(renderer).y1
    lowest = min(ax.get_tightbbox(renderer).y0 for ax in axes.flat)
    assert top <= lowest
    heading = figure.get_suptitle()
    assert heading == "What is shown"


def test_a_file_has_few_colours_and_the_same_bytes_each_time(tmp_path):
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        with plotting.style():
            figure, axes = plotting.grid(1, 1)
            for number in range(7):
                axes[0, 0].plot([0, 1], [0, number], color=plotting.WHEEL[number])
            plotting.save(figure, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with Image.open(paths[0]) as image:
        assert image.mode == "P"
        assert len(image.getcolors(256)) <= plotting.PALETTE_SIZE
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(float)
    for colour in ("#ffffff", *plotting.WHEEL):
        wanted = 255 * np.array(to_rgb(colour))
        assert np.abs(pixels - wanted).max(axis=1).min() < 12, colour


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (8.6, 13.4, ["9", "10", "11", "12", "13"]),
        (2.0, 9.0, ["2", "4", "6", "8"]),
        (1.0, 100.0, ["1", "2", "5", "10", "20", "50", "100"]),
    ],
)
def test_a_log_axis_has_several_labels_even_if_it_spans_less_than_a_decade(low, high, wanted):
    _, axes = plotting.grid(1, 1)
    ax = axes[0, 0]
    ax.set(yscale="log", ylim=(low, high))
    plotting.log_ticks(ax.yaxis)
    drawn(ax.figure)
    assert [label.get_text() for label in ax.get_yticklabels()] == wanted
    assert len(ax.yaxis.get_minorticklocs()) == 0


def test_leaders_stay_left_of_every_name():
    with plotting.style():
        figure, axes = plotting.grid(1, 1)
        ax = axes[0][0]
        for number in range(6):
            ax.plot([1, 2, 3], [1, 2, 3 - 0.01 * number], label=f"a long name of series {number}")
        plotting.label_ends(ax)
        renderer = drawn(figure)
    names = [text for text in ax.texts if text.arrow_patch is not None]
    left = min(Text.get_window_extent(text, renderer).x0 for text in names)
    rights = [text.arrow_patch.get_window_extent(renderer).x1 for text in names]
    assert len(names) == 6
    assert max(rights) <= left + 1


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ({"a": 3, "b": 3}, "Mean of 3 seeds, band: one standard error."),
        ({"a": 3, "b": 10}, "Mean of 3 to 10 seeds, band: one standard error."),
        ({"a": 1, "b": 1}, "One seed."),
    ],
)
def test_the_note_tells_the_fewest_and_the_most_seeds(seeds, told):
    rows = [("p", name, np.nan, seed) for name, count in seeds.items() for seed in range(count)]
    records = pd.DataFrame(rows, columns=["part", "series", "setting", "seed"])
    assert plotting.seeds_note(records) == told
