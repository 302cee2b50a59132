"""Builds ``gnnpipe/data/files/debian.npz`` from the package index of a Debian release.

A training graph that everybody can rebuild from a public source, large enough to be cut, and with
a hub (libc6) that no balanced cut likes. The card, ``debian.md``, says what it is.

    python datasets/build_debian.py                         # the index that apt has here
    python datasets/build_debian.py --packages Packages.xz  # one from a mirror
    python datasets/build_debian.py --check                 # compare with the file in the package

The same index gives the same bytes.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import hashlib
import lzma
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

OUT = Path(__file__).parents[1] / "gnnpipe" / "data" / "files" / "debian.npz"
RELATIONS = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Enhances")
NUM_WORDS = 1000

Stanza = dict[str, str]


def apt_index() -> tuple[str, str]:
    """The text and the source of the main amd64 index of the release that apt is set to.

    ``apt-cache dumpavail`` is not asked: it mixes in what other archives and the packages installed
    here say (and leaves out a few packages of the index).
    """
    fields = "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(ARCHITECTURE)|$(CODENAME)|$(VERSION)|$(FILENAME)"
    listed = _output("apt-get", "indextargets", "--format", fields, "Identifier: Packages")
    for line in listed.splitlines():
        origin, label, component, arch, codename, version, path = line.split("|")
        own = (origin, label, component, arch) == ("Debian", "Debian", "main", "amd64")
        if own and "-" not in codename and Path(path).exists():
            source = f"Debian {version} {codename}, main, amd64"
            release = Path(path.split("_main_binary")[0] + "_InRelease")
            if release.exists():
                date = re.search(r"^Date: (.*)$", release.read_text("utf-8"), re.MULTILINE)
                source += f" ({date[1]})" if date else ""
            return _output("/usr/lib/apt/apt-helper", "cat-file", path), source
    raise SystemExit("apt has no index of a Debian release here: run `apt-get update` first")


def packages_file(path: Path) -> str:
    """The text of a Packages file, plain or packed with gzip, xz or bzip2."""
    unpackers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.decompress,
        ".xz": lzma.decompress,
        ".bz2": bz2.decompress,
    }
    return unpackers.get(path.suffix, bytes)(path.read_bytes()).decode("utf-8")


def stanzas(text: str) -> Iterator[Stanza]:
    """The records of an index, each field's lines joined."""
    for record in re.split(r"\n\n+", text.strip()):
        fields = re.sub(r"\n[ \t]+", " ", record).split("\n")
        yield dict(f.split(": ", 1) for f in fields if ": " in f)


def main_packages(text: str) -> dict[str, Stanza]:
    """The binary packages of main by name, sorted; of several versions the newest."""
    found: dict[str, Stanza] = {}
    for new in stanzas(text):
        if not new.get("Filename", "").startswith("pool/main/") or "/" in new["Section"]:
            continue
        if new["Architecture"] not in ("amd64", "all"):
            continue
        old = found.get(new["Package"])
        if old is None or _newer(new["Version"], old["Version"]):
            found[new["Package"]] = new
    return dict(sorted(found.items()))


def dependency_pairs(packages: dict[str, Stanza]) -> np.ndarray:
    """[P, 2] the distinct undirected pairs (lower, higher vertex), sorted."""
    number = {name: i for i, name in enumerate(packages)}
    pairs = set()
    for v, stanza in enumerate(packages.values()):
        for relation in RELATIONS:
            # 'a (>= 1) | b:any, c [amd64]' names a, b and c; what is only provided by others, such
            # as mail-transport-agent, is no vertex.
            for item in re.split(r"[,|]", stanza.get(relation, "")):
                match = re.match(r"\s*([a-z0-9][a-z0-9+.\-]*)", item)
                w = number.get(match[1]) if match else None
                if w is not None and w != v:
                    pairs.add((min(v, w), max(v, w)))
    return np.array(sorted(pairs))


def word_bags(packages: dict[str, Stanza]) -> tuple[list[str], list[list[int]]]:
    """The most frequent words of the short descriptions, and for each package those it uses."""
    bags = [set(re.findall(r"[a-z]+", p.get("Description", "").lower())) for p in packages.values()]
    frequency = Counter(word for bag in bags for word in bag if len(word) > 1)
    words = sorted(sorted(frequency, key=lambda w: (-frequency[w], w))[:NUM_WORDS])
    number = {w: i for i, w in enumerate(words)}
    return words, [sorted(number[w] for w in bag if w in number) for bag in bags]


def pack(text: str, source: str) -> dict[str, np.ndarray]:
    """The arrays of the file; ``gnnpipe/data/embedded.py`` unpacks them."""
    packages = main_packages(text)
    sections = sorted({p["Section"] for p in packages.values()})
    pairs = dependency_pairs(packages)
    words, bags = word_bags(packages)
    edge_count = np.bincount(pairs[:, 0], minlength=len(packages))
    word_count = np.array([len(b) for b in bags])
    edge_low, edge_high = _steps(pairs[:, 1], edge_count)
    word_low, word_high = _steps(np.array([i for b in bags for i in b]), word_count)
    return {
        "edge_count": edge_count.astype(np.uint16),
        "edge_step_low": edge_low,
        "edge_step_high": edge_high,
        "word_count": word_count.astype(np.uint16),
        "word_step_low": word_low,
        "word_step_high": word_high,
        "y": np.array([sections.index(p["Section"]) for p in packages.values()], np.uint8),
        "class_names": np.array(sections),
        "words": np.array(words),
        "source": np.array(source),
    }


def _steps(values: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high bytes of the steps within each row; the first entry of a row is its own step."""
    steps = np.diff(values, prepend=0)
    starts = (np.cumsum(count) - count)[count > 0]
    steps[starts] = values[starts]
    return (steps & 255).astype(np.uint8), (steps >> 8).astype(np.uint8)


def _newer(a: str, b: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", a, "gt", b]).returncode == 0


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{command[0]}: {error}; use --packages where there is no apt") from None


def main() -> None:
    """Build the file, or check the one that is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packages", type=Path, help="a Packages file (.xz, .gz, .bz2 or plain)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true", help="compare with --out, write nothing")
    args = parser.parse_args()
    if args.packages:
        text, source = packages_file(args.packages), f"{args.packages.name}"
    else:
        text, source = apt_index()
    arrays = pack(text, source)
    if args.check:
        with np.load(args.out, allow_pickle=False) as old:
            differ = [k for k in arrays if k != "source" and not np.array_equal(arrays[k], old[k])]
            print(f"built from: {old['source']}\nread here:  {source}")
        sys.exit(f"differ: {', '.join(differ)}" if differ else None)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # numpy dates every member 1980-01-01, so equal arrays are equal bytes.
    np.savez_compressed(args.out, allow_pickle=False, **arrays)
    data = args.out.read_bytes()
    print(f"{args.out}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}\n{source}")


if __name__ == "__main__":
    main()
