"""Messages through shared memory between ranks of one machine."""

import fcntl
import gc
import os
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from helpers import quick_config, run_ranks, small_graph

from gnnpipe.errors import LostPeerError
from gnnpipe.runtime.comm import machine_links
from gnnpipe.runtime.comm.machine_links import connect
from gnnpipe.runtime.comm.shared_memory import Arena, Channel, SharedMemoryLink

FORWARD, BACKWARD = Channel.FORWARD, Channel.BACKWARD

TIMEOUT_S = 20.0


def connected(count=2, timeout_s=TIMEOUT_S):
    """The links of ``count`` ranks, by rank; the ranks are threads while they connect."""
    boxes = [[SimpleQueue() for _ in range(count)] for _ in range(count)]
    links = [{} for _ in range(count)]

    def main(rank):
        def gather(thing):
            for box in boxes:
                box[rank].put(thing)
            return [boxes[rank][other].get(timeout=TIMEOUT_S) for other in range(count)]

        links[rank] = connect(rank, gather, timeout_s)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links


@pytest.fixture
def pair():
    """Both ends of a link: that of rank 0 and that of rank 1."""
    (zero, one) = connected()
    yield zero[1], one[0]
    zero[1].close()
    one[0].close()


def test_every_rank_is_linked_to_every_other():
    links = connected(4)
    assert [sorted(of_rank) for of_rank in links] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    for rank, of_rank in enumerate(links):
        for other, link in of_rank.items():
            link.send(FORWARD, [torch.tensor([float(rank), float(other)])], torch.float32)
    for rank, of_rank in enumerate(links):
        for other, link in of_rank.items():
            found = torch.empty(2)
            link.receive(FORWARD, [found]).wait()
            assert found.tolist() == [other, rank]


def test_messages_of_a_channel_keep_their_order(pair):
    sender, receiver = pair
    for number in range(3):
        sender.send(FORWARD, [torch.full((2,), float(number))], torch.float32)
        sender.send(BACKWARD, [torch.full((2,), 10.0 + number)], torch.float32)
    waiting = [(channel, torch.empty(2)) for channel in map(Channel, (1, 0, 1, 1, 0, 0))]
    messages = [receiver.receive(channel, [part]) for channel, part in waiting]
    for message in reversed(messages):  # in any order
        message.wait()
    assert [part[0].item() for _, part in waiting] == [10.0, 0.0, 11.0, 12.0, 1.0, 2.0]


def test_values_may_change_once_they_are_sent(pair):
    sender, receiver = pair
    value, found = torch.ones(1000), torch.empty(1000)
    sender.send(FORWARD, [value], torch.float32)
    value.zero_()
    receiver.receive(FORWARD, [found]).wait()
    assert found.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_parts_have_the_number_type_of_the_message(pair, dtype):
    sender, receiver = pair
    parts = [torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2).t(), torch.empty(0, 3)]
    found = [torch.empty(part.shape, dtype=dtype) for part in parts]
    sender.send(FORWARD, parts, dtype)
    receiver.receive(FORWARD, found).wait()
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, parts, strict=True))


def test_a_message_without_elements_is_not_sent(pair):
    sender, receiver = pair
    found = torch.empty(1)
    sender.send(FORWARD, [torch.empty(0, 4)], torch.float32)
    sender.send(FORWARD, [torch.ones(1)], torch.float32)
    receiver.receive(FORWARD, [torch.empty(0, 4)]).wait()
    receiver.receive(FORWARD, [found]).wait()
    assert found.item() == 1


def test_blocks_are_divided_and_joined():
    arena = Arena()
    offsets = [arena.take(size)[0] for size in (10_000, 1, 20_000)]
    assert offsets == [0, 12_288, 16_384], "whole pages"
    for offset in (offsets[0], offsets[2], offsets[1]):
        arena.free(offset)
    assert [arena.take(size)[0] for size in (4096, 36_000)] == [0, 4096]
    arena.close()


def test_what_lies_in_a_block_stays_when_the_arena_grows():
    arena = Arena()
    small = arena.take(100)[0]
    arena.take(300)[1].fill_(7)
    arena.free(small)
    offset, large = arena.take(5 << 20)
    assert offset == 8192
    assert len(large) == 5 << 20
    assert arena._memory[4096:4396].eq(7).all()
    arena.close()


def test_the_arena_holds_little_more_than_what_is_under_way():
    arena, draw = Arena(), torch.Generator().manual_seed(0)
    for size in torch.randint(1, 8_000_000, (500,), generator=draw).tolist():
        arena.free(arena.take(size)[0])
    assert arena.size_bytes <= 8_003_584
    arena.close()


def test_a_message_of_another_size_is_an_error(pair):
    sender, receiver = pair
    sender.send(FORWARD, [torch.ones(3)], torch.float32)
    with pytest.raises(RuntimeError, match="split"):
        receiver.receive(FORWARD, [torch.empty(2)]).wait()


def test_the_memory_of_a_link_stops_growing(pair):
    sender, receiver = pair
    sizes = []
    for _ in range(4):
        found = [torch.empty(100_000) for _ in range(5)]
        for _ in found:
            sender.send(FORWARD, [torch.ones(100_000)], torch.float32)
        for part in found:
            receiver.receive(FORWARD, [part]).wait()
        sizes.append(os.fstat(sender._files.arena.file).st_size)
    assert len(set(sizes)) == 1


def test_a_full_pipe_holds_no_sender_up(pair):
    sender, receiver = pair
    room = fcntl.fcntl(sender._files.to_peer, fcntl.F_SETPIPE_SZ, 4096) // 32
    count = 3 * room
    for number in range(count):
        sender.send(FORWARD, [torch.tensor([float(number)])], torch.float32)
    assert sender._writer is not None
    for number in range(count):
        found = torch.empty(1)
        receiver.receive(FORWARD, [found]).wait()
        assert found.item() == number


def test_a_link_with_a_full_pipe_can_be_closed(pair):
    sender, _ = pair
    room = fcntl.fcntl(sender._files.to_peer, fcntl.F_SETPIPE_SZ, 4096) // 32
    for _ in range(room + 5):
        sender.send(FORWARD, [torch.ones(1)], torch.float32)
    start_s = time.monotonic()
    sender.close()
    assert time.monotonic() - start_s < TIMEOUT_S / 2


def test_the_end_of_a_rank_is_noticed_at_once(pair):
    sender, receiver = pair
    threading.Timer(0.2, sender.close).start()
    start_s = time.monotonic()
    with pytest.raises(LostPeerError, match="rank 0 has ended"):
        receiver.receive(FORWARD, [torch.empty(1)]).wait()
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    with pytest.raises(LostPeerError, match="rank 0 has ended"):
        receiver.send(FORWARD, [torch.ones(1)], torch.float32)


def test_a_message_that_was_sent_before_the_end_arrives(pair):
    sender, receiver = pair
    sender.send(FORWARD, [torch.ones(3)], torch.float32)
    sender.close()
    found = torch.empty(3)
    receiver.receive(FORWARD, [found]).wait()
    assert found.tolist() == [1, 1, 1]


def test_a_silent_rank_ends_the_wait():
    (zero, one) = connected(timeout_s=0.1)
    with pytest.raises(LostPeerError, match=r"rank 1 has sent nothing for 0\.1 s"):
        zero[1].receive(FORWARD, [torch.empty(1)]).wait()
    del one


@pytest.mark.parametrize("fills_pipe", [False, True])
def test_no_file_stays_open_or_behind(fills_pipe):
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    links = connected(3)
    first, second = links[0][1], links[1][0]
    assert len(os.listdir("/proc/self/fd")) == before + 3 * 2 * 4
    assert not any(map(os.get_inheritable, (first._files.their_arena, first._files.from_peer)))
    if fills_pipe:
        fcntl.fcntl(first._files.to_peer, fcntl.F_SETPIPE_SZ, 4096)
    for _ in range(150):
        first.send(FORWARD, [torch.ones(10)], torch.float32)
        if not fills_pipe:
            second.receive(FORWARD, [torch.empty(10)]).wait()
    first.close()
    other = os.open("/dev/null", os.O_RDONLY)  # takes the number of a closed file
    del links, first, second
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert threading.active_count() == threads
    os.close(other)


def test_a_closed_link_says_so(pair):
    sender, receiver = pair
    for number in range(2):
        sender.send(FORWARD, [torch.full((1,), float(number))], torch.float32)
    first, second, third = (receiver.receive(FORWARD, [torch.empty(1)]) for _ in range(3))
    first.wait()
    receiver.close()
    with pytest.raises(RuntimeError, match="the link to rank 0 is closed"):
        second.wait()  # it has arrived
    with pytest.raises(RuntimeError, match="the link to rank 0 is closed"):
        third.wait()
    with pytest.raises(RuntimeError, match="the link to rank 0 is closed"):
        receiver.send(FORWARD, [torch.ones(1)], torch.float32)


def test_without_local_sockets_there_are_no_links(monkeypatch):
    monkeypatch.setattr(machine_links, "_listener", lambda: None)
    assert connected(3) == [{}, {}, {}]


def test_ranks_in_another_network_have_no_links(monkeypatch):
    places = iter(range(1000))
    monkeypatch.setattr(machine_links, "_location", lambda: ("host", next(places)))
    assert connected(2) == [{}, {}]


@pytest.mark.parametrize("step", ["_socket", "_call", "_exchange", "_accept"])
def test_one_refused_connection_leaves_the_machine_without_links(monkeypatch, step):
    inner, lock, calls = getattr(machine_links, step), threading.Lock(), iter(range(1000))

    def refused(*arguments):
        with lock:
            if next(calls) == 1:
                raise OSError("too many open files")
        return inner(*arguments)

    monkeypatch.setattr(machine_links, step, refused)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    start_s = time.monotonic()
    assert connected(3) == [{}, {}, {}]
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    assert len(os.listdir("/proc/self/fd")) == before


def _losses(shape, over_gloo, settings):
    """Losses of a run on this rank, the bytes of an epoch, and the channels that were used."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.world import World

    channels, send = set(), SharedMemoryLink.send

    def counted(link, channel, parts, dtype):
        channels.add(channel)
        send(link, channel, parts, dtype)

    SharedMemoryLink.send = counted
    stages, shards, chunks = shape
    world = World.meet(stages * shards, "cpu")
    if over_gloo:
        world = replace(world, links={})
    config = quick_config(stages=stages, shards=shards, chunks=chunks, epochs=3, **settings)
    result = Trainer(config, graph=small_graph(), world=world).fit()
    return [row.loss for row in result.history], result.comm_bytes_per_epoch, sorted(channels)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((2, 1, 4), {}),
        ((1, 2, 2), {}),
        ((2, 2, 2), {"staleness": "exact"}),
        ((2, 1, 2), {"comm_dtype": "bf16"}),
    ],
)
def test_training_is_the_same_through_shared_memory_and_over_gloo(shape, settings):
    stages, shards, _ = shape
    shared = run_ranks(_losses, stages * shards, shape, False, settings)
    over_gloo = run_ranks(_losses, stages * shards, shape, True, settings)
    assert [found[:2] for found in shared] == [found[:2] for found in over_gloo]
    # The test of the links before training sends forward only.
    used = {channel for *_, channels in shared for channel in channels}
    assert (Channel.BACKWARD in used) == (stages > 1)
    assert (Channel.SHARDS in used) == (shards > 1)
    assert all(channels == [] for *_, channels in over_gloo)


def _trained_again():
    """Losses of two trainings after each other, in a process group of the script."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.world import World

    dist.init_process_group("gloo")
    world, found = World.meet(2, "cpu"), []
    for _ in range(2):
        config = quick_config(stages=2, chunks=2, epochs=2)
        trainer = Trainer(config, graph=small_graph(), world=world)
        found.append([row.loss for row in trainer.fit().history])
        trainer.close()
    return found, bool(world.links)


def test_links_outlast_a_trainer_in_a_group_of_the_script():
    for (first, second), has_links in run_ranks(_trained_again, 2):
        assert has_links
        assert first == second
