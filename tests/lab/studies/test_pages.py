"""Tables of pages come from result folders."""

from pathlib import Path

import pandas as pd
import pytest

from kondo_lab.studies import pages

ROOT = Path(__file__).parents[3]
FILLED = {
    "reversal-dg": "reversal-dg-v2",
    "reversal-fit": "reversal-fit-v1",
    "reversal-kondo": "reversal-kondo-v2",
}
"""Study with marks in its page -> result folder they are filled from."""


@pytest.mark.parametrize("study", FILLED)
def test_a_page_has_the_tables_of_the_committed_headline(study):
    folder = ROOT / "results" / FILLED[study]
    text = (ROOT / f"docs/results/studies/{study}.md").read_text(encoding="utf-8")
    if not folder.exists():
        assert "Not run yet." in text
        return
    assert pages.filled(text, pages.made(study, folder)) == text


def test_marks_and_tables_must_be_the_same():
    text = (
        "<!-- table: a -->\n<!-- end of table -->\nthen\n"
        "<!-- table: b -->\n1\n<!-- end of table -->"
    )
    filled = pages.filled(text, {"a": "| x |", "b": "| y |"})
    assert filled == (
        "<!-- table: a -->\n| x |\n<!-- end of table -->\nthen\n"
        "<!-- table: b -->\n| y |\n<!-- end of table -->"
    )
    with pytest.raises(ValueError, match=r"tables must be those the page marks, \['a', 'b'\]"):
        pages.filled(text, {"a": "| x |"})


def lines():
    """A headline with numbers that are judged, that are not, and an order."""
    columns = ("figure", "series", "metric", "x", "expected", "ours", "se", "seeds", "verdict")
    rows = [
        ("Fig 1", "PG", "error", 100.0, 0.2, 0.21, 0.01, 3, "matches"),
        ("Fig 1", "PG", "error", 1e6, None, 0.1, None, 1, None),
        ("Fig 1", "DG", "error", 1e6, 0.01, 0.5, 0.02, 3, "differs"),
        ("Fig 1", "DG", "passes", 7.0, 65_500.0, 61_450.0, 1_669.0, 3, "noisy"),
        ("Fig 2", "DG", "slope", None, None, 1.25, None, 3, None),
        ("Fig 2", "DG < PG", "order of slope", None, 1.0, 1.0, None, 3, "matches"),
    ]
    return pd.DataFrame(rows, columns=columns)


def test_a_table_by_x_has_a_column_for_each_series_and_the_papers_number_in_its_cell():
    assert pages.by_x(lines(), "Fig 1", "error", "step").splitlines() == [
        "| step | PG | DG |",
        "|---|---|---|",
        "| 100 | 0.21 ± 0.01 (paper 0.2) | |",
        "| 1,000,000 | 0.1 | 0.5 ± 0.02 (paper 0.01, **differs**) |",
    ]


def test_a_table_by_series_has_a_row_for_each_number():
    assert pages.by_series(lines(), "Fig 1", "passes", "step").splitlines()[2:] == [
        "| DG | 7 | 65,500 | 61,450 ± 1,669 | 3 | noisy |"
    ]


def test_a_table_by_metric_leaves_orders_out_and_they_have_their_own():
    assert pages.by_metric(lines(), "Fig 2", "what").splitlines() == [
        "| what | DG |",
        "|---|---|",
        "| slope | 1.25 |",
    ]
    assert pages.orders(lines()).splitlines()[2:] == ["| Fig 2 | slope | DG < PG | 3 | matches |"]
