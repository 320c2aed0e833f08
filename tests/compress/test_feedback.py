"""Error feedback loses nothing: the decoded vectors and the residual sum to the inputs."""

import pytest
import torch

from laconic.compress import Compressor, Log, encode_with_feedback
from tests.compress.cases import ALL, make, same_bits


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoded_and_residual_sum_to_the_inputs(compressor: Compressor, dtype: torch.dtype) -> None:
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
def test_without_x_the_residual_is_encoded(compressor: Compressor) -> None:
    x = make("normal", 3000, 0)
    with_x, without = torch.full_like(x, -0.0), x.clone()
    a = encode_with_feedback(compressor, x, with_x, step=3)
    b = encode_with_feedback(compressor, None, without, step=3)
    assert same_bits(a, b)
    assert torch.equal(with_x, without)


def test_parameters_that_require_gradients_can_be_encoded() -> None:
    x = torch.nn.Parameter(make("normal", 100, 0))
    residual = torch.zeros(100)
    encode_with_feedback(Log(3), x, residual)
    assert not residual.requires_grad


def test_invalid_arguments_are_rejected() -> None:
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="bfloat16"):
        encode_with_feedback(Log(3), x, torch.zeros(10, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="10, not 9"):
        encode_with_feedback(Log(3), x[:9], torch.zeros(10))
    with pytest.raises(ValueError, match="contiguous"):
        encode_with_feedback(Log(3), x, torch.zeros(20)[::2])
