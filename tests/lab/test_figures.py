import io

import matplotlib as mpl
import matplotlib.image
import pytest
from matplotlib.figure import Figure

from kondo_lab import figures
from kondo_lab.summary import curve, summarise
from lab.examples import comparison, record, result


def drawn(panel):
    ax = Figure().subplots()
    panel.draw(ax)
    return ax


def grid(results):
    return figures.panels(results, summarise(results))


def test_a_row_of_three_panels_per_task():
    titles = [[panel.title for panel in line] for line in grid(comparison())]
    assert [title.split(":")[0] for line in titles for title in line] == [
        *["digits"] * 3,
        *["reversal"] * 3,
    ]


def test_curves_show_the_mean_over_seeds_against_samples_and_backward_passes():
    results = comparison()
    by_samples, by_backward, _ = grid(results)[0]
    points = curve(next(r for r in results if r.method == "DG-K (3%)").records)
    for panel, field in ((by_samples, "samples"), (by_backward, "backward_passes")):
        lines = {line.get_label(): line for line in drawn(panel).get_lines()}
        assert list(lines) == ["PG", "DG", "DG-K (3%)"]
        xs, ys = lines["DG-K (3%)"].get_data()
        assert list(xs) == [getattr(point, field) for point in points]
        # The second seed's error is higher by 0.01 everywhere.
        assert abs(ys[-1] - (points[-1].error + 0.005)) < 1e-9
    assert drawn(by_backward).get_xscale() == drawn(by_samples).get_yscale() == "log"


def test_bars_add_up_to_the_learner_seconds_and_carry_the_speed_up():
    ax = drawn(grid(comparison())[0][2])
    ends = sorted({round(bar.get_x() + bar.get_width(), 6) for bar in ax.patches})
    assert ends[-1] == 6000.0  # ms of a dense step
    assert 1000.0 in ends  # of a gated one
    assert sorted(text.get_text() for text in ax.texts) == ["1.00x", "1.00x", "6.00x"]


def test_an_error_of_zero_can_be_drawn():
    results = [result("PG", [record(0.5), record(0.0)]), result("DG", [record(0.0)] * 2)]
    low, high = drawn(grid(results)[0][0]).get_ylim()
    assert low == pytest.approx(0.35)  # a little below the lowest error that is not zero
    assert high > 1


def test_methods_look_different():
    names = ["PG", "DG", "DG-K (3%)", "DG-K (10%)", "other"]
    styles = [figures.style(name, names) for name in names]
    assert len({colour for colour, _ in styles}) == len({str(dash) for _, dash in styles}) == 5


def test_the_file_is_a_png_and_the_users_settings_stay(tmp_path):
    before = dict(mpl.rcParams)
    backend = mpl.get_backend()
    figures.write_figure(tmp_path / "figure.png", grid(comparison()))
    pixels = matplotlib.image.imread(tmp_path / "figure.png")
    assert pixels.shape[1] > 1500
    assert pixels.std() > 0.05  # something was drawn
    assert dict(mpl.rcParams) == before
    assert mpl.get_backend() == backend


def test_a_panel_alone_is_a_png():
    data = figures.png(grid(comparison())[0][0])
    assert matplotlib.image.imread(io.BytesIO(data)).shape[1] > 600
