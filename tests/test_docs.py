"""The documents tell the truth: code runs, links lead somewhere, every name is there."""

import csv
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import kondo

ROOT = Path(__file__).parent.parent
PLACES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "lab/*.md")
PAGES = sorted(path for place in PLACES for path in ROOT.glob(place))
# Names of versions 0.1 and 0.2, which CHANGELOG.md alone may use.
FORMER = (
    r"kondo\.lm\.guard\b|\bGuarded\b|[Pp]rechosen|StreamedUnbiasedGate|engine\.(modules|watch|rows)\b|"
    r"rank_peers|\bcore[./](rules|contract)\b|"
    r"kondo\.priorities|GateOutput\b(?<!KondoGateOutput)|relative_temperature|\bpriority=|"
    r"kondo\.distributed|distributed\.md|kondo\.lm\.backward|kondo\.ranks\.backward|"
    r"kondo\.lab\b|src/kondo/lab|\[lab\]|screen=torch\.zeros"
)


def name(path):
    return str(path.relative_to(ROOT))


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("path", [p for p in PAGES if python_blocks(p)], ids=name)
def test_code_runs(path):
    """All Python blocks of a page, one after another, as a reader would type them."""
    code = "\n".join(python_blocks(path))
    exec(compile(code, name(path), "exec"), {"__name__": "__main__"})


def anchors(path):
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_resolve(path):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if not re.match(r"https?://", target):
            page = path.parent / target if target else path
            assert page.exists(), f"{name(path)} links to {target}"
            assert not anchor or anchor in anchors(page), f"{name(path)} links to {target}#{anchor}"


def test_every_public_name_is_documented():
    text = (ROOT / "docs/api/index.md").read_text()
    missing = [symbol for symbol in kondo.__all__ if f"kondo.{symbol}" not in text]
    assert missing == []


def functions_of(module):
    """Functions that a module or package exports, or defines if it does not say."""
    found = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    own = [name for name, value in found.items() if value.__module__ == module.__name__]
    exported = getattr(module, "__all__", [name for name in own if name[0] != "_"])
    return [name for name in exported if name in found]


def test_every_function_of_the_public_modules_is_documented():
    text = (ROOT / "docs/api/index.md").read_text()
    for module in (kondo.advantage, kondo.signals, kondo.losses):
        own = functions_of(module)
        assert own
        assert [symbol for symbol in own if f"`{symbol}`" not in text] == []


def test_every_option_is_documented():
    text = (ROOT / "docs/concepts/step.md").read_text()
    options = [field.name for field in dataclasses.fields(kondo.Options) if field.init]
    assert [option for option in options if f"| `{option}`" not in text] == []


def test_every_member_of_a_gate_is_documented():
    text = (ROOT / "docs/concepts/gates.md").read_text()
    members = [member for member in vars(kondo.BaseGate) if member[0] != "_"]
    assert "choose" in members
    assert [member for member in members if f"`{member}`" not in text] == []
    assert [field for field in kondo.Choice._fields if f"`{field}`" not in text] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.md")), ids=name)
def test_a_page_begins_with_what_it_is_for(path):
    title, first = path.read_text().split("\n\n")[:2]
    assert re.fullmatch(r"# [^\n]+", title)
    assert re.match(r"[A-Z`]|\*\*", first), (
        f"{name(path)} must begin with a paragraph, not {first!r}"
    )


# Line of the table -> file, model and rows in it.
SPEEDS = {
    "Qwen2-0.5B shape, 1024 x": ("results/lm-step-v1/qwen2-0.5b-large.csv", "qwen2-0.5b", "1024"),
    "Qwen2-0.5B shape, 128 x": ("results/lm-step-v1/qwen2-0.5b-128.csv", "qwen2-0.5b", "128"),
    "GPT-2 medium, 256 x": ("benchmarks/data/step_cuda.csv", "larger", "256"),
    "GPT-2 shape, 6 layers": ("benchmarks/data/step_cpu.csv", "larger", "64"),
    "GPT-2 shape, 4 layers": ("benchmarks/data/step_cpu.csv", "gpt2", "64"),
    "MLP": ("benchmarks/data/step_cpu.csv", "mlp", "4096"),
}


@pytest.mark.parametrize("line", SPEEDS)
def test_the_table_of_speeds_is_that_of_the_files(line):
    place, model, rows = SPEEDS[line]
    with (ROOT / place).open() as file:
        found = {
            record["contender"]: [float(record[f"speedup_p{share}"]) for share in (20, 50, 80)]
            for record in csv.DictReader(file)
            if (record["model"], record["rows"], record["rate"]) == (model, rows, "0.03")
        }
    table = (ROOT / "docs/results/performance.md").read_text()
    (shown,) = re.findall(rf"^\| {re.escape(line)}[^|]*\|(.*)\|$", table, flags=re.M)
    for contender, cell in zip(
        ("kondo-gate-0.1.0", "exact", "free"), shown.split("|"), strict=True
    ):
        numbers = re.findall(r"[\d.]+", cell)
        assert (numbers == []) == (contender not in found)
        for number, true in zip(numbers, found.get(contender, []), strict=True):
            assert number == f"{true:.{len(number.partition('.')[2])}f}"


def lines_of(folder, file="headline.csv"):
    with (ROOT / "results" / folder / file).open() as opened:
        return list(csv.DictReader(opened))


def number_of(folder, series, metric, x):
    """The mean and standard error of a line of headline.csv."""
    (found,) = [
        line
        for line in lines_of(folder)
        if (line["series"], line["metric"], line["x"]) == (series, metric, x)
    ]
    return float(found["ours"]), float(found["se"])


def text_of(page):
    """A page as one line."""
    return " ".join((ROOT / page).read_text().split())


FILTER_PAGES = (
    "docs/results/studies/lm-rl-v1.md",
    "docs/results/studies/lm-rl.md",
    "docs/results/language-models.md",
)


@pytest.mark.parametrize("page", FILTER_PAGES)
@pytest.mark.parametrize("model", ["25m", "85m"])
@pytest.mark.parametrize("axis", ["learner", "loop"])
def test_the_measurement_of_the_filter_is_that_of_version_1(page, model, axis):
    metric = f"{axis} seconds to 0.88, speed-up over GRPO plain"
    ours, se = number_of(
        "lm-rl-v1", "zero-advantage filter", metric, f"sorting-3-{model}, by the clock"
    )
    assert f"{ours:.2f} ± {se:.2f}x" in text_of(page)


def test_a_short_page_has_the_learner_times_of_the_filter():
    text = text_of("docs/concepts/cost.md")
    assert "1.05x at 25M" in text  # both are in the test above
    assert "1.32 ± 0.06x at 85M" in text


@pytest.mark.parametrize("axis", ["loop", "learner"])
def test_the_front_page_has_the_gate_against_the_strongest_baseline(axis):
    with (ROOT / "results/lm-rl-v2/baselines-verdicts.csv").open() as file:
        (line,) = (
            each
            for each in csv.DictReader(file)
            if (each["model"], each["role"], each["factor"]) == ("300m", "claim", "1")
            and each["axis"] == f"{axis} seconds"
        )
    found = re.search(rf"([\d.]+)x in the {axis} \(\**(\w+)", text_of("README.md"))
    assert found is not None
    assert (float(found[1]), found[2]) == (round(float(line["ratio"]), 2), line["verdict"])


SAVING = r"3\.53 (± 0\.14x|times)|1\.77 (± 0\.07|times)|times sooner in"
"""What lm-rl's largest model saved in the learner and in the loop."""


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name != "CHANGELOG.md" and re.search(SAVING, text_of(path))],
    ids=name,
)
def test_a_saving_in_training_stands_beside_what_it_is_against(path):
    text = text_of(path)
    assert "rows of advantage 0" in text
    assert "58%" in text
    assert "generation" in text.lower()


def test_the_claims_of_lm_rl_are_those_of_its_file():
    page = (ROOT / "docs/results/studies/lm-rl.md").read_text()
    table = page.split("## Claims")[1].split("\n\n")[1]
    shown = re.findall(r"\| \*\*(\w+)\*\* \|$", table, flags=re.M)
    verdicts = [line["verdict"] for line in lines_of("lm-rl-v2", "claims.csv")]
    assert sorted(shown) == sorted(verdicts)
    assert len(table.splitlines()) == 2 + len(verdicts)


def test_frontier_repeats_the_number_of_mnist_kondo():
    lines = lines_of("mnist-kondo-v2")
    (found,) = [
        line
        for line in lines
        if (line["figure"], line["series"], line["x"]) == ("Kondo Fig 1", "PG", "1e+06")
        and line["metric"] == "online error"
    ]
    told = f"{float(found['ours']):.4f} ± {float(found['se']):.4f}".replace("0.", ".")
    assert f"30 seeds in mnist-kondo give {told};" in text_of("docs/results/studies/frontier.md")


def test_the_changelog_counts_verdicts_as_the_page_of_the_papers_does():
    counts = re.search(
        r"(\d+) match the papers, (\d+) are too noisy to tell and (\d+) differ",
        text_of("docs/results/papers.md"),
    )
    assert "{} match, {} are too noisy to tell, {} differ (".format(*counts.groups()) in text_of(
        "CHANGELOG.md"
    )


def test_the_demo_page_has_no_error_that_its_run_does_not_have():
    """Errors as "mean ± standard error" are those of headline.csv, in percent."""
    known = {
        f"{100 * float(line['ours']):.3g} ± {100 * float(line['se'] or 0):.3g}"
        for line in lines_of("demo-v2")
        if "error" in line["metric"]
    }
    told = re.findall(r"(\d+\.\d+) ± (\d+\.\d+)", text_of("docs/get-started/demo.md"))
    assert told
    for mean, se in told:
        assert any(
            abs(float(mean) - float(own.split()[0])) < 0.06
            and abs(float(se) - float(own.split()[2])) < 0.06
            for own in known
        ), (mean, se)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_no_page_uses_a_former_name(path):
    if path.name != "CHANGELOG.md":
        assert re.findall(FORMER, path.read_text()) == []


def test_the_changelog_and_the_citation_name_this_version():
    assert f"\n## [{kondo.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {kondo.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_citation_names_the_three_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert all(paper in text for paper in ("2603.20526", "2603.14608", "2603.20521"))
