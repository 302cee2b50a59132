"""Writes the report page of a run, and its pictures."""

from __future__ import annotations

from pathlib import Path

from gnnpipe.errors import InputError
from gnnpipe.report.html import MARK, page
from gnnpipe.report.run import read_run


def write_report(folder: Path, save: str | None, with_pictures: bool) -> list[Path]:
    """Write the report of the run in ``folder`` and return the paths of the files.

    ``save``: the file of the page (``None``: report.html in ``folder``). The PNG files are written
    beside the page. Raises ``InputError`` for a folder without a run, and for an existing file
    that is not a page of gnnpipe.
    """
    if save == "":
        raise InputError("--save '': give a file, like report.html")
    target = Path(save) if save else folder / "report.html"
    run = read_run(folder)
    if not _can_replace(target):
        raise InputError(
            f"--save {str(target)!r}: exists and is not a page of gnnpipe; give a new file"
        )
    # Texts of the run may contain characters that UTF-8 cannot encode.
    files = {target: page(run).encode("utf-8", "replace")}
    if with_pictures:
        from gnnpipe.report.png import pictures

        stem = target.with_suffix("").name
        files |= {target.with_name(f"{stem}-{k}.png"): data for k, data in pictures(run).items()}
    try:
        for path, data in files.items():
            # A symbolic link in a folder from elsewhere must not redirect the write.
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.write(data)
    except OSError as error:
        raise InputError(
            f"--save {str(target)!r}: cannot be written ({error.strerror}); give another file"
        ) from None
    return list(files)


def _can_replace(path: Path) -> bool:
    """Return whether ``path`` does not exist or is a page that this module has written."""
    try:
        if not path.exists():
            return True
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False
