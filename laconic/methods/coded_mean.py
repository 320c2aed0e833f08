"""The mean of a vector over workers when only codes of it travel. Codes do not add, so no all-reduce can do it."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm import Comm
from laconic.compress import Compressor, encode_with_feedback


def shard_slices(numel: int, size: int) -> list[slice]:
    """The vector cut in `size` parts that differ by one entry at most: rank r takes the mean of the r-th."""
    return [slice(r * numel // size, (r + 1) * numel // size) for r in range(size)]


def coded_mean(
    comm: Comm,
    vector: Tensor,
    compressor: Compressor,
    *,
    step: int,
    rider: Tensor,
    residual: Tensor | None = None,
    shard_residual: Tensor | None = None,
) -> list[Tensor]:
    """Make `vector` the mean of what its codes say on all workers, said in codes again: the same bits on all ranks.

    Rank r receives everyone's code of the r-th shard, and sends everyone the code of their mean. So a worker sends
    2(n−1)/n of a code, as little as a ring all-reduce of it would; one all-gather of whole codes would send n−1.
    With residuals (of the vector, and of the mean of this rank's shard) there is error feedback at both ends.

    The `rider` (bytes) goes to everyone unchanged, in the same messages. Returns all riders, by rank.
    """

    def encode(part: Tensor, unsaid: Tensor | None, shard: int, position: int) -> Tensor:
        # Randomness must differ from shard to shard, and from worker to worker and to the one that answers.
        own = compressor.for_rank(shard * (comm.size + 1) + position)
        if unsaid is None:
            return own.encode(part, step=step)
        return encode_with_feedback(own, part, unsaid, step=step)

    shards = shard_slices(vector.numel(), comm.size)
    messages = []
    for j, shard in enumerate(shards):
        code = encode(vector[shard], None if residual is None else residual[shard], j, comm.rank)
        messages.append(torch.cat([code, rider]))
    received = comm.all_to_all(messages)
    mean = torch.zeros_like(vector[shards[comm.rank]])
    for message in received:
        compressor.decode_add(message[: message.numel() - rider.numel()], mean, step=step)
    mean /= comm.size
    answer = encode(mean, shard_residual, comm.rank, comm.size)
    numels = [shard.stop - shard.start for shard in shards]
    answers = comm.all_to_all([answer] * comm.size, lengths=[compressor.nbytes(numel) for numel in numels])
    for code, shard, numel in zip(answers, shards, numels, strict=True):
        compressor.decode(code, numel, step=step, out=vector[shard])
    return [message[message.numel() - rider.numel() :] for message in received]


def coded_mean_nbytes(compressor: Compressor, numel: int, rider_nbytes: int, rank: int, size: int) -> int:
    """What a worker sends."""
    codes = [compressor.nbytes(shard.stop - shard.start) for shard in shard_slices(numel, size)]
    return sum(codes) - codes[rank] + (size - 1) * (codes[rank] + rider_nbytes)
