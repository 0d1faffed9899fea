"""What came of the claims in the repository's own results, for those who installed the package.

`python -m kondo_lab.studies.pages` writes the file. Only full runs of a study's present version
count.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import get_args

from kondo_lab.evidence import result_folder
from kondo_lab.evidence.study import Claim, ClaimVerdict, Study
from kondo_lab.evidence.table import markdown

FILE = "claims.json"
_ASSETS = files("kondo_lab.evidence") / "assets"


def read() -> dict[str, list[Claim]]:
    """Return result folder -> its claims, as bundled."""
    content = json.loads((_ASSETS / FILE).read_text(encoding="utf-8"))
    return {folder: [Claim(**claim) for claim in claims] for folder, claims in content.items()}


def gather(results: Path, versions: Mapping[str, int]) -> dict[str, list[Claim]]:
    """Return result folder -> its claims, of the present version of every study."""
    found = {}
    for path in sorted(results.glob(f"*/{result_folder.CLAIMS}")):
        own = result_folder.read(path.parent)
        study, version = own.manifest["study"], own.manifest["version"]
        if not own.small and versions.get(study) == version:
            found[path.parent.name] = own.claims
    return found


def of_study(study: Study, bundled: Mapping[str, Sequence[Claim]]) -> dict[str, Sequence[Claim]]:
    """Return the folders of a study: its name, perhaps a device, and its version."""
    end = f"-v{study.version}"
    names = (study.name, f"{study.name}-cpu", f"{study.name}-cuda")
    return {name: bundled[name + end] for name in names if name + end in bundled}


def told(claims: Sequence[Claim]) -> str:
    """Return "2 met, 1 missed"; empty where there is none.

    Example:
        >>> from kondo_lab.evidence.bundled_claims import told
        >>> from kondo_lab.evidence.study import Claim
        >>> told([Claim("a", "missed", ""), Claim("b", "met", ""), Claim("c", "met", "")])
        '2 met, 1 missed'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[own]} {own}" for own in get_args(ClaimVerdict) if counts[own])


def table(bundled: Mapping[str, Sequence[Claim]]) -> str:
    """Return the counts of every folder, and of all, for a page."""
    verdicts = get_args(ClaimVerdict)
    everything = [claim for claims in bundled.values() for claim in claims]
    rows = [
        [name, *(str(sum(claim.verdict == verdict for claim in claims)) for verdict in verdicts)]
        for name, claims in [*bundled.items(), ("all results", everything)]
    ]
    return markdown(["results", *verdicts], rows)


def bundle(results: Path, versions: Mapping[str, int]) -> str:
    """Write the bundled file from the folder of results, and return the table."""
    found = gather(results, versions)
    content = {name: [claim._asdict() for claim in claims] for name, claims in found.items()}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    Path(str(_ASSETS / FILE)).write_text(text, encoding="utf-8")
    return table(found)
