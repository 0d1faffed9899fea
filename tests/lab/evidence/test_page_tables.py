"""Tables of pages: cells and tables by hand, places in a page, and every page that has places."""

import importlib
from pathlib import Path

import pandas as pd
import pytest

from kondo_lab.evidence import page_tables, result_folder
from kondo_lab.studies import pages, registry
from kondo_lab.studies.mnist_kondo import page as kondo_page
from kondo_lab.studies.mnist_kondo.settings import Settings

ROOT = Path(__file__).parents[3]
STUDIES = [
    path.stem
    for path in sorted((ROOT / "docs/results/studies").glob("*.md"))
    if page_tables.places(path.read_text(encoding="utf-8"))
]
"""With places for tables in their page."""
COLUMNS = [*("figure", "series", "metric", "x", "expected"), *("ours", "se", "seeds")]
COLUMNS += ["against", "verdict"]


def headline(*lines):
    """Lines of (figure, series, metric, x, ours, se, verdict)."""
    rows = [
        (figure, series, metric, x, None, ours, se, 30, "", verdict)
        for figure, series, metric, x, ours, se, verdict in lines
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0171, ".0171"),
        (0.03, ".0300"),
        (-0.5, "-.500"),
        (2.318, "2.32"),
        (13.235, "13.2"),
        (224845.0, "225,000"),
        (0.0, "0"),
        (float("inf"), "never"),
        (float("nan"), "-"),
    ],
)
def test_numbers_have_three_digits_and_no_zero_before_the_point(value, told):
    assert page_tables.number(value) == told


def test_a_cell_has_the_number_its_error_and_what_is_wrong_with_it():
    table = headline(
        ("F", "PG", "error", 20000, 0.31609, 0.00918566, "matches"),
        ("F", "PG", "error", 50000, 0.2, 0.01, "differs"),
        ("F", "PG", "error", "", 0.2, None, "noisy"),
    )
    cell = page_tables.cell
    assert cell(table, series="PG", x=20000.02) == ".316 ± .0092"
    assert cell(table, series="PG", x=50000) == ".200 ± .010 **differs**"
    assert cell(table, series="PG", x=50000, error=False) == ".200 **differs**"
    assert cell(table, series="PG", x="") == ".200 (noisy)"
    assert cell(table, series="DG") == ""


def test_a_page_gets_its_tables():
    end = "<!-- end of table -->\n"
    page = f"a\n<!-- table b -->\nold\n{end}c\n<!-- table d -->\n{end}"
    filled = page_tables.fill(page, {"d": "| 2 |", "b": "| 1 |"})
    assert filled == f"a\n<!-- table b -->\n| 1 |\n{end}c\n<!-- table d -->\n| 2 |\n{end}"
    assert page_tables.fill(filled, {"b": "| 1 |", "d": "| 2 |"}) == filled
    with pytest.raises(ValueError, match=r"tables \['b'\], got places for \['b', 'd'\]"):
        page_tables.fill(page, {"b": ""})


def test_a_row_of_the_learning_curves():
    lines = [
        ("Kondo Fig 1", name, "online error", 20000, 0.25, 0.01, "matches")
        for name in ("PG", "DG", "DG-K 3%")
    ]
    made = kondo_page.tables(headline(*lines), Settings())["fig 1"].splitlines()
    assert (
        made[0] == "| forward passes | PG, paper | PG | DG, paper | DG | DG-K 3%, paper | DG-K 3% |"
    )
    ours = ".250 ± .010"
    assert made[2] == f"| 20k | .269 | {ours} | .182 | {ours} | .573 | {ours} |"


def test_a_row_of_the_speed_ups_says_which_reading_is_compared():
    words = "speed-up over PG to 5% online error"
    beside, curve = f"{words}, median of seeds", f"{words}, mean curve"
    lines = [("Kondo Fig 3", "DG", beside, c, 2.5, 0.25, "matches") for c in range(9)]
    lines.append(("Kondo Fig 3", "DG", f"{curve}, of the paper's own Fig 1", 0, 3.526, None, ""))
    made = kondo_page.tables(headline(*lines), Settings())["fig 3"].splitlines()
    cells = " | ".join(["2.50 ± .25"] * 5)
    assert f"| DG | **online error, median of seeds**, compared | {cells} |" in made
    read = "online error, mean curve, read off the paper's Figure 1"
    assert f"| DG | {read} | 3.53 | | | | |" in made
    assert "| DG | the paper | 2.25 | 2.25 | 2.25 | 2.25 | 2.25 |" in made


def test_studies_with_a_version_that_was_not_run_yet_have_places():
    assert {"mnist-kondo", "reversal-dg", "reversal-fit", "speculative"} <= set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_has_the_tables_of_its_run_or_says_that_it_was_not_run(name):
    study = registry.find(name)
    text = pages.page_path(name, ROOT).read_text(encoding="utf-8")
    if (ROOT / "results" / f"{name}-v{study.version}").exists():
        assert text == page_tables.fill(text, pages.made(name, ROOT))
    else:
        page = importlib.import_module(f"kondo_lab.studies.{name.replace('-', '_')}.page")
        tables = page.tables(headline(), study.settings("full", None))
        assert page_tables.places(text) == dict.fromkeys(tables, page_tables.NOT_RUN)


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "reversal-fit"])
def test_a_page_says_of_which_version_its_numbers_are(name):
    """In its first lines, and in the section that is not run yet."""
    version = registry.find(name).version
    text = pages.page_path(name, ROOT).read_text(encoding="utf-8")
    if not (ROOT / "results" / f"{name}-v{version}").exists():
        assert "version 1" in " ".join(text.splitlines()[:8])
        assert f"## Version {version} (set up, not run yet)" in text


CLAIMED = [
    *("mnist-dg", "mnist-kondo", "mnist-stale", "speculative"),
    *("reversal-dg", "reversal-fit", "reversal-frictions", "reversal-kondo"),
]
"""Whose pages show each claim in the words of its rule."""


@pytest.mark.parametrize("name", CLAIMED)
def test_verdicts_on_a_page_are_those_of_the_rules(name):
    text = pages.page_path(name, ROOT).read_text(encoding="utf-8")
    folder = ROOT / "results" / f"{name}-v{registry.find(name).version}"
    claims = result_folder.read(folder).claims
    assert claims
    for claim in claims:
        assert f"| {claim.statement} | {claim.verdict} |" in text


def of(name, *lines):
    """Lines of a study's tables, from lines of its headline."""
    page = importlib.import_module(f"kondo_lab.studies.{name.replace('-', '_')}.page")
    made = page.tables(headline(*lines), registry.find(name).settings("full", None))
    return "\n".join(made.values()).splitlines()


def test_a_row_of_the_rates_names_the_learning_rate_that_was_chosen():
    metric = "online error after 13,000,000 forward passes, learning rate 0.0003"
    fall = "online error at the end over that at two thirds of the steps"
    made = of(
        "mnist-kondo",
        ("Kondo Fig 2", "DG-K 1%", metric, 0.01, 0.004, 0.0001, "differs"),
        ("Kondo Fig 2", "DG-K 1%", fall, 0.01, 0.93, None, ""),
    )
    assert "| 1% | 0.0003 | .00400 ± .00010 **differs** | .005 | .930 |" in made


def test_rows_of_noise_signals_and_mixes():
    noise = "logit noise in the surprisal alone"
    made = of(
        "mnist-kondo",
        ("Kondo Fig 4b", f"DG, {noise}", "online error", 3, 0.0229, 0.001, ""),
        ("Kondo Fig 4b", f"DG, {noise}", "noise at which the error is 1.25x", "", 2.5, None, ""),
        ("Kondo Fig 5a", "|advantage|", "online error", 0.1, 0.5, 0.1, ""),
        ("Kondo Fig 5b", "additive mix", "online error", 0.3, 0.06, 0.01, ""),
    )
    (row,) = (line for line in made if line.startswith(f"| DG, {noise} |"))
    assert [cell.strip() for cell in row.split("|") if "." in cell] == [".0229", "2.50"]
    assert "| \\|advantage\\| | | | .500 ± .10 | |" in made
    (mixes,) = (line for line in made if line.startswith("| online error |"))
    assert mixes.split("|")[5].strip() == ".0600"


def test_rows_of_mnist_dg_have_the_paper_beside_ours():
    made = of(
        "mnist-dg",
        ("DG Fig 2", "PG, zero baseline", "online error", 100, 0.3, 0.01, "matches"),
        ("DG Fig 3", "DG, oracle baseline", "online error at the end", 3, 0.0171, 0.0003, ""),
        ("DG Fig 4b", "PG S=100", "1 - cosine to the cross-entropy gradient", 1000, 0.8, 0.07, ""),
        ("DG App B", "PG", "online error by width", 16, 0.2, 0.01, ""),
        ("DG App B", "DG", "online error by width", 16, 0.1, 0.01, ""),
        ("DG App B", "DG < PG", "order of online error by width", 16, 1.0, None, "matches"),
        ("DG App B", "DG", "online error by eta", 0.3, 0.02, 0.001, ""),
    )
    assert made[2].startswith("| PG, zero baseline | .308 / .300 ± .010 | |")
    assert "| oracle | DG | | .0157 / .0171 ± .00030 | | | |" in made
    assert "| PG S=100 | .520 / .800 ± .070 | | | | |" in made
    assert "| width | 16 | .200 ± .010 | .100 ± .010 | matches |" in made
    assert "| temperature eta | 0.3 | | .0200 ± .0010 | |" in made


def test_rows_of_mnist_stale_have_the_factors():
    metric = "learner error, the oldest parameters, by delay"
    figure = "Distributed, MNIST with staleness"
    made = of(
        "mnist-stale",
        (figure, "DG", metric, 1000, 0.0165, 0.0006, "differs"),
        (figure, "IS-PG cap 10 / DG", metric, 1000, 3.85, None, ""),
    )
    assert "| 1000 | | | | | .0165 ± .00060 **differs** | | | 3.85 |" in made


def test_rows_of_speculative_tell_how_many_seeds_arrived():
    place = ("beyond the paper", "8 bits")
    cost = "counted cost to 5% test error, c = 2"
    table = headline(
        (*place, "kept agreement over training", 0.03, 0.988, 0.001, ""),
        (*place, "test error at the end", 0.03, 0.0304, 0.0007, ""),
        (*place, cost, 0.03, 72236.6, None, ""),
    )
    page = importlib.import_module("kondo_lab.studies.speculative.page")
    settings = registry.find("speculative").settings("full", None)
    for reached, told in ((10, "72,200"), (7, "72,200 (7 of 10 seeds)")):
        made = page.tables(table.assign(seeds=reached), settings)["screens"].splitlines()
        assert f"| 8 bits | .988 | .0304 ± .00070 | {told} | | | |" in made


def judged():
    """Lines with numbers that are judged, that are not, and an order."""
    rows = [
        ("Fig 1", "PG", "error", 100, 0.2, 0.21, 0.01, 3, "paper", "matches"),
        ("Fig 1", "PG", "error", 1e6, None, 0.1, None, 1, "", ""),
        ("Fig 1", "DG", "error", 1e6, 0.01, 0.5, 0.02, 3, "paper", "differs"),
        ("Fig 1", "DG", "passes", 7, 65_500.0, 61_450.0, 1_669.0, 3, "paper", "noisy"),
        ("Fig 2", "DG", "slope", "", None, 1.25, None, 3, "", ""),
        ("Fig 2", "DG < PG", "order of slope", "", 1.0, 1.0, None, 3, "paper", "matches"),
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def test_a_table_by_x_has_a_column_for_each_series_and_the_papers_number_in_its_cell():
    assert page_tables.by_x(judged(), "Fig 1", "error", "step").splitlines() == [
        "| step | PG | DG |",
        "|---|---|---|",
        "| 100 | .210 ± .010 (paper .200) | |",
        "| 1,000,000 | .100 | .500 ± .020 (paper .0100, **differs**) |",
    ]


def test_a_table_by_series_has_a_row_for_each_number():
    assert page_tables.by_series(judged(), "Fig 1", "passes", "step").splitlines()[2:] == [
        "| DG | 7 | 65,500 | 61,400 ± 1,700 | 3 | noisy |"
    ]
    assert page_tables.by_series(judged(), "Fig 1", "error", "step").splitlines()[2:] == [
        "| PG | 100 | .200 | .210 ± .010 | 3 | matches |",
        "| PG | 1,000,000 | | .100 | 1 | |",
        "| DG | 1,000,000 | .0100 | .500 ± .020 | 3 | **differs** |",
    ]


def test_a_table_by_metric_leaves_orders_out_and_they_have_their_own():
    assert page_tables.by_metric(judged(), "Fig 2", "what").splitlines() == [
        "| what | DG |",
        "|---|---|",
        "| slope | 1.25 |",
    ]
    made = page_tables.orders(judged()).splitlines()[2:]
    assert made == ["| Fig 2 | slope | DG < PG | 3 | matches |"]


def test_rows_of_reversal_kondo_have_every_cost_of_a_backward():
    speed, passes = "speed-up over PG to 25% error, H=10, M=4", "backward passes at the end"
    made = of(
        "reversal-kondo",
        ("Kondo Fig 8", "DG-K 3%", passes, "", 25957, 1435, ""),
        ("Kondo section 5", "DG", speed, 0, 1.5, None, ""),
        ("Kondo section 5", "DG", speed, 2, 1.25, None, ""),
        ("Kondo section 5", "DG", "online error at the end, H=10, by M", 4, 0.002, None, ""),
    )
    assert "| DG-K 3% | 26,000 ± 1,400 | 30 |" in made
    assert "| task | series | c = 0 | c = 2 |" in made
    assert "| H=10, M=4 | DG | 1.50 | 1.25 |" in made
    assert "| 4 | .00200 |" in made


def test_what_was_not_run_has_no_tables(tmp_path):
    with pytest.raises(ValueError, match=r"run: kondo run speculative --out .*speculative-v"):
        pages.made("speculative", tmp_path)


def test_the_command_fills_the_page_of_the_newest_version(tmp_path, monkeypatch, capsys):
    version = registry.find("speculative").version
    results = tmp_path / "results" / f"speculative-v{version}"
    docs = tmp_path / "docs" / "results" / "studies"
    results.mkdir(parents=True)
    docs.mkdir(parents=True)
    line = ("beyond the paper", "exact", "test error at the end", 0.1, 0.0339, 0.0011, "")
    headline(line).to_csv(results / "headline.csv", index=False)
    path = docs / "speculative.md"
    path.write_text(
        "# page\n<!-- table screens -->\ngone\n<!-- end of table -->\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    pages.main(["speculative"])
    text = path.read_text(encoding="utf-8")
    assert "| exact | | | | | .0339 ± .0011 | |" in text
    assert "gone" not in text
    assert "speculative.md" in capsys.readouterr().out
