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
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.comm.coder import Coder, any_marked, is_unmarked
from laconic.comm.coder import Part as Part
from laconic.comm.coder import block_of as block_of
from laconic.comm.coder import split as split
from laconic.comm.comm import Comm, Pending
from laconic.comm.solo import Arrived
from laconic.compress import Compressor
from laconic.forms import Fields, Form, Row, Vector, Whole


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
        decay: the share of both residuals that is kept for the next vector.
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
        decay: float = 1.0,
        answer_comm: Comm | None = None,
        name: str = "vector",
    ) -> None:
        answer_compressor = answer_compressor or compressor
        self.compressor: Compressor | None = compressor
        self.parts = [part for part in parts if part.numel]
        self.workers = list(range(comm.size)) if workers is None else list(workers)
        self.residual, self.owner_residual, self._decay = residual, owner_residual, decay
        self._comm, self._answer_comm, self._name = comm, answer_comm or comm, name
        if any(a.owner > b.owner or a.stop != b.start for a, b in pairwise(self.parts)):
            raise ValueError(f"parts must follow one another, with ascending owners, not {self.parts}")
        by_owner = [[part for part in self.parts if part.owner == rank] for rank in range(comm.size)]
        owned = by_owner[comm.rank]
        self._trains = comm.rank in self.workers
        # Stochastic rounding must differ between the workers, and between a worker and the owner: n + 1 seeds a part.
        seeds = len(self.workers) + 1
        own_seed = self.workers.index(comm.rank) if self._trains else 0
        self._up = Coder(compressor, self.parts, own_seed, seeds)  # to the owners
        self._up_owned = Coder(compressor, owned, 0, seeds)
        self._down = Coder(answer_compressor, self.parts, len(self.workers), seeds)  # from the owners
        self._down_owned = Coder(answer_compressor, owned, len(self.workers), seeds)
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
            self._let_decay(self.residual)
            sent = self._up.encode(vector, self.residual, step)
        else:
            sent = torch.zeros(sum(self._sent_nbytes), dtype=torch.uint8, device=vector.device)
        return Transfer(step, sent, self._start(sent), self._comm.meter.step, counted)

    def _let_decay(self, residual: Tensor | None) -> None:
        if residual is not None and self._decay != 1:
            residual.mul_(self._decay)

    def _start(self, sent: Tensor) -> Pending[list[Tensor]]:
        return self._comm.all_to_all_async(torch.split(sent, self._sent_nbytes), lengths=self._received_nbytes)

    def answer(self, transfer: Transfer) -> None:
        """Waits for the workers' messages, averages the parts that this rank owns, and starts sending the average."""
        received = transfer.pending.wait()
        average = self._average([received[rank] for rank in transfer.counted], transfer.step)
        if average is None:
            answer = self._down_owned.not_finite(transfer.sent.device)
        else:
            self._let_decay(self.owner_residual)
            answer = self._down_owned.encode(average, self.owner_residual, transfer.step)
        # A NaN is raised by `receive`, on all ranks in the same step: here only owners know of it, and a rank that owns
        # nothing would wait for them elsewhere.
        transfer.pending = self._answer_comm.all_to_all_async([answer] * self._comm.size, lengths=self._answer_nbytes)

    def _average(self, messages: list[Tensor], step: int) -> Tensor | None:
        """Returns the average of the owned parts, or None if a worker's vector is not finite; on a device, NaNs."""
        coder = self._up_owned
        is_late = coder.is_late(messages[0])
        if not is_late and not all(map(is_unmarked, messages)):
            return None
        average = coder.decode(messages[0], None, step)
        for message in messages[1:]:  # in the order of ranks: the order changes the rounding of the sum
            coder.decode_add(message, average, step)
        average.div_(len(messages))
        return average.masked_fill_(any_marked(messages), torch.nan) if is_late else average

    def receive(self, transfer: Transfer, out: Tensor | None = None) -> Tensor:
        """Waits for the owners' answers and returns the average, in `out` if given."""
        answers = transfer.pending.wait()
        self._check(answers, transfer, self._down)
        return self._down.decode(torch.cat(answers), out, transfer.step)

    def _check(self, messages: list[Tensor], transfer: Transfer, coder: Coder) -> None:
        """Raises on all ranks if a message is not finite: at once, or on a device when the next step begins."""
        if coder.is_late(messages[0]):
            self._comm.late.read(
                any_marked(messages), lambda values: self._raise_not_finite(transfer) if values[0] else None
            )
        elif not all(map(is_unmarked, messages)):
            self._raise_not_finite(transfer)

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
        if not all(map(is_unmarked, [sent, *arrived])):
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
        finite = self._comm.meet(f"a {self._name} that is not finite", is_unmarked(transfer.sent))
        ranks = zip(self._comm.members, finite, strict=True)
        culprits = ", ".join(self._comm.name_of(rank) for rank, is_fine in ranks if not is_fine)
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
        decay: float = 1.0,
        name: str = "vector",
    ) -> None:
        super().__init__(comm, [Part(start, stop, comm.rank)], compressor, residual=residual, decay=decay, name=name)

    @property
    def nbytes(self) -> int:
        return (self._comm.size - 1) * sum(self._sent_nbytes)

    def _start(self, sent: Tensor) -> Pending[list[Tensor]]:
        return self._comm.all_gather_async(sent)

    def answer(self, transfer: Transfer) -> None:
        """Does nothing: there is no second hop."""

    def receive(self, transfer: Transfer, out: Tensor | None = None) -> Tensor:
        received = transfer.pending.wait()
        messages = [received[rank] for rank in transfer.counted]
        self._check(messages, transfer, self._up_owned)
        average = self._average(messages, transfer.step)
        assert average is not None  # it was checked
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
        return Transfer(step, sent, self._start(sent), self._comm.meter.step, counted)

    def _start(self, sent: Tensor) -> Pending[Tensor]:
        return self._comm.mean_async(sent)

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
