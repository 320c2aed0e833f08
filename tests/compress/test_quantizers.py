"""The algebra of the quantizers (methods: error bounds, exact points, symmetry, idempotence) and of TopK."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.compress import Half, Log, Pick, Sign, Ternary, TopK, Uniform
from tests.compress.cases import DENSE, DETERMINISTIC, few, make, plain_torch, vectors

TINY = torch.finfo(torch.float32).tiny
LEAST = 2.0**-149  # the spacing of denormal numbers
logs = st.sampled_from([Log(b) for b in range(2, 7)])
uniforms = st.sampled_from([Uniform(b) for b in range(2, 9)])


def through(compressor, x):
    return compressor.decode(compressor.encode(x), x.numel())


def block_largest(x, block):
    largest = torch.zeros_like(x)
    for start in range(0, x.numel(), block):
        largest[start : start + block] = x[start : start + block].abs().max()
    return largest


@few
@given(st.sampled_from([*DENSE, *DETERMINISTIC]), vectors)
def test_odd_and_zero_to_zero(compressor, x):
    assert torch.equal(through(compressor, -x), -through(compressor, x))
    assert not through(compressor, torch.zeros_like(x)).any()


@few
@given(st.one_of(logs, uniforms, st.sampled_from(DENSE)), vectors)
def test_idempotent(compressor, x):
    once = through(compressor, x)
    assert torch.equal(through(compressor, once), once)


@few
@given(st.one_of(logs, uniforms), vectors)
def test_the_largest_of_a_block_is_exact(compressor, x):
    largest = block_largest(x, compressor.block)
    decoded = through(compressor, x)
    assert torch.equal(decoded[x.abs() == largest], x[x.abs() == largest])
    assert (decoded.abs() <= largest).all()


@few
@given(logs, vectors)
def test_log_errs_by_at_most_a_third(compressor, x):
    k = 2 ** (compressor.bits - 1) - 2
    largest = block_largest(x, compressor.block).double()
    error = (through(compressor, x).double() - x.double()).abs()
    near = x.abs().double() >= largest * 2.0**-k
    assert (error <= x.abs().double() / 3 + LEAST / 2)[near].all()
    assert (error <= largest * 2.0 ** -(k + 1) + LEAST / 2)[~near].all()


@few
@given(logs, vectors)
def test_log_takes_the_nearest_level(compressor, x):
    levels = 2.0 ** -torch.arange(2 ** (compressor.bits - 1) - 1).double()
    levels = torch.cat([levels, torch.zeros(1).double()])
    nearest = (x.double().abs()[:, None] - block_largest(x, compressor.block).double()[:, None] * levels).abs().amin(1)
    error = (through(compressor, x).double() - x.double()).abs()
    assert (error <= nearest + LEAST / 2).all()


@few
@given(uniforms, vectors)
def test_uniform_errs_by_at_most_half_a_step(compressor, x):
    step = block_largest(x, compressor.block).double() / (2 ** (compressor.bits - 1) - 1)
    error = (through(compressor, x).double() - x.double()).abs()
    assert (error <= step * (0.5 + 2.0**-14) + LEAST / 2).all()


def test_unit_times_levels_is_one():
    """Else the largest entry of a block would not be exact."""
    for bits in range(2, 9):
        top = torch.tensor(2.0 ** (bits - 1) - 1)
        assert (torch.tensor(1.0) / top) * top == 1.0


@few
@given(vectors)
def test_sign_keeps_signs_and_the_mean_magnitude(x):
    decoded = through(Sign(block=64), x)
    for start in range(0, x.numel(), 64):
        part, code = x[start : start + 64], decoded[start : start + 64]
        mean = part.double().abs().mean()
        assert torch.allclose(code.double().abs(), mean.expand(part.shape), rtol=1e-6, atol=2 * LEAST)
    assert torch.equal(torch.signbit(decoded), torch.signbit(x))


@few
@given(vectors)
def test_ternary_takes_the_nearest_of_0_and_three_mean_magnitudes(x):
    decoded = through(Ternary(block=64), x).double()
    for start in range(0, x.numel(), 64):
        part, code = x[start : start + 64].double(), decoded[start : start + 64]
        level = min(3 * part.abs().mean(), part.abs().max())
        error, nearest = (code - part).abs(), torch.minimum(part.abs(), (part.abs() - level).abs())
        assert (error <= nearest + level * 1e-6 + 12 * LEAST).all()
        assert part.abs().max() < 12 * LEAST or code.any()  # or error feedback would wait forever


@few
@given(vectors)
def test_pick_tells_the_largest_of_each_seven(x):
    ternary, decoded = through(Ternary(block=64), x), through(Pick(block=64), x)
    for start in range(0, x.numel(), 64):
        part, full, picked = (vector[start : start + 64] for vector in (x, ternary, decoded))
        groups = -(-part.numel() // 7)
        for first in range(groups):
            group, told = part[first::groups].abs(), picked[first::groups] != 0
            assert int(told.sum()) == int(bool(full[first::groups].any()))
            assert (group[told] == group.max()).all()
        assert torch.equal(picked, picked.where(picked == 0, full))  # a level of ternary, or none


def test_what_is_next_to_nothing_has_a_sign_with_and_without_kernels():
    for x in (torch.tensor([-(2.0**-149)]), torch.tensor([0.0, -1e-42, 0.0]).repeat(700)):
        with plain_torch():
            plain = through(Pick(), x)
        assert torch.equal(through(Pick(), x).view(torch.int32), plain.view(torch.int32))


@few
@given(vectors)
def test_half_rounds_as_torch_does_and_stops_at_the_largest(x):
    for compressor, dtype in ((Half("fp16"), torch.float16), (Half("bf16"), torch.bfloat16)):
        limit = torch.finfo(dtype).max
        assert torch.equal(through(compressor, x), x.clamp(-limit, limit).to(dtype).float())
    assert through(Half(), torch.tensor([65520.0, -1e9])).tolist() == [65504.0, -65504.0]


@few
@given(st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]), vectors)
def test_topk_keeps_the_largest_exactly_and_of_equals_the_first(ratio, x):
    decoded = through(TopK(ratio), x)
    k = max(1, round(ratio * x.numel())) if x.numel() else 0
    order = sorted(range(x.numel()), key=lambda i: (-abs(x[i].item()), i))[:k]
    expected = torch.zeros_like(x)
    expected[order] = x[order]
    assert torch.equal(decoded, expected)


def test_topk_when_its_sample_misleads():
    n = 1 << 17
    sampled = torch.arange(n) % 1024 < 16
    large_where_sampled = torch.where(sampled, 100.0, 1.0) * make("normal", n, 0)
    large_elsewhere = torch.where(sampled, 0.0, 1.0) * make("normal", n, 1)
    for x in (large_where_sampled, large_elsewhere, torch.ones(n), torch.zeros(n)):
        decoded = through(TopK(0.01), x)
        kept = decoded.nonzero().flatten()
        k = round(0.01 * n)
        assert torch.equal(decoded[kept], x[kept])
        assert torch.equal(decoded.abs().sort().values[-k:], x.abs().sort().values[-k:])
        if torch.equal(x, torch.ones(n)):
            assert kept.tolist() == list(range(k))
