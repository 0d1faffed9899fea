import io
import math

from rich.console import Console

from kondo_lab.evidence import table
from kondo_lab.evidence.study import Claim, Estimate, headline
from lab.studies import toy

WIDTH = 100
MET = {"met": 1, "missed": 0, "open": 0}


def printed(content):
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(content)
    return console.file.getvalue()


def test_the_headline_fits_and_loses_no_number():
    lines = [
        headline(
            "Kondo Fig 2 and more of it",
            "DG-K 3% [soft], a name as long as they come",
            "speed-up to 5% test error at cost ratio 4",
            1_000_000,
            Estimate(0.0241987, 0.000678, 30),
            expected=0.0236123,
        ),
        headline("Fig 3", "PG", "error", "all", math.nan),
    ]
    text = printed(table.headline(lines))
    assert max(map(len, text.splitlines())) <= 100
    assert "1e+06   0.02361  0.0242 ±0.00068     30  matches" in text
    assert "[soft]" in text
    assert text.splitlines()[-1].split() == ["Fig", "3", "PG", "error", "all", "-", "-", "1"]


def test_a_verdict_says_whose_number_it_is_about():
    formula = headline("Prop 1", "PG", "c", "", 1.0, expected=1.0, against="formula")
    paper = headline("Fig 1", "PG", "c", "", 1.0, expected=1.0)
    rows = printed(table.headline([formula, paper])).splitlines()[-2:]
    assert [row.split("1  ")[-1].strip() for row in rows] == ["matches (formula)", "matches"]


def test_numbers_without_a_paper_stand_side_by_side():
    lines = [
        headline("digits", "PG [dense]", "error", 300_000, Estimate(0.1074, 0.0055, 2)),
        headline("digits", "PG [dense]", "passes", 300_000, Estimate(9000.0, seeds=2)),
        headline("reversal", "PG [dense]", "passes", 60_000, Estimate(1800.0, seeds=2)),
    ]
    text = printed(table.headline(lines))
    rows = [line.split() for line in text.splitlines() if "PG" in line]
    assert rows == [
        ["digits", "PG", "[dense]", "300,000", "0.1074", "±0.0055", "9000"],
        ["reversal", "PG", "[dense]", "60,000", "-", "1800"],
    ]
    many = [headline("a", "PG", f"metric {i}", "", 1.0) for i in range(7)]
    assert "verdict" in printed(table.headline(many))
    assert "verdict" not in printed(table.headline(many[:6]))


def test_studies_are_listed_with_paper_and_claim():
    text = printed(table.studies([toy.study(paper="Fig [1]")], {"toy": {"toy": MET}}, full=True))
    assert text.splitlines()[-1].split() == [
        "toy",
        "Fig",
        "[1]",
        "Counting",
        "works.",
        "1",
        "0",
        "0",
    ]
    without = printed(table.studies([toy.study(title="A [toy]")], {}, full=False))
    assert without.splitlines()[-1].split() == ["toy", "A", "[toy]", "-", "-", "-"]


def test_claims_are_told_with_their_verdict_and_numbers():
    several = [Claim("DG [all] ends first", "missed", "0.1 and 0.2"), Claim("b", "open", "")]
    rows = printed(table.claims(several)).splitlines()[-2:]
    assert rows[0].split() == ["missed", *["DG", "[all]", "ends", "first", "0.1", "and", "0.2"]]
    assert rows[1].split() == ["open", "b"]


def test_the_claim_gets_most_of_the_width():
    text = printed(
        table.studies([toy.study(paper="Figures " * 20, claim="It works. " * 20)], {}, full=True)
    )
    assert text.splitlines()[0].index("claim") < 40
