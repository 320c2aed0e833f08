"""Fuzzes decoders: damaged codes of every compressor.

A decoder must raise a ValueError, or return as many entries as it was asked for, the same ones by kernels and in plain
torch, and finite unless a scale is close to the largest number. It must depend on no byte outside of the code, write
nothing outside of its target, and leave an accumulator unchanged when it raises.
"""

from __future__ import annotations

import random
from unittest import mock

import torch
from torch import Tensor

from fuzz.driver import main
from laconic.compress import Compressor, Half, Identity, Log, Pick, Sign, TopK, Uniform, backend

COMPRESSORS: list[Compressor] = [
    Identity(),
    Half(),
    Half("bf16"),
    *(Sign(block=block) for block in (64, 2048)),
    *(Pick(of, block=block) for of in range(2, 8) for block in (64, 2048)),
    *(Log(bits, block=block) for bits in range(2, 7) for block in (64, 2048)),
    *(Uniform(bits, block=block) for bits in range(2, 9) for block in (64, 2048)),
    Uniform(4, stochastic=True),
    *(TopK(ratio, bits) for ratio in (0.001, 0.01, 0.3, 1.0) for bits in (1, 32)),
]
GUARD = 32  # bytes, or entries, on either side


def damage(code: Tensor, chance: random.Random) -> Tensor:
    """Returns a copy with some bytes changed, set to extreme values, exchanged or drawn at random."""
    code = code.clone()
    if code.numel() == 0:
        return code
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        i = chance.randrange(code.numel())
        length = chance.choice([1, 1, 2, 4, 16])
        part = code[i : i + length]
        kind = chance.randrange(4)
        if kind == 0:
            code[i] ^= 1 << chance.randrange(8)
        elif kind == 1:
            part.fill_(chance.choice([0, 1, 127, 128, 254, 255]))
        elif kind == 2:
            part.copy_(torch.tensor([chance.randrange(256) for _ in range(part.numel())], dtype=torch.uint8))
        else:
            j = chance.randrange(code.numel() - part.numel() + 1)
            part.copy_(code[j : j + part.numel()].clone())
    return code


def guarded(content: Tensor, fill: float, offset: int) -> tuple[Tensor, Tensor]:
    """Returns a copy of `content` inside of a longer vector, and that vector."""
    whole = torch.full((content.numel() + 2 * GUARD + offset,), fill).to(content.dtype)
    part = whole[GUARD + offset : GUARD + offset + content.numel()]
    part.copy_(content)
    return part, whole


def decode(compressor: Compressor, code: Tensor, numel: int, step: int, *, add: bool, around: int) -> Tensor | None:
    """Decodes in guarded memory. Returns None if that raises a ValueError, after checking that nothing has changed."""
    code_part, _ = guarded(code, around, around % 4)
    start = torch.linspace(-1, 1, max(numel, 1))[:numel]
    target, memory = guarded(start, 7.0, 0)
    try:
        if add:
            compressor.decode_add(code_part, target, 0.5, step=step)
        else:
            compressor.decode(code_part, numel, step=step, out=target)
    except ValueError:
        assert not add or torch.equal(target, start), "an accumulator has changed although decode_add has raised"
        return None
    assert torch.equal(code_part, code), "the code has changed"
    assert (memory[:GUARD] == 7).all(), "written before the target"
    assert (memory[GUARD + numel :] == 7).all(), "written after the target"
    assert target.isfinite().all() or has_huge_scale(code), "entries that are not finite"
    return target.clone()


def has_huge_scale(code: Tensor) -> bool:
    """Returns whether some four bytes are a number so large that a symbol which `encode` never writes overflows."""
    numbers = torch.cat([code[i : i + (code.numel() - i) // 4 * 4].clone().view(torch.float32) for i in range(4)])
    return bool(((numbers > 1e38) & numbers.isfinite()).any())


def try_case(chance: random.Random) -> None:
    compressor = chance.choice(COMPRESSORS)
    numel = chance.choice([0, 1, 2, 7, 63, 64, 65, 100, 777, 2047, 2048, 2049, 5000])
    step = chance.randrange(1000)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(chance.randrange(2**32)))
    code = damage(compressor.encode(x * 10 ** chance.uniform(-30, 30), step=step), chance)
    if chance.random() < 0.1:  # of another length
        other = code.repeat(2)[: chance.randrange(2 * code.numel() + 1)]
        if other.numel() != code.numel():
            assert decode(compressor, other, numel, step, add=False, around=0) is None, "a code of a wrong length"
            return
    for add in (False, True):
        results = [decode(compressor, code, numel, step, add=add, around=around) for around in (0, 255)]
        with mock.patch.object(backend, "_numba_kernels", return_value=None):
            results.append(decode(compressor, code, numel, step, add=add, around=7))
        for other_result in results[1:]:
            same = (results[0] is None) == (other_result is None)
            assert same, f"{compressor}: one of two ways to decode raises"
            if results[0] is not None and other_result is not None:
                assert torch.equal(results[0].nan_to_num(), other_result.nan_to_num()), (
                    f"{compressor}: two ways to decode differ"
                )


if __name__ == "__main__":
    main("codes", try_case)
