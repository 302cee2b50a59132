"""`gnnpipe.verify` takes what a Trainer takes, and the command prints its result."""

import pytest
import torch
from helpers import pyg_data, run_ranks, small_graph
from torch_geometric.nn import GCN, GCNConv

import gnnpipe
from gnnpipe import Graph, TrainConfig
from gnnpipe.cli.main import main
from gnnpipe.errors import InputError


def config(**settings):
    given = {"epochs": 2, "dtype": "float64", "hidden": 8, "cache_dir": "off", "device": "cpu"}
    return TrainConfig(**given | settings)


def test_a_graph_and_a_model_that_stays_as_it_is():
    module = GCN(7, 8, 2, 3, dropout=0.3)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    found = gnnpipe.verify(config(chunks=3, staleness="exact"), small_graph(), module)
    assert found.is_equal
    assert (len(found.epochs), found.tolerance) == (2, 1e-9)
    assert 0 < found.largest == max(epoch.largest for epoch in found.epochs) < 1e-12
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())


class Unused(torch.nn.Module):
    """Demands edge data and does not use it."""

    def __init__(self):
        super().__init__()
        self.conv = GCNConv(7, 3)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index)


def test_edge_data_that_a_model_demands_and_does_not_use():
    data = pyg_data(small_graph())
    data.edge_attr = torch.ones(data.num_edges, 2)
    with pytest.warns(UserWarning, match="Unused does not use its edge_attr"):
        found = gnnpipe.verify(config(chunks=3, staleness="exact"), Graph.from_pyg(data), Unused())
    assert found.is_equal


def test_a_difference_above_the_tolerance():
    def loss_fn(logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    found = gnnpipe.verify(config(), small_graph(), loss_fn=loss_fn, tolerance=1e-30)
    assert not found.is_equal
    assert str(found).endswith("tolerance 1e-30: DIFFERENT from one device")


def test_the_command_prints_the_result(capsys):
    words = ["--dataset", "karate", "--hidden", "8", "--epochs", "2", "--chunks", "2"]
    assert main(["verify", *words, "--cache-dir", "off", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{gnnpipe.verify(config(dataset='karate', chunks=2))}\n"


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(InputError, match=r"--tolerance .*: must be a number above 0"):
        gnnpipe.verify(config(), small_graph(), tolerance=tolerance)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="--comm-dtype bf16: rounds"):
        gnnpipe.verify(config(comm_dtype="bf16"), small_graph())
    with pytest.raises(InputError, match="graph: is a str"):
        gnnpipe.verify(config(), "karate")


def on_two_ranks():
    graph = small_graph()
    shape = config(stages=2, chunks=3)
    return [gnnpipe.verify(shape, graph) for _ in range(2)]


def test_ranks_get_the_same_result():
    (first, again), other = run_ranks(on_two_ranks, 2)
    assert first == again == other[0] == other[1]
    assert first.is_equal
