"""What the pages say exists: files, functions, links, flags; and the reference page is fresh."""

import argparse
import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gnnpipe.cli.commands import make_parser
from gnnpipe.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
TOP = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "datasets" / "README.md"]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
TOUR = ROOT / "docs" / "explanation" / "follow-an-embedding.md"
NAMED = [TOUR, ROOT / "docs" / "layout.md"]
TUTORIAL = ROOT / "docs" / "tutorial.md"
HAND_WRITTEN = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.parent.name not in ("benchmarks", "adr")
]
"""Pages that say in their first line what they are for."""
FILES = sorted((ROOT / "gnnpipe").rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def code_spans(text):
    """What stands between backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


@cache
def defined():
    """Every name that the package defines, and 'Class.member' for the members of classes."""
    names = set()
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {path.stem, *path.relative_to(ROOT).parts[:-1]}
        for item in ast.walk(tree):
            if isinstance(item, ast.FunctionDef | ast.ClassDef):
                names.add(item.name)
            if isinstance(item, ast.arg):
                names.add(item.arg)
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                names.add(item.id)
            if isinstance(item, ast.ClassDef):
                for member in item.body:
                    if isinstance(member, ast.FunctionDef):
                        names.add(f"{item.name}.{member.name}")
                    elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                        names.add(f"{item.name}.{member.target.id}")
    return names


# Not ours, checked where they live.
FOREIGN = {"torch.autograd.backward", "torch.optim.Adam.step", "MODELS.add", "PARTITIONERS.add"}


@pytest.mark.parametrize("page", NAMED, ids=name_of)
def test_every_name_exists(page):
    spans = set(code_spans(page.read_text(encoding="utf-8")))
    looks_like_a_name = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
    missing = []
    for span in sorted(spans):
        if re.search(r"\.(py|md|toml|csv|json|txt)\b|/", span):
            # A run's own files are made by a run; folders and sources are here.
            if not (ROOT / span.removeprefix("python ")).exists() and span.endswith(".py"):
                missing.append(span)
            continue
        if not looks_like_a_name.fullmatch(span) or span in FOREIGN:
            continue
        if span.removesuffix("()") not in defined():
            missing.append(span)
    assert not missing, f"{name_of(page)} names what is not there: {missing}"


def test_foreign_names_exist():
    import torch

    from gnnpipe.graph.partition import PARTITIONERS
    from gnnpipe.models import MODELS

    assert callable(torch.autograd.backward)
    assert callable(torch.optim.Adam.step)
    assert callable(MODELS.add)
    assert callable(PARTITIONERS.add)


@pytest.mark.parametrize("page", NAMED, ids=name_of)
def test_every_source_file_exists(page):
    known = {
        p.name for p in [*FILES, *(ROOT / "scripts").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    }
    named = set(re.findall(r"[\w-]+\.py\b", page.read_text(encoding="utf-8")))
    assert not named - known


def test_a_function_is_in_the_file_named_beside_it():
    """`name` in [file.py](...): the file defines it."""
    text = TOUR.read_text(encoding="utf-8")
    pairs = re.findall(r"`([\w.]+)`[^`.;]{0,30}? (?:in |\()\[[\w]+\.py\]\(([^)]+)\)", text)
    assert len(pairs) > 20
    for name, link in pairs:
        source = (TOUR.parent / link).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"\b(def|class) {part}\b", source), f"{name} is not in {link}"


def anchors(text):
    heads = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        page_of = target.suffix == ".md" and target.exists()
        known = anchors(target.read_text(encoding="utf-8")) if page_of else set()
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    assert not broken


@cache
def parser():
    return make_parser()


@cache
def flags_of(command):
    actions = parser()[0]._actions
    choices = next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices
    return {s for a in choices[command]._actions for s in a.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_only_flags_that_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    names = "|".join(parser()[1])
    for command, rest in re.findall(rf"gnnpipe ({names})\b([^\n`]*)", text):
        unknown = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - flags_of(command)
        assert not unknown, f"gnnpipe {command}{rest}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name_of)
def test_flags_in_backticks_exist(page):
    """A flag on its own, such as `--chunks 8`, is one of gnnpipe's, or of the scripts for OGB."""
    known = set().union(*map(flags_of, parser()[1])) | {"--no-..."}
    text = (ROOT / "scripts" / "ogb_run.py").read_text(encoding="utf-8")
    known |= set(re.findall(r'"(--[a-z_]+)"', text))
    for span in code_spans(page.read_text(encoding="utf-8")):
        if span.startswith("--") and "torchrun" not in span:
            assert set(re.findall(r"(?<!\S)--[a-z._-]+", span)) <= known, span


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_path_of_ours(page):
    """What a reader cannot reach is not named."""
    text = page.read_text(encoding="utf-8")
    for hidden in ("/work/", "/tmp/", "design.md", "papers.md", "../shared"):
        assert hidden not in text


def test_the_reference_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "scripts" / "make_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fresh = "run python scripts/make_reference.py"
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), fresh
    assert module.PYTHON_PAGE.read_text(encoding="utf-8") == module.python_page(), fresh


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_what_the_page_shows_of_info_is_what_is_printed(capsys):
    page = ROOT / "docs" / "how-to" / "estimate-memory.md"
    text = page.read_text(encoding="utf-8")
    ((words, shown),) = re.findall(r"    gnnpipe (info .*)\n\n```\n(.*?)```", text, re.DOTALL)
    assert main([*words.split(), "--cache-dir", "off"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in shown.splitlines():
        assert line in lines or line.strip() == "..."


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name_of)
def test_a_page_begins_with_its_purpose(page):
    """A title, an empty line, then 'This page ...' or 'This tutorial ...'."""
    title, empty, first = page.read_text(encoding="utf-8").splitlines()[:3]
    assert title.startswith("# ")
    assert not empty
    assert re.match(r"This (page|tutorial) \w+", first), first


@pytest.mark.parametrize("folder", ["how-to", "explanation"])
def test_every_page_is_in_the_index_of_its_folder(folder):
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
    index = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)\)", index))


def commands_in(page):
    """The gnnpipe commands of a page's code blocks, as lists of words."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    names = "|".join(parser()[1])
    for line in re.findall(r"^    (.+)$", text, flags=re.M):
        found = re.search(rf"\bgnnpipe ((?:{names})\b.*)", line)
        if found:
            yield shlex.split(found.group(1), comments=True)


HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", TUTORIAL, *HOW_TO], ids=name_of)
def test_commands_parse(page):
    """Flags exist, and values have the right type."""
    for words in commands_in(page):
        parser()[0].parse_args(words)


def test_the_tutorial_has_commands():
    assert len(list(commands_in(TUTORIAL))) > 5


@pytest.mark.parametrize("page", [ROOT / "README.md", TUTORIAL, *HOW_TO], ids=name_of)
def test_python_on_a_page_compiles(page):
    text = page.read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        compile(code, str(page), "exec")


@pytest.mark.slow
def test_the_script_of_the_readme_runs(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert "epochs=50" in code
    script = tmp_path / "train.py"
    script.write_text(code.replace("epochs=50", "epochs=2"), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=True
    )
    assert b"torch.Size" in done.stdout
    assert (tmp_path / "model.pt").exists()


def test_the_readme_counts_rightly():
    """Models that are compared with plain PyG, and convolutions by how they run."""
    import hetero_models
    import link_models
    import pyg_models

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    counts = [len(m.MODELS) for m in (pyg_models, hetero_models, link_models)]
    found = re.search(r"(\d+) models with plain PyG: \[(\d+) .*?\[(\d+) .*?\[(\d+) ", text)
    assert [int(n) for n in found.groups()] == [sum(counts), *counts]
    table = (ROOT / "docs" / "reference" / "convolutions.md").read_text(encoding="utf-8")
    ways = re.findall(r"^\| \w+ \| ([\w, ]+) \|", table, flags=re.M)[1:]
    other, absent = ways.count("as it is"), ways.count("not tried")
    pattern = r"Of the (\d+) .*? (\d+) are recorded .*? (\d+) run as they are .*? (\d+) were not"
    found = re.search(pattern, text)
    expected = [len(ways), len(ways) - other - absent, other, absent]
    assert [int(n) for n in found.groups()] == expected
