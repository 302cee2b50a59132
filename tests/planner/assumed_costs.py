"""Models of row-wise ops, and costs that a test assumes for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gnnpipe.plan import ModelGraph, Op


def model_of(edges: Mapping[str, Sequence[str]], width: int = 4, **weights: tuple[str, ...]):
    """A model of ops that each compute one value; ``edges``: the ops that each op reads."""
    ops = tuple(
        Op(
            name,
            tuple(f"{other}.y" for other in inputs),
            {f"{name}.y": width},
            num_parameters=10,
            flops_per_row=1,
            kept_per_row=width,
            reads_features=not inputs,
            weights=weights.get(name, (f"{name}.w",)),
        )
        for name, inputs in edges.items()
    )
    return ModelGraph("assumed", 4, width, ops)


def branches(count: int, length: int, is_chained: bool = False):
    """Branches of ops and a join; ``is_chained``: each branch reads the end of the one before."""
    edges: dict[str, list[str]] = {}
    for b in range(count):
        for i in range(length):
            earlier = [f"b{b}_{i - 1}"] if i else []
            if is_chained and b and not i:
                earlier = [f"b{b - 1}_{length - 1}"]
            edges[f"b{b}_{i}"] = earlier
    edges["join"] = [f"b{b}_{length - 1}" for b in range(count)]
    return model_of(edges)


def random_model(seed: int, most: int = 6):
    """A random DAG of 2 to ``most`` ops; later ops read up to three earlier ones.

    The last op reads all that no other op reads.
    """
    draw = random.Random(seed)
    edges: dict[str, list[str]] = {}
    for i in range(draw.randint(2, most)):
        names = list(edges)
        edges[f"op{chr(97 + i)}"] = draw.sample(names, draw.randint(0, min(3, len(names))))
    *others, last = edges
    read = {name for inputs in edges.values() for name in inputs}
    edges[last] += [name for name in others if name not in read]
    return model_of(edges, width=draw.choice([1, 4]))


@dataclass
class AssumedCosts:
    """Times that add up over ops and divide by devices; a device more costs ``split_s``."""

    model: ModelGraph
    chunks: int = 4
    op_s: Mapping[int, float] = field(default_factory=dict)
    """Of one chunk; 1 if not given."""
    split_s: float = 0.25
    once_s: float = 0.0
    number_s: float = 0.0
    """Of a number of a message."""
    weight_bytes: int = 0
    held_bytes: int = 0
    """Of an op, for each chunk in flight."""

    def stage_s(self, ops, shards):
        return sum(self.op_s.get(op, 1.0) for op in ops) / shards + self.split_s * (shards - 1)

    def epoch_s(self, ops, shards):
        return self.once_s * len(ops)

    def message_s(self, width, shards):
        return self.number_s * width / shards

    def memory_bytes(self, ops, shards, in_flight):
        return len(ops) * (self.weight_bytes + -(-self.held_bytes * in_flight // shards))


def random_costs(seed: int, model: ModelGraph, **changes):
    draw = random.Random(seed)
    times = {op: float(draw.randint(1, 20)) for op in range(model.num_ops)}
    given = {"chunks": draw.choice([1, 2, 4]), "number_s": draw.choice([0.0, 0.5, 3.0])}
    return AssumedCosts(model, op_s=times, once_s=draw.choice([0.0, 2.0]), **given | changes)
