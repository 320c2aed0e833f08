"""Compressors: a vector → a short byte tensor → an approximation of the vector.

Every compressor has four verbs: `nbytes`, `encode`, `decode` and `decode_add`. Error feedback is one function over any
of them, `encode_with_feedback`. `parse` reads a compressor from text such as `log:3`; `str` writes it.
"""

from laconic.compress.compressor import Compressor as Compressor
from laconic.compress.compressor import bits_per_entry as bits_per_entry
from laconic.compress.dense import Half as Half
from laconic.compress.dense import Identity as Identity
from laconic.compress.feedback import encode_with_feedback as encode_with_feedback
from laconic.compress.quantizers import Log as Log
from laconic.compress.quantizers import Pick as Pick
from laconic.compress.quantizers import Sign as Sign
from laconic.compress.quantizers import Uniform as Uniform
from laconic.compress.spec import parse as parse
from laconic.compress.topk import TopK as TopK
