"""The last map is computed behind the aggregation where few rows have a training label."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import plain_pyg_losses, pyg_data, quick_config, small_graph
from torch_geometric.nn import GCN, GCNConv

from gnnpipe import Trainer
from gnnpipe.capture.markers import aggregate
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare


def graph_of(share, degree=2):
    graph = small_graph(n=120, degree=degree)
    return replace(graph, train_mask=np.arange(120) >= 120 * (1 - share))


def pushed_width(graph, module):
    """Columns of the last aggregation."""
    model = prepare(quick_config(), Mesh.alone(), graph, module).model
    last = [op for op in model.recording.ops if op.target is aggregate][-1]
    return model.recording.facts[last].width


@pytest.mark.parametrize(
    ("share", "degree", "width"),
    # 2 x 64 x 3 operations for each of the other rows against 10 x 61 for each edge.
    [(0.05, 2, 64), (0.05, 40, 3), (0.5, 2, 3), (0.9, 2, 3), (0.0, 2, 3)],
)
def test_by_operations(share, degree, width):
    graph = graph_of(share, degree)
    train = graph.train_mask
    others = 120 - train.sum()
    saves = 2 * 64 * 3 * others > 10 * graph.degrees[train].sum() * 61
    assert (saves and 0 < train.sum() <= 90) == (width == 64)
    assert pushed_width(graph, GCN(7, 64, 3, 3)) == width


def test_features_are_mapped_first():
    assert pushed_width(graph_of(0.05), GCNConv(7, 3)) == 3


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_plain_pyg(chunks, bias):
    graph = graph_of(0.05)
    module = GCN(7, 64, 3, 3, bias=bias).double()
    assert pushed_width(graph, module) == 64
    data = pyg_data(graph)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    expected = plain_pyg_losses(module, data, (data.x.double(), data.edge_index.long()), 3)
    module.load_state_dict(start)
    config = quick_config(chunks=chunks, staleness="exact", lr=0.01)
    found = [row.loss for row in Trainer(config, graph, module).fit().history]
    assert found == pytest.approx(expected, rel=1e-9)
