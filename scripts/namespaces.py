"""Hosts on one machine: network namespaces around a bridge, each link limited to a rate.

Needs root and iproute2. Nothing leaves the machine: no route leads out, and no interface of the
machine itself takes part.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import IO

__all__ = ["Hosts"]

BURST_S, LEAST_BURST, QUEUE = 0.002, 65536, 8 << 20
"""tc's bucket, in seconds of the rate; a queue long enough that TCP is paced, not dropped."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """``count`` hosts, each linked with ``mbit`` Mbit/s both ways (0: unlimited).

    >>> with Hosts(2, 200) as hosts:                                        # doctest: +SKIP
    ...     ranks = [hosts.start(i, ["python", "rank.py"], {}, 29517, log) for i in range(2)]
    """

    def __init__(self, count: int, mbit: float, prefix: str = "gnnpipe") -> None:
        self.count, self.mbit, self.prefix = count, mbit, prefix
        self.switch = f"{prefix}-sw"

    def name(self, host: int) -> str:
        """Of its namespace."""
        return f"{self.prefix}-{host}"

    @staticmethod
    def address(host: int) -> str:
        """Of its link."""
        return f"10.78.0.{host + 1}"

    def __enter__(self) -> Hosts:
        self.down()  # what an ended run may have left
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for host in range(self.count):
            name, port = self.name(host), f"p{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.switch,
            )
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", self.switch, "link", "set", port, "master", "br0")
            _ip("-n", self.switch, "link", "set", port, "up")
            self._limit(name, "eth0")  # out of the host
            self._limit(self.switch, port)  # into it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def down(self) -> None:
        """Take everything away that is there."""
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for line in there.splitlines():
            name = line.split()[0]
            if name.rsplit("-", 1)[0] == self.prefix:
                _ip("netns", "del", name)

    def cut(self, host: int) -> None:
        """As if its cable was pulled: nothing is closed, packets are lost."""
        _ip("-n", self.switch, "link", "set", f"p{host}", "down")

    def _limit(self, namespace: str, device: str) -> None:
        if not self.mbit:
            return
        burst = max(int(self.mbit * 1e6 / 8 * BURST_S), LEAST_BURST)
        subprocess.run(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                f"{self.mbit:g}mbit",
                "burst",
                str(burst),
                "limit",
                str(QUEUE),
            ],
            check=True,
            capture_output=True,
            text=True,
        )

    def start(
        self, host: int, command: list[str], more: Mapping[str, str], port: int, errors: IO[str]
    ) -> subprocess.Popen[str]:
        """A rank on a host; its input and output are pipes."""
        env = {
            **os.environ,
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def run(self, command: list[str], more: Mapping[str, str], port: int) -> None:
        """Runs a command on every host; ends the script with the errors if one fails."""
        with tempfile.TemporaryFile("w+") as errors:
            ranks = [self.start(i, command, more, port, errors) for i in range(self.count)]
            try:
                codes = [rank.wait(600) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                errors.seek(0)
                raise SystemExit(f"{command}: {codes}\n{errors.read()[-2000:]}")

    def sent_bytes(self, host: int) -> int:
        """What left the host since it is up, headers and all."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        words = ["ip", "netns", "exec", self.name(host), "cat", path]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
