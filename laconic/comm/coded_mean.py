"""Averages a vector over workers when only quantized messages travel.

Quantized messages cannot be added, so an all-reduce cannot average them. Two classes can, by the same three verbs:

    transfer = mean.send(vector, step=t)    # quantize, start sending
    mean.answer(transfer)                   # wait for the messages; their owner averages them and starts its answer
    average = mean.receive(transfer)        # wait for the answers, dequantize them

- `CodedMean` takes two hops. Every part of the vector has an owner: a rank that receives the part from all workers
  and sends their average, quantized again, to all ranks. With one owner per worker, each rank sends 2(n−1)/n quantized
  vectors, as little as a ring all-reduce. With one owner in all, that rank is a parameter server.
- `GatheredMean` takes one hop. Every rank receives all quantized vectors and averages them itself: n−1 quantized
  vectors sent per rank, nothing quantized twice, and `answer` has nothing to do.

No verb waits for a message that the same verb started, so several transfers can be in flight at the same time. All
ranks must call the verbs in the same order. The average is bit-identical on all ranks, and does not depend on which
rank owns a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from laconic.comm.comm import Comm, Pending
from laconic.comm.solo import Arrived
from laconic.compress import Compressor, encode_with_feedback
from laconic.compress.blockwise import Blockwise
from laconic.forms import Fields, Form, Row, Vector, Whole

# A message that is full of this byte stands for a vector with a NaN or an infinity. No compressor writes such a
# message: each begins with a float, and these bytes are a NaN in fp32, fp16 and bf16.
NOT_FINITE = 255


class Part(NamedTuple):
    """Entries `start` to `stop` of a vector, averaged by the rank `owner`."""

    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split(start: int, stop: int, owners: Sequence[int], unit: int = 1) -> list[Part]:
    """Splits the entries `start` to `stop` into one part per owner: whole units, equal to within one unit.

    >>> split(0, 10, owners=[0, 1, 2])
    [Part(start=0, stop=3, owner=0), Part(start=3, stop=6, owner=1), Part(start=6, stop=10, owner=2)]
    """
    units = -(-(stop - start) // unit)
    bounds = [min(stop, start + unit * (i * units // len(owners))) for i in range(len(owners) + 1)]
    return [Part(bounds[i], bounds[i + 1], owner) for i, owner in enumerate(owners)]


def block_of(compressor: Compressor) -> int:
    """Returns how many consecutive entries share one scale; 1 for compressors without blocks."""
    return compressor.block if isinstance(compressor, Blockwise) else 1


@dataclass
class Transfer:
    """A vector in flight: what this rank has sent, and the messages it waits for."""

    step: int
    sent: Tensor  # this rank's quantized vector, uint8 (fp32 where nothing is quantized)
    pending: Pending[Any]  # a message from each rank (the average itself where nothing is quantized)
    sent_at: int  # the training step, for error messages
    counted: Sequence[int]  # the ranks whose vectors are averaged

    def state_dict(self) -> dict[str, Any]:
        """Waits for the messages and returns them with the rest, for `CodedMean.restore`."""
        return {"step": self.step, "sent": self.sent, "arrived": self.pending.wait(), "sent_at": self.sent_at}


class CodedMean:
    """Averages a vector whose parts have owners, in two hops.

    Args:
        comm: carries the messages to the owners, and the answers too unless `answer_comm` is given.
        parts: the parts of the vector, in order, with ascending owners, as `split` returns them. Their positions
            only need to be relative to each other; stochastic compressors draw differently at different positions.
        compressor: quantizes the workers' vectors.
        answer_compressor: quantizes the owners' averages; the same compressor by default.
        workers: the ranks whose vectors are averaged; all by default. Other ranks may still own parts.
        residual: error feedback of this worker, as long as the vector. It is updated in place: the quantization error
            of one vector is added to the next one.
        owner_residual: the same for the averages of the parts that this rank owns, end to end.
        answer_comm: a channel for the answers.
        name: what the vector is, for error messages.

    A vector with a NaN or an infinity raises FloatingPointError on every rank, with the rank that sent it.

    >>> from laconic.comm import Solo
    >>> from laconic.compress import Uniform
    >>> mean = CodedMean(Solo(), split(0, 4, owners=[0]), Uniform(2))
    >>> mean.average(torch.tensor([1.0, -1.0, 0.2, 0.0]), step=1)
    tensor([ 1., -1.,  0.,  0.])
    """

    hops = 2

    def __init__(
        self,
        comm: Comm,
        parts: Sequence[Part],
        compressor: Compressor,
        answer_compressor: Compressor | None = None,
        *,
        workers: Sequence[int] | None = None,
        residual: Tensor | None = None,
        owner_residual: Tensor | None = None,
        answer_comm: Comm | None = None,
        name: str = "vector",
    ) -> None:
        answer_compressor = answer_compressor or compressor
        self.compressor: Compressor | None = compressor
        self.parts = [part for part in parts if part.numel]
        self.workers = list(range(comm.size)) if workers is None else list(workers)
        self.residual, self.owner_residual = residual, owner_residual
        self._comm, self._answer_comm, self._name = comm, answer_comm or comm, name
        if any(a.owner > b.owner or a.stop != b.start for a, b in pairwise(self.parts)):
            raise ValueError(f"parts must follow one another, with ascending owners, not {self.parts}")
        by_owner = [[part for part in self.parts if part.owner == rank] for rank in range(comm.size)]
        owned = by_owner[comm.rank]
        self._trains = comm.rank in self.workers
        # Stochastic rounding must differ between the workers, and between a worker and the owner: n + 1 seeds a part.
        seeds = len(self.workers) + 1
        own_seed = self.workers.index(comm.rank) if self._trains else 0
        self._up = _Coder(compressor, self.parts, own_seed, seeds)  # to the owners
        self._up_owned = _Coder(compressor, owned, 0, seeds)
        self._down = _Coder(answer_compressor, self.parts, len(self.workers), seeds)  # from the owners
        self._down_owned = _Coder(answer_compressor, owned, len(self.workers), seeds)
        to_owner = [sum(compressor.nbytes(part.numel) for part in of_rank) for of_rank in by_owner]
        self._sent_nbytes = to_owner if self._trains else [0] * comm.size
        self._received_nbytes = [to_owner[comm.rank] if rank in self.workers else 0 for rank in range(comm.size)]
        self._answer_nbytes = [sum(answer_compressor.nbytes(part.numel) for part in of_rank) for of_rank in by_owner]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to others for one average."""
        rank, size = self._comm.rank, self._comm.size
        return sum(self._sent_nbytes) - self._sent_nbytes[rank] + (size - 1) * self._answer_nbytes[rank]

    def send(self, vector: Tensor, *, step: int, counted: Sequence[int] | None = None) -> Transfer:
        """Quantizes `vector` and starts sending each part to its owner.

        Args:
            vector: on a rank that does not count, its entries do not matter, and its residual stays as it is.
            step: stochastic compressors draw by it; give every vector a new one.
            counted: the ranks whose vectors are averaged, the same on all ranks; all workers by default.
        """
        counted = self.workers if counted is None else [rank for rank in self.workers if rank in counted]
        if self._comm.rank in counted:
            sent = self._up.encode(vector, self.residual, step)
        else:
            sent = torch.zeros(sum(self._sent_nbytes), dtype=torch.uint8, device=vector.device)
        return Transfer(step, sent, self._start(sent), self._comm.meter.step, counted)

    def _start(self, sent: Tensor) -> Pending[list[Tensor]]:
        return self._comm.all_to_all_async(torch.split(sent, self._sent_nbytes), lengths=self._received_nbytes)

    def answer(self, transfer: Transfer) -> None:
        """Waits for the workers' messages, averages the parts that this rank owns, and starts sending the average."""
        received = transfer.pending.wait()
        average = self._average([received[rank] for rank in transfer.counted], transfer.step)
        if average is None:
            answer = self._down_owned.not_finite(transfer.sent.device)
        else:
            answer = self._down_owned.encode(average, self.owner_residual, transfer.step)
        # A NaN is raised by `receive`, on all ranks in the same step: here only owners know of it, and a rank that owns
        # nothing would wait for them elsewhere.
        transfer.pending = self._answer_comm.all_to_all_async([answer] * self._comm.size, lengths=self._answer_nbytes)

    def _average(self, messages: list[Tensor], step: int) -> Tensor | None:
        """Returns the average of the owned parts, or None if a worker's vector is not finite."""
        if not all(map(_is_finite, messages)):
            return None
        average = torch.zeros(self._up_owned.numel, dtype=torch.float32, device=messages[0].device)
        for message in messages:  # in the order of ranks: the order changes the rounding of the sum
            self._up_owned.decode_add(message, average, step)
        return average.div_(len(messages))

    def receive(self, transfer: Transfer, out: Tensor | None = None) -> Tensor:
        """Waits for the owners' answers and returns the average, in `out` if given."""
        answers = transfer.pending.wait()
        if not all(map(_is_finite, answers)):
            self._raise_not_finite(transfer)
        return self._down.decode(torch.cat(answers), out, transfer.step)

    def own(self, transfer: Transfer) -> Tensor:
        """Returns this worker's contribution to the average: its vector as the owners dequantize it, or zeros."""
        if self._comm.rank not in transfer.counted:
            return torch.zeros(self._up.numel, dtype=torch.float32, device=transfer.sent.device)
        return self._up.decode(transfer.sent, None, transfer.step)

    def average(
        self, vector: Tensor, *, step: int, counted: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Sends, answers and receives in a row."""
        transfer = self.send(vector, step=step, counted=counted)
        self.answer(transfer)
        return self.receive(transfer, out)

    def restore(self, saved: dict[str, Any], device: torch.device | None = None) -> Transfer:
        """Returns the transfer that `Transfer.state_dict` has saved; it continues with the verb that came next."""
        return _restore(saved, self.workers, device)

    def check_saved(self, what: str, saved: Any, step: int, answered: bool) -> None:
        """Raises a ValueError if `restore` must not take this: its messages are not valid codes of these parts."""
        lengths = self._answer_nbytes if answered else self._received_nbytes
        messages = Row(tuple(Vector((length,), torch.uint8) for length in lengths))
        _transfer_form(step, Vector((sum(self._sent_nbytes),), torch.uint8), messages).check(what, saved)
        sent, arrived, key = saved["sent"], saved["arrived"], saved["step"]
        if not all(map(_is_finite, [sent, *arrived])):
            raise ValueError(f"{what} must be finite, and has messages that stand for NaN or infinity")
        rank = self._comm.rank
        if self._trains:
            self._up.decode(sent, None, key)  # raises if it is no code
            if not answered and not torch.equal(torch.split(sent, self._sent_nbytes)[rank], arrived[rank]):
                raise ValueError(f"{what}: what rank {rank} has sent to itself must be what it has received")
        if answered:
            self._down.decode(torch.cat(arrived), None, key)
        else:
            for worker in self.workers:
                self._up_owned.decode(arrived[worker], None, key)

    def _raise_not_finite(self, transfer: Transfer) -> NoReturn:
        """Raises on all ranks: owners mark their answer too, so every rank notices and comes here."""
        finite = self._comm.meet(f"a {self._name} that is not finite", _is_finite(transfer.sent))
        culprits = ", ".join(str(rank) for rank, is_fine in zip(self._comm.members, finite, strict=True) if not is_fine)
        where = f"in the {self._name} of rank {culprits}" if culprits else f"in the sum of finite {self._name}s"
        raise FloatingPointError(
            f"NaN or infinity {where} at step {transfer.sent_at}: look at its loss, data and learning rate, and "
            f"continue from a checkpoint"
        )


class GatheredMean(CodedMean):
    """Averages the entries `start` to `stop` of a vector in one hop: every rank receives every quantized vector.

    For few workers: it sends n/2 times the bytes of `CodedMean`, but needs half the time for short messages.
    """

    hops = 1

    def __init__(
        self,
        comm: Comm,
        start: int,
        stop: int,
        compressor: Compressor,
        *,
        residual: Tensor | None = None,
        name: str = "vector",
    ) -> None:
        super().__init__(comm, [Part(start, stop, comm.rank)], compressor, residual=residual, name=name)

    @property
    def nbytes(self) -> int:
        return (self._comm.size - 1) * sum(self._sent_nbytes)

    def _start(self, sent: Tensor) -> Pending[list[Tensor]]:
        return self._comm.all_gather_async(sent)

    def answer(self, transfer: Transfer) -> None:
        """Does nothing: there is no second hop."""

    def receive(self, transfer: Transfer, out: Tensor | None = None) -> Tensor:
        received = transfer.pending.wait()
        average = self._average([received[rank] for rank in transfer.counted], transfer.step)
        if average is None:
            self._raise_not_finite(transfer)
        return average if out is None else out.copy_(average)


class PlainMean:
    """Averages vectors in fp32, by one all-reduce, with the verbs of `CodedMean`."""

    hops = 1
    compressor: Compressor | None = None

    def __init__(self, comm: Comm, numel: int) -> None:
        self._comm, self._numel = comm, numel

    def send(self, vector: Tensor, *, step: int, counted: Sequence[int] | None = None) -> Transfer:
        counted = range(self._comm.size) if counted is None else counted
        sent = vector if self._comm.rank in counted else torch.zeros_like(vector)
        return Transfer(step, sent, self._comm.mean_async(sent), self._comm.meter.step, counted)

    def answer(self, transfer: Transfer) -> None:
        """Does nothing: there is no second hop."""

    def receive(self, transfer: Transfer) -> Tensor:
        average: Tensor = transfer.pending.wait()
        share = len(transfer.counted) / self._comm.size
        return average if share == 1 else average / share

    def own(self, transfer: Transfer) -> Tensor:
        return transfer.sent

    def restore(self, saved: dict[str, Any], device: torch.device | None = None) -> Transfer:
        return _restore(saved, range(self._comm.size), device)

    def check_saved(self, what: str, saved: Any, step: int, answered: bool) -> None:
        sent = saved.get("sent") if isinstance(saved, dict) else None
        kind = sent.dtype if isinstance(sent, Tensor) and sent.is_floating_point() else torch.float32
        vector = Vector((self._numel,), kind)
        _transfer_form(step, vector, vector).check(what, saved)


def _transfer_form(step: int, sent: Form, arrived: Form) -> Fields:
    """Returns the form of a saved transfer of at most step `step`."""
    return Fields({"step": Whole(0, step), "sent": sent, "arrived": arrived, "sent_at": Whole(0, step)})


def _restore(saved: dict[str, Any], counted: Sequence[int], device: torch.device | None) -> Transfer:
    arrived = saved["arrived"]  # one tensor, or one from each rank
    arrived = [one.to(device) for one in arrived] if isinstance(arrived, list) else arrived.to(device)
    return Transfer(saved["step"], saved["sent"].to(device), Arrived(arrived), saved["sent_at"], counted)


class _Coder:
    """Encodes neighbouring parts of a vector one by one, end to end in one message.

    The code of a part does not depend on its neighbours, so it is the same whoever owns them. Where a single call
    writes the same message, it is used: that is faster.
    """

    def __init__(self, compressor: Compressor, parts: Sequence[Part], seed: int, seeds: int) -> None:
        self.numel = sum(part.numel for part in parts)
        self._numels = [part.numel for part in parts]
        self._compressors = [compressor.with_stream(part.start * seeds + seed) for part in parts]
        if parts and _is_sliceable(compressor) and all(n % block_of(compressor) == 0 for n in self._numels[:-1]):
            self._numels, self._compressors = [self.numel], [compressor]
        self._nbytes = [compressor.nbytes(numel) for numel in self._numels]

    def encode(self, vector: Tensor, residual: Tensor | None, step: int) -> Tensor:
        message = torch.empty(sum(self._nbytes), dtype=torch.uint8, device=vector.device)
        vectors, codes = _split(vector, self._numels), _split(message, self._nbytes)
        residuals = [None] * len(vectors) if residual is None else _split(residual, self._numels)
        for compressor, x, e, code in zip(self._compressors, vectors, residuals, codes, strict=True):
            try:
                if e is None:
                    compressor.encode(x, step=step, out=code)
                else:
                    encode_with_feedback(compressor, x, e, step=step, out=code)
            except ValueError:
                if bool(torch.isfinite(x).all()):
                    raise
                return self.not_finite(vector.device)  # the other ranks wait for a message
        return message

    def decode(self, message: Tensor, out: Tensor | None, step: int) -> Tensor:
        if out is None:
            out = torch.empty(self.numel, dtype=torch.float32, device=message.device)
        codes, vectors = _split(message, self._nbytes), _split(out, self._numels)
        for compressor, code, x in zip(self._compressors, codes, vectors, strict=True):
            compressor.decode(code, x.numel(), step=step, out=x)
        return out

    def decode_add(self, message: Tensor, total: Tensor, step: int) -> None:
        codes, vectors = _split(message, self._nbytes), _split(total, self._numels)
        for compressor, code, x in zip(self._compressors, codes, vectors, strict=True):
            compressor.decode_add(code, x, step=step)

    def not_finite(self, device: torch.device) -> Tensor:
        return torch.full((sum(self._nbytes),), NOT_FINITE, dtype=torch.uint8, device=device)


def _split(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """torch.split, but without the time for a view where there is one size."""
    return (tensor,) if len(sizes) == 1 else torch.split(tensor, sizes)


def _is_sliceable(compressor: Compressor) -> bool:
    """Whether the codes of consecutive whole blocks, end to end, are the code of all of them."""
    return isinstance(compressor, Blockwise) and compressor.with_stream(1) == compressor


def _is_finite(message: Tensor) -> bool:
    """Whether the message does not stand for a vector with a NaN or an infinity. Reads 4 bytes of most messages."""
    return set(message[:4].tolist()) != {NOT_FINITE} or not bool((message == NOT_FINITE).all())
