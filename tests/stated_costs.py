"""Costs that a test states, for the simulator."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StatedCosts:
    """The same for every stage and chunk, unless ``scale`` (stage, shard, chunk) says otherwise."""

    forward_s: float = 1.0
    """Of a step."""
    backward_s: float = 2.0
    own_share: float = 0.0
    """Of a backward step, the product for the own rows."""
    begin_time_s: float = 0.0
    finish_time_s: float = 0.0
    pilot_time_s: float = 0.0
    update_time_s: float = 0.0
    link_time_s: float = 0.0
    exchange_time_s: float = 0.0
    reduce_time_s: float = 0.0
    sync_time_s: float = 0.0
    message_size: int = 8
    exchanged_size: int = 4
    is_one_wire: bool = False
    port_bytes_per_s: float = 0.0
    """0: ranks have no ports."""
    shards: int = 1
    """Of every stage."""
    scale: Callable[[int, int, int], float] = lambda stage, shard, chunk: 1.0

    def begin_s(self, stage, shard):
        return self.begin_time_s

    def step_s(self, way, stage, shard, chunk, step):
        return {"F": self.forward_s, "B": self.backward_s}[way] * self.scale(stage, shard, chunk)

    def finish_s(self, stage, shard):
        return self.finish_time_s

    def pull_s(self, stage, shard, chunk, step):
        return self.own_share * self.step_s("B", stage, shard, chunk, step)

    def probe_s(self, kind, stage, shard):
        return self.pilot_time_s

    def fit_bytes(self, stage):
        return ()

    def mean_bytes(self, stage, step):
        return ()

    def has_columns(self, stage, step):
        return False

    def has_exchange(self, way, stage, step):
        return True

    def update_s(self, stage, shard):
        return self.update_time_s

    def message_pairs(self, source, target):
        return [(shard, shard) for shard in range(self.shards)]

    def message_bytes(self, way, source, target, pair, chunk):
        return self.message_size

    def exchange_bytes(self, way, stage, shard, chunk, step):
        return self.exchanged_size

    def gradient_bytes(self, stage, steps):
        return 16

    def message_s(self, source, target, size_bytes):
        return self.link_time_s

    def exchange_s(self, stage, sizes_bytes):
        return self.exchange_time_s

    def shard_sum_s(self, stage, size_bytes):
        return self.reduce_time_s

    def shard_sum_bytes(self, stage, size_bytes):
        return 2 * size_bytes

    def shard_sum_phases(self):
        return 2

    def sync_s(self):
        return self.sync_time_s

    def link(self, source, target):
        return "wire" if self.is_one_wire else f"link {source} to {target}"

    def group(self, stage):
        return "wire" if self.is_one_wire else f"shards of stage {stage}"

    def port_s(self, sent_bytes):
        return sent_bytes / self.port_bytes_per_s if self.port_bytes_per_s else 0.0


class DrawnCosts(StatedCosts):
    """Whole seconds from 0 to 9 for everything, by chance but always the same; sums are exact."""

    def __init__(self, seed, is_one_wire=False, shards=1, port_bytes_per_s=0.0):
        super().__init__(is_one_wire=is_one_wire, shards=shards, port_bytes_per_s=port_bytes_per_s)
        self.seed = seed

    def _drawn(self, *what):
        return float(random.Random(repr((self.seed, *map(str, what)))).randint(0, 9))

    def begin_s(self, stage, shard):
        return self._drawn("begin", stage, shard)

    def step_s(self, way, stage, shard, chunk, step):
        return self._drawn("step", way, stage, shard, chunk, step)

    def finish_s(self, stage, shard):
        return self._drawn("finish", stage, shard)

    def pull_s(self, stage, shard, chunk, step):
        return self.step_s("B", stage, shard, chunk, step) // 2

    def probe_s(self, kind, stage, shard):
        return self._drawn("pilot", kind, stage, shard)

    def fit_bytes(self, stage):
        return ()

    def mean_bytes(self, stage, step):
        draw = random.Random(repr((self.seed, "mean", stage, step)))
        return [draw.randint(1, 99) for _ in range(draw.randint(0, 2))]

    def has_columns(self, stage, step):
        return False

    def has_exchange(self, way, stage, step):
        return bool(random.Random(repr((self.seed, "exchange", stage, step))).randint(0, 3))

    def update_s(self, stage, shard):
        return self._drawn("update", stage, shard)

    def message_bytes(self, way, source, target, pair, chunk):
        return random.Random(repr((self.seed, str(way), source, target, pair, chunk))).randint(
            0, 99
        )

    def message_s(self, source, target, size_bytes):
        return self._drawn("link", source, target, size_bytes)

    def exchange_s(self, stage, sizes_bytes):
        return self._drawn("exchange", stage, *sizes_bytes)

    def shard_sum_s(self, stage, size_bytes):
        return self._drawn("reduce", stage)

    def sync_s(self):
        return self._drawn("sync")
