"""Every transform is orthogonal, keeps QK^T, takes any input, and is a value."""

from __future__ import annotations

import math

import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8attn.testing import (
    OutlierSpec,
    assert_close_to_reference,
    assert_orthogonal,
    assert_qk_invariant,
    orthogonal_transforms,
    outlier_specs,
    qkv,
    shapes,
)
from fp8attn.transforms import (
    DCT,
    TRANSFORM_NAMES,
    BlockDiagonal,
    Compose,
    HaarRandom,
    Hadamard,
    Identity,
    Permutation,
    RandomHadamard,
    SignFlip,
    Transform,
    fold_value_rotation,
    hadamard,
    incoherence,
    make_transform,
)

EPS32 = 2.0**-23
settings.register_profile("transforms", max_examples=40, deadline=None)
EXAMPLES = settings.get_profile("transforms")

COMPOSED = Compose([Permutation(range(47, -1, -1)), BlockDiagonal([DCT(16), RandomHadamard(32, seed=5)]), SignFlip(48)])


@given(orthogonal_transforms())
@EXAMPLES
def test_orthogonal(transform: Transform) -> None:
    assert_orthogonal(transform)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (name, dim)
        for name in TRANSFORM_NAMES
        for dim in (1, 2, 3, 31, 52, 80, 256, 512, 576)
        if dim not in (3, 31, 52) or name not in ("hadamard", "random_hadamard")  # these sizes have no matrix
    ],
)
def test_orthogonal_at_every_kind_of_size(name: str, dim: int) -> None:
    assert_orthogonal(make_transform(name, dim, seed=1))


def test_composition_is_orthogonal_and_in_order() -> None:
    assert_orthogonal(COMPOSED)
    x = torch.randn(7, 48, dtype=torch.float64)
    one_by_one = x
    for transform in COMPOSED.transforms:
        one_by_one = transform.apply(one_by_one)
    # Entries of size |x| / sqrt(48) = 1 after at most 3 x 48 float64 roundings of 1.1e-16 each
    torch.testing.assert_close(
        COMPOSED.apply(x), one_by_one, rtol=0, atol=3 * 48 * 2.0**-53 * x.norm(dim=1).max().item()
    )


@given(st.data())
@EXAMPLES
def test_keeps_qk(data: st.DataObject) -> None:
    x = data.draw(qkv(shapes=shapes(max_group=1)))
    assert_qk_invariant(x.q, x.k, data.draw(orthogonal_transforms(dim=x.shape.head_dim)))


@given(st.data())
@EXAMPLES
def test_keeps_norms_and_inverts(data: st.DataObject) -> None:
    x = data.draw(qkv()).q
    transform = data.draw(orthogonal_transforms(dim=x.shape[-1]))
    y = transform.apply(x)
    norm, dim = x.norm(dim=-1), x.shape[-1]
    # A random walk of dim roundings of at most 2^-24 |x| each in every element, 2^-23 being generous by two; the norm
    # itself is a float32 sum with as many.
    assert ((y.norm(dim=-1) - norm).abs() <= math.sqrt(dim) * EPS32 * norm).all()
    # There and back: as much twice.
    assert ((transform.inverse(y) - x).norm(dim=-1) <= 2 * math.sqrt(dim) * EPS32 * norm).all()


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_seed_decides_and_equality_is_by_value(name: str) -> None:
    first, again, other = (make_transform(name, 48, seed=seed) for seed in (7, 7, 8))
    assert first == again and hash(first) == hash(again) and repr(first) == repr(again)
    assert torch.equal(first.matrix(), again.matrix())
    is_random = name in ("random_hadamard", "haar", "block_hadamard", "sign_flip", "permutation")
    assert (first != other) == is_random
    assert torch.equal(first.matrix(), other.matrix()) != is_random
    if is_random:
        # The generator is the CPU's own: neither the global seed nor the default device has a say.
        with torch.device("meta"):
            torch.manual_seed(1)
            assert torch.equal(
                make_transform(name, 80, seed=7).matrix(device="cpu"),
                make_transform(name, 80, seed=7).matrix(device="cpu"),
            )


def test_known_matrices() -> None:
    """Pinned, so that a seed means the same rotation in the next release."""
    signs = (RandomHadamard(16, seed=3).matrix()[:, 0] * 4).int().tolist()
    assert signs == SignFlip(16, seed=3).matrix().diagonal().int().tolist()
    assert signs == (torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(3)) * 2 - 1).tolist()
    assert torch.equal(Hadamard(12).matrix(dtype=torch.float64), hadamard(12) / math.sqrt(12))


def test_dct_is_scipys() -> None:
    for dim in (1, 2, 5, 64, 80):
        x = torch.randn(6, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
        expected = torch.from_numpy(scipy.fft.dct(x.numpy(), norm="ortho"))
        # dim products and the matrix entries in them, each rounded to 2^-53 of at most |x|, here and in scipy
        limit = 2 * (dim + 1) * 2.0**-53 * x.norm(dim=1).max().item()
        torch.testing.assert_close(DCT(dim).apply(x), expected, rtol=0, atol=limit)


def test_haar_has_no_preferred_signs() -> None:
    """Plain QR leaves the diagonal of R negative, so that Q's has a mean of about -E|x| = -sqrt(2 / (pi d)) = -0.2."""
    diagonals = torch.stack([HaarRandom(16, seed=seed).matrix().diagonal() for seed in range(100)])
    # 1,600 entries of standard deviation 1 / sqrt(16): their mean has 0.00625; four of those
    assert abs(diagonals.mean().item()) < 0.025


def test_permutation_moves_channels() -> None:
    transform = Permutation([2, 0, 1])
    x = torch.tensor([[10.0, 20.0, float("nan")]])
    assert transform.apply(x)[0, 1:].tolist() == [10.0, 20.0] and transform.apply(x)[0, 0].isnan()
    assert transform.inverse(transform.apply(x))[0, :2].tolist() == [10.0, 20.0]
    assert torch.equal(torch.tensor([1.0, 2.0, 3.0]) @ transform.matrix(), torch.tensor([3.0, 1.0, 2.0]))


def test_block_hadamard_blocks_differ() -> None:
    transform = make_transform("block_hadamard", 192, seed=2)
    assert isinstance(transform, BlockDiagonal)
    assert [block.dim for block in transform.blocks] == [64, 64, 64]
    assert len(set(transform.blocks)) == 3
    matrix = transform.matrix()
    assert matrix[:64, 64:].abs().max() == 0 and matrix[:64, :64].abs().min() == 0.125
    assert [b.dim for b in make_transform("block_hadamard", 80).blocks] == [16] * 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("transform", [RandomHadamard(48, seed=1), COMPOSED, SignFlip(48), Identity(48)], ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (3,), (2, 0, 3), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_shape_and_dtype(transform: Transform, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*lead, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    y = transform.apply(x)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert y.shape == x.shape
    assert (torch.equal(x, before) and y.data_ptr() != x.data_ptr()) or x.numel() == 0
    # dim roundings of at most 2^-24 |x| (2^-53 in float64) in each element, which has size |x| / sqrt(dim)
    exact = x.double() @ transform.matrix(dtype=torch.float64)
    assert_close_to_reference(y, exact, relative_error=48 * (2.0**-53 if dtype == torch.float64 else 2.0**-24))
    assert_close_to_reference(transform.inverse(y), x, relative_error=2 * 48 * 2.0**-24)


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_strided_input_is_the_contiguous_one(name: str) -> None:
    transform = make_transform(name, 32, seed=1)
    base = torch.randn(4, 64, 6, generator=torch.Generator().manual_seed(0))
    for view in (base.mT[..., ::2], base[:, :32].mT, base[:1, :32, :1].mT.expand(5, 3, 32)):
        assert_close_to_reference(
            transform.apply(view), transform.apply(view.contiguous()), relative_error=32 * 2.0**-24
        )
        # as in test_any_shape_and_dtype: a sum of 32 terms in another order


def test_autocast_and_inference_mode_do_not_leak_in() -> None:
    transform = RandomHadamard(64, seed=1234)
    x = torch.randn(8, 64)
    with torch.inference_mode():
        transform.apply(x)  # fills the cache
    leaf = x.clone().requires_grad_()
    transform.apply(leaf).sum().backward()
    # The gradient of a sum of y is R 1: 64 float32 roundings of sums of at most 8 = |row| sqrt(64)
    torch.testing.assert_close(leaf.grad[0], transform.matrix().sum(1), rtol=0, atol=64 * 2.0**-24 * 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_qk_invariant(x, x, transform)


def test_caller_cannot_corrupt_the_cache() -> None:
    transform = HaarRandom(32, seed=5)
    before = transform.matrix().clone()
    transform.matrix().zero_()
    assert torch.equal(transform.matrix(), before)
    for identity in (Identity(4), SignFlip(4), Permutation(range(4))):
        x = torch.ones(2, 4)
        identity.apply(x).zero_()
        identity.inverse(x).zero_()
        assert torch.equal(x, torch.ones(2, 4))
    with pytest.raises(AttributeError):
        transform.dim = 3  # type: ignore[misc]


def test_incoherence_range() -> None:
    assert incoherence(torch.tensor([3.0, -3.0, 3.0, 3.0])).item() == 1.0
    assert incoherence(torch.tensor([0.0, 0.0, -1e-30, 0.0])).item() == 2.0
    # Squares of 1e38 are beyond float32, and zero divides nothing.
    assert incoherence(torch.tensor([[1e38] * 4, [0.0] * 4])).tolist() == [1.0, 1.0]


@given(qkv(), st.integers(0, 2**32 - 1))
@EXAMPLES
def test_sign_flip_and_permutation_spread_nothing(data: object, seed: int) -> None:
    q = data.q  # type: ignore[attr-defined]
    dim = q.shape[-1]
    assert torch.equal(incoherence(SignFlip(dim, seed=seed).apply(q)), incoherence(q))
    permuted = incoherence(make_transform("permutation", dim, seed=seed).apply(q))
    # the norm's squares are summed in another order: dim float32 roundings
    torch.testing.assert_close(permuted, incoherence(q), rtol=dim * 2.0**-24, atol=0)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_random_signs_spread_what_hadamard_alone_gathers(dim: int) -> None:
    constant = torch.ones(dim)
    spike = math.sqrt(dim)
    assert abs(incoherence(Hadamard(64).apply(torch.ones(64))).item() - 8) < 64 * 2.0**-24 * 8  # 64 roundings
    # P(max |x_i| > t |x| / sqrt d) <= 2 d exp(-t^2 / 2) (QuIP#, Lemma 3.1): at most a tenth of the draws may exceed the
    # t at which the right side is a tenth. 100 draws: 10 expected at most, 22 is four standard deviations above.
    bound = math.sqrt(2 * math.log(2 * dim / 0.1))
    mu = torch.stack([incoherence(RandomHadamard(dim, seed=seed).apply(constant)) for seed in range(100)])
    assert (mu > bound).sum() <= 22
    assert mu.mean() < bound < spike


def test_one_hot_becomes_flat() -> None:
    for transform in (Hadamard(48), RandomHadamard(80, seed=4)):
        one_hot = torch.eye(transform.dim)
        # every entry is the same float32 number; only the norm's sum of dim terms rounds
        torch.testing.assert_close(
            incoherence(transform.apply(one_hot)), torch.ones(transform.dim), rtol=transform.dim * 2.0**-24, atol=0
        )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 3e-6)], ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_folded_value_rotation_keeps_the_layer(
    dtype: torch.dtype, limit: float, num_q_heads: int, num_kv_heads: int
) -> None:
    """Limits: sums of hidden = 40, keys = 9 and 6 x 16 terms, 145 roundings of eps/2, 8.7e-6 and 1.6e-14 if all agreed
    in sign; a third of that, and 1e-13 for float64, whose weights are rounded again by the fold."""
    dim, hidden = 16, 40
    transform = RandomHadamard(dim, seed=2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, hidden, generator=generator, dtype=dtype)
    w_q, w_o = (torch.randn(num_q_heads * dim, hidden, generator=generator, dtype=dtype) for _ in range(2))
    w_k, w_v = (torch.randn(num_kv_heads * dim, hidden, generator=generator, dtype=dtype) for _ in range(2))
    w_o = w_o.T.contiguous()

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight).unflatten(-1, (-1, dim)).transpose(1, 2)

    def attend(w_v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            heads(w_q), heads(w_k), heads(w_v), is_causal=True, enable_gqa=True
        )

    def layer(w_v: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(attend(w_v).transpose(1, 2).flatten(2), w_o)

    before = w_v.clone(), w_o.clone()
    folded_v, folded_o = fold_value_rotation(w_v, w_o, transform)
    assert torch.equal(w_v, before[0]) and torch.equal(w_o, before[1])
    assert folded_v.dtype == folded_o.dtype == dtype
    assert_close_to_reference(layer(folded_v, folded_o), layer(w_v, w_o), relative_error=limit)
    # and the values in between are the rotated ones, head by head
    assert_close_to_reference(heads(folded_v), transform.apply(heads(w_v)), relative_error=limit)


def test_fold_value_rotation_errors() -> None:
    transform = Identity(16)
    with pytest.raises(ValueError, match=r"w_v must be .* multiple of the transform's dim 16, got shape \(40, 8\)"):
        fold_value_rotation(torch.zeros(40, 8), torch.zeros(8, 32), transform)
    with pytest.raises(ValueError, match=r"w_o must be .* got shape \(8, 40\)"):
        fold_value_rotation(torch.zeros(32, 8), torch.zeros(8, 40), transform)
    with pytest.raises(ValueError, match="w_o has 3 heads of 16, which must be a multiple of the 2 heads of w_v"):
        fold_value_rotation(torch.zeros(32, 8), torch.zeros(8, 48), transform)
    with pytest.raises(ValueError, match=r"w_o must be a matrix"):
        fold_value_rotation(torch.zeros(32, 8), torch.zeros(48), transform)


def test_errors_name_what_was_given() -> None:
    transform = RandomHadamard(64)
    for method in (transform.apply, transform.inverse):
        with pytest.raises(ValueError, match=r"last axis of 64, the dim of RandomHadamard.*got shape \(3, 80\)"):
            method(torch.zeros(3, 80))
        with pytest.raises(ValueError, match=r"got shape \(\)"):
            method(torch.tensor(1.0))
        with pytest.raises(TypeError, match=r"x must have a real floating-point dtype, got torch.int32"):
            method(torch.zeros(64, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"dtype must be a real floating-point dtype, got torch.complex64"):
        transform.matrix(dtype=torch.complex64)
    for name in ("hadamard", "random_hadamard"):
        with pytest.raises(ValueError, match=r'order 100 .* 96 \(below\) and 104 \(above\); "haar" and "dct" work'):
            make_transform(name, 100)
    with pytest.raises(ValueError, match=r"'none', 'hadamard', .*'permutation', got 'fourier'"):
        make_transform("fourier", 64)
    for name in TRANSFORM_NAMES:
        with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
            make_transform(name, 0)
        with pytest.raises(TypeError, match=r"dim must be an integer, got 64\.0"):
            make_transform(name, 64.0)  # type: ignore[arg-type]
    for name in ("random_hadamard", "haar", "block_hadamard", "sign_flip", "permutation"):
        with pytest.raises(ValueError, match=r"seed must be in 0 \.\. 2\*\*32 - 1, got 4294967296"):
            make_transform(name, 64, seed=2**32)
    with pytest.raises(ValueError, match=r"indices must hold each of 0 .. n-1 exactly once, got \(0, 0, 1\)"):
        Permutation([0, 0, 1])
    with pytest.raises(ValueError, match=r"same dim, got dims \[4, 8\]"):
        Compose([Identity(4), Identity(8)])
    with pytest.raises(ValueError, match="transforms must hold at least one transform"):
        Compose([])
    with pytest.raises(TypeError, match="blocks must hold transforms, got 3"):
        BlockDiagonal([3])  # type: ignore[list-item]


@given(
    qkv(
        shapes=shapes(head_dims=[64], min_seqlen=16),
        outliers=outlier_specs(kinds=["same_channels"], magnitudes=[100.0]),
    )
)
@EXAMPLES
def test_rotation_spreads_outlier_channels(data: object) -> None:
    q = data.q  # type: ignore[attr-defined]
    assert isinstance(data.outliers, OutlierSpec)  # type: ignore[attr-defined]
    # A row with channels 100 times larger has mu near sqrt(64 / outlier channels) >= 3; spread over Hadamard rows with
    # at most 6 such channels mu is at most about sqrt(6).
    assert incoherence(RandomHadamard(64, seed=9).apply(q)).mean() < incoherence(q).mean()
