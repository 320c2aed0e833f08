"""Error bounds, exact points, symmetry and idempotence of the quantizers, of `Half` and of `TopK`."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compress import Compressor, Half, Log, Pick, Sign, TopK, Uniform
from tests.compress.cases import DENSE, DETERMINISTIC, few, make, plain_torch, vectors

SMALLEST = 2.0**-149  # the spacing of subnormal numbers
logs = st.sampled_from([Log(b) for b in range(2, 7)])
uniforms = st.sampled_from([Uniform(b) for b in range(2, 9)])


def through(compressor: Compressor, x: Tensor) -> Tensor:
    """Encodes and decodes x."""
    return compressor.decode(compressor.encode(x), x.numel())


def block_largest(x: Tensor, block: int) -> Tensor:
    """Returns for each entry the largest magnitude of its block."""
    largest = torch.zeros_like(x)
    for start in range(0, x.numel(), block):
        largest[start : start + block] = x[start : start + block].abs().max()
    return largest


@few
@given(st.sampled_from([*DENSE, *DETERMINISTIC]), vectors)
def test_odd_and_zero_to_zero(compressor: Compressor, x: Tensor) -> None:
    assert torch.equal(through(compressor, -x), -through(compressor, x))
    assert not through(compressor, torch.zeros_like(x)).any()


@few
@given(st.one_of(logs, uniforms, st.sampled_from(DENSE)), vectors)
def test_idempotent(compressor: Compressor, x: Tensor) -> None:
    once = through(compressor, x)
    assert torch.equal(through(compressor, once), once)


@few
@given(st.one_of(logs, uniforms), vectors)
def test_the_largest_of_a_block_is_exact(compressor: Log | Uniform, x: Tensor) -> None:
    largest = block_largest(x, compressor.block)
    decoded = through(compressor, x)
    assert torch.equal(decoded[x.abs() == largest], x[x.abs() == largest])
    assert (decoded.abs() <= largest).all()


@few
@given(logs, vectors)
def test_log_has_a_relative_error_of_at_most_a_third(compressor: Log, x: Tensor) -> None:
    k = 2 ** (compressor.bits - 1) - 2
    largest = block_largest(x, compressor.block).double()
    error = (through(compressor, x).double() - x.double()).abs()
    near = x.abs().double() >= largest * 2.0**-k
    assert (error <= x.abs().double() / 3 + SMALLEST / 2)[near].all()
    assert (error <= largest * 2.0 ** -(k + 1) + SMALLEST / 2)[~near].all()


@few
@given(logs, vectors)
def test_log_rounds_to_the_nearest_level(compressor: Log, x: Tensor) -> None:
    levels = 2.0 ** -torch.arange(2 ** (compressor.bits - 1) - 1).double()
    levels = torch.cat([levels, torch.zeros(1).double()])
    nearest = (x.double().abs()[:, None] - block_largest(x, compressor.block).double()[:, None] * levels).abs().amin(1)
    error = (through(compressor, x).double() - x.double()).abs()
    assert (error <= nearest + SMALLEST / 2).all()


@few
@given(uniforms, vectors)
def test_uniform_has_an_error_of_at_most_half_a_level(compressor: Uniform, x: Tensor) -> None:
    spacing = block_largest(x, compressor.block).double() / (2 ** (compressor.bits - 1) - 1)
    error = (through(compressor, x).double() - x.double()).abs()
    assert (error <= spacing * (0.5 + 2.0**-14) + SMALLEST / 2).all()


def test_unit_times_levels_is_one() -> None:
    """Otherwise the largest entry of a block would not be exact."""
    for bits in range(2, 9):
        top = torch.tensor(2.0 ** (bits - 1) - 1)
        assert (torch.tensor(1.0) / top) * top == 1.0


@few
@given(vectors)
def test_sign_keeps_signs_and_the_mean_magnitude(x: Tensor) -> None:
    decoded = through(Sign(block=64), x)
    for start in range(0, x.numel(), 64):
        part, code = x[start : start + 64], decoded[start : start + 64]
        mean = part.double().abs().mean()
        assert torch.allclose(code.double().abs(), mean.expand(part.shape), rtol=1e-6, atol=2 * SMALLEST)
    assert torch.equal(torch.signbit(decoded), torch.signbit(x))


@few
@given(vectors)
def test_pick_sends_the_largest_of_each_seven(x: Tensor) -> None:
    decoded = through(Pick(block=64), x)
    for start in range(0, x.numel(), 64):
        part, picked = x[start : start + 64], decoded[start : start + 64]
        level = min(3 * part.double().abs().mean(), part.double().abs().max())
        slack = 1e-6 * level + 12 * SMALLEST
        groups = -(-part.numel() // 7)
        for first in range(groups):
            group, sent = part[first::groups].abs(), picked[first::groups] != 0
            assert int(sent.sum()) <= 1
            assert (group[sent] == group.max()).all()
            # Rounded to 0 or the level, whichever is nearer.
            assert group.max() >= level / 2 - slack if sent.any() else group.max() <= level / 2 + slack
        assert torch.equal(torch.signbit(picked[picked != 0]), torch.signbit(part[picked != 0]))
        assert ((picked[picked != 0].double().abs() - level).abs() <= slack).all()
        assert part.abs().max() < 12 * SMALLEST or picked.any()  # otherwise error feedback would never send it


def test_pick_keeps_the_sign_of_subnormal_numbers_with_and_without_kernels() -> None:
    for x in (torch.tensor([-(2.0**-149)]), torch.tensor([0.0, -1e-42, 0.0]).repeat(700)):
        with plain_torch():
            plain = through(Pick(), x)
        assert torch.equal(through(Pick(), x).view(torch.int32), plain.view(torch.int32))


@few
@given(vectors)
def test_half_rounds_as_torch_does_and_clamps(x: Tensor) -> None:
    for compressor, dtype in ((Half("fp16"), torch.float16), (Half("bf16"), torch.bfloat16)):
        limit = torch.finfo(dtype).max
        assert torch.equal(through(compressor, x), x.clamp(-limit, limit).to(dtype).float())
    assert through(Half(), torch.tensor([65520.0, -1e9])).tolist() == [65504.0, -65504.0]


@few
@given(st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]), vectors)
def test_topk_keeps_the_largest_exactly_and_the_first_of_equals(ratio: float, x: Tensor) -> None:
    decoded = through(TopK(ratio), x)
    k = max(1, round(ratio * x.numel())) if x.numel() else 0
    order = sorted(range(x.numel()), key=lambda i: (-abs(x[i].item()), i))[:k]
    expected = torch.zeros_like(x)
    expected[order] = x[order]
    assert torch.equal(decoded, expected)


def test_topk_is_exact_if_its_sample_misleads() -> None:
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
