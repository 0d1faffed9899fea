import gzip
import math

import pandas as pd
import pytest

from kondo_lab.evidence import records, statistics
from kondo_lab.evidence.study import FrontierPoint, Headline
from kondo_lab.training import provenance
from kondo_lab.training.part import Record


def record(**changes):
    plain = Record("a", "PG", math.nan, 0, 10, 1000, 30, "error", 0.123456789)
    return plain._replace(**changes)


def test_a_table_has_the_fields_of_a_record_with_their_types():
    table = records.frame([record(), record(seed=1, setting=0.5)], part="a")
    assert list(table) == list(Record._fields)
    assert [str(table[name].dtype) for name in ("seed", "forward", "value", "setting")] == [
        "int64",
        "int64",
        "float64",
        "float64",
    ]
    assert len(table) == 2


def test_records_come_back_with_six_digits(tmp_path):
    odd = [record(), record(series="None"), record(series="", value=math.nan, setting=-0.03)]
    odd += [record(series='a "b", c', value=math.inf, forward=12_345_678_901)]
    records.write(tmp_path / "a.csv.gz", records.frame(odd, part="a"))
    table = records.read(tmp_path / "a.csv.gz")
    assert list(table["series"]) == ["PG", "None", "", 'a "b", c']
    assert table["value"][0] == 0.123457
    assert math.isnan(table["value"][2])
    assert table["value"][3] == math.inf
    assert math.isnan(table["setting"][0])
    assert table["setting"][2] == -0.03
    assert table["forward"][3] == 12_345_678_901
    assert {name: str(dtype) for name, dtype in table.dtypes.items() if name == "seed"} == {
        "seed": "int64"
    }


def test_the_same_records_give_the_same_bytes_again_and_again(tmp_path):
    table = records.frame([record(), record(seed=1, value=1 / 3)], part="a")
    records.write(tmp_path / "first.gz", table)
    records.write(tmp_path / "second.gz", records.read(tmp_path / "first.gz"))
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()
    header = gzip.decompress((tmp_path / "first.gz").read_bytes()).decode().splitlines()[0]
    assert header == "part,series,setting,seed,step,forward,backward,metric,value"
    assert (tmp_path / "first.gz").read_bytes()[4:8] == bytes(4)  # no time in it


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "part 'a' must give at least one record"),
        ([record(part="b")], r"must name it as their part, got \['b'\]"),
        ([record(), record(value=2.0)], "step or metric, got 1 repeated, first series PG"),
        ([record(forward=10.5)], "forward must be whole"),
    ],
)
def test_bad_records_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        records.frame(made, part="a")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")

    def write():
        with provenance.atomically(path) as partial:
            partial.write_text("ne")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write()
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
    assert path.read_text() == "old"


def test_a_write_takes_the_place_of_the_old_file_at_its_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with provenance.atomically(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_curves_are_means_over_seeds(tmp_path):
    made = [record(seed=seed, value=float(seed), forward=10 * seed) for seed in (1, 2, 3)]
    table = statistics.over_seeds(records.frame(made, part="a"))
    records.write(tmp_path / "curves.csv.gz", table)
    assert gzip.decompress((tmp_path / "curves.csv.gz").read_bytes()).decode() == (
        "part,series,setting,step,metric,mean,se,seeds,forward,backward\n"
        "a,PG,,10,error,2,0.57735,3,20,30\n"
    )


def test_headline_and_frontier_leave_empty_what_there_is_none_of(tmp_path):
    lines = [Headline("Fig 1, left", "PG", "error", "", None, 0.12345678, None, 3, "", "")]
    records.write_rows(tmp_path / "headline.csv", Headline, lines)
    assert (tmp_path / "headline.csv").read_text() == (
        "figure,series,metric,x,expected,ours,se,seeds,against,verdict\n"
        '"Fig 1, left",PG,error,,,0.123457,,3,,\n'
    )
    points = [FrontierPoint("digits", "DG", math.nan, "5% error", math.nan, math.nan, 0, 3, 0.5)]
    records.write_rows(tmp_path / "frontier.csv", FrontierPoint, points)
    assert (tmp_path / "frontier.csv").read_text() == (
        "task,series,rate,target,forward,backward,reached,seeds,final_error\n"
        "digits,DG,,5% error,,,0,3,0.5\n"
    )


def test_a_table_of_several_parts_keeps_their_order(tmp_path):
    tables = [records.frame([record(part=part)], part=part) for part in ("z", "a")]
    records.write(tmp_path / "all.gz", pd.concat(tables, ignore_index=True))
    assert list(records.read(tmp_path / "all.gz")["part"]) == ["z", "a"]
