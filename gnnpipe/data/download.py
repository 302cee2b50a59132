"""Downloads archives of datasets, whole or not at all.

pooch fetches an archive into a temporary folder next to the target, and the unpacked folder gets
its name in one rename. A failure therefore leaves nothing behind. A lock keeps ranks that start
together from downloading twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import pooch
import requests

from gnnpipe.files import check_folder
from gnnpipe.output import hidden_steps

NETWORK_TIMEOUT_S = 30.0


class FetchError(Exception):
    """Says in a few words why a download failed; callers add the remedy."""


def data_root(data_dir: str) -> Path:
    """Return the folder of downloaded datasets: ``data_dir``, else ~/.cache/gnnpipe/datasets.

    Raises ``InputError`` if the path is a file.
    """
    path = Path(os.path.expanduser(data_dir or "~/.cache/gnnpipe/datasets"))
    check_folder("--data-dir", data_dir, path)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time work on ``folder``, which need not exist."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"gnnpipe-{os.getuid()}-{digest}.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def tidied(folder: Path) -> Iterator[None]:
    """Remove everything that the block has put into ``folder`` if the block fails.

    Removes ``folder`` itself if the block has made the folder. Hold ``locked(folder)`` meanwhile:
    files that another process puts there would go as well.
    """
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    before = set(folder.rglob("*"))
    try:
        yield
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        # Contents before their folder: longer paths first.
        for path in sorted(set(folder.rglob("*")) - before, reverse=True) + new[1:]:
            with suppress(OSError):  # a parent that another process has begun to use stays
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
        raise


def fetch_zip(url: str, target: Path, folder: str) -> None:
    """Download the zip archive at ``url`` and move its ``folder`` to the new folder ``target``.

    Raises ``FetchError`` without network or enough disk space, and for an archive that is broken
    or unsafe. Nothing is left on disk then.
    """
    root = target.parent
    try:
        with tidied(target):
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as temporary:
                unpacked = Path(temporary) / "unpacked"
                archive = _download(url, temporary)
                _extract(archive, unpacked)
                archive.unlink()
                if not (unpacked / folder).is_dir():
                    raise FetchError(f"{url} holds no folder {folder!r}")
                (unpacked / folder).rename(target)
    except (OSError, ValueError) as error:
        raise FetchError(f"{url}: {_reason(error)}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{url} is not a sound zip archive ({error})") from error


def _reason(error: Exception) -> object:
    """Return the cause inside an error of requests, without the pool of connections around it."""
    return getattr(error.args[0], "reason", error) if error.args else error


def _download(url: str, folder: str) -> Path:
    reply = requests.head(url, timeout=NETWORK_TIMEOUT_S, allow_redirects=True)
    size_bytes = int(reply.headers.get("Content-Length") or 0)
    # The archive and its contents: text packs about fourfold, features hardly.
    _check_space(Path(folder), 3 * size_bytes)
    print(f"downloading {url} ({size_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), timeout=NETWORK_TIMEOUT_S, chunk_size=1 << 20
    )
    with hidden_steps("the progress bar of the download"):
        return Path(pooch.retrieve(url, None, "archive.zip", folder, downloader=downloader))


def _extract(archive: Path, folder: Path) -> None:
    """Unpack plain files and folders only, none of them outside ``folder``."""
    with zipfile.ZipFile(archive) as packed:
        members = packed.infolist()
        for member in members:
            path = PurePosixPath(member.filename.replace("\\", "/"))
            kind = stat.S_IFMT(member.external_attr >> 16)
            is_outside = path.is_absolute() or ".." in path.parts or ":" in member.filename
            if is_outside or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise FetchError(f"the archive holds an unsafe entry {member.filename!r}")
        _check_space(folder.parent, sum(m.file_size for m in members))
        packed.extractall(folder)


def _check_space(folder: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise FetchError(
            f"{folder} has {free_bytes / 1e9:.1f} GB free, {size_bytes / 1e9:.1f} GB are needed"
        )
