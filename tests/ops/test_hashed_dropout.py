"""The dropout mask depends on seed, epoch, site, vertex and feature only."""

import itertools
import weakref

import pytest
import torch
from helpers import quick_config, small_graph

from gnnpipe import Trainer
from gnnpipe.models import layer as layer_module
from gnnpipe.models.layer import MODELS, LayerSpec
from gnnpipe.models.layer_stack import GNN
from gnnpipe.ops import hashed_dropout
from gnnpipe.ops.hashed_dropout import ChunkMasks, KeptMasks, keyed_mask, row_keys
from gnnpipe.ops.hashed_dropout import keyed_dropout as drop_kept

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
    masks.begin(KEY["seed"], 0)  # nothing was used yet
    drop = KEY | {"epoch": 0, "masks": masks}
    for site, p in ((0, 0.5), (1, 0.3)):
        keyed_dropout(x, keys, p, **drop | {"site": site})
    first = [weakref.ref(made[1]) for made in masks._made.values()]
    fill, left = hashed_dropout._fill, []
    with monkeypatch.context() as seen:
        seen.setattr(
            hashed_dropout, "_fill", lambda *a: left.append([r() for r in first]) or fill(*a)
        )
        masks.begin(KEY["seed"], 6)
    assert left == [[None, None]] * 2, "the first masks are freed before new ones are allocated"
    rooms = [made[1].data_ptr() for made in masks._made.values()]
    masks.begin(KEY["seed"], 7)
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


def test_masks_of_a_chunk_are_drawn_at_once_and_equal_those_of_each_site(monkeypatch):
    keys, fill, filled = row_keys(torch.arange(900)), hashed_dropout._fill, []
    masks = ChunkMasks(keys)
    sites = [(0, 40, 0.5), (1, 40, 0.5), (2, 6, 0.3), (3, 40, 0.5), (4, 40, 0.1)]
    wanted = {
        (start, epoch, site): keyed_mask(
            keys[start : start + 300], width, p, seed=1, epoch=epoch, site=site
        )
        for start in (0, 300, 600)
        for epoch in (0, 1)
        for site, width, p in sites
    }
    monkeypatch.setattr(hashed_dropout, "_fill", lambda *a: filled.append(len(a[1])) or fill(*a))
    counts = []
    for start, epoch in [(0, 0), (300, 0), (600, 0), (600, 1), (0, 1)]:
        # The second pass uses another site of a known shape, the third one of a new shape.
        used = sites[: 3 + min(len(counts), 2)]
        for site, width, p in used:
            found = keyed_mask(
                keys[start : start + 300], width, p,
                seed=1, epoch=epoch, site=site, masks=masks, start=start,
            )  # fmt: skip
            assert torch.equal(found.kept, wanted[start, epoch, site].kept)
            assert found.scale == wanted[start, epoch, site].scale
        counts.append(filled[:])
        filled.clear()
    assert counts == [[1, 1, 1], [2, 1, 1], [3, 1, 1], [3, 1, 1], [3, 1, 1]]


KINDS = ("gcn", "sage", "resgcn", "gat")


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS, 3)), ids="-".join)
def test_rows_are_dropped_once_between_layers_of_any_kinds(kinds, monkeypatch):
    """Every site is used once; ``resgcn`` drops inside and at the end."""
    sites = []

    def noted(*args, site, **rest):
        sites.append(site)
        return keyed_mask(*args, site=site, **rest)

    graph = small_graph(n=60)
    spec = LayerSpec(graph.num_features, graph.num_classes, 3, 8, dropout=0.5, heads=2)
    model = GNN([MODELS[kind](i, spec) for i, kind in enumerate(kinds)]).double()
    trainer = Trainer(quick_config(epochs=1, layers=3, dropout=0.5), graph=graph, model=model)
    assert trainer.plan.num_stages == 1, "set up, which runs the layers on samples"
    monkeypatch.setattr(layer_module, "keyed_mask", noted)
    trainer.fit()
    made = [i + 1 for i, kind in enumerate(kinds[:2]) if kind != "resgcn"]
    decoded = [3] * (kinds[2] in ("resgcn", "gat"))
    inside = [4 + i for i, kind in enumerate(kinds) if kind == "resgcn"]
    assert sorted(sites) == sorted([*made, *decoded, *inside])
