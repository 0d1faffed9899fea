"""The page about ranks tells the truth: its code runs, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ddp-fsdp2.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert len(blocks) == 3
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
