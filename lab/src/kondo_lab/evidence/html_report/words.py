"""Values as words and numbers of a page. Whatever comes from a file is escaped here."""

import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from kondo_lab.evidence.study import Headline


def text(value: Any) -> str:
    """Return a value as text that cannot become markup."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return escape(str(value))


def count(number: int, one: str, several: str = "") -> str:
    """Return "1 figure", "2 figures"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def shortened(sentence: str, longest: int = 260) -> str:
    """Return the whole sentences, or else the words, that fit into `longest` characters.

    Example:
        >>> from kondo_lab.evidence.html_report.words import shortened
        >>> shortened("DG ends at 1.5%. PG ends at 90%.", 20)
        'DG ends at 1.5%.'
        >>> shortened("DG ends at 1.5% and PG at 90%.", 20)
        'DG ends at 1.5% …'
    """
    if len(sentence) <= longest:
        return sentence
    ends = [found.end() for found in re.finditer(r"[.;](?= )", sentence[: longest + 1])]
    if ends and ends[-1] >= longest / 3:
        return sentence[: ends[-1] - 1].rstrip(".;") + "."
    return sentence[: longest - 1].rsplit(" ", 1)[0].rstrip(" ,:;") + " …"


def definitions(items: Mapping[str, Any], *, most: int, where: str) -> str:
    """Return `items` as terms with definitions: the first `most`, then where the others are."""
    shown = list(items.items())[:most]
    lines = [f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in shown]
    if len(items) > most:
        lines.append(f"<dt>{len(items) - most:,} more</dt><dd>in {text(where)}</dd>")
    return "\n".join(lines)


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level: "network: width", ..."""
    made: dict[str, Any] = {}
    for name, value in nested.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        made |= flat(value, f"{label}: ") if isinstance(value, Mapping) else {label: value}
    return made


def number(value: float) -> str:
    """Four digits; whole numbers in full, with thousands set apart."""
    if math.isnan(value):
        return "none"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    whole = value.is_integer() or abs(value) >= 1e3
    return f"{value:,.0f}" if whole and abs(value) < 1e12 else f"{value:.4g}"


def place(x: float | str) -> str:
    """Return where on the figure's axis: a number like all others, or what the file says."""
    try:
        return number(float(x))
    except ValueError:
        return text(x)


def with_error(value: float, se: float | None) -> str:
    """Return "0.0236 ± 0.0004": both to the second digit of the error."""
    if se is None or not (0 < se < math.inf and math.isfinite(value)):
        return number(value) + ("" if se is None else f" ± {number(se)}")
    decimals = max(0, 1 - math.floor(math.log10(se)))
    if decimals > 8:
        return f"{value:.4g} ± {se:.2g}"
    return f"{value:,.{decimals}f} ± {se:,.{decimals}f}"


def relative(line: Headline) -> str:
    """Return how far ours is from what is expected, in percent."""
    if not line.expected or not math.isfinite(line.ours):
        return ""
    percent = 100 * (line.ours - line.expected) / abs(line.expected)
    if not math.isfinite(percent):
        return ""
    return f"{round(percent):+d}%" if round(percent) else "0%"
