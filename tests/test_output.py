"""Lines and warnings of a run: printed once, and sent to the logger gnnpipe."""

import logging
import os
import re
import subprocess
import sys
import time
import warnings

import pytest
from helpers import quick_config, run_ranks, small_graph
from rich.console import Console
from rich.logging import RichHandler

from gnnpipe import TrainConfig, Trainer, fit_seeds, output
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup import prepare as prepare_module

CAUSE = {"chunks": 2, "label_inputs": 0.5}
WARNING = (
    "--label-inputs 0.5: stale rows carry labels that were inputs in the last epoch, also those "
    "that are trained on now; exact with --chunks 1 or --staleness exact"
)


@pytest.fixture
def configured():
    """Adds a handler to the root logger, as ``logging.basicConfig`` does."""
    root, added = logging.getLogger(), []
    before = root.level

    def configure(handler, level=logging.INFO):
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(level)
        added.append(handler)

    yield configure
    for handler in added:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before)


def train(**settings):
    Trainer(quick_config(eval_every=1, **{"quiet": False} | settings), small_graph()).fit()


def epochs_in(text):
    return [int(number) for number in re.findall(r"epoch (\d)/3 ", text)]


def test_without_logging_lines_are_printed(capsys):
    train()
    found = capsys.readouterr()
    assert epochs_in(found.out) == [1, 2, 3]
    assert found.err == ""


@pytest.mark.parametrize("name", ["stderr", "stdout"])
def test_lines_that_logging_shows_are_not_printed_again(capsys, configured, name):
    configured(logging.StreamHandler(getattr(sys, name)))
    train()
    found = capsys.readouterr()
    assert epochs_in(found.out + found.err) == [1, 2, 3]
    text = getattr(found, name.removeprefix("std"))
    assert all(line.startswith("gnnpipe INFO ") for line in text.splitlines())
    assert "gnnpipe INFO graph small: 60 vertices" in text
    assert "gnnpipe INFO epoch 3/3  loss" in text


def test_lines_that_rich_shows_are_not_printed_again(capsys, configured):
    configured(RichHandler(console=Console(file=sys.stderr, width=200)))
    train()
    found = capsys.readouterr()
    assert epochs_in(found.err) == [1, 2, 3]
    assert found.out == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_file_has_the_lines_also_of_a_quiet_run(capsys, configured, tmp_path, quiet):
    configured(logging.FileHandler(tmp_path / "log"))
    train(quiet=quiet)
    assert epochs_in((tmp_path / "log").read_text()) == [1, 2, 3]
    assert epochs_in(capsys.readouterr().out) == ([] if quiet else [1, 2, 3])


def test_a_handler_for_warnings_alone_leaves_lines_to_be_printed(capsys, configured):
    configured(logging.StreamHandler(sys.stderr), logging.WARNING)
    train()
    found = capsys.readouterr()
    assert epochs_in(found.out) == [1, 2, 3]
    assert found.err == ""


@pytest.mark.slow
def test_the_lines_of_seeds(capsys, configured, tmp_path):
    configured(logging.FileHandler(tmp_path / "log"))
    fit_seeds(quick_config(epochs=1), 2, small_graph())
    assert "gnnpipe INFO seed 1 (2 of 2)\n" in (tmp_path / "log").read_text()
    assert capsys.readouterr().out == ""


def test_a_warning_is_pythons_and_points_to_the_users_line(configured, tmp_path):
    configured(logging.FileHandler(tmp_path / "log"))
    with pytest.warns(UserWarning, match=WARNING) as found:
        train(quiet=True, **CAUSE)
    assert found[0].filename == __file__
    assert f"gnnpipe WARNING {WARNING}\n" in (tmp_path / "log").read_text()


def test_a_warning_that_logging_shows_is_shown_once(capsys, configured):
    configured(logging.StreamHandler(sys.stderr), logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        train(quiet=True, **CAUSE)
    assert capsys.readouterr().err == f"gnnpipe WARNING {WARNING}\n"


def test_a_warning_without_logging_is_shown_once():
    """In a process of its own: pytest records warnings and has handlers."""
    code = "from gnnpipe.output import warn; warn('so ' + 'it is')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("so it is") == 1


def log_on_ranks(folder):
    path = folder / f"log of rank {os.environ['RANK']}"
    logging.basicConfig(filename=path, level=logging.INFO, force=True)
    train(quiet=True, stages=2, layers=2)
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    return epochs_in(path.read_text())


def test_rank_0_logs(tmp_path):
    assert run_ranks(log_on_ranks, 2, tmp_path) == [[1, 2, 3], []]


@pytest.fixture
def quick_steps(monkeypatch):
    """A step is shown after a hundredth of a second, and ten times as often."""
    monkeypatch.setattr(output, "_SHOWN_AFTER_S", 0.01)
    monkeypatch.setattr(output, "_LINE_EVERY_S", 0.1)
    monkeypatch.setattr(output, "_REDRAWN_EVERY_S", 0.02)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Lines(list):
    """A stand-in for stderr."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal

    def write(self, text):
        self.append(text)

    def flush(self):
        pass


def shown(monkeypatch, is_terminal=False, **settings):
    """What a step shows that goes on until it has shown two lines."""
    lines = Lines(is_terminal)
    monkeypatch.setattr(sys, "stderr", lines)
    with output.Step("reading cora", **settings):
        output.report_progress(left_s=100.0)
        wait_for(lambda: "".join(lines).count("reading") == 2)
    return "".join(lines)


def test_a_long_step_is_shown_with_an_estimate(quick_steps, monkeypatch):
    line = r"reading cora: \d s, about (100|99) s left"
    assert re.fullmatch(f"{line}\n{line}\n", shown(monkeypatch))
    clear = re.escape("\r\x1b[2K")
    assert re.fullmatch(f"({clear}{line}){{2,}}{clear}", shown(monkeypatch, is_terminal=True))


def test_other_lines_and_bars_have_the_terminal_for_themselves(quick_steps, monkeypatch):
    lines = Lines(True)
    monkeypatch.setattr(sys, "stderr", lines)
    with output.Step("reading cora"):
        wait_for(lambda: lines)
        with output.hidden_steps("a bar"):
            time.sleep(0.1)
            drawn = len(lines)
            assert "".join(lines).endswith("\r\x1b[2K")
            time.sleep(0.1)
            assert len(lines) == drawn
        wait_for(lambda: len(lines) > drawn)


def test_a_share_gives_an_estimate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    step = output.Step("measuring", is_first=False)
    with step:
        now[0] += 30
        assert step._line() == "measuring: 30 s"
        output.report_progress(0.75)
        now[0] += 2
        assert step._line() == "measuring: 32 s, about 8 s left"
        now[0] += 20
        assert step._line() == "measuring: 52 s"
    output.report_progress(0.5)
    assert step._line() == "measuring: 52 s"


@pytest.mark.parametrize("settings", [{"is_quiet": True}, {"is_first": False}])
def test_no_step_is_shown_by_other_ranks_and_quietly(quick_steps, monkeypatch, settings):
    lines = Lines(False)
    monkeypatch.setattr(sys, "stderr", lines)
    with output.Step("reading cora", **settings), output.Step("an inner step"):
        time.sleep(0.3)
    assert lines == []


def test_a_short_step_is_not_shown(monkeypatch):
    lines = Lines(True)
    monkeypatch.setattr(sys, "stderr", lines)
    with output.Step("reading cora"):
        pass
    assert lines == []


def test_logging_gets_the_lines_of_a_step(quick_steps, caplog):
    caplog.set_level(logging.INFO, "gnnpipe")
    with output.Step("reading cora", is_quiet=True):
        wait_for(lambda: len(caplog.messages) == 2)
    assert all(text.startswith("reading cora: ") for text in caplog.messages)


def test_the_steps_of_a_run_are_named(quick_steps, monkeypatch):
    lines = Lines(False)
    monkeypatch.setattr(sys, "stderr", lines)
    slow = {"configured_graph": 0.2, "choose_model": 0.2, "make_chunking": 0.2}
    for name, time_s in slow.items():
        real = getattr(prepare_module, name)

        def slowed(*given, real=real, time_s=time_s, **settings):
            time.sleep(time_s)
            return real(*given, **settings)

        monkeypatch.setattr(prepare_module, name, slowed)
    prepare_module.prepare(TrainConfig(dataset="karate", cache_dir="off"), World.alone())
    text = "".join(lines)
    steps = ("reading karate: ", "recording the model: ", "partitioning the graph: ")
    assert [text.count(step) > 0 for step in steps] == [True] * 3
