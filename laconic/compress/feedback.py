"""Error feedback over any compressor: the quantization error is kept and added to the next vector."""

import torch
from torch import Tensor

from laconic.compress.compressor import Compressor, as_float32, check_vector


def encode_with_feedback(
    compressor: Compressor, x: Tensor | None, residual: Tensor, *, step: int = 0, out: Tensor | None = None
) -> Tensor:
    """Encodes x plus the residual of earlier codes, and stores the new residual.

        p = x + residual        code = encode(p)        residual ← p − decode(code)

    So the sum of all decoded vectors and the residual equals the sum of all inputs, up to rounding.

    Args:
        compressor: any compressor.
        x: the vector to send, or None if the caller has already added it to `residual`.
        residual: the accumulated error, a contiguous fp32 or fp64 vector, updated in place. It starts as zeros.
        step: the training step, on which random choices depend.
        out: where to write the code, as in `Compressor.encode`.

    Returns:
        The code of p.

    Raises:
        ValueError: an entry of p is NaN or infinite; `residual` is then unchanged.

    Example:
        >>> import torch
        >>> from laconic.compress import Sign, encode_with_feedback
        >>> x, residual = torch.tensor([1.0, 3.0]), torch.zeros(2)
        >>> code = encode_with_feedback(Sign(), x, residual)
        >>> Sign().decode(code, 2), residual
        (tensor([2., 2.]), tensor([-1.,  1.]))
        >>> code = encode_with_feedback(Sign(), x, residual)  # of [0, 4]
        >>> Sign().decode(code, 2), residual
        (tensor([2., 2.]), tensor([-2.,  2.]))

    References:
        Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
        Training of Speech DNNs", Interspeech 2014.

        Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
        2019, arXiv 1901.09847.
    """
    check_vector("residual", residual)
    if residual.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"residual must be float32 or float64, not {residual.dtype}: the errors it accumulates need that precision"
        )
    if x is not None:
        if x.numel() != residual.numel():
            raise ValueError(f"x must have as many entries as residual, {residual.numel()}, not {x.numel()}")
        x = as_float32(x) if residual.dtype == torch.float32 else x.detach().reshape(-1).to(torch.float64)
    out = compressor._check_or_allocate(out, residual.numel(), residual.device)
    compressor._encode_with_feedback(x, residual.detach(), out, step)
    return out
