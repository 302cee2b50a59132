"""Triton kernels: on a GPU if there is one, else by Triton's interpreter."""

import pytest
import torch
from helpers import quick_config, small_graph

pytest.importorskip("triton")

from gnnpipe import Trainer
from gnnpipe.errors import InputError
from gnnpipe.ops import hashed_dropout, triton
from gnnpipe.ops.hashed_dropout import KeptMasks, Mask, keyed_mask, row_keys
from gnnpipe.ops.norm_relu_blocks import NormReluBackward, norm_relu_block, to_save
from gnnpipe.ops.spmm import default_kernel, kernel_named
from gnnpipe.ops.triton import spmm
from gnnpipe.ops.triton.dropout import fill_masks
from gnnpipe.ops.triton.norm_relu import norm_relu_backward, norm_relu_forward
from gnnpipe.ops.triton.spmm import product

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def near(found, wanted, kind):
    wanted = wanted.double()
    assert found.shape == wanted.shape
    error = (found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert error < KINDS[kind]


def draw(*size, kind=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(kind)


def slow(value):
    """Mark a parameter as slow: the interpreter takes seconds for small pieces and wide rows."""
    return pytest.param(value, marks=pytest.mark.slow)


def matrix(kind, rows=40, columns=45, wide=torch.int32):
    """A matrix with empty rows, two long rows and parallel entries."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 9, (rows,), generator=generator)
    counts[3], counts[rows - 2], counts[0], counts[rows - 1] = 57, 21, 0, 0
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    indices = torch.randint(0, columns, (int(offsets[-1]),), generator=generator)
    values = draw(len(indices), kind=kind)
    dense = torch.zeros(rows, columns, dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(rows), counts)
    dense.index_put_((row, indices), values.double(), accumulate=True)
    return dense, [t.to(HERE) for t in (offsets.to(wide), indices.to(wide), values)]


@pytest.mark.parametrize("longest", [slow(1), 8, slow(21), 1000])
@pytest.mark.parametrize("width", [slow(1), 7, 128, slow(300)])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, width, longest):
    dense, parts = matrix(kind)
    rows = draw(45, width, kind=kind)
    times = product(*parts, longest)
    found = times(rows.to(HERE))
    near(found, dense @ rows.double(), kind)
    assert torch.equal(found, times(rows.to(HERE)))


def test_pieces_grow_with_the_matrix(monkeypatch):
    """The number of partial sums is bounded, however many entries there are."""
    dense, parts = matrix(torch.float64)
    assert len(parts[1]) > 200
    monkeypatch.setattr(spmm, "MIN_PIECE", 4)
    for most, longest in ((1 << 20, 4), (20, len(parts[1]) // 20)):
        monkeypatch.setattr(spmm, "MAX_PIECES", most)
        sizes = []
        cut = spmm._cut
        with monkeypatch.context() as seen:
            seen.setattr(spmm, "_cut", lambda o, n, c=cut, s=sizes: s.append(n) or c(o, n))
            near(product(*parts)(draw(45, 7).to(HERE)), dense @ draw(45, 7), torch.float64)
        assert sizes == [longest]
        stage_modules, _ = cut(parts[0], longest)
        assert int((stage_modules.stops - stage_modules.starts).max()) == longest
        assert stage_modules.num_apart <= max(2 * most, 2 * len(parts[1]) // 4)


def test_product_without_features():
    _, parts = matrix(torch.float32)
    assert product(*parts)(torch.empty(45, 0, device=HERE)).shape == (40, 0)


def test_products_with_int64_indices_and_strided_rows():
    dense, parts = matrix(torch.float64, wide=torch.int64)
    rows = draw(16, 45).t()
    near(product(*parts, 8)(rows.to(HERE)), dense @ rows, torch.float64)


def test_a_matrix_without_entries():
    offsets = torch.zeros(4, dtype=torch.int32, device=HERE)
    found = product(offsets, offsets[:0], draw(0).to(HERE))(draw(5, 3).to(HERE))
    assert torch.equal(found.cpu(), torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("size", [(37, 7), (50, 130), (1, 3), (0, 5)])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_norm_relu(kind, size, is_dropped):
    """Compared with the CPU code, with more rows than the programs process at a time."""
    total, grad, scale, shift = (
        draw(*shape, kind=kind, seed=i) for i, shape in enumerate([size, size, size[1:], size[1:]])
    )
    kept = (draw(size[0], size[1] + 3) < 0.2).to(torch.int8)[:, : size[1]]
    mask = Mask(kept, 1 / 0.6) if is_dropped else None
    factor, out = 1 / 0.6 if is_dropped else 1.0, torch.empty_like(total)
    stats = norm_relu_block(total, out, slice(None), scale, shift, 1e-5, mask)
    back = NormReluBackward(to_save(scale, shift, total, out, [stats]), factor, (True, True))
    wanted = back.rows(grad, slice(None))
    of_weights = [*back.weights(), wanted.sum(0)]
    args = total.to(HERE), scale.to(HERE), shift.to(HERE)
    made = torch.empty_like(args[0])
    mine = None
    if is_dropped:  # with room behind each row
        mine = torch.zeros(size[0], size[1] + 3, dtype=torch.int8, device=HERE)[:, : size[1]]
        mine.copy_(kept)
    mean, rstd = norm_relu_forward(*args, 1e-5, mine, factor, made)
    near(made, out, kind)
    near(mean, stats[0], kind)
    near(rstd, stats[1], kind)
    for into in (None, args[0]):
        saved = args[1], args[2], args[0], made, mean, rstd
        found, sums = norm_relu_backward(grad.to(HERE), saved, factor, into, programs=3)
        near(found, wanted, kind)
        for mine, other in zip(sums, of_weights, strict=True):
            near(mine, other, kind)
    assert found is args[0]


def test_nan_stays_nan():
    total = draw(4, 8)
    total[2, 3] = float("nan")
    out = torch.zeros_like(total).to(HERE)
    ones = torch.ones(8, dtype=torch.float64, device=HERE)
    kept = torch.zeros(4, 8, dtype=torch.int8, device=HERE)
    for mask in (None, kept):
        mean, rstd = norm_relu_forward(total.to(HERE), ones, ones, 1e-5, mask, 2.0, out)
        assert out[2].isnan().all()
        assert not out[[0, 1, 3]].isnan().any()
    grad = torch.ones_like(out)
    found, _ = norm_relu_backward(grad, (ones, ones, total.to(HERE), out, mean, rstd), 2.0)
    assert found[2].isnan().all()


@pytest.mark.parametrize("probability", [0.5, 0.1, 1e-9, 0.999999])
@pytest.mark.parametrize("width", [5, 128, 300])
def test_masks_equal_those_of_the_cpu(width, probability):
    keys = row_keys(torch.arange(2**33, 2**33 + 77))
    sites = [hashed_dropout._scalar_key(3, 4, site) for site in range(3)]
    per_hash, least, _ = hashed_dropout._levels(probability)
    full = -(-width // per_hash) * per_hash
    masks = torch.full((3, 77, full), 9, dtype=torch.int8, device=HERE)
    fill_masks(
        keys.to(HERE), torch.tensor(sites, dtype=torch.int32).to(HERE), masks, least, per_hash
    )
    for site, mask in zip(sites, masks, strict=True):
        wanted, _ = hashed_dropout._keep_mask(keys, width, probability, site)
        assert torch.equal(mask[:, :width].cpu(), wanted)


@pytest.fixture
def on_triton(monkeypatch):
    """Use Triton on the device of these tests, also where that is the CPU."""
    monkeypatch.setattr(triton, "works_on", lambda device: device.type == HERE.type)


def test_masks_stay_in_the_same_memory(on_triton, monkeypatch):
    """A CUDA graph reads the masks of all epochs from the same addresses."""
    keys = row_keys(torch.arange(9)).to(HERE)
    masks, what = KeptMasks(keys), [(6, 0.5, 0), (6, 0.5, 1), (3, 0.1, 2)]
    places = []
    for epoch in range(4):
        masks.begin(7, epoch, [0])
        found = [
            keyed_mask(keys, w, p, seed=7, epoch=epoch, site=s, masks=masks).kept
            for w, p, s in what
        ]
        places.append([mask.data_ptr() for mask in found])
        with monkeypatch.context() as plain:
            plain.setattr(triton, "works_on", lambda device: False)
            wanted = [
                keyed_mask(keys.cpu(), w, p, seed=7, epoch=epoch, site=s).kept for w, p, s in what
            ]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    assert places[1] == places[2] == places[3]


@pytest.fixture
def fresh_cache():
    """Clear the cached result of ``fault_on``."""
    triton.fault_on.cache_clear()
    yield
    triton.fault_on.cache_clear()


def test_fallback_if_triton_fails(monkeypatch, fresh_cache):
    """Triton may be installed without a C compiler, which shows at the first kernel."""

    def fails(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    monkeypatch.setattr(spmm, "try_out", fails)
    there = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match=r"cuda:0 \(Failed to find C compiler\.\): torch's own"):
        assert not triton.works_on(there)
    assert default_kernel(there) is default_kernel(torch.device("cuda", 0))  # and no second warning
    assert default_kernel(there).__name__ == "_torch_csr"
    with pytest.raises(InputError, match=r"--kernel triton: .*Failed to find C compiler.*; try"):
        kernel_named("triton", torch.float32, there)


def test_triton_is_tried_once(monkeypatch, fresh_cache):
    tried = []
    monkeypatch.setattr(spmm, "try_out", tried.append)
    there = torch.device("cuda", 0)
    assert triton.works_on(there)
    assert default_kernel(there).__name__ == "_triton"
    assert tried == [there]
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    triton.fault_on.cache_clear()
    assert triton.fault_on(there) == "the package triton is not installed"


def test_trial_product():
    spmm.try_out(HERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmm, "product", lambda *_: lambda rows: 2 * rows - 1)
        with pytest.raises(RuntimeError, match="2 x 3 is 5"):
            spmm.try_out(HERE)


def losses(**settings):
    config = quick_config(layers=3, hidden=8, epochs=3, dropout=0.5, device=HERE.type, **settings)
    result = Trainer(config, graph=small_graph(n=40)).fit()
    return [row.loss for row in result.history] + [result.test_acc]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings", [{}, {"chunks": 3}, slow({"recompute": True}), slow({"kernel": "triton"})]
)
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn"])
def test_training(model, settings, on_triton, monkeypatch):
    with monkeypatch.context() as plain:
        plain.setattr(triton, "works_on", lambda device: False)
        wanted = losses(model=model, **(settings | {"kernel": "embedding-bag"}))
    assert losses(model=model, **settings) == pytest.approx(wanted, rel=1e-9)
