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

    The longest path is counted in stages for 1F1B, and in time otherwise.
    """
    found = None
    for parts in partitions(list(range(model.num_ops))):
        if len(parts) > devices:
            continue
        order = reading_parts(model, parts)
        if order is None:
            continue
        depth = [0] * len(parts)
        for p in order[1]:
            depth[p] = 1 + max((depth[q] for q in order[0][p]), default=0)
        times = {
            (p, n): stage_s(model, costs, part, n) for p, part in enumerate(parts) for n in counts
        }
        for shards in product(counts, repeat=len(parts)):
            if sum(shards) > devices:
                continue
            path = depth if is_1f1b else paths(model, costs, parts, shards, order)
            held = [min(d, costs.chunks) if is_1f1b else costs.chunks for d in depth]
            if all(
                costs.memory_bytes(sorted(part), n, h) <= memory_bytes
                for part, n, h in zip(parts, shards, held, strict=True)
            ):
                value = max(times[p, n] for p, n in enumerate(shards)), max(path)
                if found is None or value < found:
                    found = value
    return found


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
