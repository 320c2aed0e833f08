"""Error feedback loses nothing: what was decoded and what is kept sum to what was put in."""

import pytest
import torch

from laconic.compress import Log, RandomBlock, encode_with_feedback
from tests.compress.cases import ALL, make, same_bits


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoded_and_residual_sum_to_the_inputs(compressor, dtype):
    n = 5000
    residual = torch.zeros(n, dtype=dtype)
    inputs, decoded = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(12):
        x = make("normal", n, step).to(dtype)
        code = encode_with_feedback(compressor, x, residual, step=step)
        inputs += x
        compressor.decode_add(code, decoded, step=step)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    assert torch.allclose(decoded + residual, inputs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_without_x_the_residual_is_what_is_coded(compressor):
    x = make("normal", 3000, 0)
    with_x, without = torch.full_like(x, -0.0), x.clone()
    a = encode_with_feedback(compressor, x, with_x, step=3)
    b = encode_with_feedback(compressor, None, without, step=3)
    assert same_bits(a, b)
    assert torch.equal(with_x, without)


def test_random_block_without_x_touches_its_block_only():
    compressor, n = RandomBlock(10), 1000
    residual = torch.full((n,), float("nan"))
    start, stop = compressor.bounds(n, 4)
    residual[start:stop] = 1.0
    encode_with_feedback(compressor, None, residual, step=4)
    assert not residual[start:stop].any()
    assert residual.isnan().sum() == n - (stop - start)


def test_parameters_that_need_gradients_can_be_encoded():
    x = torch.nn.Parameter(make("normal", 100, 0))
    residual = torch.zeros(100)
    encode_with_feedback(Log(3), x, residual)
    assert not residual.requires_grad


def test_what_is_refused():
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="bfloat16"):
        encode_with_feedback(Log(3), x, torch.zeros(10, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="10, not 9"):
        encode_with_feedback(Log(3), x[:9], torch.zeros(10))
    with pytest.raises(ValueError, match="contiguous"):
        encode_with_feedback(Log(3), x, torch.zeros(20)[::2])
