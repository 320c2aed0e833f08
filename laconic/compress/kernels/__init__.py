"""The numba kernels of the compressors; imported at first use (by `laconic.compress.backend`), not with the package."""

from laconic.compress.kernels import blockwise as blockwise
from laconic.compress.kernels import dense as dense
from laconic.compress.kernels import levels as levels
from laconic.compress.kernels import settle as settle
from laconic.compress.kernels import topk as topk
