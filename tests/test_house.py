"""What keeps the house readable, where ruff, mypy and import-linter do not look."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gnnpipe"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES = 600
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
ORPHAN_LINES = 40

LARGE_FUNCTIONS: dict[str, str] = {
    "graph/graph.py from_pyg": "a user describes a graph by name",
    "ops/norm_relu.py forward": "a torch.autograd.Function takes its inputs one by one",
    "ops/triton/dropout.py _fill": "a Triton kernel takes its pointers and sizes one by one",
    "ops/triton/norm_relu.py _forward": "a Triton kernel",
    "ops/triton/norm_relu.py _backward": "a Triton kernel",
    "ops/triton/spmm.py _sum_pieces": "a Triton kernel",
    "train/trainer.py __init__": "a user passes the parts of a run by name",
}
"""Functions over the limits, and why."""

ODD_FIRST_WORDS = r"(What|Of|By|Where|Who|Those|Whose|As|In that)\b"
# A word and what to say instead (style.md's glossary).
WORDS = {
    "ghost": "halo",
    "mirror": "halo; M counts crossings",
    "microbatch": "chunk",
    "minibatch": "chunk",
    "strategy": "plan",
}

# (file, word): why it has to stand there.
ALLOWED: dict[tuple[str, str], str] = {}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


SCRIPTS = sorted((PACKAGE.parent / "scripts").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path, monkeypatch):
    """Scripts are run by hand, and seldom: what was renamed under them would not be seen."""
    monkeypatch.syspath_prepend(str(path.parent))
    for item in ast.walk(tree_of(path)):
        module = getattr(item, "module", None) or ""
        is_ours = module.startswith("gnnpipe") or path.with_name(f"{module}.py").exists()
        if isinstance(item, ast.ImportFrom) and is_ours:
            # As the statement does: a name in the module, or a module below it.
            found = __import__(module, fromlist=[name.name for name in item.names])
            missing = [name.name for name in item.names if not hasattr(found, name.name)]
            assert not missing, f"{module} has no {', '.join(missing)}"


def test_the_package_is_found():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_one_idea(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: is it still one idea?"


def functions(tree: ast.Module):
    """(name, lines, parameters without self) of every function of a file."""
    for item in ast.walk(tree):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            given = [a for a in given if a.arg not in ("self", "cls")]
            yield item.name, item.end_lineno - item.lineno + 1, len(given)


def too_large(path: Path) -> set[str]:
    return {
        f"{name_of(path)} {name}"
        for name, lines, parameters in functions(tree_of(path))
        if lines > MOST_FUNCTION_LINES or parameters > MOST_PARAMETERS
    }


def test_a_function_fits_on_a_screen():
    found = set().union(*map(too_large, FILES))
    assert found == LARGE_FUNCTIONS.keys()


def first_lines(tree: ast.Module):
    for item in ast.walk(tree):
        if isinstance(item, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (ast.get_docstring(item) or "").split("\n")[0]


def test_a_docstring_says_what_the_thing_does_or_returns():
    odd = [
        f"{name_of(path)}: {line}"
        for path in FILES
        for line in first_lines(tree_of(path))
        if re.match(ODD_FIRST_WORDS, line)
    ]
    assert odd == []


def test_the_formatter_lays_out_the_code():
    assert not [name_of(path) for path in FILES if "# fmt: skip" in path.read_text()]


def test_a_small_file_has_several_readers():
    """A file under 40 lines that one other file imports belongs there, unless it registers."""
    readers: dict[str, set[str]] = {}
    for path in FILES:
        for item in ast.walk(tree_of(path)):
            if isinstance(item, ast.ImportFrom) and item.module:
                for name in (item.module, *(f"{item.module}.{a.name}" for a in item.names)):
                    readers.setdefault(name, set()).add(name_of(path))
    orphans = [
        name_of(path)
        for path in FILES
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text().splitlines()) < ORPHAN_LINES
        and not re.search(r"^[A-Z_]+\.add\(", path.read_text(), re.MULTILINE)
        and len(readers.get("gnnpipe." + name_of(path)[:-3].replace("/", "."), ())) == 1
    ]
    assert orphans == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_everything_public_has_a_docstring(path):
    tree = tree_of(path)
    bare = [] if ast.get_docstring(tree) else ["the module"]
    for item in tree.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not item.name.startswith("_") and not ast.get_docstring(item):
            bare.append(item.name)
    assert not bare, f"without a docstring: {', '.join(bare)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_with_an_underscore_stay_in_their_module(path):
    """The public names of a module are those without one; packages list theirs in ``__all__``."""
    tree = tree_of(path)
    taken = [
        f"{alias.name} of {item.module}"
        for item in ast.walk(tree)
        if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("gnnpipe")
        for alias in item.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not taken, f"private names are imported: {', '.join(taken)}"
    lists = [
        i for i in tree.body if isinstance(i, ast.Assign) and ast.unparse(i.targets[0]) == "__all__"
    ]
    offers = any(isinstance(i, ast.ImportFrom) and i.module != "__future__" for i in tree.body)
    assert bool(lists) == (path.name == "__init__.py" and offers)


def imported_at_top(path: Path, modules: dict[str, Path]) -> set[str]:
    """The gnnpipe modules that importing ``path`` imports at once, or under TYPE_CHECKING.

    Imports inside a function are left out: import-linter sees their direction.
    """
    found: set[str] = set()
    body = tree_of(path).body
    if path != PACKAGE / "__init__.py":  # whose names are imported on first use
        guarded = [i for i in body if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)]
        body = [*body, *(inner for item in guarded for inner in item.body)]
    for item in body:
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module:
            assert item.level == 0, f"{name_of(path)}: a relative import"
            for alias in item.names:
                full = f"{item.module}.{alias.name}"
                found.add(full if full in modules else item.module)
    return found & modules.keys()


def test_no_import_cycle():
    modules = {}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imported_at_top(path, modules) for name, path in modules.items()}
    # `from gnnpipe.models import gat` inside gnnpipe.models is a package reading its own parts
    for name, found in graph.items():
        found -= {p for p in found if name.startswith(p + ".")}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def words(text: str) -> set[str]:
    """The words of an identifier or a text, in lower case and singular."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    joined = re.sub(r"\b(micro|mini)[- _](?=batch)", r"\1", split, flags=re.IGNORECASE)
    found = set(re.findall(r"[a-z]+", joined.lower()))
    return found | {re.sub(r"(?<=ch|sh)es$|s$", "", w) for w in found}


def identifiers(tree: ast.Module) -> set[str]:
    """Names that the file gives; not the names of others that it uses."""
    found: set[str] = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.arg):
            found.add(item.arg)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            found.add(item.attr)
    return found


def texts(tree: ast.Module) -> set[str]:
    """Docstrings, those under a field included."""
    return {
        item.value.value
        for item in ast.walk(tree)
        if isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_one_vocabulary(path):
    tree = tree_of(path)
    given = identifiers(tree)
    found = [
        f"{word!r} in {place.splitlines()[0]!r}: say {instead}"
        for place in sorted(given | texts(tree))
        for word, instead in WORDS.items()
        if word in words(place) and (name_of(path), word) not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_still_needed():
    for name, word in ALLOWED:
        tree = tree_of(PACKAGE / name)
        assert any(word in words(t) for t in identifiers(tree) | texts(tree)), (name, word)
