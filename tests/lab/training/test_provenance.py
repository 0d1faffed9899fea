import json
import platform
import shutil
import subprocess

import pytest
import torch

import kondo
from kondo_lab.training import provenance


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
