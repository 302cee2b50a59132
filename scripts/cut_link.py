"""Take one host's network away in the middle of a run: do all ranks end, and say why?

    python scripts/cut_link.py --host 1

Hosts are network namespaces of this machine (``namespaces.py``; needs root), one stage on each. A
few epochs in, a link goes down, as when a cable is pulled: nothing is closed, packets are lost.
Exit code 1 if a rank is still there 30 s later.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from long_run import epochs  # noqa: E402
from namespaces import Hosts  # noqa: E402

LIMIT_S = 30.0
HOSTS = 3


def main() -> int:
    """Run, cut, wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=int, default=1, choices=range(HOSTS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gnnpipe-cut-"))
    words = [
        sys.executable,
        "-m",
        "gnnpipe",
        "train",
        "--dataset",
        "debian",
        "--model",
        "gcnii",
        "--layers",
        "9",
        "--hidden",
        "32",
        "--stages",
        str(HOSTS),
        "--chunks",
        "8",
        "--epochs",
        "100000",
        "--out",
        str(folder / "run"),
    ]
    with Hosts(HOSTS, 0, "gnnpipe-cut") as hosts, contextlib.ExitStack() as files:
        paths = [folder / f"{host}.log" for host in range(HOSTS)]
        logs = [files.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
        more = {"PYTHONPATH": str(ROOT)}
        ranks = [hosts.start(i, words, more, 29533, logs[i]) for i in range(HOSTS)]
        while epochs(folder / "run") < 3:
            if any(rank.poll() is not None for rank in ranks):
                print("a rank ended before the link was cut; see", folder)
                return 1
            time.sleep(0.1)
        hosts.cut(options.host)
        cut = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < HOSTS and time.monotonic() - cut < LIMIT_S:
            for host, rank in enumerate(ranks):
                if host not in ended and rank.poll() is not None:
                    ended[host] = time.monotonic() - cut
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
            rank.wait()
    for host, path in enumerate(paths):
        last = path.read_text(encoding="utf-8").strip().splitlines()[-1:]
        when = f"{ended[host]:.1f} s" if host in ended else "NOT ENDED"
        print(f"rank {host}: {when}, exit code {ranks[host].returncode}: {''.join(last)}")
    return int(len(ended) < HOSTS)


if __name__ == "__main__":
    sys.exit(main())
