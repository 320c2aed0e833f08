"""The numba kernels of the compressors, imported by `laconic.compress.backend` when they are first needed."""

from laconic.compress.kernels import blockwise as blockwise
from laconic.compress.kernels import dense as dense
from laconic.compress.kernels import topk as topk
