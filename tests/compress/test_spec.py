"""Compressors as text, as repr and pickled."""

import pickle

import pytest

from laconic.compress import Compressor, Half, Identity, Log, Pick, Sign, TopK, Uniform, parse
from tests.compress.cases import ALL


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("identity", Identity()),
        ("half", Half()),
        ("half:bf16", Half("bf16")),
        ("sign", Sign()),
        ("pick", Pick()),
        ("pick:of=4", Pick(4)),
        ("log:3", Log(3)),
        ("uniform:4", Uniform(4)),
        ("uniform:8:stochastic", Uniform(8, stochastic=True)),
        ("uniform:8:stochastic:seed=5", Uniform(8, stochastic=True, seed=5)),
        ("uniform:8:seed=5", Uniform(8, seed=5)),
        ("topk:0.01", TopK(0.01)),
        ("topk:0.01:bits=1", TopK(0.01, bits=1)),
        ("sign:block=64", Sign(64)),
    ],
)
def test_parse_and_str(text: str, compressor: Compressor) -> None:
    assert parse(text) == compressor
    assert str(compressor) == text


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_settings_survive(compressor: Compressor) -> None:
    assert parse(str(compressor)) == compressor
    assert eval(repr(compressor)) == compressor
    assert pickle.loads(pickle.dumps(compressor)) == compressor
    assert hash(compressor) == hash(parse(str(compressor)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lug:3", "did you mean log"),
        ("top", "did you mean topk"),
        ("uniforn:4", "did you mean uniform"),
        ("zzz", "there are: identity, half"),
        ("Uniform(4", "the bracket is not closed"),
        ("Uniform4)", "the bracket is not opened"),
        ("log:three", "bits must be a number, not 'three'"),
        ("log:7", "bits must be a whole number from 2 to 6, not 7"),
        ("uniform:9", "bits must be a whole number from 2 to 8, not 9"),
        ("uniform:8:random", "write 'stochastic' to set stochastic, or leave it out; not 'random'"),
        ("log:3:block=100", "multiple of 64, at most 2147483647, not 100"),
        ("log:3:bits=4", "'bits=4' sets bits for the second time"),
        ("log:3:levels=4", "'levels=4' is not a setting of log; its settings are bits, block"),
        ("identity:3", "'3' is not a setting of identity; it has none"),
        ("topk:0", "above 0 and at most 1, not 0"),
        ("topk:1.5", "not 1.5"),
        ("half:fp8", "one of fp16, bf16, not 'fp8'"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
