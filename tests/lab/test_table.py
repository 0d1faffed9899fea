import io

from rich.console import Console

from kondo_lab import table
from kondo_lab.summary import Estimate, summarise
from lab.examples import comparison


def printed(rows, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table.build(rows))
    return console.file.getvalue()


def test_every_row_and_number_is_printed_within_100_columns():
    rows = summarise(comparison(num_steps=4000))
    text = printed(rows, 100)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for row in rows:
        line = next(line for line in text.splitlines() if line.split()[0] == row.method.split()[0])
        assert all(cell in text for cell in table.cells(row))
        assert f"{row.speed_up:.2f}x" in line
    assert text.index("digits") < text.index("reversal")


def test_cells_of_a_gated_row():
    row = summarise(comparison())[2]
    assert dict(zip(table.HEADERS, table.cells(row), strict=True)) == {
        "method": "DG-K (3%)",
        # Steps 39 and 40 of 40 of a line from 0.9 to 0.2, and 0.01 more for the second seed.
        "final error %": "23.1 ±0.5",
        "test error %": "6.00 ±1.00",
        "samples seen": "4,000",
        "backward paid": "120",
        "sampling s": "40.0",
        "forward s": "10.00",
        "backward s": "10.00",
        "gate s": "20.00",
        "speed up": "6.00x",
    }


def test_a_dense_row_chooses_nothing():
    assert table.cells(summarise(comparison())[0])[-2] == "-"


def test_small_errors_get_more_digits_and_one_seed_no_error():
    assert table.percent(Estimate(0.1234, float("nan"))) == "12.3"
    assert table.percent(Estimate(0.00346, float("nan"))) == "0.35"


def test_every_column_is_explained():
    assert list(table.MEANINGS) == list(table.HEADERS[1:])
