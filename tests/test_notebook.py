"""The notebook of the first hour runs from top to bottom, and what it shows is of such a run."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "get-started" / "first-hour.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook after a run, in a real kernel and an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    return nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources=folder
    ).execute()


def printed(notebook) -> str:
    """What all cells print."""
    return "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    )


def test_what_it_says_of_the_gate_holds(executed):
    told = printed(executed)
    assert "dense differentiates 100 rows, the gate 3" in told
    assert float(re.search(r"largest difference: (\S+)", told)[1]) < 1e-6
    errors = dict(re.findall(r"^(\S.*?) +error (\S+) ", told, flags=re.M))
    passes = dict(re.findall(r"^(\S.*?) +error .* passes (\S+)$", told, flags=re.M))
    assert set(errors) == {"PG", "DG", "DG-K 3%", "unbiased 10%"}
    assert all(float(error) < 0.4 for error in errors.values())  # by chance 0.9
    assert (passes["PG"], passes["DG-K 3%"]) == ("150,000", "4,500")
    one, mean = (float(re.search(rf"{name}: +(\S+)", told)[1]) for name in ("draw", "draws"))
    assert mean < one / 5
    assert "recommended:" in told
    assert "6 of 64 rows, 150 tokens" in told


def test_what_is_committed_is_a_run_without_warnings_or_paths():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    names = {output.get("name") for cell in cells for output in cell.outputs}
    assert "stderr" not in names
    assert not re.search(r"/(home|root|work|tmp|Users)/", printed(notebook))
    assert NOTEBOOK.stat().st_size < 200_000
