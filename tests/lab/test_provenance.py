import csv
import json
import platform
import shutil
import subprocess

import pytest
import torch

import kondo
from kondo_lab import provenance
from kondo_lab.summary import curve
from lab.examples import comparison


def test_a_new_folder_is_made(tmp_path):
    wanted = tmp_path / "a" / "demo"
    assert provenance.claim_folder(wanted) == wanted
    assert wanted.is_dir()


@pytest.mark.parametrize("name", provenance.FILES)
def test_a_folder_with_results_is_left_alone(tmp_path, name):
    wanted = tmp_path / "demo"
    wanted.mkdir()
    (wanted / name).write_text("old")
    assert provenance.claim_folder(wanted) == tmp_path / "demo-2"
    assert provenance.claim_folder(wanted) == tmp_path / "demo-3"
    assert (wanted / name).read_text() == "old"


def test_a_folder_with_other_things_is_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert provenance.claim_folder(tmp_path) == tmp_path


def test_the_current_folder_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first, second = (provenance.claim_folder(provenance.Path(".")) for _ in range(2))
    assert (first, second) == (tmp_path / "here", tmp_path / "here-2")


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        provenance.claim_folder(tmp_path / "demo")


def test_a_released_folder_is_gone_unless_something_else_is_in_it(tmp_path):
    provenance.release_folder(provenance.claim_folder(tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()
    (tmp_path / "notes.txt").write_text("mine")
    provenance.release_folder(provenance.claim_folder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_curves_hold_every_point_of_every_run(tmp_path):
    results = comparison()
    provenance.write_curves(tmp_path / "curves.csv", results)
    with (tmp_path / "curves.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 12 * 40
    last = [line for line in lines if line["method"] == "DG-K (3%)" and line["seed"] == "1"][39]
    assert (last["task"], last["samples"], last["backward_passes"]) == ("digits", "4000", "120")
    expected = curve(results[5].records)[-1]
    assert float(last["error"]) == pytest.approx(expected.error)
    assert float(last["learner_seconds"]) == pytest.approx(expected.learner_seconds)


def test_manifest_is_json(tmp_path):
    provenance.write_manifest(tmp_path / "manifest.json", {"a": [1, None]})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"a": [1, None]}


def test_environment_names_versions_and_device():
    found = provenance.environment()
    assert found["kondo"] == kondo.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["cores"] >= 1
    assert {"numpy", "scikit-learn", "matplotlib", "processor", "commit", "device"} <= found.keys()


def test_environment_names_the_gpu(monkeypatch):
    class Properties:
        name = "A GPU"
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert "gpu" not in provenance.environment("cpu")
    found = provenance.environment("cuda")
    assert (found["device"], found["gpu"], found["gpu_memory_gib"]) == ("cuda", "A GPU", 80)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_commit_is_that_of_the_package_and_says_when_files_differ(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "package" / "lab" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("first")
    git("init", "-q")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance.commit() is None  # inside a repository, but not part of it
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert provenance.commit() == git("rev-parse", "HEAD")
    source.write_text("second")
    assert provenance.commit() == git("rev-parse", "HEAD") + "+changes"


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("KONDO_COMMIT", "abc123")

    assert provenance.commit() == "abc123"
