"""``gnnpipe report RUN``: its flags, and where the page and the pictures go."""

from __future__ import annotations

import argparse
from pathlib import Path

from gnnpipe.errors import InputError

__all__ = ["add_flags", "report"]


def add_flags(command: argparse.ArgumentParser) -> None:
    """The words that ``gnnpipe report`` takes."""
    command.add_argument("run", metavar="RUN", help="folder of a run")
    command.add_argument("--save", metavar="FILE", help="the page (default RUN/report.html)")
    command.add_argument(
        "--png",
        action="store_true",
        help="also the curves and the timeline as PNG files beside the page, for a paper",
    )


def report(options: argparse.Namespace) -> int:
    """Write the page, and the pictures if asked for; say where they are."""
    from gnnpipe.report.html import MARK, page
    from gnnpipe.report.run import read_run

    if options.save == "":
        raise InputError("--save '': give a file, like report.html")
    folder = Path(options.run)
    target = Path(options.save) if options.save else folder / "report.html"
    run = read_run(folder)
    if not _may_replace(target, MARK):
        raise InputError(
            f"--save {str(target)!r}: is something else than a page of gnnpipe; give a new file"
        )
    # Words from outside may hold what UTF-8 cannot.
    files = {target: page(run).encode("utf-8", "replace")}
    if options.png:
        from gnnpipe.report.png import pictures

        stem = target.with_suffix("").name
        files |= {target.with_name(f"{stem}-{k}.png"): data for k, data in pictures(run).items()}
    try:
        for path, data in files.items():
            # A link that a folder from elsewhere holds must not lead the writing out of it.
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.write(data)
    except OSError as error:
        raise InputError(
            f"--save {str(target)!r}: cannot be written ({error.strerror}); give another file"
        ) from None
    for path in files:
        print(path)
    return 0


def _may_replace(path: Path, mark: str) -> bool:
    """Nothing is there, or a page that this command made."""
    try:
        if not path.exists():
            return True
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(mark)) == mark.encode()
    except OSError:
        return False
