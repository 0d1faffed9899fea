"""`kondo actors run` in a process of its own, with deadlines that a test can wait for.

    python quick_command.py '{"rollout_timeout": 4.0}' TASK OPTIONS

What the command line has no option for is given as JSON: other defaults of `Settings`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from kondo import cli
from kondo.actors.setup import Settings

HERE = Path(__file__)


def start(folder, *options, task="actors.toys:toy", popen=None, **defaults):
    """Start a run of `task` into `folder`; return the process.

    `popen` are further arguments of it: without any, what it prints goes to pipes.
    """
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **(popen or {})}
    command = [sys.executable, str(HERE), json.dumps(defaults), task, "--checkpoint", str(folder)]
    # Its processes import the packages, and the toys, from where this process does.
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [*command, *options],
        env=os.environ | {"PYTHONPATH": paths} | more.pop("env", {}),
        text=True,
        **more,
    )


if __name__ == "__main__":
    Settings.__init__.__kwdefaults__.update(json.loads(sys.argv[1]))
    sys.exit(cli.main(["actors", "run", *sys.argv[2:]]))
