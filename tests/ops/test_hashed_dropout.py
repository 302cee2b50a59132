"""The dropout mask depends on seed, epoch, site, vertex and feature only."""

import itertools
import random
import weakref

import pytest
import torch
from helpers import quick_config, small_graph

from gnnpipe import Trainer
from gnnpipe.models import MODELS
from gnnpipe.models import rows as rows_module
from gnnpipe.ops import hashed_dropout
from gnnpipe.ops.hashed_dropout import ChunkMasks, KeptMasks, keyed_mask, row_keys
from gnnpipe.ops.hashed_dropout import keyed_dropout as drop_kept
from gnnpipe.verification.reference_dropout import drop as reference_drop

KEY = {"seed": 1, "epoch": 2, "site": 3}


def keyed_dropout(x, keys, probability, **key):
    return drop_kept(x, keyed_mask(keys, x.shape[1], probability, **key))


def test_mask_of_a_row_does_not_depend_on_its_place():
    keys = row_keys(torch.arange(1000))
    x = torch.ones(1000, 24)
    whole = keyed_dropout(x, keys, 0.5, **KEY)
    some = torch.tensor([7, 999, 3])
    assert torch.equal(keyed_dropout(x[some], keys[some], 0.5, **KEY), whole[some])


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 0.9])
def test_share_and_scale(probability):
    keys = row_keys(torch.arange(40000))
    dropped = keyed_dropout(torch.ones(40000, 50), keys, probability, **KEY)
    kept = dropped != 0
    assert abs(kept.double().mean() - (1 - probability)) < 0.002
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert (kept.double().mean(0) - (1 - probability)).abs().max() < 0.02
    # Neighbouring vertices and features are independent of one another.
    both = (kept[1:] & kept[:-1]).double().mean()
    across = (kept[:, 1:] & kept[:, :-1]).double().mean()
    assert both == pytest.approx((1 - probability) ** 2, abs=0.004)
    assert across == pytest.approx((1 - probability) ** 2, abs=0.004)


def test_probability_one_drops_all():
    keys = row_keys(torch.arange(500))
    x = torch.ones(500, 24, requires_grad=True)
    dropped = keyed_dropout(x, keys, 1.0, **KEY)
    dropped.sum().backward()
    assert not dropped.any()
    assert not x.grad.any()


@pytest.mark.parametrize("change", [{"seed": 9}, {"epoch": 9}, {"site": 9}])
def test_every_part_of_the_key_matters(change):
    keys = row_keys(torch.arange(2000))
    x = torch.ones(2000, 16)
    a = keyed_dropout(x, keys, 0.5, **KEY) != 0
    b = keyed_dropout(x, keys, 0.5, **(KEY | change)) != 0
    assert (a == b).double().mean() == pytest.approx(0.5, abs=0.02)


def test_gradient_has_the_same_mask():
    keys = row_keys(torch.arange(50))
    x = torch.randn(50, 8, requires_grad=True)
    out = keyed_dropout(x, keys, 0.3, **KEY)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    kept = x.grad[x.grad != 0]
    assert kept.min() == kept.max()


def test_masks_are_made_when_a_pass_begins(monkeypatch):
    keys, x = row_keys(torch.arange(300)), torch.ones(300, 8)
    masks = KeptMasks(keys)
    masks.begin(KEY["seed"], 0, [0])  # nothing was used yet
    drop = KEY | {"epoch": 0, "masks": masks}
    for site, p in ((0, 0.5), (1, 0.3)):
        keyed_dropout(x, keys, p, **drop | {"site": site})
    first = [weakref.ref(made[1]) for made in masks._made.values()]
    fill, left = hashed_dropout._fill, []
    with monkeypatch.context() as seen:
        seen.setattr(
            hashed_dropout, "_fill", lambda *a: left.append([r() for r in first]) or fill(*a)
        )
        masks.begin(KEY["seed"], 6, [0])
    assert left == [[None, None]] * 2, "the first masks are freed before new ones are allocated"
    rooms = [made[1].data_ptr() for made in masks._made.values()]
    masks.begin(KEY["seed"], 7, [0])
    assert [made[1].data_ptr() for made in masks._made.values()] == rooms
    for site, p in ((0, 0.5), (1, 0.3)):
        key = KEY | {"epoch": 7, "site": site}
        wanted = keyed_dropout(x, keys, p, **key)
        with monkeypatch.context() as seen:
            seen.setattr(hashed_dropout, "_keep_mask", None)  # all of them are there
            assert torch.equal(keyed_dropout(x, keys, p, **key, masks=masks), wanted)


def test_zero_probability_is_the_identity():
    x = torch.randn(4, 4)
    assert keyed_dropout(x, row_keys(torch.arange(4)), 0.0, **KEY) is x


@pytest.mark.parametrize("probability", [0.5, 0.3])
def test_kept_masks_equal_those_of_each_chunk(probability):
    keys = row_keys(torch.arange(3000))
    x = torch.ones(3000, 130)  # More rows than are hashed in one go, and half a hash over.
    whole = keyed_dropout(x, keys, probability, **KEY)
    masks = KeptMasks(keys)
    for epoch in (KEY["epoch"], KEY["epoch"] + 1, KEY["epoch"]):
        key = KEY | {"epoch": epoch}
        some = slice(700, 2900)
        part = keyed_dropout(x[some], keys[some], probability, **key, masks=masks, start=700)
        assert torch.equal(part, whole[some]) == (epoch == KEY["epoch"])


SITES = ((0, 40, 0.5), (1, 40, 0.5), (2, 7, 0.3), (3, 40, 0.5), (4, 40, 0.1))
"""Number, width and probability."""


@pytest.fixture
def drawn(monkeypatch):
    """Sites and rows of every call that draws masks."""
    shapes, fill = [], hashed_dropout._fill

    def noted(keys, epoch_keys, masks, *levels):
        assert masks.shape[:2] == (len(epoch_keys), len(keys))
        shapes.append((len(epoch_keys), len(keys)))
        fill(keys, epoch_keys, masks, *levels)

    monkeypatch.setattr(hashed_dropout, "_fill", noted)
    return shapes


def assert_masks_of(masks, keys, rows, epoch, sites, seed=1):
    """Compare the masks of rows with the dropout of the reference, which shares no code."""
    start, stop = rows
    for site, width, p in sites:
        found = keyed_mask(
            keys[start:stop], width, p, seed=seed, epoch=epoch, site=site, masks=masks, start=start
        )
        if start == stop:
            assert found is None
            continue
        wanted = reference_drop(torch.ones(stop, width), p, seed, epoch, site)[start:]
        assert torch.equal(found.kept, (wanted != 0).to(torch.int8))
        assert found.scale == pytest.approx(wanted.max().item())


def test_masks_of_rows_that_are_no_chunk_are_drawn_alone(drawn):
    keys = row_keys(torch.arange(900))
    masks, counts = ChunkMasks(keys, [0, 300, 600, 900]), []
    masks.begin(1, 0, [0, 1, 2])
    # The second rows use another site of a known shape, the third ones a site of a new shape.
    passes = [((0, 290), 0), ((290, 600), 0), ((600, 890), 0), ((600, 890), 9), ((0, 300), 9)]
    for i, (rows, epoch) in enumerate(passes):
        assert_masks_of(masks, keys, rows, epoch, SITES[: 3 + min(i, 2)])
        counts.append([sites for sites, _ in drawn])
        assert {count for _, count in drawn} == {rows[1] - rows[0]}
        drawn.clear()
    assert counts == [[1, 1, 1], [2, 1, 1], [3, 1, 1], [3, 1, 1], [3, 1, 1]]


def test_masks_of_the_next_chunks_are_drawn_at_once(drawn):
    keys, ends = row_keys(torch.arange(15 * 400)), range(0, 15 * 400 + 1, 400)
    masks, order = ChunkMasks(keys, ends), [*reversed(range(15)), *range(15)]
    masks.begin(1, 5, order)
    for i, chunk in enumerate(order):
        rows = 400 * chunk, 400 * chunk + 400
        assert_masks_of(masks, keys, rows, 5 + i // 15, [(0, 64, 0.5), (1, 64, 0.5)])
    # 51,200 bytes a chunk: five at once, of one epoch. Of the first chunk no site was known.
    groups = [1, 1, 5, 5, 4, 5, 5, 5]
    assert [count // 400 for _, count in drawn] == groups
    assert [sites for sites, _ in drawn] == [1, 1, *[2] * 6]


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_groups_equal_those_of_the_reference_in_any_order(seed, drawn):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 37, 400, 4000]) for _ in range(5)]
    ends = [*itertools.accumulate(sizes, initial=0)]
    keys = row_keys(torch.arange(ends[-1]))
    masks, epochs = ChunkMasks(keys, ends), (3, 4)
    order = [chunk for _ in epochs for chunk in rng.sample(range(5), 5)]
    passes = [(chunk, 3 + i // 5) for i, chunk in enumerate(order)]
    for number in range(3):
        masks.begin(1, 3, order)
        for chunk, epoch in passes:
            sites = rng.sample(SITES, rng.randrange(1, 6))
            # A pass of another run between two passes must not get masks of this one.
            assert_masks_of(
                masks, keys, ends[chunk : chunk + 2], epoch, sites, rng.choice([1, 1, 2])
            )
        if number:
            rng.shuffle(passes)
    for sites, rows in drawn:
        assert sites * rows * 7 <= hashed_dropout.GROUP_BYTES or rows in sizes


def test_a_mask_keeps_no_mask_of_other_chunks():
    keys = row_keys(torch.arange(8 * 100))
    masks = ChunkMasks(keys, range(0, 801, 100))
    masks.begin(1, 0, range(8))
    for start in range(0, 800, 100):
        some = keys[start : start + 100]
        for site in (0, 1):
            found = keyed_mask(some, 62, 0.5, seed=1, epoch=0, site=site, masks=masks, start=start)
            # The masks of both sites are drawn at once, with columns for whole hashes.
            assert found.kept.untyped_storage().nbytes() == 100 * 64 * (2 if start else 1)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_dropout_has_a_site_of_its_own(name, monkeypatch):
    sites = []

    def noted(*args, site, **rest):
        sites.append(site)
        return keyed_mask(*args, site=site, **rest)

    graph = small_graph(n=60)
    config = quick_config(model=name, layers=3, hidden=8, epochs=1, dropout=0.5)
    trainer = Trainer(config, graph=graph)
    assert trainer.plan.num_stages == 1, "set up, which runs the calls on samples"
    monkeypatch.setattr(rows_module, "keyed_mask", noted)
    trainer.fit()
    count = {"gcn": 2, "sage": 2, "gcnii": 4, "resgcn": 4, "gat": 3}[name]
    assert len(sites) == len(set(sites)) == count
