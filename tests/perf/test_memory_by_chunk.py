"""With steps by chunk a stage keeps the chunks in flight alone, and no gradients of tables."""

from functools import cache

import pytest
import torch
from helpers import quick_config, small_graph

from gnnpipe.ops.hashed_dropout import GROUP_BYTES, ChunkMasks
from gnnpipe.optim.weight_policies import WEIGHT_POLICIES, StageSteps
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.stage import Stage
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epochs

LAYERS, HIDDEN, CHUNKS = 8, 32, 8


def kept_at_once(model, schedule, monkeypatch):
    """The most bytes of passes in flight and masks ahead between two actions, and of tables."""
    passes, most = {}, [0]
    forward, backward = Stage.forward, Stage.backward

    def watched(self, chunk, steps):
        kept = passes.setdefault(chunk, {})

        def keep(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = forward(self, chunk, steps)
        for step in self._chunks[chunk].tape:
            for tensor in (*step.leaves.values(), *(r.rows for r in step.received.values())):
                keep(tensor)
        ahead = self.rows[0].masks
        for mask in ahead._made.values() if isinstance(ahead, ChunkMasks) else ():
            keep(mask)
        own = {t.data_ptr() for h in self.histories.values() for t in (h.table, h._grads)}
        own |= {p.untyped_storage().data_ptr() for p in self.stage_module.parameters()}
        every = {place: size for one in passes.values() for place, size in one.items()}
        most[0] = max(most[0], sum(size for place, size in every.items() if place not in own))
        return found

    def freed(self, chunk, steps, following=None):
        found = backward(self, chunk, steps, following)
        passes.pop(chunk)
        return found

    config = quick_config(
        model=model, layers=LAYERS, hidden=HIDDEN, chunks=CHUNKS, schedule=schedule,
        dtype="float32", staleness="none", eval_every=2,
    )  # fmt: skip
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph(n=800, degree=3))
    runtime = build_rank(prepared, mesh)
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "forward", watched)
        patched.setattr(Stage, "backward", freed)
        program = prepared.program
        train_epochs(runtime, mesh, program, prepared.passes(0, program.epochs), 0)
    tables = sum(
        t.nbytes for h in runtime.executor.stage.histories.values() for t in (h.table, h._grads)
    )
    (estimate,) = memory_by_rank(prepared)
    return most[0], tables, estimate


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn"])
def test_one_chunk_of_all_is_kept_and_estimated(model, monkeypatch):
    whole, tables, of_whole = kept_at_once(model, "fill-drain", monkeypatch)
    one, fewer_tables, estimate = kept_at_once(model, "async", monkeypatch)
    # One chunk of eight; fill-drain has the aggregated rows in the tables of gradients.
    assert one < 0.3 * whole + GROUP_BYTES
    assert fewer_tables == estimate.history < 0.55 * tables
    assert tables == of_whole.history
    # Masks that are drawn ahead take a constant; those of the loss rows are counted too.
    assert one < estimate.activations < 0.3 * of_whole.activations + 2 * GROUP_BYTES


@cache
def estimates(schedule, **settings):
    config = quick_config(
        model="gcn", layers=16, hidden=64, stages=4, chunks=32, dtype="float32", schedule=schedule,
        staleness="auto", eval_every=0, **settings,
    )  # fmt: skip
    return memory_by_rank(prepare(config, World.alone(), small_graph(n=800, degree=4)))


def test_four_stages_take_half_of_a_pipeline_that_fills_and_drains():
    plain, flowing = estimates("fill-drain"), estimates("async")
    for before, after in zip(plain, flowing, strict=True):
        assert after.history + after.activations < 0.5 * (before.history + before.activations)
    # Stage s keeps 4 - s chunks.
    assert [e.activations for e in flowing[:3]] == sorted(
        (e.activations for e in flowing[:3]), reverse=True
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["stash", "predict", "spectrain", "xpipe"])
def test_versions_of_the_weights_are_counted(policy):
    plain, counted = estimates("async", weights="latest"), estimates("async", weights=policy)
    copies = [WEIGHT_POLICIES[policy].copies_held(gap) for gap in (3, 2, 1, 0)]
    for before, after, count in zip(plain, counted, copies, strict=True):
        # Weights, gradients one by one and as one tensor, and two moments.
        assert after.weights == before.weights // 5 * (5 + count)


@pytest.mark.parametrize("policy", sorted(WEIGHT_POLICIES))
def test_policies_hold_the_copies_that_are_counted(policy):
    for gap in (0, 1) if policy == "2bw" else (0, 1, 3):
        found = most_copies(policy, gap)
        assert found <= WEIGHT_POLICIES[policy].copies_held(gap)
        assert found == WEIGHT_POLICIES[policy].copies_held(gap) or (
            policy in ("2bw", "spectrain") and not gap
        )


def most_copies(policy, gap):
    """The most copies of one weight that are held in a steady 1F1B."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight])
    steps = StageSteps(optimizer, [min(p, gap) for p in range(12)], depth=2)
    policy, made = WEIGHT_POLICIES[policy](steps), []
    make = policy._made

    def counted():
        made.append(make())
        return made[-1]

    policy._made = counted
    # The memory of the copies is kept over flushes.
    for _ in range(2):
        for p in range(12 + gap):
            if p < 12:
                with policy.for_forward(p):
                    pass
            if p >= gap:
                with policy.for_backward(p - gap):
                    pass
                weight.grad = torch.ones(1000)
                optimizer.step()
                policy.stepped()
        policy.flush()
    return len(made)


def test_tables_have_no_gradients_between_epochs():
    config = quick_config(chunks=4, schedule="1f1b", layers=3)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph())
    runtime = build_rank(prepared, mesh)
    train_epochs(runtime, mesh, prepared.program, prepared.chunk_order(0), 0)
    for history in runtime.executor.stage.histories.values():
        assert isinstance(history, History)
        assert not len(history._grads)
        assert not history._of_chunk
