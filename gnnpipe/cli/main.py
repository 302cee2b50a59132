"""Entry point of the command line: runs a command, prints errors, returns an exit code.

Wrong input is reported as one line on stderr. torch is imported only after the flags have been
checked, so that ``--help`` and a wrong flag answer at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import TextIO

from gnnpipe.cli.commands import COMMANDS, make_parser
from gnnpipe.errors import ExitCode, FailedError, InputError, LostRankError, StoppedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its ``ExitCode``.

    ``arguments``: the words after ``gnnpipe``; ``None`` takes ``sys.argv``.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run_command(sys.argv[1:] if arguments is None else arguments)
        except (Exception, KeyboardInterrupt) as error:
            return _report_error(error)


def _run_command(arguments: Sequence[str]) -> int:
    parser, subparsers = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers.get(options.command, parser).refuse(unknown, arguments, subparsers)
    if options.command is None:
        known = ", ".join(COMMANDS)
        raise InputError(f"gnnpipe: give a command: {known}; see `gnnpipe --help`")
    return COMMANDS[options.command].run(options)


def _report_error(error: BaseException) -> ExitCode:
    """Print the error: one line if the user can act on it, a traceback otherwise."""
    if isinstance(error, InputError | FloatingPointError | FailedError):
        _print_once(f"error: {' '.join(str(error).split())}")
        return ExitCode.BAD_INPUT if isinstance(error, InputError) else ExitCode.FAILED
    if isinstance(error, StoppedError):
        _print_once(str(error))
        return ExitCode.STOPPED
    _leave_connections_open()
    if isinstance(error, LostRankError):
        print(f"gnnpipe: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, BrokenPipeError):
        # The reader of our output has gone (`| head`): nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, KeyboardInterrupt):
        _print_once(f"interrupted; {str(error) or 'nothing had begun'}")
        return ExitCode.INTERRUPTED
    else:
        _report_fault(error)
    return ExitCode.FAILED


def _report_fault(error: BaseException) -> None:
    from gnnpipe.run.rank_log import is_lost_peer
    from gnnpipe.run.signals import PATIENCE_S

    if is_lost_peer(error):
        # The failed rank should report first: torchrun then ends the others while they wait here.
        time.sleep(PATIENCE_S)
        rank = os.environ.get("RANK", "0")
        print(f"gnnpipe: rank {rank} lost another rank: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
        sys.stderr.flush()


def _leave_connections_open() -> None:
    """Skip the wait for the other ranks at exit: after a fault a message may never arrive."""
    mesh = sys.modules.get("gnnpipe.runtime.comm.world")
    if mesh is not None:
        mesh.stay_at_exit()


def _print_once(text: str) -> None:
    """Print a line on stderr, from rank 0 only, for errors that occur on every rank."""
    if _is_first_rank(os.environ):
        print(f"gnnpipe: {text}", file=sys.stderr, flush=True)


def _is_first_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0, or was not started as a rank."""
    rank, world = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    is_rank = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    return not is_rank or int(rank) == 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line, without the source line that Python adds."""
    _print_once(f"warning: {message}")
