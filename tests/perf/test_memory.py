"""What a step keeps until backward is what the ops say they keep: counted, tensor by tensor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.graph.blocks import Incidence
from gnnpipe.graph.quality import copied_rows
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.block import BlockHistory
from gnnpipe.runtime.stage import Stage
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.tasks.loss import kept_by_loss, labels_of, loss_sum
from gnnpipe.train.evaluate import train_epoch

N, HIDDEN = 400, 32


def kept_bytes(monkeypatch, layers, graph, chunks, net=None, **settings):
    """Bytes of all tensors that forward leaves behind, weights and what is small left out.

    So are single rows of ``HIDDEN`` numbers, as of the statistics of a norm.
    """
    kept = {}
    forward = Stage.forward

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    def watched(self, chunk, steps):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward(self, chunk, steps)
        for step in self._chunks[chunk].tape:
            for tensor in (*step.leaves.values(), *(r.rows for r in step.received.values())):
                keep(tensor)
        return out

    monkeypatch.setattr(Stage, "forward", watched)
    config = quick_config(layers=layers, hidden=HIDDEN, epochs=1, chunks=chunks, **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, graph, net)
    rank_runtime = build_rank(prepared, mesh)
    train_epoch(rank_runtime, mesh, prepared.program_of(0), prepared.chunk_order(0), 0)
    monkeypatch.setattr(Stage, "forward", forward)
    # Masks are not for backward, but are written over by the next epoch's and not freed.
    stage = rank_runtime.executor.stage
    loss_rows = stage._loss_rows
    all_rows = [*stage.rows, *(loss_rows.rows if loss_rows is not None else ())]
    for one in {rows.masks for rows in all_rows if rows.masks is not None}:
        for _, mask, _ in one._made.values():
            keep(mask)
    # Aggregated features count as features, tables as what they are, places of loss rows as
    # structure.
    elsewhere = [x for rows in stage.rows for x in rows.aggregated.values()]
    elsewhere += loss_rows.places if loss_rows is not None else ()
    for history in stage.histories.values():
        elsewhere += [history.table, history._grads] if chunks > 1 else []
        if isinstance(history, BlockHistory):  # structure, too
            parts = (x for i in range(chunks) for x in vars(history.block(i)).values())
            elsewhere += (x.target for x in parts if isinstance(x, Incidence))
    features = {x.untyped_storage().data_ptr() for x in elsewhere}
    weights = {
        p.untyped_storage().data_ptr()
        for p in rank_runtime.executor.stage.stage_module.parameters()
    }
    return sum(
        size
        for place, (tensor, size) in kept.items()
        if place not in weights | features
        and size >= N // 20
        and tuple(tensor.shape) not in ((HIDDEN,), (1, HIDDEN))
    )


def in_tables(op, prepared):
    """Numbers that tables hold anyway, of what is kept for an op and of what it pushes."""
    recompute, loss_rows = prepared.config.recompute, prepared.loss_rows
    if prepared.config.chunks == 1:
        return 0
    # What was aggregated is where its gradient will be, where a table has both.
    is_shared = op.name in prepared.shared_tables
    found = is_shared * loss_rows.rows_of(op.name, N) * op.push_width
    # Recomputed, only what is read is kept; and of rows asked for, what is held is a copy.
    is_kept = not recompute or (op.holds_pushed and op.name not in loss_rows.ops)
    return found + bool(op.push_maker and is_kept) * N * op.push_width


def said_numbers(prepared):
    """Numbers that the ops keep, without those in tables and without copies of loss rows."""
    ops, loss_rows, graph = prepared.model_graph.ops, prepared.loss_rows, prepared.graph
    recompute = prepared.config.recompute
    said = sum(loss_rows.kept_numbers(op, N, recompute) - in_tables(op, prepared) for op in ops)
    blocks = [op for op in ops if op.aggregates and not (op.is_linear or op.is_mean)]
    copied = copied_rows(graph, prepared.chunking)
    said += sum((op.push_width + (not recompute) * op.kept_per_read_row) * copied for op in blocks)
    if not recompute:
        said += sum(op.kept_per_edge for op in blocks) * (graph.num_edges + N)
    return said


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_few", [False, True])
@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn", "gat"])
def test_built_in_models_keep_what_their_ops_say(model, recompute, chunks, is_few, monkeypatch):
    graph = small_graph(n=N, features=16, degree=3)
    known = graph.y >= 0
    graph = replace(
        graph, train_mask=known & (np.arange(N) % 5 == 0 if is_few else np.arange(N) % 5 > 0)
    )
    settings = {"model": model, "recompute": recompute, "chunks": chunks, "staleness": "none"}
    settings["dtype"] = "float32"
    # Log-probabilities of 3 classes, and in two numbers each the label and the place of a row.
    # Recomputed, the loss keeps nothing.
    of_loss = 0 if recompute else (3 + 2 + 2) * int(graph.train_mask.sum())
    for layers in (4, 8):
        kept = kept_bytes(monkeypatch, layers, graph, **settings)
        config = quick_config(layers=layers, hidden=HIDDEN, **settings)
        prepared = prepare(config, Mesh.alone(), graph)
        loss_rows = prepared.loss_rows
        assert bool(loss_rows.ops) == (is_few and model != "gat")
        copies = loss_rows.copied_widths(prepared.model_graph) * loss_rows.rows
        assert kept == pytest.approx(4 * (said_numbers(prepared) + copies + of_loss), rel=1e-9)


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_the_loss_keeps_what_it_says(kind):
    rows, width = 60, 7
    y = {
        "classes": np.arange(rows) % width,
        "labels": np.arange(rows * width).reshape(rows, width) % 2,
        "numbers": np.linspace(0, 1, rows * width, dtype=np.float32).reshape(rows, width),
    }[kind]
    graph = replace(small_graph(n=rows), y=y, num_classes=width)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    logits = torch.randn(rows, width, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(logits, labels_of(graph, np.arange(rows), torch.float32))
    rows_of = [t for t in kept.values() if t.is_floating_point() and t.dim()]
    numbers = sum(t.untyped_storage().nbytes() // 4 for t in rows_of)
    assert numbers == rows * kept_by_loss(graph, width)


class Skips(nn.Module):
    """What is kept once, twice or never: sums, ReLUs, dropout, a map of a sum."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.convs = nn.ModuleList(pyg.GCNConv(width, width) for _ in range(3))

    def forward(self, x, edge_index):
        x = self.enter(x).relu()
        for conv in self.convs:
            x = x + F.dropout(conv(x, edge_index).relu(), 0.5, self.training)
        return self.leave(x)


class LayerNormed(nn.Module):
    """Sums of products, LayerNorm, ReLU and dropout that are one call, with residuals or not."""

    def __init__(self, conv=pyg.SAGEConv, is_residual=False, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.convs = nn.ModuleList(conv(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.is_residual = is_residual

    def made(self, x, norm):
        return F.dropout(norm(x).relu(), 0.5, self.training)

    def forward(self, x, edge_index):
        x = self.enter(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.is_residual:
                x = x + conv(self.made(x, norm), edge_index)
            else:
                x = self.made(conv(x, edge_index), norm)
        return self.leave(x)


class Normed(nn.Module):
    def __init__(self, width=HIDDEN):
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(16, width), pyg.SAGEConv(width, width)])
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))
        self.leave = nn.Linear(width, 3)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), 0.5, self.training)
        return self.leave(x)


class Gated(nn.Module):
    """A recurrent cell that reads what was aggregated: gates that are nobody's value."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.conv, self.cell = pyg.GCNConv(width, width), nn.GRUCell(width, width)

    def forward(self, x, edge_index):
        x = self.enter(x).relu()
        for _ in range(3):
            x = self.cell(self.conv(x, edge_index), x)
        return self.leave(x)


class Stacked(nn.Module):
    """Helpers whose rows do not come first, and that two ops of a step read."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.convs = nn.ModuleList(pyg.GCNConv(width, width) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.enter(x)
        for conv in self.convs:
            both = torch.stack([conv(x, edge_index), x]).sigmoid()
            x = both.sum(0) + both.prod(0)
        return self.leave(x)


class Masked(nn.Module):
    """A comparison, a buffer, a weight that is not trained, and what needs no gradient."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.convs = nn.ModuleList(pyg.SAGEConv(width, width) for _ in range(2))
        self.frozen = nn.Linear(16, width).requires_grad_(False)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x, edge_index):
        fixed = self.frozen(x).tanh() * self.scale
        x = self.enter(x)
        for conv in self.convs:
            x = conv(x, edge_index)
            x = torch.where(x > 0.1, x * self.scale, x.exp()) + fixed
        return self.leave(x)


class Noticing(pyg.MessagePassing):
    """Messages that depend on both ends: a convolution that runs unchanged."""

    def __init__(self, width):
        super().__init__(aggr="add")
        self.map = nn.Linear(2 * width, width)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x).relu()

    def message(self, x_i, x_j):
        return self.map(torch.cat([x_i, x_j - x_i], dim=1))


class Unchanged(nn.Module):
    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.convs = nn.ModuleList(Noticing(width) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.enter(x)
        for conv in self.convs:
            x = x + conv(x, edge_index)
        return self.leave(x)


class OnEdges(nn.Module):
    """What edges carry is encoded, once for each convolution, as the guide has it."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 3)
        self.encoder = nn.Linear(5, width)
        self.convs = nn.ModuleList(pyg.GINEConv(nn.Linear(width, width)) for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        x, carried = self.enter(x), self.encoder(edge_attr).relu().tanh()
        for conv in self.convs:
            x = conv(x, edge_index, carried).relu()
        return self.leave(x)


NETS = {
    "on edges": OnEdges,
    "wide": lambda: pyg.GraphSAGE(16, 128, 2, 3, aggr="max"),
    "wide attended": lambda: pyg.GAT(16, 128, 3, 3, heads=2, v2=True),
    "attended": lambda: pyg.GAT(16, HIDDEN, 3, 3, heads=2, dropout=0.5, v2=True),
    "fused": lambda: pyg.GAT(16, HIDDEN, 3, 3, heads=2),
    "gated": Gated,
    "stacked": Stacked,
    "masked": Masked,
    "unchanged": Unchanged,
    "lstm": lambda: pyg.GraphSAGE(16, HIDDEN, 3, 3, jk="lstm"),
    "skips": Skips,
    "normed": Normed,
    "layer norm": LayerNormed,
    "residual": lambda: LayerNormed(pyg.GCNConv, is_residual=True),
    "GIN": lambda: pyg.GIN(16, HIDDEN, 3, 3),
    "jumping": lambda: pyg.GraphSAGE(16, HIDDEN, 3, 3, jk="cat", dropout=0.5),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("name", list(NETS))
def test_recorded_calls_keep_what_the_sample_says(name, chunks, recompute, monkeypatch):
    graph = small_graph(n=N, features=16, degree=3)
    if name == "on edges":
        carried = np.random.default_rng(0).random((graph.num_edges, 5), dtype=np.float32)
        graph = replace(graph, edge_attr=carried)
    settings = {"recompute": recompute, "staleness": "exact", "dtype": "float32"}
    kept = kept_bytes(monkeypatch, 3, graph, chunks, NETS[name](), **settings)
    config = quick_config(layers=3, hidden=HIDDEN, chunks=chunks, **settings)
    prepared = prepare(config, Mesh.alone(), graph, NETS[name]())
    loss_rows = prepared.loss_rows
    said = said_numbers(prepared) + 3 * int(graph.train_mask.sum())
    # Rows that are copied for the loss; which of them are kept anyway, the graph does not tell.
    copies = loss_rows.copied_widths(prepared.model_graph) * loss_rows.rows
    assert said <= 1.15 * kept / 4
    assert kept / 4 <= 1.03 * said + copies
