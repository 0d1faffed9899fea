import dataclasses
import gzip
import json
import math

import pytest

from kondo.run_files import DamagedFileError
from kondo_lab.evidence import records, statistics
from kondo_lab.evidence.study import FrontierPoint, Headline
from kondo_lab.training import provenance
from kondo_lab.training.record import Run

ABOUT = {"study": "toy", "device": "cpu", "commit": None}


def row(value=0.123456789, **changes):
    return {"step": 10, "rollouts": 1000, "passes": 30, "error": value} | changes


def run(*rows, **changes):
    fields = {"part": "a", "arm": "PG", "seed": 0, "curve": list(rows) or [row()], "about": ABOUT}
    return Run(**fields | changes)


def written(path):
    """Return the lines of a file as any other program reads them."""
    strict = {"parse_constant": lambda text: pytest.fail(f"{text} is not JSON")}
    text = gzip.decompress(path.read_bytes()).decode()
    return [json.loads(line, **strict) for line in text.splitlines()]


def test_a_run_is_one_json_line(tmp_path):
    made = run(row(), row(step=20, more=2.0), x=0.5, learning_rate=1e-3, task="digits bandit")
    records.write(tmp_path / "a.gz", [made])
    assert written(tmp_path / "a.gz") == [
        {
            **{"study": "toy", "part": "a", "arm": "PG", "x": 0.5, "k": 1, "learning_rate": 0.001},
            **{"seed": 0, "task": "digits bandit", "device": "cpu", "commit": None},
            "curve": [
                {"step": 10, "rollouts": 1000, "passes": 30, "error": 0.123457},
                {"step": 20, "rollouts": 1000, "passes": 30, "error": 0.123457, "more": 2},
            ],
        }
    ]
    assert list(written(tmp_path / "a.gz")[0]) == list(records.KEYS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "null"),
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        (1 / 3, "0.333333"),
        (1e-12, "1e-12"),
        (1234567.0, "1234570"),
        (2.0, "2"),
        (-3.0, "-3"),
        (0.0, "0"),
        (-0.0, "-0.0"),
        (1e300, "1e+300"),
        (True, "1"),
    ],
)
def test_numbers_are_strict_json_and_come_back_exactly(tmp_path, value, text):
    path = tmp_path / "a.gz"
    records.write(path, [run(row(value), x=float(value), learning_rate=1 / 3)])
    written(path)
    line = gzip.decompress(path.read_bytes()).decode()
    assert f'"x": {text},' in line
    assert f'"error": {text}}}' in line
    (back,) = records.read(path)
    for number in (back.x, back.curve[0]["error"]):
        assert math.isnan(number) if value != value else number == float(f"{value:.6g}")
        assert math.copysign(1, number) == math.copysign(1, value) or value != value
    assert back.learning_rate == 1 / 3  # not rounded
    records.write(tmp_path / "b.gz", [back])
    assert (tmp_path / "b.gz").read_bytes() == path.read_bytes()


def test_a_table_has_a_line_for_each_number_with_its_type(tmp_path):
    odd = [run(), run(arm="None"), run(row(math.nan), arm="", x=-0.03)]
    odd += [run(row(math.inf, rollouts=12_345_678_901), arm='a "b", c')]
    records.write(tmp_path / "a.gz", odd)
    for runs in (odd, records.read(tmp_path / "a.gz")):
        table = records.table(runs)
        assert {name: str(dtype) for name, dtype in table.dtypes.items()} == {
            name: "str" if dtype is str else dtype for name, dtype in records.DTYPES.items()
        }
        assert list(table["series"]) == ["PG", "None", "", 'a "b", c']
        assert math.isnan(table["value"][2])
        assert table["value"][3] == math.inf
        assert math.isnan(table["setting"][0])
        assert table["setting"][2] == -0.03
        assert table["forward"][3] == 12_345_678_901
    assert table["value"][0] == 0.123457


def test_a_table_tells_runs_of_an_arm_that_follow_one_another_step_by_step():
    rows = row(1.0), row(2.0, step=20)
    runs = [run(*rows), run(*rows, seed=1), run(*rows, arm="DG"), run(*rows, seed=2)]
    table = records.table(runs)
    assert table[["series", "seed", "step"]].to_numpy().tolist() == [
        *(["PG", 0, 10], ["PG", 1, 10], ["PG", 0, 20], ["PG", 1, 20]),
        *(["DG", 0, 10], ["DG", 0, 20], ["PG", 2, 10], ["PG", 2, 20]),
    ]


def test_the_same_runs_give_the_same_bytes_again_and_again(tmp_path):
    records.write(tmp_path / "first.gz", [run(), run(row(1 / 3), seed=1)])
    records.write(tmp_path / "second.gz", records.read(tmp_path / "first.gz"))
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()
    assert (tmp_path / "first.gz").read_bytes()[4:8] == bytes(4)  # no time in it


def test_what_else_a_line_says_is_kept(tmp_path):
    told = ABOUT | {"model": "85m", "rows": 2048, "role": None}
    records.write(tmp_path / "a.gz", [run(about=told)])
    (back,) = records.read(tmp_path / "a.gz")
    assert back.about == told

    assert list(written(tmp_path / "a.gz")[0])[-4:] == ["model", "rows", "role", "curve"]


def test_lines_are_added_to_what_a_file_has(tmp_path):
    path = tmp_path / "a.gz"
    for seed in (0, 1):
        records.add(path, [records.line(run(row(math.inf), seed=seed)) | {"role": "tuning"}])
    found = records.lines(path)
    assert [(each["seed"], each["role"]) for each in found] == [(0, "tuning"), (1, "tuning")]
    assert found[0]["curve"] == [row(math.inf)]
    assert [each.seed for each in records.read(path)] == [0, 1]


def test_lines_of_other_measurements_need_not_be_whole_runs(tmp_path):
    path = tmp_path / "a.gz"
    records.add(path, [{"arm": "seconds", "curve": [{"policy": "start", "seconds": 0.5}]}])
    assert records.lines(path)[0]["curve"] == [{"policy": "start", "seconds": 0.5}]
    with pytest.raises(DamagedFileError, match=r"a\.gz is damaged \(line 1: lacks study, part, x,"):
        records.read(path)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "part 'a' must give at least one run"),
        ([run(part="b")], r"must name it as their part, got \['b'\]"),
        ([run(), run(row(2.0))], "arm, x or seed, .*got 1 repeated, first arm PG, x nan, seed 0"),
        ([run(x=0.0), run(x=-0.0)], "got 1 repeated, first arm PG, x 0, seed 0"),
        ([run(x=0.5), run(x=0.5000000001)], "got 1 repeated, first arm PG, x 0.5, seed 0"),
        ([run(row(), row(2.0))], "got repeated rows, first arm PG, .* step 10, metric error"),
        ([run(row(rollouts=10.5))], "rollouts must be whole"),
        ([run(row(step=math.nan))], "step must be whole"),
        ([run(seed=0.5)], "seed must be whole"),
        ([run({"step": 1, "rollouts": 0, "passes": 0})], "must have a metric, got none of 'PG'"),
    ],
)
def test_bad_runs_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        records.checked(made, part="a")


def test_runs_of_no_study_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="about of every run must have study, device, commit"):
        records.write(tmp_path / "a.gz", [dataclasses.replace(run(), about={})])
    assert list(tmp_path.iterdir()) == []


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
    made = [run(row(float(seed), rollouts=10 * seed), seed=seed) for seed in (1, 2, 3)]
    records.write_table(tmp_path / "curves.csv.gz", statistics.over_seeds(records.table(made)))
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


def test_runs_of_several_parts_keep_their_order(tmp_path):
    records.write(tmp_path / "all.gz", [run(part=part) for part in ("z", "a")])
    assert list(records.table(records.read(tmp_path / "all.gz"))["part"]) == ["z", "a"]
