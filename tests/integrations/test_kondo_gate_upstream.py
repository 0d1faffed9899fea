"""The original's own test file, from its source distribution, passes on our module.

The file is not in the repository: `make test` downloads the distribution into the environment.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kondo

PEER = Path(sys.prefix) / "peers" / "kondo_gate-0.1.0.tar.gz"

# Where pytest was told to look for `kondo_gate`, and whose classes it found there.
CONFTEST = """
import kondo_gate

def pytest_report_header():
    return f"stands in: {kondo_gate.__file__} {kondo_gate.KondoTrainer.__module__}"
"""


@pytest.mark.skipif(not PEER.is_file(), reason=f"no {PEER.name}: `make test` downloads it")
def test_original_test_file_passes_on_our_module(tmp_path):
    with tarfile.open(PEER) as archive:
        source = archive.extractfile("kondo_gate-0.1.0/tests/test_kondo_gate.py")
        (tmp_path / "test_kondo_gate.py").write_bytes(source.read())
    shim = tmp_path / "shim" / "kondo_gate" / "__init__.py"
    shim.parent.mkdir(parents=True)
    shim.write_text("from kondo.integrations.kondo_gate import *\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)

    # Its tests need no plugin, and one thread: the ones around us use the other cores.
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(tmp_path / "shim"), str(Path(kondo.__file__).parents[1])])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "test_kondo_gate.py"),
            *("-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--junitxml", "results.xml"),
        ],
        cwd=tmp_path,
        env=os.environ | plain | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stands in: {shim} kondo.integrations.kondo_gate" in done.stdout
    (suite,) = ElementTree.parse(tmp_path / "results.xml").getroot()
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 60, "failures": 0, "errors": 0, "skipped": 0}
