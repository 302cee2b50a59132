"""Lines and warnings of a run: printed once, and sent to the logger gnnpipe."""

import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
from helpers import quick_config, run_ranks, small_graph
from rich.console import Console
from rich.logging import RichHandler

from gnnpipe import Trainer, fit_seeds

CAUSE = {"model": "gcn", "alpha": 0.3}
WARNING = "--alpha 0.3: --model gcn does not read it, gcnii does"


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
