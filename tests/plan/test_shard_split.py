"""The ends of shards that are found by bisection are the nearest ones."""

from hypothesis import given
from hypothesis import strategies as st

from gnnpipe.plan.shard_split import ShardSplit, _nearest


@given(st.lists(st.floats(0, 1), min_size=1, unique=True), st.floats(-0.1, 1.1))
def test_the_nearest_end_is_found(ends, end):
    ends = sorted(ends)
    distances = [abs(one - end) for one in ends]
    assert distances[_nearest(ends, end)] == min(distances)


def test_many_equal_shards_are_their_own_parts():
    shares = (1 / 1024,) * 1024
    assert ShardSplit.of([shares]).bounds == (tuple(range(1025)),)
