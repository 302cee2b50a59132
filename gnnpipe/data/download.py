"""Brings archives onto this machine, whole or not at all.

A download can break, an archive can be cut off or (from a strange mirror) name files outside its
folder. So everything goes into a temporary folder beside the target and is renamed at the end; a
failure leaves nothing behind. The ranks of a run start together, hence the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from gnnpipe.files import check_folder

__all__ = ["FetchError", "data_root", "fetch_zip", "locked", "tidied"]

BLOCK_BYTES = 1 << 20
NETWORK_TIMEOUT_S = 30.0


class FetchError(Exception):
    """What went wrong with a download, in a few words; callers say what to do instead."""


def data_root(data_dir: str) -> Path:
    """The folder of downloaded datasets: ``data_dir``, else ~/.cache/gnnpipe/datasets.

    ``InputError`` if it is a file.
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
    """If the block fails, remove whatever it has put into ``folder``, and ``folder`` if new.

    To be used under ``locked(folder)``: what another process puts there would go as well.
    """
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    before = set(folder.rglob("*"))
    try:
        yield
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        # What lies in a folder before the folder: the longer path first.
        for path in sorted(set(folder.rglob("*")) - before, reverse=True) + new[1:]:
            with suppress(OSError):  # a parent that another process has begun to use stays
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
        raise


def fetch_zip(url: str, target: Path, folder: str) -> None:
    """Download the archive at ``url`` and make its ``folder`` the new folder ``target``.

    Raises:
        FetchError: no network, not enough room, or an archive that is broken or unsafe. Nothing
            is left on disk.
    """
    root = target.parent
    try:
        with tidied(target):
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as temporary:
                archive = Path(temporary) / "archive.zip"
                _download(url, archive)
                _extract(archive, Path(temporary) / "out")
                archive.unlink()
                inside = Path(temporary) / "out" / folder
                if not inside.is_dir():
                    raise FetchError(f"{url} holds no folder {folder!r}")
                inside.rename(target)
    except (OSError, HTTPException, ValueError) as error:
        raise FetchError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{url} is not a sound zip archive ({error})") from error


def _download(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=NETWORK_TIMEOUT_S) as reply, open(path, "wb") as file:
        size_bytes = int(reply.headers.get("Content-Length") or 0)
        # The archive and what comes out of it: text packs about fourfold, features not at all.
        _room(path.parent, 3 * size_bytes)
        print(f"downloading {url} ({size_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        shutil.copyfileobj(reply, file, BLOCK_BYTES)
        if size_bytes and file.tell() != size_bytes:
            raise FetchError(f"{url} broke off after {file.tell()} of {size_bytes} bytes")


def _extract(archive: Path, folder: Path) -> None:
    """Unpack plain files and folders only, none of them outside ``folder``."""
    with zipfile.ZipFile(archive) as packed:
        members = packed.infolist()
        for member in members:
            path = PurePosixPath(member.filename.replace("\\", "/"))
            kind = stat.S_IFMT(member.external_attr >> 16)
            outside = path.is_absolute() or ".." in path.parts or ":" in member.filename
            if outside or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise FetchError(f"the archive holds an unsafe entry {member.filename!r}")
        _room(folder.parent, sum(m.file_size for m in members))
        for member in members:
            packed.extract(member, folder)


def _room(folder: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise FetchError(
            f"{folder} has {free_bytes / 1e9:.1f} GB free, {size_bytes / 1e9:.1f} GB are needed"
        )
