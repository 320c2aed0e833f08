"""Small Transformers: a decoder for characters and an encoder-decoder for translation, with pre-norm and no dropout.

Without dropout a training step depends only on the weights and the batch, so a resumed run is identical to an
uninterrupted one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KeysValues = tuple[Tensor, Tensor]  # each (batch, heads, length, width / heads)


class Attention(nn.Module):
    """Multi-head attention. Keys and values are computed by a separate call, so that a decoder can cache them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_values(self, memory: Tensor) -> KeysValues:
        keys, values = self.key_value(memory).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        mixed = F.scaled_dot_product_attention(self._split(self.query(x)), *memory, attn_mask=mask, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """A Transformer block: self-attention, cross-attention if `cross`, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross_attention = Attention(width, heads) if cross else None
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: KeysValues | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        normed = self.self_norm(x)
        x = x + self.self_attention(normed, self.self_attention.keys_values(normed), mask, causal)
        return self._rest(x, memory, memory_mask)

    def step(self, x: Tensor, past: KeysValues | None, memory: KeysValues, mask: Tensor) -> tuple[Tensor, KeysValues]:
        """Decodes one more position.

        Args:
            x: The new position, (batch, 1, width).
            past: The cached keys and values of earlier positions, or None for the first one.
            memory: The keys and values of the encoder's output.
            mask: Which encoder positions are not padding, (batch, 1, 1, s).

        Returns:
            The block's output, (batch, 1, width), and the extended cache.
        """
        normed = self.self_norm(x)
        keys, values = self.self_attention.keys_values(normed)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        x = x + self.self_attention(normed, (keys, values))
        return self._rest(x, memory, mask), (keys, values)

    def memory(self, encoded: Tensor) -> KeysValues:
        """Returns the keys and values of the encoder's output for this block's cross-attention."""
        assert self.cross_attention is not None
        return self.cross_attention.keys_values(encoded)

    def _rest(self, x: Tensor, memory: KeysValues | None, memory_mask: Tensor | None) -> Tensor:
        if self.cross_attention is not None and self.cross_norm is not None:
            assert memory is not None
            x = x + self.cross_attention(self.cross_norm(x), memory, memory_mask)
        out: Tensor = x + self.feed(self.feed_norm(x))
        return out


class CharacterModel(nn.Module):
    """A GPT over characters.

    Maps character indices, (batch, length), to logits of the next character, (batch, length, alphabet_size).
    """

    def __init__(self, alphabet_size: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet_size, bias=False)
        initialise(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        h = embed(self.embedding, x)
        for block in self.blocks:
            h = block(h, causal=True)
        logits: Tensor = self.head(self.norm(h))
        return logits


class Translator(nn.Module):
    """An encoder-decoder over subword pieces. Source, target and output share one embedding matrix.

    Maps the source, (batch, s), and the target prefix, (batch, t), to logits of the next piece,
    (batch, t, vocabulary_size).
    """

    def __init__(self, vocabulary_size: int, pad: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Block(width, heads, cross=True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        initialise(self, layers)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memories, mask = self._encode(source)
        h = embed(self.embedding, target)
        for block, memory in zip(self.decoder, memories, strict=True):
            h = block(h, causal=True, memory=memory, memory_mask=mask)
        return F.linear(self.decoder_norm(h), self.embedding.weight)

    def greedy(self, source: Tensor, begin: int, end: int, limit: int) -> Tensor:
        """Translates by greedy decoding.

        Args:
            source: Piece indices, (batch, s), padded with `pad`.
            begin: The index that starts every target sentence.
            end: The index that ends a sentence.
            limit: The largest number of pieces per sentence.

        Returns:
            Piece indices, (batch, at most limit), with `pad` after the end of each sentence.
        """
        memories, mask = self._encode(source)
        pasts: list[KeysValues | None] = [None] * len(self.decoder)
        piece = torch.full((len(source), 1), begin, device=source.device)
        finished = torch.zeros_like(piece, dtype=torch.bool)
        out: list[Tensor] = []
        for position in range(limit):
            h = embed(self.embedding, piece, position)
            for i, block in enumerate(self._decoder_blocks()):
                h, pasts[i] = block.step(h, pasts[i], memories[i], mask)
            piece = F.linear(self.decoder_norm(h), self.embedding.weight).argmax(dim=-1)
            piece = piece.masked_fill(finished, self.pad)
            finished = finished | (piece == end)
            out.append(piece)
            if bool(finished.all()):
                break
        return torch.cat(out, dim=1)

    def _encode(self, source: Tensor) -> tuple[list[KeysValues], Tensor]:
        """Returns the keys and values for each decoder block, and the mask of real positions, (batch, 1, 1, s)."""
        mask = (source != self.pad)[:, None, None, :]
        h = embed(self.embedding, source)
        for block in self.encoder:
            h = block(h, mask=mask)
        h = self.encoder_norm(h)
        return [block.memory(h) for block in self._decoder_blocks()], mask

    def _decoder_blocks(self) -> list[Block]:
        return [block for block in self.decoder if isinstance(block, Block)]


def embed(embedding: nn.Embedding, numbers: Tensor, start: int = 0) -> Tensor:
    """Returns scaled embeddings plus sinusoidal encodings of positions from `start` on (Vaswani et al. 2017)."""
    width = embedding.embedding_dim
    embedded: Tensor = embedding(numbers) * math.sqrt(width)
    position = torch.arange(start, start + numbers.shape[1], dtype=torch.float32)[:, None]
    phase = position * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return embedded + torch.cat([torch.sin(phase), torch.cos(phase)], dim=1).to(embedded)


def initialise(model: nn.Module, layers: int) -> None:
    """Draws weights from N(0, 1 / inputs); those that write to the residual stream are divided by √(2 · layers).

    References:
        Radford et al. 2019, Language Models are Unsupervised Multitask Learners.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            into_residual = name.endswith((".out", ".feed.2"))
            nn.init.normal_(module.weight, std=(module.weight.shape[1] * (2 * layers if into_residual else 1)) ** -0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
