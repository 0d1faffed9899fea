"""The commands that the laboratory adds to `kondo`: demo, list, run, plot and report.

Installed as an entry point of the group `kondo.commands`. A command imports what it needs when it
runs, so that `kondo --help` starts without torch.
"""

from kondo.cli import Commands
from kondo_lab.cli.demo import add_demo
from kondo_lab.cli.list_studies import add_list
from kondo_lab.cli.plot import add_plot
from kondo_lab.cli.report import add_report
from kondo_lab.cli.run import MNIST, add_run

__all__ = ["MNIST", "add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the laboratory's commands to the command line."""
    for add in (add_demo, add_list, add_run, add_plot, add_report):
        add(commands)
