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


def test_a_cut_needs_a_vertex_for_every_part_of_every_chunk_over_all_types():
    split = ShardSplit.of([(0.5, 0.5), (0.3, 0.7)])
    assert split.num_parts == 3
    assert split.can_cut({"": 12}, 4)
    assert not split.can_cut({"": 11}, 4)
    # A type with few vertices does not count alone.
    assert split.can_cut({"author": 11, "venue": 1}, 4)
