"""Compressors: a vector as a short code and back, at the speed of memory, with error feedback over any of them."""

from laconic.compress.compressor import Compressor as Compressor
from laconic.compress.dense import Half as Half
from laconic.compress.dense import Identity as Identity
from laconic.compress.feedback import encode_with_feedback as encode_with_feedback
from laconic.compress.quantizers import Log as Log
from laconic.compress.quantizers import Pick as Pick
from laconic.compress.quantizers import Sign as Sign
from laconic.compress.quantizers import Ternary as Ternary
from laconic.compress.quantizers import Uniform as Uniform
from laconic.compress.random_block import RandomBlock as RandomBlock
from laconic.compress.spec import parse as parse
from laconic.compress.spec import spec as spec
from laconic.compress.topk import TopK as TopK
