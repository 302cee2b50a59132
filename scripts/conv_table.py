"""How every convolution of torch_geometric runs here: docs/reference/convolutions.md.

python scripts/conv_table.py            # write the page (some minutes)
python scripts/conv_table.py --check    # exit code 1 if a convolution runs otherwise than it says

Each convolution is put into a small model between two linear layers (``conv_models``). The model is
recorded and trained on each shape, and its losses are compared with those of plain PyG; what cannot
be recorded is listed with the reason that a user would be given.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as convs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import write_page  # noqa: E402
from conv_models import RELATIONS, WITHOUT_PYG_LIB, inputs_of, make_data, make_model  # noqa: E402
from parity import (  # noqa: E402
    ALONE,
    EPOCHS,
    LR,
    SHAPES,
    Shape,
    difference,
    gnnpipe_losses,
    losses_on_two_ranks,
    shown,
)

from gnnpipe.capture import capture  # noqa: E402
from gnnpipe.capture.edge_work.modules import EdgeModule  # noqa: E402
from gnnpipe.capture.recording import Recording  # noqa: E402
from gnnpipe.errors import InputError  # noqa: E402
from gnnpipe.models.gat_attention import is_additive  # noqa: E402
from gnnpipe.models.without_messages import can_avoid_messages  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "convolutions.md"
OF_RELATIONS = {
    "HeteroConv": "lowered, each relation by its own convolution",
    "HANConv": "relation by relation, each attention on blocks",
    "HGTConv": "relation by relation, each attention on blocks",
}
NOT_TRIED = {
    "CuGraphSAGEConv": "needs the cugraph library and its own graph format",
    "CuGraphGATConv": "needs the cugraph library and its own graph format",
    "CuGraphRGCNConv": "needs the cugraph library and its own graph format",
    "FusedGATConv": "needs the dgNN library and its own graph format; use GATConv, which computes "
    "the same",
    "PANConv": "needs the torch_sparse library",
}
"""Convolutions that are not tried, and why."""
AS_IT_IS = "as it is"


def row(name: str) -> tuple[str, str]:
    """How a convolution runs, and what there is to say of it."""
    if name in NOT_TRIED:
        return "not tried", NOT_TRIED[name]
    more = [NOTES[name]] if name in NOTES else []
    try:
        found = capture(*make_model(name)).recording
    except InputError as error:
        return AS_IT_IS, "; ".join([reason(name, str(error)), *more])
    how, note = described(found)
    if name in OF_RELATIONS:
        hops = note.split(",")[0]
        how, note = OF_RELATIONS[name], f"{hops} for {len(RELATIONS)} relations"
    return how, "; ".join([note, *more])


FIND_NEIGHBOURS = ("DynamicEdgeConv", "GravNetConv", "XConv")
NOTES = {
    **dict.fromkeys(("SplineConv", *FIND_NEIGHBOURS), WITHOUT_PYG_LIB),
    "MessagePassing": "a subclass of the user's own",
    "HypergraphConv": "with `num_edges` given",
}
"""Notes on convolutions, for the table."""
REASONS = {
    **dict.fromkeys(FIND_NEIGHBOURS, "finds the neighbours of a vertex among all vertices"),
    "GPSConv": "every vertex attends to every other; recorded with `attn_type='performer'`",
    "WLConv": "numbers the colours of all vertices one after another",
    "MeshCNNConv": "reads messages in the order in which the edges are given",
}
"""Why a convolution is not recorded, in fewer words than the message has."""


def reason(name: str, message: str) -> str:
    """Why a convolution is not recorded."""
    message = message.removeprefix("model: ").split(" (/")[0].split(". It may")[0]
    return REASONS.get(name, message)


def described(found: Recording) -> tuple[str, str]:
    """How the convolutions of a recording run, and how many aggregations they make."""
    count = sum(map(found.aggregates, found.ops))
    hops = "1 aggregation" if count == 1 else f"{count} aggregations"
    forms = {op: found.facts[op].form for op in found.ops if found.facts[op].form}
    if not forms:
        return "lowered", hops
    run = [found.graph_module.get_submodule(str(op.target)) for op in forms]
    if any(isinstance(module, EdgeModule) for module in run):
        return "call by call", hops
    form = next(iter(forms.values()))
    words = {"pair": "called on a pair", "square": "called on the whole block"}[str(form)]
    convs = [m for m in found.model.modules() if isinstance(m, MessagePassing)]
    is_known = any(
        can_avoid_messages(conv) or (form == "pair" and is_additive(conv)) for conv in convs
    )
    return "without messages" if is_known else "unchanged", f"{hops}, {words}"


def truth_of(name: str) -> list[float]:
    """Losses of the model around a convolution in a loop of plain PyG."""
    (model, _), data = make_model(name), make_data(name)
    model = model.double()
    labelled, inputs = data["b"] if name in OF_RELATIONS else data, inputs_of(data, torch.float64)
    y, train = labelled.y, labelled.train_mask
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*inputs)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    name: str, shape: Shape, world: Mesh | None = None, must_be_recorded: bool = True
) -> list[float]:
    """Losses of the model around a convolution in gnnpipe."""
    model, graph = make_model(name)
    return gnnpipe_losses(model, graph, shape, world, must_be_recorded)


def differences(hows: Mapping[str, str]) -> dict[str, list[str]]:
    """By convolution, the largest difference to plain PyG for each of ``SHAPES``."""
    tried = [name for name in hows if name not in NOT_TRIED]
    recorded = [name for name in tried if hows[name] != AS_IT_IS]
    on_ranks = losses_on_two_ranks(trained, recorded)
    found = {name: ["—"] * len(SHAPES) for name in hows}
    for name in tried:
        truth = truth_of(name)
        losses = {shape: on_ranks.get((name, shape), []) for shape in SHAPES}
        for shape in ALONE if name in recorded else ALONE[:1]:
            losses[shape] = trained(name, shape, must_be_recorded=name in recorded)
        found[name] = [shown(difference(losses[shape], truth)) for shape in SHAPES]
    return found


def written_differences() -> dict[str, list[str]]:
    """The differences that the page has."""
    text = PAGE.read_text(encoding="utf-8")
    rows = (re.split(r" \| ", line.strip("| ")) for line in text.splitlines())
    return {cells[0]: cells[3:] for cells in rows if len(cells) == 3 + len(SHAPES)}


def page() -> str:
    """The whole page; with --check, differences are taken from the page as it is."""
    version = ".".join(torch_geometric.__version__.split(".")[:2])
    rows = {name: row(name) for name in sorted(convs.__all__)}
    hows = {name: how for name, (how, _) in rows.items()}
    numbers = written_differences() if "--check" in sys.argv[1:] else differences(hows)
    tried = [how for how in hows.values() if how != "not tried"]
    recorded = len(tried) - tried.count(AS_IT_IS)
    lines = [
        "# How each PyG convolution runs",
        "",
        f"This page says for every convolution of torch_geometric {version} how gnnpipe runs it, "
        f"and how far its losses are from plain PyG's. Of {len(rows)} convolutions, {recorded} are "
        f"recorded and {tried.count(AS_IT_IS)} run as they are. `scripts/conv_table.py` writes the "
        "page.",
        "",
        "Each convolution, with PyG's default arguments, was put into a small model. The model was "
        "trained for three epochs in float64. The last columns have the largest relative "
        "difference of a loss to a loop of plain PyG, for shapes (stages, shards, chunks), with "
        "`--staleness exact`.",
        "",
        "- *lowered*: becomes row-wise work and sparse products with a fixed matrix. For some "
        "arguments such a convolution runs unchanged instead.",
        "- *unchanged*: PyG's own module runs on a block: the rows of a chunk and their "
        "neighbours. *Called on a pair*: its input is the pair (rows of the block, rows of the "
        "chunk), as for bipartite graphs. *Called on the whole block*: it takes no pair, so it "
        "computes all rows of the block, and those of the chunk are kept.",
        "- *without messages*: runs on a block, by a "
        "[kernel of gnnpipe](../adr/0061-convolutions-keep-no-messages.md) that stores no "
        "messages.",
        "- *call by call*: the calls of its `forward` are recorded. Those that depend on the edges "
        "alone are [computed once](../adr/0038-work-on-edges-is-taken-out.md), and `propagate` "
        "runs on blocks.",
        "- *as it is*: would give other results when it is computed chunk by chunk. A model with "
        "it runs as in plain PyG on one rank in one chunk, and is refused otherwise.",
        "- *not tried*: needs a library that was not there.",
        "- *n aggregations*: how often the convolution aggregates neighbours.",
        "",
        "Arguments matter: `SAGEConv` with `max` aggregation runs without messages, `PNAConv` with "
        "edge features unchanged. With an LSTM `SAGEConv` runs as it is, because PyG pads "
        "sequences to the largest degree.",
        "",
        "| convolution | how | notes | " + " | ".join(map(shape_text, SHAPES)) + " |",
        "|---" * (3 + len(SHAPES)) + "|",
    ]
    for name, cells in rows.items():
        lines.append(f"| {' | '.join([name, *cells, *numbers.get(name, [])])} |")
    return "\n".join(lines) + "\n"


def shape_text(shape: Shape) -> str:
    """'(2,1,4)'."""
    return str(shape).replace(" ", "")


def main() -> int:
    warnings.simplefilter("ignore")
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
