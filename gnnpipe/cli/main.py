"""Words to programs: the flags of ``gnnpipe``, made from the config's own definitions.

What a command does stands with its flags. A mistake in the input is one line on stderr and exit
code 2; torch is only imported once the words make sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, TextIO

from gnnpipe.cli.parser import Parser, may_speak, one_line, reader
from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.config.train_config import check_stages, check_verifiable
from gnnpipe.errors import FailedError, InputError, LostRankError, StoppedError
from gnnpipe.report.command import add_flags, report
from gnnpipe.report.compare import add_compare_flags, compare
from gnnpipe.tools.doctor import add_flags as add_doctor_flags
from gnnpipe.tools.doctor import doctor

__all__ = ["add_profile_flags", "add_simulate_flags", "main"]


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
        "--shape",
        metavar="N=V,...",
        help="simulate no dataset but a graph in numbers, shared out evenly: vertices=..,edges=..,"
        "features=..,classes=.. and maybe halo=.. (rows of other shards read for each own row, "
        "default 1) and stored=.. (numbers that sparse features hold)",
    )
    command.add_argument(
        "--hardware", metavar="DEVICE:LINK", help=f"by data sheets instead of --profile: {SHEETS}"
    )
    command.add_argument(
        "--cluster",
        metavar="FILE",
        help="TOML file of devices (speed, memory) and links; without it every rank is as the "
        "profile says",
    )
    command.add_argument("--json", metavar="FILE", help="also write the answer there (JSON)")


GROUPS = (
    "data",
    "model",
    "training",
    "evaluation",
    "shape",
    "staleness",
    "ranks",
    "output",
    "checkpoints",
)


VERIFY_DEFAULTS = {"epochs": 3, "dtype": "float64"}
"""Where ``verify`` differs from ``train``."""


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="gnnpipe",
        description="Train deep graph neural networks on the whole graph, on one device or many.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gnnpipe {version('gnnpipe')}")
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    train = commands.add_parser("train", help="train a model", allow_abbrev=False)
    info = commands.add_parser(
        "info",
        help="graph, cut, memory and bytes of a shape, before any training",
        allow_abbrev=False,
    )
    info.add_argument("--list", action="store_true", help="list the datasets known by name")
    verify = commands.add_parser(
        "verify",
        help="train a shape and one device, compare losses and gradients",
        allow_abbrev=False,
    )
    verify.add_argument(
        "--tolerance",
        type=reader(float),
        metavar="FLOAT",
        help="largest relative difference allowed (default 1e-9 in float64, 1e-5 in float32)",
    )

    train.add_argument(
        "--seeds",
        type=reader(int),
        metavar="INT",
        help="train so many times, from --seed on, and print mean and deviation",
    )
    train.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the run in this folder, from its newest whole checkpoint; other flags "
        "change its settings from there on",
    )
    profile = commands.add_parser(
        "profile",
        help="measure what this machine takes for a model and its links",
        allow_abbrev=False,
    )
    add_profile_flags(profile)
    tried = commands.add_parser(
        "simulate",
        help="what an epoch would take, in any shape, on devices that are not here",
        allow_abbrev=False,
    )
    add_simulate_flags(tried)
    page = commands.add_parser("report", help="make a page of a run folder", allow_abbrev=False)
    add_flags(page)
    both = commands.add_parser(
        "compare",
        help="set the scores of two runs, or of their seeds, side by side",
        allow_abbrev=False,
    )
    add_compare_flags(both)
    health = commands.add_parser(
        "doctor", help="look whether this machine has what a run needs", allow_abbrev=False
    )
    add_doctor_flags(health)
    for command in (train, info, verify, profile, tried):
        command.add_argument("--config", help="TOML file with any of the settings below")
        _add_settings(command, VERIFY_DEFAULTS if command is verify else {})
    return parser, {
        "train": train,
        "info": info,
        "verify": verify,
        "profile": profile,
        "report": page,
        "compare": both,
        "doctor": health,
        "simulate": tried,
    }


def _add_settings(command: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    hints = typing.get_type_hints(TrainConfig)
    groups = {name: command.add_argument_group(name) for name in GROUPS}
    for field in dataclasses.fields(TrainConfig):
        hint = hints[field.name]
        kind = next((t for t in typing.get_args(hint) if t is not type(None)), hint)
        text = field.metadata["help"].replace("%", "%%")
        default = defaults.get(field.name, field.default)
        if default not in (None, ""):
            text += f" (default {default})"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": reader(kind), "metavar": kind.__name__.upper()}
        groups[field.metadata["group"]].add_argument(flag(field.name), **options)


def _config(options: argparse.Namespace, defaults: dict[str, Any]) -> TrainConfig:
    """Command's defaults, then the TOML file, then flags; or a run's own, then flags."""
    values = dict(defaults)
    if options.config is not None:
        values |= {k.replace("-", "_"): v for k, v in TrainConfig.read_toml(options.config).items()}
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    values |= {k: v for k, v in vars(options).items() if k in names}
    if getattr(options, "resume", None) is not None:
        from gnnpipe.run.resume import resumed_config

        config = resumed_config(options.resume, values)
    else:
        config = TrainConfig.from_dict(values)
    check_stages(config)
    return config


def _train(options: argparse.Namespace) -> int:
    config = _config(options, {})
    if options.seeds is not None and options.seeds < 1:
        raise InputError(f"--seeds {options.seeds}: must be at least 1")
    if options.seeds is not None and options.resume is not None:
        raise InputError(
            f"--seeds {options.seeds}: goes with no --resume, which goes on with one run; leave "
            "it out"
        )
    from gnnpipe.train.trainer import Trainer

    if options.seeds is None:
        trainer = Trainer(config, resume=options.resume)
        trainer.fit()
        trainer.close()
        return 0
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.train.multi_seed import fit_seeds

    mesh = Mesh.join(config.stages, config.shards, config.device, config.timeout_s)
    found = fit_seeds(config, options.seeds, mesh=mesh)
    if mesh.rank == 0 and not config.quiet:
        print("\n".join(found.lines()), flush=True)
    mesh.leave()
    return 0


def _info(options: argparse.Namespace) -> int:
    config = _config(options, {})
    if options.list:
        from gnnpipe.data.load import dataset_names

        print("\n".join(dataset_names()))
        return 0
    from gnnpipe.run.info import info

    print(info(config))
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
        raise InputError(f"--tolerance {options.tolerance}: must be a number above 0, like 1e-5")
    config = _config(options, VERIFY_DEFAULTS)
    check_verifiable(config)
    from gnnpipe.run.summary import head_lines
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verify.verify import TOLERANCE, verdict, verify

    mesh = Mesh.join(config.stages, config.shards, config.device, config.timeout_s)
    prepared = prepare(config, mesh)
    found = verify(prepared, mesh, config.epochs)
    tolerance = options.tolerance or TOLERANCE[config.dtype]
    if mesh.rank == 0:
        lines = [*head_lines(prepared), *(c.text() for c in found)]
        print("\n".join([*lines, verdict(prepared, found, tolerance)]), flush=True)
    mesh.leave()
    return 0 if all(c.largest <= tolerance for c in found) else 1


def _profile(options: argparse.Namespace) -> int:
    config = _config(options, {})
    from gnnpipe.profile.profile import profile_command

    return profile_command(config, options.save, options.hardware)


def _simulate(options: argparse.Namespace) -> int:
    config = _config(options, {})
    from gnnpipe.profile.simulate import simulate_command

    return simulate_command(config, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code: 0 done, 1 a fault of the run (or verify found a difference), 2 bad input, 75
    told to stop (and ready to be gone on with), 130 interrupted.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    rank = os.environ.get("RANK", "0")
    try:
        parser, commands = _parser()
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            words = sys.argv[1:] if arguments is None else arguments
            commands.get(options.command, parser).refuse(unknown, words, commands)
        if options.command is None:
            known = ", ".join(commands)
            raise InputError(f"gnnpipe: give a command: {known}; see `gnnpipe --help`")
        run = {
            "train": _train,
            "info": _info,
            "verify": _verify,
            "profile": _profile,
            "report": report,
            "compare": compare,
            "doctor": doctor,
            "simulate": _simulate,
        }
        return run[options.command](options)
    except LostRankError as error:
        _stay()
        print(f"gnnpipe: {error}", file=sys.stderr, flush=True)
        return 1
    except (InputError, FloatingPointError, FailedError) as error:
        # Every rank stands before the same fault; one line is enough.
        if may_speak():
            print(f"gnnpipe: error: {one_line(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, InputError) else 1
    except StoppedError as stop:
        if may_speak():
            print(f"gnnpipe: {stop}", file=sys.stderr, flush=True)
        return 75
    except BrokenPipeError:
        _stay()
        # Whoever read our output has gone (`| head`); nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        _stay()
        if may_speak():
            where = str(stop) or "nothing had begun"
            print(f"gnnpipe: interrupted; {where}", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        _stay()
        # Another rank's fault reaches this one as a broken connection. The rank at fault speaks
        # first: torchrun ends the others while they wait here.
        from gnnpipe.run.rank_log import is_lost_peer
        from gnnpipe.run.signals import PATIENCE_S

        if is_lost_peer(error):
            time.sleep(PATIENCE_S)
            print(f"gnnpipe: rank {rank} lost another rank: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
            sys.stderr.flush()
        return 1


def _stay() -> None:
    """After a fault something may be on its way between ranks, and would be waited for at exit."""
    mesh = sys.modules.get("gnnpipe.runtime.comm.mesh")  # or nobody has met
    if mesh is not None:
        mesh.stay_at_exit()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line, from one rank, without the line of code that it came from."""
    if may_speak():
        print(f"gnnpipe: warning: {message}", file=sys.stderr, flush=True)
