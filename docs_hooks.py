"""Hooks of the docs site (mkdocs.yml): what MkDocs does not know of this repository.

Pages link to files outside docs/ by their paths, as readers on GitHub need them. Each such file is
given to MkDocs under the address that the link has, "../examples/x.py", and MkDocs then checks and
rewrites the link like any other: Markdown becomes a page, other text a page that shows it, a folder
its README.md or a list of its files, and anything else (images, CSV) is copied. A file that is not
there is not given, so that a strict build fails.
"""

import ast
import logging
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
log = logging.getLogger("mkdocs.hooks.kondo")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ATTRIBUTE = re.compile(r'((?:href|src)=")([^"#:]+)((?:#[^"]*)?")')
# What is not to be touched, or a public name that the API may have a place for.
NAME = re.compile(r"<(a|h\d|pre)\b.*?</\1>|<code>(kondo\.[\w.]+)(\([^<]*\))?</code>", re.S)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".cff": "yaml", ".json": "json"}
TEXT = {*LANGUAGES, ".txt", ""}
LARGEST_COPIED = 1_000_000
# Where lunr, as Material ships it, adds an edge to the name of a state.
_STATE = "e=e+s+o.id"
CHANGELOG = "../CHANGELOG.md"


class ShownFile(File):
    """A text or a folder of the repository as a page."""

    def is_documentation_page(self) -> bool:
        """Return True: MkDocs else goes by the name."""
        return True


class Docstrings(griffe.Extension):
    """Read our docstrings as we write them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Name the section of examples as griffe does, and join table rows that go on below."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r" *\|\n\| +\| *", " ", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give MkDocs every file outside docs/ that a page links to, and what those link to."""
    pages = [file for file in files if file.src_uri.endswith((".md", ".ipynb"))]
    changelog = _outside(ROOT / "CHANGELOG.md", config)
    changelog.dest_uri, changelog.inclusion = "changelog.html", InclusionLevel.INCLUDED
    files.append(changelog)
    pages.append(changelog)
    while pages:
        page = pages.pop()
        for match in LINK.finditer(page.content_string):
            path = _target(page, match[2], config)
            is_new = path is not None and files.get_file_from_path(_uri(path, config)) is None
            if path is not None and is_new and path.exists() and not _in_docs(path, config):
                file = _outside(path, config)
                files.append(file)
                if file.is_documentation_page():
                    pages.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of pages outside docs/ lead to pages inside: "docs/faq.md" is "/faq.md" here."""
    if not page.file.src_uri.startswith("../"):
        return markdown

    def inside(match: re.Match[str]) -> str:
        path = _target(page.file, match[2], config)
        if path is None or not _in_docs(path, config):
            return match[0]
        return f"{match[1]}/{path.relative_to(config.docs_dir).as_posix()}{match[3]}"

    return LINK.sub(inside, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names to their place in the API, and resolve the links of notebooks."""

    def named(match: re.Match[str]) -> str:
        if not match[2]:
            return match[0]
        return f'<autoref optional identifier="{match[2]}">{match[0]}</autoref>'

    def resolved(match: re.Match[str]) -> str:
        path = _target(page.file, match[2], config)
        file = path and files.get_file_from_path(_uri(path, config))
        if not file:
            log.warning(
                f"Notebook '{page.file.src_uri}' links to '{match[2]}', which is not there."
            )
            return match[0]
        return f"{match[1]}{file.url_relative_to(page.file)}{match[3]}"

    if page.file.src_uri.endswith(".ipynb"):
        html = ATTRIBUTE.sub(resolved, html)
    return NAME.sub(named, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Mend lunr's index, which mixes up two states of its automaton by chance.

    It names a state by the letters and numbers of its edges, one after another: an edge "1" to
    state 23 reads like an edge "1" to 2 and what follows. A search then ends in a TypeError.
    """
    workers = Path(config.site_dir, "assets/javascripts/workers")
    for worker in workers.glob("search.*.min.js"):
        text = worker.read_text()
        if text.count(_STATE) != 1:
            raise PluginError(f"{worker.name} must hold {_STATE!r} once: look at lunr anew.")
        worker.write_text(text.replace(_STATE, _STATE + '+","'))


def _target(page: File, link: str, config: MkDocsConfig) -> Path | None:
    """Return the file of this repository that a link names, whether it exists or not."""
    if re.match(r"[a-z]+:|/", link):
        return None
    path = Path(os.path.normpath(Path(config.docs_dir) / page.src_uri / ".." / link))
    return path if path.is_relative_to(ROOT) else None


def _in_docs(path: Path, config: MkDocsConfig) -> bool:
    return path.is_relative_to(config.docs_dir)


def _uri(path: Path, config: MkDocsConfig) -> str:
    """Return what MkDocs calls a file: its path from docs/, "../" and more if it is outside."""
    return Path(os.path.relpath(path, config.docs_dir)).as_posix()


def _outside(path: Path, config: MkDocsConfig) -> File:
    """Return a file or folder outside docs/ as a page, or as a file to copy."""
    name = path.relative_to(ROOT).as_posix()
    shown = path.is_dir() or path.suffix in TEXT
    address = name.removesuffix(".md") + ".html" if shown or path.suffix == ".md" else name
    file = (ShownFile if shown else File)(
        _uri(path, config),
        config.docs_dir,
        config.site_dir,
        config.use_directory_urls,
        dest_uri=f"repository/{address}",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
    if (path / "README.md").exists():
        file.content_string = _readme(path)
    elif shown:
        text = _listing(path) if path.is_dir() else _fenced(path)
        file.content_string = f"---\nsearch:\n  exclude: true\n---\n# `{name}`\n\n{text}\n"
    return file


def _fenced(path: Path) -> str:
    return f"``````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n``````"


def _readme(folder: Path) -> str:
    """Return the text of a folder's README.md, with links that start at the folder's own path."""
    text = (folder / "README.md").read_text()
    return re.sub(r"(\]\()(?![a-z]+:|[/#])", rf"\g<1>{folder.name}/", text)


def _listing(folder: Path) -> str:
    """Return a table of a folder's files; a large one is named and not copied."""
    lines = ["| file | kB | |", "|---|---|---|"]
    for path in sorted(path for path in folder.rglob("*") if _is_shown(path)):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        link = f"[{name}]({folder.name}/{name})" if size <= LARGEST_COPIED else name
        lines.append(f"| {link} | {size / 1e3:,.0f} | {_summary(path)} |")
    return "\n".join(lines)


def _is_shown(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    if path.suffix != ".py":
        return ""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
