"""`kondo report`: one HTML page from result folders. It needs nothing from anywhere else.

    folders -> older_folders.read -> layout (order) -> images, captions, tables -> page

The page's skeleton, style and script lie in assets/. Without script everything but the frontier
can be read. Equal folders give equal bytes: the page does not say when or where it was written.
"""

from collections.abc import Sequence
from pathlib import Path

from kondo.run_files import atomically
from kondo_lab.evidence import older_folders


def write(folders: Sequence[Path], out: Path) -> None:
    """Write the page that shows `folders` to the file `out`.

    The order of the page is that of `layout`, whatever the order of `folders`.

    Raises:
        ValueError: a folder is not a result folder; the message names what is missing.
    """
    from kondo_lab.evidence.html_report.page import page

    if not folders:
        raise ValueError("folders: expected at least one result folder, got none. Run a study.")
    made = page([older_folders.read(Path(folder)) for folder in folders])
    with atomically(out) as partial:
        # As bytes: text mode would write other line ends elsewhere.
        # A command may have had bytes that are no text; Python keeps them as lone surrogates.
        partial.write_bytes(made.encode(errors="backslashreplace"))
