"""Commands of the command line: the flags of each, and the function that runs it.

Commands import what they run on first use, so that a wrong flag is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpipe.cli.parser import Parser, add_settings, config_of, number
from gnnpipe.config import TrainConfig
from gnnpipe.config.settings import PREDICTION_SETTINGS
from gnnpipe.config.validation import check_verifiable
from gnnpipe.errors import ExitCode, InputError
from gnnpipe.files import NewFile
from gnnpipe.output import say
from gnnpipe.tools.doctor import add_flags as add_doctor_flags
from gnnpipe.tools.doctor import doctor
from gnnpipe.version import __version__

if TYPE_CHECKING:
    from gnnpipe.plan.cluster import Cluster
    from gnnpipe.planner.given_devices import Hardware

DATA_SHEETS = "p100, v100, a100 or h100; nvlink3, nvlink4, 10gbe or 100gbe"

VERIFY_DEFAULTS = {"epochs": 3, "dtype": "float64"}
"""Defaults of ``verify`` that differ from those of ``train``."""


@dataclass(frozen=True)
class Command:
    """A command of ``gnnpipe``."""

    help: str
    add_flags: Callable[[Parser], None]
    """Adds the flags that only this command has."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns its exit code."""
    has_settings: bool = True
    """Whether the command takes every field of ``TrainConfig`` as a flag."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of ``gnnpipe`` and the parser of every command by name."""
    parser = Parser(
        prog="gnnpipe",
        description="Train deep graph neural networks on the whole graph, on one device or many.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gnnpipe {__version__}")
    choices = parser.add_subparsers(dest="command", parser_class=Parser)
    subparsers = {}
    for name, command in COMMANDS.items():
        # argparse's own usage line would list every setting.
        usage = f"gnnpipe {name} [flags]" if command.has_settings else None
        subparser = choices.add_parser(name, help=command.help, usage=usage, allow_abbrev=False)
        command.add_flags(subparser)
        if command.has_settings:
            add_settings(subparser, command.defaults)
        subparsers[name] = subparser
    return parser, subparsers


def _add_train_flags(parser: Parser) -> None:
    parser.add_argument(
        "--seeds",
        type=number(int),
        metavar="INT",
        help="train this many times, with seeds --seed, --seed + 1, ..., and print mean and "
        "standard deviation",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="continue the run in this folder from its newest complete checkpoint; other flags "
        "change its settings from there on",
    )

    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="with --plan auto: TOML file with the device of every rank and the links, as "
        "`gnnpipe profile --save-cluster` writes it (default: measured before the run)",
    )


def _train(options: argparse.Namespace) -> int:
    config = config_of(options)
    cluster = _cluster(options)
    if options.seeds is not None and options.seeds < 1:
        raise InputError(f"--seeds {options.seeds}: must be at least 1")
    if options.seeds is not None and options.resume is not None:
        raise InputError(
            f"--seeds {options.seeds}: cannot be combined with --resume, which continues one run; "
            "leave one out"
        )
    if options.seeds is None:
        from gnnpipe.run.summary import result_lines
        from gnnpipe.runtime.comm.launch import launched_rank
        from gnnpipe.train.trainer import Trainer

        # Given now, not in the config of the run that is resumed.
        replan = options.resume is not None and getattr(options, "plan", None) == "auto"
        trainer = Trainer(config, resume=options.resume, cluster=cluster, replan=replan)
        result = trainer.fit()
        if config.quiet and launched_rank() == 0:
            print("\n".join(result_lines(result)), flush=True)
        trainer.close()
        return ExitCode.DONE
    from gnnpipe.multi_seed import fit_seeds
    from gnnpipe.setup.prepare import join_world

    world = join_world(config)
    found = fit_seeds(config, options.seeds, world=world, cluster=cluster)
    for line in found.lines() if world.rank == 0 else ():
        say(line)
    world.leave()
    return ExitCode.DONE


def _add_verify_flags(parser: Parser) -> None:
    parser.add_argument(
        "--tolerance",
        type=number(float),
        metavar="FLOAT",
        help="largest relative difference allowed (default 1e-9 in float64, 1e-5 in float32)",
    )


def _verify(options: argparse.Namespace) -> int:
    config = config_of(options, VERIFY_DEFAULTS)
    check_verifiable(config)
    from gnnpipe.setup.prepare import join_world
    from gnnpipe.verification.verify import verify

    world = join_world(config)
    found = verify(config, world=world, tolerance=options.tolerance)
    if world.rank == 0:
        print(found, flush=True)
    world.leave()
    return ExitCode.DONE if found.is_equal else ExitCode.FAILED


def _add_search_flags(parser: Parser, sheets: str) -> None:
    """Add the flags that say what the devices are; ``sheets``: help of --hardware."""
    parser.add_argument("--hardware", metavar="DEVICE:LINK", help=f"{sheets}: {DATA_SHEETS}")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="TOML file with the devices (speed, memory) and links; without it every rank is the "
        "device of the profile",
    )
    parser.add_argument(
        "--devices",
        type=number(int),
        metavar="INT",
        help="with --plan auto and without --cluster: number of equal devices",
    )


def _hardware(config: TrainConfig, options: argparse.Namespace) -> Hardware | None:
    """Return the devices for --plan auto, and None for another plan; also checks a plan file."""
    from gnnpipe.planner import AUTO, planner_named
    from gnnpipe.planner.given_devices import hardware_of

    planner_named(config.plan)
    if config.plan != AUTO:
        return None
    return hardware_of(config, options.hardware, _cluster(options), options.devices)


def _cluster(options: argparse.Namespace) -> Cluster | None:
    """Return the cluster in the file of --cluster, or None without the flag."""
    from gnnpipe.plan.cluster import Cluster

    return None if options.cluster is None else Cluster.read(options.cluster)


def _add_info_flags(parser: Parser) -> None:
    parser.add_argument("--list", action="store_true", help="list the built-in datasets and exit")
    _add_search_flags(parser, "for --plan auto: data sheets of the devices")


def _info(options: argparse.Namespace) -> int:
    config = config_of(options)
    if options.list:
        from gnnpipe.data.load import dataset_names

        print("\n".join(dataset_names()))
        return ExitCode.DONE
    hardware = _hardware(config, options)
    given = {f"--{name}": getattr(options, name) for name in ("hardware", "cluster", "devices")}
    if hardware is None and any(value is not None for value in given.values()):
        name, value = next((k, v) for k, v in given.items() if v is not None)
        raise InputError(f"{name} {value}: `gnnpipe info` uses it for --plan auto; leave it out")
    from gnnpipe.run.info import info

    print(info(config, hardware=hardware))
    return ExitCode.DONE


def _add_profile_flags(parser: Parser) -> None:
    parser.add_argument("--save", metavar="FILE", help="write the profile to this new JSON file")
    parser.add_argument(
        "--save-cluster",
        metavar="FILE",
        help="write the speed of every rank, relative to the fastest one, its memory and the links "
        "to this new TOML file, for --cluster",
    )
    parser.add_argument(
        "--hardware",
        metavar="DEVICE:LINK",
        help=f"measure nothing and use data sheets instead: {DATA_SHEETS}",
    )


def _profile(options: argparse.Namespace) -> int:
    config = config_of(options)
    if options.save_cluster is not None and options.hardware is not None:
        raise InputError(
            f"--save-cluster {options.save_cluster!r}: --hardware {options.hardware} measures "
            "nothing; leave one out"
        )
    from gnnpipe.profiling.profile import profile, profile_and_cluster
    from gnnpipe.runtime.comm.launch import launched_world_size
    from gnnpipe.runtime.comm.world import World

    file = NewFile("--save", options.save, "profile.json")
    cluster_file = NewFile("--save-cluster", options.save_cluster, "cluster.toml")
    world = World.meet(launched_world_size(), config.device, config.timeout_s)
    cluster_text = ""
    if options.save_cluster is None:
        found = profile(config, world=world, hardware=options.hardware)
    else:
        found, cluster = profile_and_cluster(config, world)
        cluster_text = cluster.to_toml(f"gnnpipe profile: {found.machine}, {found.note}")
    if world.rank == 0:
        print(found)
        if file.write(found.to_json()):
            print(f"profile: {options.save}")
        if cluster_file.write(cluster_text):
            print(f"{cluster_text}cluster: {options.save_cluster}")
        sys.stdout.flush()
    world.leave()
    return ExitCode.DONE


def _add_simulate_flags(parser: Parser) -> None:
    parser.add_argument(
        "--shape",
        metavar="N=V,...",
        help="simulate a graph given by its sizes, evenly balanced, instead of a dataset: "
        "vertices=..,edges=..,features=..,classes=.., and optionally halo=.. (rows of other shards "
        "read for each own row, default 1) and stored=.. (nonzeros of sparse features)",
    )
    _add_search_flags(parser, "use data sheets instead of --profile")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this JSON file")


def _simulate(options: argparse.Namespace) -> int:
    config = config_of(options)
    # A dataset in a config file is for other commands.
    if options.shape is not None and hasattr(options, "dataset"):
        raise InputError(
            f"--dataset {options.dataset}: goes with no --shape, which stands for a graph; leave "
            "one out"
        )
    file = NewFile("--json", options.json, "simulated.json")
    # Before torch is loaded.
    cluster = _cluster(options)
    from gnnpipe.planner.given_devices import profile_or_sheets

    known = _hardware(config, options)
    profile = profile_or_sheets(config, options.hardware) if known is None else known.profile
    from gnnpipe.profiling.scenario import GraphShape
    from gnnpipe.profiling.simulate import simulate

    found = simulate(
        config,
        profile=profile,
        hardware=options.hardware,
        shape=None if options.shape is None else GraphShape.parse(options.shape),
        cluster=cluster,
        devices=options.devices,
    )
    print(found, flush=True)
    file.write(found.to_json())
    return ExitCode.DONE


def _add_predict_flags(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--dataset",
        default=argparse.SUPPRESS,
        metavar="STR",
        help="graph to predict for, with features like those of the run's graph (default: the "
        "run's graph); needs no labels and no split",
    )
    parser.add_argument(
        "--out",
        dest="file",
        required=True,
        metavar="FILE",
        help="write the logits [N, classes] to this new .npy file, in the order of the vertices",
    )
    parser.add_argument(
        "--layer",
        default="",
        metavar="NAME",
        help="write what this layer of the model returns in place of the logits: its path, such as "
        "convs.0",
    )
    add_settings(parser, {}, set(PREDICTION_SETTINGS) - {"dataset"})


def _predict(options: argparse.Namespace) -> int:
    given = {name: v for name, v in vars(options).items() if name in PREDICTION_SETTINGS}
    NewFile("--out", options.file, "predictions.npy")  # before torch is loaded
    from gnnpipe.train.trainer import Trainer

    trainer = Trainer.load(options.run, layer=options.layer, **{"quiet": False} | given)
    trainer.save_predictions(options.file)
    trainer.close()
    return ExitCode.DONE


def _add_report_flags(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--save", metavar="FILE", help="write the page here (default RUN/report.html)"
    )
    parser.add_argument(
        "--png",
        action="store_true",
        help="also write the curves and the timeline as PNG files beside the page, for a paper",
    )


def _report(options: argparse.Namespace) -> int:
    from gnnpipe.report.html import write_report

    for path in write_report(Path(options.run), options.save, options.png):
        print(path)
    return ExitCode.DONE


def _add_compare_flags(parser: Parser) -> None:
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(), metavar=name, help="folder of a run, or of the runs of several seeds"
        )


def _compare(options: argparse.Namespace) -> int:
    from gnnpipe.report.compare import compare_lines

    print("\n".join(compare_lines(Path(options.a), Path(options.b))))
    return ExitCode.DONE


COMMANDS = {
    "train": Command("train a model", _add_train_flags, _train),
    "info": Command(
        "show graph, partition, memory and communication of a configuration without training",
        _add_info_flags,
        _info,
    ),
    "verify": Command(
        "compare losses and gradients with a reference on one device",
        _add_verify_flags,
        _verify,
        defaults=VERIFY_DEFAULTS,
    ),
    "profile": Command(
        "measure compute and communication times of a model on this machine",
        _add_profile_flags,
        _profile,
    ),
    "simulate": Command(
        "predict the epoch time of any configuration on any devices", _add_simulate_flags, _simulate
    ),
    "predict": Command(
        "write the logits of a trained model, for the run's graph or another one",
        _add_predict_flags,
        _predict,
        False,
    ),
    "report": Command("write an HTML page about a run", _add_report_flags, _report, False),
    "compare": Command(
        "compare the test scores of two runs, or of two sets of seeds",
        _add_compare_flags,
        _compare,
        False,
    ),
    "doctor": Command("check this machine for what a run needs", add_doctor_flags, doctor, False),
}
"""Every command by name."""
