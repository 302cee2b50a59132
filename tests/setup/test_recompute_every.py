"""The number of steps recomputed together, chosen by a limit of memory."""

import warnings
from dataclasses import replace

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import InputError, Trainer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup import memory_estimate
from gnnpipe.setup.memory_estimate import check_memory, least_memory_bytes, memory_by_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.setup.recompute_every import fastest_that_fits, recomputing

LAYERS = 24
"""25 steps: their root is 5."""


def prepared_with(every=1, recompute=False):
    config = quick_config(
        model="gcn", layers=LAYERS, hidden=16, dtype="float32",
        recompute=recompute, recompute_every=every,
    )  # fmt: skip
    return prepare(config, Mesh.alone(), small_graph(n=500, degree=3))


def with_every(prepared, every):
    return replace(prepared, config=recomputing(prepared.config, every))


def total(prepared):
    return memory_by_rank(prepared)[0].on_device


def test_passes_first_then_memory():
    prepared = prepared_with()
    size = {n: total(with_every(prepared, n)) for n in (1, 2, 4, 5, 8, 16)}
    assert size[5] < size[1]

    def found(capacity):
        return fastest_that_fits(prepared.model_graph, prepared.plan, size.get, capacity)

    least = min((2, 4), key=size.get)
    assert found(size[1]) == (1, size[1])
    assert found(size[1] - 1) == (5, size[5])
    assert found(size[5] - 1) == (least, size[least])
    assert found(size[least] - 1) == (least, size[least])  # more than there is


def test_a_refusal_names_the_number_that_fits(monkeypatch):
    prepared = prepared_with()
    needed = least_memory_bytes(with_every(prepared, 5), 0, 0)
    assert needed < least_memory_bytes(with_every(prepared, 1), 0, 0)
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: needed)
    with pytest.raises(InputError, match="try --recompute --recompute-every 5, a smaller --hidden"):
        check_memory(prepared, Mesh.alone())
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: 1)
    with pytest.raises(InputError, match="try a smaller --hidden"):
        check_memory(prepared, Mesh.alone())


def test_zero_is_settled_by_the_memory_of_the_machine(monkeypatch):
    assert prepared_with(0, recompute=True).config.recompute_every == 1
    size = total(with_every(prepared_with(), 5))
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: int(1.4 * size) + 2)
    assert prepared_with(0, recompute=True).config.recompute_every == 5


@pytest.mark.slow
def test_zero_warns_if_no_number_fits(monkeypatch):
    sizes = {n: total(with_every(prepared_with(), n)) for n in (1, 2, 4, 5, 8, 16)}
    least = min(sizes, key=sizes.get)
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: 1000)
    said = f"--recompute-every 0: no number fits into memory by estimate; {least} takes least"
    with pytest.warns(UserWarning, match=said):
        assert prepared_with(0, recompute=True).config.recompute_every == least


def warnings_of_rank():
    mesh = Mesh.join(1, 2)
    config = quick_config(layers=4, hidden=8, shards=2, recompute=True, recompute_every=0)
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patched.setattr(memory_estimate, "memory_bytes", lambda: 1000)
        prepare(config, mesh, small_graph())
    return [text for text in (str(one.message) for one in told) if "no number fits" in text]


def test_one_rank_alone_warns():
    first, second = run_ranks(warnings_of_rank, 2)
    assert len(first) == 1
    assert not second


def test_zero_trains_to_the_same_losses():
    def losses(**settings):
        config = replace(quick_config(model="gcn", layers=4, hidden=8), **settings)
        return [row.loss for row in Trainer(config, graph=small_graph()).fit().history]

    assert losses(recompute=True, recompute_every=0) == losses()


def test_zero_is_refused_without_recompute():
    with pytest.raises(InputError, match="--recompute-every 0: has no effect without --recompute"):
        quick_config(recompute_every=0)
