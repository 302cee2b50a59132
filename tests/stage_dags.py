"""Plans for tests of programs: chains of stages, and any DAG of them."""

from itertools import pairwise

from hypothesis import strategies as st

from gnnpipe.plan import Placement, Plan, StageDag, StagePlan, Transfer


def plan_of_runs(runs, shards, chunks, schedule="fill-drain"):
    """A plan whose stages are runs of ops (first, one past the last) on equal ranks."""
    ranks = Placement.grid(len(runs), shards).stages
    stages = tuple(StagePlan.even(tuple(range(*r)), g) for r, g in zip(runs, ranks, strict=True))
    return Plan(stages, chunks, schedule)


def chain(stages, chunks, schedule="fill-drain", layers_each=2, shards=1):
    runs = tuple((s * layers_each, (s + 1) * layers_each) for s in range(stages))
    return StageDag(
        plan_of_runs(runs, shards, chunks, schedule),
        (layers_each + 1,) * stages,
        tuple(Transfer(s, s + 1, {"x": 4}) for s in range(stages - 1)),
    )


@st.composite
def dags(draw):
    """Stages of 1 to 3 ops and 1 to 4 steps; all but the first hear from some earlier ones."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    transfers = [
        Transfer(source, target, {"x": 4})
        for target in range(1, len(sizes))
        for source in draw(st.sets(st.integers(0, target - 1), min_size=1))
    ]
    schedule = draw(st.sampled_from(["fill-drain", "layer-sync"]))
    stages = tuple(pairwise(bounds))
    steps = tuple(draw(st.integers(1, 4)) for _ in stages)
    plan = plan_of_runs(stages, draw(st.integers(1, 3)), draw(st.integers(1, 6)), schedule)
    return StageDag(plan, steps, tuple(transfers))
