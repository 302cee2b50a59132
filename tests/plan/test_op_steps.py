"""Ops run in the latest step that their readers allow, if fewer values then pass between steps."""

from gnnpipe.plan import ModelGraph, Op


def model(*ops):
    return ModelGraph("by hand", 4, 3, ops)


def op(name, inputs=(), width=4, push_width=0, **more):
    return Op(name, tuple(inputs), {name: width}, 0, 0, push_width=push_width, **more)


def deep(layers, width=4):
    """Layer l adds ``s_l`` [``width``], which is computed from x_0, to its rows."""
    ops = [op("x0", reads_features=True)]
    last = "x0"
    for i in range(layers):
        ops += [op(f"a{i}", [last], push_width=4), op(f"s{i}", ["x0"], width)]
        ops.append(op(f"h{i}", [f"a{i}", f"s{i}"]))
        last = f"h{i}"
    return model(*ops)


def passed(graph):
    """Values that pass from a step to the next, counted once for each."""
    steps = dict(zip(range(graph.num_ops), graph.depths(range(graph.num_ops)), strict=True))
    count = 0
    for i in steps:
        uses = [steps[r] - graph.ops[r].aggregates for r in graph.readers[i]]
        count += max([*uses, steps[i]]) - steps[i]
    return count


def test_a_multiple_of_x0_runs_with_its_layer():
    graph = deep(3)
    assert graph.depths(range(graph.num_ops)) == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert graph.num_steps(range(graph.num_ops)) == 4


def test_values_passed_are_linear_in_the_layers():
    assert passed(deep(16)) == 16
    assert passed(deep(64)) == 64


def test_a_value_that_is_narrower_than_its_source_does_not_wait():
    graph = deep(3, width=2)
    assert graph.depths(range(graph.num_ops)) == [0, 1, 0, 1, 2, 0, 2, 3, 0, 3]


def test_an_only_reader_of_its_source_does_not_wait():
    """GIN's multiple of x: a value passes to the next step in any case, this one or x."""
    ops = [op("x", reads_features=True), op("a", ["x"], push_width=4), op("more", ["x"])]
    graph = model(*ops, op("sum", ["a", "more"]))
    assert graph.depths(range(4)) == [0, 1, 0, 1]


def test_a_pushed_value_waits_one_step_less():
    ops = [
        op("x", reads_features=True),
        op("y", ["x"]),
        op("a", ["x"], push_width=4),
        op("b", ["a"], push_width=4),
        op("sum", ["b", "y"]),
        op("other", ["x"]),
        op("both", ["sum", "other"]),
    ]
    assert model(*ops).depths(range(7)) == [0, 2, 1, 2, 2, 2, 2]
    # y is pushed at the end of step 0, for c.
    ops.insert(4, op("c", ["y"], push_width=4))
    ops[-1] = op("both", ["sum", "c", "other"])
    assert model(*ops).depths(range(8)) == [0, 0, 1, 2, 1, 2, 2, 2]


def test_a_value_that_leaves_the_stage_does_not_wait():
    graph = deep(2)
    first = range(5)  # x0, a0, s0, h0, a1: without s1 and h1, which read x0
    assert graph.depths(first) == [0, 1, 1, 1, 2]
    assert graph.depths([0, 2]) == [0, 0]
