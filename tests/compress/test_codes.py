"""Properties of every compressor: sizes, equality of both implementations, buffers, dtypes, rejected input."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compress import Compressor, Identity, Log, Pick, Sign, TopK, Uniform, encode_with_feedback
from laconic.compress.blockwise import Blockwise
from tests.compress.cases import (
    ALL,
    BLOCKWISE,
    DENSE,
    SPARSE,
    blockwise,
    compressors,
    few,
    make,
    plain_torch,
    same_bits,
    vectors,
)


@few
@given(compressors, vectors, st.integers(0, 10**6))
def test_torch_and_numba_agree_bit_for_bit(compressor: Compressor, x: Tensor, step: int) -> None:
    residual = (0.3 * x.roll(1)).contiguous()

    def run_all() -> tuple[Tensor, ...]:
        r = residual.clone()
        code = compressor.encode(x, step=step)
        with_feedback = encode_with_feedback(compressor, x, r, step=step)
        decoded = compressor.decode(code, x.numel(), step=step)
        added = compressor.decode_add(code, residual.clone(), 1 / 3, step=step)
        return code, with_feedback, r, decoded, added

    by_kernel = run_all()
    with plain_torch():
        by_torch = run_all()
    assert by_kernel[0].numel() == compressor.nbytes(x.numel())
    for name, a, b in zip(("code", "with feedback", "residual", "decoded", "added"), by_kernel, by_torch, strict=True):
        assert same_bits(a, b), name


@few
@given(st.sampled_from(ALL), vectors)
def test_decode_add_is_decode_then_add(compressor: Compressor, x: Tensor) -> None:
    code = compressor.encode(x)
    start = torch.ones_like(x)
    expected = start + 0.25 * compressor.decode(code, x.numel())
    assert torch.equal(compressor.decode_add(code, start, 0.25), expected)
    in_double = compressor.decode_add(code, torch.ones_like(x, dtype=torch.float64))
    assert torch.equal(in_double, 1 + compressor.decode(code, x.numel()).double())


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_encoded_as_fp32(compressor: Compressor, dtype: torch.dtype) -> None:
    x = make("normal", 3000, 1).to(dtype)
    assert same_bits(compressor.encode(x), compressor.encode(x.float()))
    out = torch.empty(3000, dtype=dtype)
    assert compressor.decode(compressor.encode(x), 3000, out=out) is out
    assert torch.equal(out, compressor.decode(compressor.encode(x), 3000).to(dtype))


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize(("offset", "plain"), [(0, False), (1, False), (2, False), (3, False), (1, True)])
def test_buffers_may_have_any_alignment(compressor: Compressor, offset: int, plain: bool) -> None:
    with plain_torch() if plain else contextlib.nullcontext():
        for n in (2050, 4099):
            check_buffers_at(compressor, offset, n)


def check_buffers_at(compressor: Compressor, offset: int, n: int) -> None:
    x, residual = make("normal", n, 2), make("normal", n, 3)
    expected, other = compressor.encode(x), residual.clone()
    storage = torch.zeros(compressor.nbytes(n) + 8, dtype=torch.uint8)
    out = storage[offset : offset + compressor.nbytes(n)]
    assert compressor.encode(x, out=out).data_ptr() == out.data_ptr()
    assert same_bits(out, expected)
    assert same_bits(compressor.decode(out, n), compressor.decode(expected, n))
    assert same_bits(compressor.decode_add(out, residual.clone()), compressor.decode_add(expected, other.clone()))
    encode_with_feedback(compressor, x, residual, out=out)
    assert same_bits(out, encode_with_feedback(compressor, x, other))
    assert same_bits(residual, other)
    assert not storage[:offset].any()
    assert not storage[offset + compressor.nbytes(n) :].any()


@few
@given(blockwise, st.integers(0, 3), st.integers(0, 3), st.integers(0, 70))
def test_the_code_of_whole_blocks_is_a_slice_of_the_code(
    compressor: Blockwise, first: int, count: int, rest: int
) -> None:
    x = make("normal", (first + count + 1) * compressor.block + rest, 5)
    stop = (first + count) * compressor.block
    part = x[first * compressor.block : stop]
    if isinstance(compressor, Uniform) and compressor.stochastic and first:
        return  # random numbers depend on the block's number, which starts at 0 in each call
    a, b = compressor.nbytes(first * compressor.block), compressor.nbytes(stop)
    assert same_bits(compressor.encode(part), compressor.encode(x)[a:b].clone())


@pytest.mark.parametrize("compressor", [c for c in BLOCKWISE if not isinstance(c, Pick)], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 2048, 2049, 10**6])
def test_size_of_quantized_codes(compressor: Blockwise, numel: int) -> None:
    blocks = -(-numel // compressor.block)
    assert compressor.nbytes(numel) == -(-numel * compressor.bits // 8) + 4 * blocks


def test_size_of_other_codes() -> None:
    assert [Identity().nbytes(9), *(c.nbytes(9) for c in DENSE[1:])] == [36, 18, 18]
    assert [Pick().nbytes(numel) for numel in (0, 1, 7, 2048, 2049)] == [0, 5, 5, 151, 156]
    assert [round(8 * Pick(of).nbytes(2048) / 2048, 2) for of in (7, 4, 2)] == [0.59, 1.02, 2.02]
    index_bits = (TopK(0.01).nbytes(10**6) - 4 * 10**4) * 8 / 10**4
    assert index_bits < 8.6


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_a_code_of_the_wrong_length_or_type_is_rejected(compressor: Compressor) -> None:
    code = compressor.encode(torch.ones(100))
    longer = torch.cat([code, code[:1]])
    for bad in (code[:-1], longer, code.float(), code.repeat(2)[::2]):
        with pytest.raises(ValueError, match="code"):
            compressor.decode(bad, 100)
        with pytest.raises(ValueError, match="code"):
            compressor.encode(torch.ones(100), out=bad)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("block", [0, 1])
def test_an_invalid_scale_is_rejected_before_anything_changes(plain: bool, scale: float, block: int) -> None:
    for compressor in (Sign(), Log(3), Uniform(8)):
        x = make("normal", 3000, 0)
        code = compressor.encode(x)
        start = compressor.nbytes(block * compressor.block)
        code[start : start + 4] = torch.tensor([scale]).view(torch.uint8)
        accumulator = torch.ones(3000)
        with (
            plain_torch() if plain else pytest.MonkeyPatch.context(),
            pytest.raises(ValueError, match=f"block {block}"),
        ):
            compressor.decode_add(code, accumulator)
        assert torch.equal(accumulator, torch.ones(3000))


@pytest.mark.parametrize("plain", [False, True])
def test_invalid_indices_are_rejected(plain: bool) -> None:
    compressor = TopK(0.1)
    code = compressor.encode(make("normal", 1000, 0))
    for flipped in (code.numel() - 1, 450, 3):
        bad = code.clone()
        bad[flipped - 1 : flipped + 1] = 255  # in the last bytes of a value this is a NaN
        with (
            plain_torch() if plain else pytest.MonkeyPatch.context(),
            pytest.raises(ValueError, match=r"indices|finite"),
        ):
            compressor.decode(bad, 1000)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("compressor", DENSE, ids=str)
@pytest.mark.parametrize("sign", [0, 128])
def test_a_code_with_infinity_is_rejected_before_anything_changes(
    compressor: Compressor, sign: int, plain: bool
) -> None:
    code = compressor.encode(make("normal", 100, 0))
    size = code.numel() // 100
    infinity = {"Identity()": [0, 0, 128, 127], "Half(format='fp16')": [0, 124]}.get(repr(compressor), [128, 127])
    code[50 * size : 51 * size] = torch.tensor([*infinity[:-1], infinity[-1] | sign], dtype=torch.uint8)
    accumulator = torch.ones(100)
    with plain_torch() if plain else contextlib.nullcontext():
        with pytest.raises(ValueError, match=r"entry 50 of 100 is -?inf"):
            compressor.decode(code, 100)
        with pytest.raises(ValueError, match=r"entry 50 of 100 is -?inf"):
            compressor.decode_add(code, accumulator)
    assert torch.equal(accumulator, torch.ones(100))


@few
@given(st.sampled_from([*DENSE, *BLOCKWISE, *SPARSE[:3]]), st.integers(0, 4999), st.booleans())
def test_nan_and_inf_raise_and_leave_the_residual_unchanged(compressor: Compressor, index: int, plain: bool) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x, residual = make("normal", 5000, 1), make("normal", 5000, 2)
        x[index] = bad
        before = residual.clone()
        with plain_torch() if plain else pytest.MonkeyPatch.context():
            with pytest.raises(ValueError, match=f"entry {index} of 5000"):
                compressor.encode(x)
            with pytest.raises(ValueError, match=f"entry {index} of 5000"):
                encode_with_feedback(compressor, x, residual)
        assert same_bits(residual, before)


def test_a_sum_that_overflows_raises_too() -> None:
    x = torch.full((3000,), 3e38)
    for compressor in ALL:
        residual = x.clone()
        with pytest.raises(ValueError, match="inf"):
            encode_with_feedback(compressor, x, residual)
        assert torch.equal(residual, x)
