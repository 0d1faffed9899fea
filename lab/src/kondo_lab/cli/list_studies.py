"""`kondo list`: the studies, and how many of their claims the repository's results meet."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, get_args

from kondo.cli import Commands
from kondo.command_line import add_json, print_json
from kondo_lab.cli.output import add_full, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kondo_lab.evidence.study import Claim, Study


def add_list(commands: Commands) -> None:
    """Add `list` to the command line."""
    parser = commands.add_parser(
        "list",
        help="list the studies and their verdicts",
        description=(
            "List the studies. For each, count the claims that the results in the repository meet, "
            "miss or leave open."
        ),
        allow_abbrev=False,
    )
    add_full(parser, "also print the figures of the papers and the claims")
    add_json(parser)
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    from kondo_lab.evidence import bundled_claims, progress, table
    from kondo_lab.studies import registry

    known, bundled = registry.all_studies(), bundled_claims.read()
    counts = {study.name: _counts(study, bundled) for study in known}
    if options.json:
        fields = ("name", "title", "paper", "claim", "version")
        rows = [{name: getattr(study, name) for name in fields} for study in known]
        print_json({"studies": [row | {"verdicts": counts[row["name"]]} for row in rows]})
        return 0
    console = progress.make_console()
    console.print(table.studies(known, counts, full=options.full))
    say(
        console,
        "\nmet, missed, open: claims of the study, by the results in the repository.",
        "`kondo run STUDY --small` runs one in under two minutes on two cores.",
        *(() if options.full else ("--full prints the claims.",)),
    )
    return 0


def _counts(study: "Study", bundled: "Mapping[str, Sequence[Claim]]") -> dict[str, dict[str, int]]:
    """Return result folder without version -> verdict -> number of claims."""
    from kondo_lab.evidence import bundled_claims
    from kondo_lab.evidence.study import ClaimVerdict

    return {
        folder: {name: Counter(own.verdict for own in claims)[name] for name in verdicts}
        for verdicts in (get_args(ClaimVerdict),)
        for folder, claims in bundled_claims.of_study(study, bundled).items()
    }
