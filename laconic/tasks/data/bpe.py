"""Byte-pair encoding (Sennrich et al. 2016): deterministic to learn, and lossless for known characters."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
WORD = re.compile(r" ?\w+| ?[^\w\s]+")

Pair = tuple[str, str]


class Vocabulary:
    """Subword pieces and the merges that build them.

    Words keep the space before them, so concatenating pieces restores the text.

    Args:
        pieces: The string of each piece index.
        merges: Pairs of pieces, in the order in which encoding merges them.
    """

    def __init__(self, pieces: list[str], merges: list[Pair]) -> None:
        self.pieces = pieces
        self._number = {piece: i for i, piece in enumerate(pieces)}
        self._rank = {pair: i for i, pair in enumerate(merges)}
        self._encode_word = lru_cache(maxsize=None)(self._encode_one)

    def encode(self, sentence: str) -> list[int]:
        """Returns the piece indices of a sentence; unknown characters become UNKNOWN."""
        return [number for word in words(sentence) for number in self._encode_word(word)]

    def _encode_one(self, word: str) -> tuple[int, ...]:
        symbols = list(word)
        while len(symbols) > 1:
            best = min(pairwise(symbols), key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            symbols = merge_pair(symbols, best)
        return tuple(self._number.get(symbol, UNKNOWN) for symbol in symbols)


def decode(pieces: list[str], numbers: Iterable[int]) -> str:
    """Returns the sentence that the piece indices spell, without special pieces."""
    return "".join(pieces[n] for n in numbers if n >= len(SPECIAL)).strip()


def words(sentence: str) -> list[str]:
    """Returns words and runs of punctuation, each with the space before it. The first word gets a space too."""
    return WORD.findall(" " + " ".join(sentence.split()))


def merge_pair(symbols: list[str], pair: Pair) -> list[str]:
    """Returns the symbols with every occurrence of `pair` merged into one, from left to right."""
    out: list[str] = []
    i = 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def learn(sentences: Iterable[str], size: int) -> Vocabulary:
    """Learns a vocabulary of at most `size` pieces.

    The vocabulary starts with the special pieces and all characters; then the most frequent pair is merged repeatedly.
    Ties are broken alphabetically, so the result depends only on the text.

    Example:
        >>> vocabulary = learn(["low lower lowest"], size=20)
        >>> decode(vocabulary.pieces, vocabulary.encode("lower low"))
        'lower low'
    """
    counts = Counter(word for sentence in sentences for word in words(sentence))
    spelled = [list(word) for word in sorted(counts)]
    weight = [counts[word] for word in sorted(counts)]
    pieces = [*SPECIAL, *sorted({character for word in counts for character in word})]
    frequency: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for i, symbols in enumerate(spelled):
        for pair in pairwise(symbols):
            frequency[pair] += weight[i]
            where[pair].add(i)
    # Heap entries become stale when a frequency changes; every change pushes a fresh entry, and stale ones are skipped.
    heap = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    known = set(pieces)
    while heap and len(pieces) < size:
        negative, pair = heapq.heappop(heap)
        if frequency[pair] != -negative or negative == 0:
            continue
        merges.append(pair)
        if pair[0] + pair[1] not in known:  # different merges may produce the same string
            known.add(pair[0] + pair[1])
            pieces.append(pair[0] + pair[1])
        changed: set[Pair] = set()
        for i in sorted(where[pair]):
            for old in pairwise(spelled[i]):
                frequency[old] -= weight[i]
                changed.add(old)
            spelled[i] = merge_pair(spelled[i], pair)
            for new in pairwise(spelled[i]):
                frequency[new] += weight[i]
                where[new].add(i)
                changed.add(new)
        for touched in changed:
            heapq.heappush(heap, (-frequency[touched], touched))
    return Vocabulary(pieces, merges)
