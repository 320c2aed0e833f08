"""Codes of differences, parts of codes, and codes settled: the same, to the last bit, as their steps one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.compress import Identity, Log, Ternary, Uniform
from tests.compress.cases import KINDS, SIZES, compressors, few, make, plain_torch, same_bits, vectors

MODEST = [kind for kind in KINDS if kind not in ("huge", "wide")]  # their sums are finite


@few
@given(compressors, st.sampled_from(MODEST), st.sampled_from(SIZES), st.integers(0, 99))
def test_the_code_of_a_difference(compressor, kind, size, seed):
    x, base = make(kind, size, seed), make("normal", size, seed + 1)
    assert same_bits(compressor.encode_difference(x, base, step=3), compressor.encode(x - base, step=3))
    assert same_bits(compressor.encode_difference(x, x, step=3), compressor.encode(torch.zeros(size), step=3))


@few
@given(compressors, vectors, st.floats(0, 1), st.floats(0, 1))
def test_a_part_of_what_a_code_says(compressor, x, a, b):
    start, stop = sorted((math.ceil(a * len(x)), math.ceil(b * len(x))))
    code = compressor.encode(x, step=5)
    part = compressor.decode_part(code, len(x), start, stop, step=5)
    assert same_bits(part, compressor.decode(code, len(x), step=5)[start:stop].clone())


@few
@given(compressors, st.sampled_from(MODEST), st.sampled_from(SIZES), st.integers(1, 3), st.booleans())
def test_settling_is_decoding_and_adding(compressor, kind, size, count, with_base):
    said = [make(kind, size, seed) for seed in range(count)]
    codes = [compressor.encode(vector, step=7) for vector in said]
    weights, own = [0.0, 0.5, 0.25][:count], count - 1
    decoded = [compressor.decode(code, size, step=7) for code in codes]
    news = torch.zeros(size)
    for vector, weight in zip(decoded, weights, strict=True):
        news += weight * vector
    x, base = make("normal", size, 10), make("normal", size, 11)
    for plain in (False, True):
        moved, new_base = x.clone(), base.clone()
        if plain:
            with plain_torch():
                compressor.settle(codes, weights, own, moved, new_base if with_base else None, step=7)
        else:
            compressor.settle(codes, weights, own, moved, new_base if with_base else None, step=7)
        change = news - decoded[own]
        assert torch.equal(moved, x + change if with_base else change)
        assert torch.equal(new_base, base + news if with_base else base)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_vectors_of_other_dtypes(dtype):
    x, base = torch.randn(5000, dtype=dtype), torch.randn(5000, dtype=dtype)
    code = Log(4).encode_difference(x, base)
    assert same_bits(code, Log(4).encode(x - base))
    moved, new_base = x.clone(), base.clone()
    Log(4).settle([code, code], [0.5, 0.5], 1, moved, new_base)
    assert torch.equal(moved, x), "who said the same as all is where they are"
    torch.testing.assert_close(new_base, base + Log(4).decode(code, 5000).to(dtype))


@pytest.mark.parametrize("compressor", [Uniform(4), Ternary(), Log(3), Identity()])
def test_bad_input_is_named_and_changes_nothing(compressor):
    x, base = torch.randn(100), torch.zeros(100)
    code = compressor.encode(x)
    with pytest.raises(ValueError, match="x must have as many entries as base, 99, not 100"):
        compressor.encode_difference(x, base[:99])
    broken = x.clone()
    broken[17] = float("nan")
    with pytest.raises(ValueError, match="entry 17 of 100 is nan"):
        compressor.encode_difference(broken, base)
    with pytest.raises(ValueError, match="from 0 to 100, not 7 and 101"):
        compressor.decode_part(code, 100, 7, 101)
    for codes, weights, own, target, match in [
        ([code], [1.0, 1.0], 0, base, "each of 1 codes must have a weight .*not 2 weights and own=0"),
        ([code], [1.0], 1, base, "own=1"),
        ([code[:-1]], [1.0], 0, base, "must have"),
        ([code], [1.0], 0, base[:99], "base must have as many entries as x, 100, not 99"),
    ]:
        with pytest.raises(ValueError, match=match):
            compressor.settle(codes, weights, own, x, target)
    assert not base.any()


def test_a_bad_scale_changes_nothing():
    x, base = torch.randn(5000), torch.zeros(5000)
    code = Uniform(4).encode(x)
    bad = code.clone()
    bad[:4] = torch.tensor([-1.0]).view(torch.uint8)
    before = x.clone()
    with pytest.raises(ValueError, match="block 0 has -1"):
        Uniform(4).settle([code, bad], [0.5, 0.5], 0, x, base)
    assert torch.equal(x, before)
    assert not base.any()


def test_codes_of_another_length_are_not_given_to_kernels():
    code = Log(2).encode(torch.ones(3000))
    with pytest.raises(ValueError, match="a code of 3000 entries must have 1508 bytes, not 758"):
        Uniform(4).readable([code], [1.0], 0, 3000)
