"""Where results come from: the manifest, its environment and commit."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import kondo
from kondo.run_files import atomically
from kondo_lab.training.worker_pool import usable_cores


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write what made the results, as JSON."""
    with atomically(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return versions, device and commit."""
    kind = torch.device(device).type
    return {
        "kondo": kondo.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "scikit-learn", "matplotlib")},
        "platform": platform.system() + " " + platform.machine(),
        "device": kind,
        "processor": _processor(),
        "cores": usable_cores(),
        **(_gpu(device) if kind == "cuda" else {}),
    }


def commit() -> str | None:
    """Return the commit this package was run from, "+changes" added if files differ from it.

    None where the package is not itself under version control: an installed copy may lie inside
    some other project's repository, whose commit would say nothing. The environment variable
    KONDO_COMMIT tells it where files were copied without their history, as into a container.
    """
    if told := os.environ.get("KONDO_COMMIT"):
        return told
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parent, "status", "--porcelain", "--", str(here.parent.parent))
    return f"{head}+changes" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str:
    # An installed torch tells its build (such as +cpu) only by itself.
    return torch.__version__ if name == "torch" else importlib.metadata.version(name)


def _gpu(device: torch.device | str) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    memory = round(found.total_memory / 2**30)
    return {"gpu": found.name, "gpu_memory_gib": memory, "cuda": torch.version.cuda}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
