"""The words that ``gnnpipe profile`` and ``gnnpipe simulate`` take beside a run's settings."""

from __future__ import annotations

import argparse

__all__ = ["add_profile_flags", "add_simulate_flags"]

SHEETS = "a100 or h100; nvlink3, nvlink4, 10gbe or 100gbe"


def add_profile_flags(command: argparse.ArgumentParser) -> None:
    """Where a profile goes, and what it is of."""
    command.add_argument("--save", metavar="FILE", help="new file for the profile (JSON)")
    command.add_argument(
        "--hardware", metavar="DEVICE:LINK", help=f"measure nothing, but take data sheets: {SHEETS}"
    )


def add_simulate_flags(command: argparse.ArgumentParser) -> None:
    """What is simulated, on what, and where the answer goes."""
    command.add_argument(
        "--shape", metavar="N=V,...",
        help="simulate no dataset but a graph in numbers, shared out evenly: vertices=..,edges=..,"
        "features=..,classes=.. and maybe halo=.. (rows of other shards read for each own row, "
        "default 1) and stored=.. (numbers that sparse features hold)",
    )  # fmt: skip
    command.add_argument(
        "--hardware", metavar="DEVICE:LINK", help=f"by data sheets instead of --profile: {SHEETS}"
    )
    command.add_argument(
        "--cluster", metavar="FILE",
        help="TOML file of devices (speed, memory) and links; without it every rank is as the "
        "profile says",
    )  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="also write the answer there (JSON)")
