"""Every partition of a small model into stages, tried one by one; shares no code with planners."""

from __future__ import annotations

from itertools import product


def partitions(items):
    """All partitions of a list into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i, part in enumerate(smaller):
            yield [*smaller[:i], [first, *part], *smaller[i + 1 :]]


def reading_parts(model, parts):
    """For each part the other parts that read one of its values; None if they form a cycle."""
    part_of = {op: i for i, part in enumerate(parts) for op in part}
    maker = {value: i for i, op in enumerate(model.ops) for value in op.outputs}
    reads = [set() for _ in parts]
    for i, op in enumerate(model.ops):
        for value in op.inputs:
            if part_of[maker[value]] != part_of[i]:
                reads[part_of[maker[value]]].add(part_of[i])
    left, ordered = set(range(len(parts))), []
    while left:
        ends = [p for p in left if not reads[p] & left]
        if not ends:
            return None
        ordered += ends
        left -= set(ends)
    return reads, ordered


def leaving(model, part):
    """Width of the values that ops outside of the part read."""
    outside = {v for i, op in enumerate(model.ops) if i not in part for v in op.inputs}
    made = [item for i in part for item in model.ops[i].outputs.items()]
    return sum(width for value, width in made if value in outside)


def stage_s(model, costs, part, shards):
    part = sorted(part)
    passing = 2 * costs.message_s(leaving(model, part), shards)
    return max(costs.stage_s(part, shards), passing) + costs.epoch_s(part, shards) / costs.chunks


def best(model, costs, devices, memory_bytes, is_1f1b, counts=(1, 2)):
    """Least (time of the slowest stage, longest path) of all plans that fit; None if no plan does.

    The longest path is counted in stages for 1F1B, and in time otherwise; every stage has the
    fewest devices that keep to the least time.
    """
    cuts = []
    for parts in partitions(list(range(model.num_ops))):
        order = reading_parts(model, parts)
        if order is not None and len(parts) <= devices:
            depth = [0] * len(parts)
            for p in order[1]:
                depth[p] = 1 + max((depth[q] for q in order[0][p]), default=0)
            held = [min(d, costs.chunks) if is_1f1b else costs.chunks for d in depth]
            fitting = [
                [n for n in counts if costs.memory_bytes(sorted(part), n, h) <= memory_bytes]
                for part, h in zip(parts, held, strict=True)
            ]
            times = [
                {n: stage_s(model, costs, part, n) for n in each}
                for part, each in zip(parts, fitting, strict=True)
            ]
            cuts.append((parts, order, depth, times))
    slowest = min(
        (
            max(times[p][n] for p, n in enumerate(shards))
            for _, _, _, times in cuts
            for shards in product(*times)
            if sum(shards) <= devices
        ),
        default=None,
    )
    if slowest is None:
        return None
    longest = []
    for parts, order, depth, times in cuts:
        fewest = [min((n for n, t in of.items() if t <= slowest), default=99) for of in times]
        if sum(fewest) <= devices:
            path = depth if is_1f1b else paths(model, costs, parts, fewest, order)
            longest.append(max(path))
    return slowest, min(longest)


def paths(model, costs, parts, shards, order):
    """Longest time from each part to the end, with messages and the work once an epoch."""
    reads, ordered = order
    found = [0.0] * len(parts)
    for p in ordered:
        own = costs.stage_s(parts[p], shards[p]) + costs.epoch_s(parts[p], shards[p])
        if width := leaving(model, parts[p]):
            own += 2 * costs.message_s(width, shards[p])
        found[p] = own + max((found[q] for q in reads[p]), default=0.0)
    return found
