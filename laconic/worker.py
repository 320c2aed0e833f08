"""Binds one replica of a model to a communication method, through the hooks of the user's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler
from typing_extensions import Self

from laconic.comm import Comm
from laconic.consensus import average_tensors, require_same_forms
from laconic.method import Method
from laconic.nodes import Nodes, check_arguments
from laconic.rules import check_choice, check_flag, check_number, check_seed
from laconic.saving import SavingReplica
from laconic.tracking import parse_address
from laconic.watch import checksum
from laconic.wrappers import BareModel, bare_optimizers

MOST_SECONDS = 1e9  # of a time-out; torch counts milliseconds in 64 bits


class Worker(SavingReplica):
    """Trains a model together with the other workers, for the length of a `with` block around the training loop.

    Each process that torchrun starts creates one Worker; under plain `python` it is a run of one worker. All ranks
    start from rank 0's parameters and buffers. The user still calls `optimizer.step()`: the method runs in its hooks,
    and its post-step hook runs before all other post-step hooks. At the end of the block the worker waits for all
    messages in flight, and every rank then holds the averaged model (see `consensus`).

    Args:
        model: the module, on its device and in its dtype, compiled or not. A DistributedDataParallel is unwrapped, and
            its communication is switched off until the worker ends. No FSDP.
        optimizer: any `torch.optim` optimizer over parameters of the model, or a list of them, each also in a
            framework's wrapper. A step is over when each has stepped once. Parameters that none trains keep rank 0's
            values. Parameters that are unfrozen or added to an optimizer later are taken up in the next step, on all
            ranks in the same one: all models are averaged, and the method begins anew.
        method: the communication method. The worker uses a copy, `worker.method`.
        timeout: seconds that one wait for other workers may take (at the start at least 60, until all are connected).
            A rank that fails is noticed within seconds; the timeout is for a rank that hangs.
        seed: the seed of `worker.generator`, whose random numbers are the same on all ranks.
        comm: the communication to use instead of torch.distributed.
        dashboard: a port at which rank 0 serves a live view of the job (docs/tracking.md) on its loopback interface, or
            "HOST:PORT" to listen elsewhere; port 0 is any free one. The same on all ranks.
        local: the process group of the ranks of this node, all on one host. They average their gradients in every step
            and train as one worker, whose communication they share (docs/nodes.md); a DistributedDataParallel over
            this group is left as it is. By default every rank is a worker of its own.
        nodes: "auto": the nodes are torchrun's, by LOCAL_WORLD_SIZE.

    Attributes:
        step: the number of optimizer steps so far.
        dashboard: the address of the live view on rank 0, such as "http://127.0.0.1:8080"; None elsewhere.
        node: this rank's place in its node (`laconic.nodes.Node`); None where every rank is a worker of its own.
        consensus_distance: √(mean over workers of ‖x − x̄‖²) at the last `consensus()`; None before.

    Raises:
        ValueError: model, optimizer and method do not fit together, the ranks differ, or the dashboard's port is taken;
            on every rank.

    >>> import laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with laconic.Worker(model, optimizer, laconic.LocalSGD(period=4)) as worker:
    ...     for _ in range(8):
    ...         model(torch.ones(3)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> worker.step, worker.size, worker.x.shape
    (8, 1, torch.Size([4]))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        *,
        timeout: float = 1800.0,
        seed: int = 0,
        comm: Comm | None = None,
        dashboard: int | str | None = None,
        local: dist.ProcessGroup | None = None,
        nodes: Nodes = None,
    ) -> None:
        check_arguments(local, nodes)
        bare, optimizers = _check_arguments(
            model, optimizer, timeout, seed, comm, in_node=local is not None or nodes is not None
        )
        if dashboard is not None:
            parse_address(dashboard)
        self._known_checkpoints = {}
        super().__init__(bare, optimizers, method, timeout, seed, comm, dashboard, local, nodes)

    @contextmanager
    def consensus(self, *, exact: bool = False) -> Iterator[nn.Module]:
        """Sets the model to the average of all workers' models for the length of a `with` block, for evaluation.

        Parameters and floating-point buffers are averaged, other buffers are those of the first rank that trains. All
        ranks call it. Afterwards this worker's own values are back, bit for bit. `optimizer.step()` is an error
        inside; a nested `consensus()` gives the same model. After the end of the block it gives the model as it is,
        which is the averaged one, and communicates nothing.

        With `Divisible`, and with `LocalSGD`, `ADPSGD` and `DiLoCo` that have a compressor, workers send their
        difference to the last agreed model, in 4 bits: an eighth of the bytes of fp32, and the same model on all ranks.
        The average at the end of the block is always exact.

        Args:
            exact: sends parameters in fp32 with every method.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     with worker.consensus() as averaged:
        ...         prediction = averaged(torch.ones(3))
        """
        if self._shown == "consensus()" or self._end == "done":
            yield self.model
            return
        check_flag("exact", exact)
        self._require_running("consensus()")
        with self.tracking.verb("consensus"):
            own = [tensor.clone() for tensor in self._own_tensors()]
            is_equal = self._meet("consensus()")
        self._shown = "consensus()"
        try:
            with self.tracking.verb("consensus"):
                self._average_model(is_equal, exact=exact)
                square = (own[0] - self.x).double().square().sum().reshape(1)
                mean = self._control.among_members("consensus()", lambda: self._control.mean(square))
                self.consensus_distance = mean.sqrt().item()
            yield self.model
        finally:
            self._restore(own)
            self._shown = ""

    def _own_tensors(self) -> list[Tensor]:
        return [self.x, *self.model.buffers()]

    @torch.no_grad()
    def _restore(self, own: list[Tensor]) -> None:
        """Ends `consensus()` or `agreed()`: x and buffers are this worker's again."""
        for mine, saved in zip(self._own_tensors(), own, strict=True):
            mine.copy_(saved)
        self._changes.end_step()

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Sets the model to the agreed one for the length of a `with` block: this rank holds it, so nothing is sent.

        The agreed model is bit-identical on all ranks and, unlike that of `consensus()`, some steps old: x̂ of
        `Divisible`, θ of `DiLoCo`, the result of the last round of `LocalSGD` and `ADPSGD` (without a compressor only
        until the next step), x of `AllReduce`, `QSGD` and `EfficientAdam()`. `A2CiD2` has none. Any rank may call it
        alone, except in a node, all ranks of which call it. Buffers stay this worker's own. Afterwards the local values
        are back, bit for bit. `optimizer.step()` is an error inside.

        Raises:
            ValueError: the method holds no agreed model now.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.AdamW(model.parameters()), laconic.Divisible()) as worker:
        ...     if worker.rank == 0:
        ...         with worker.agreed() as agreed:
        ...             prediction = agreed(torch.ones(3))
        """
        if self._shown == "agreed()" or self._end == "done":
            yield self.model
            return
        if self._shown:
            raise RuntimeError(f"agreed() must not be called inside {self._shown}, which has a newer model")
        if self._end == "failed":
            raise RuntimeError("agreed() is for a worker that has not failed, and this one has: load a checkpoint")
        self._stepping.require_complete("agreed()")
        self._changes.check(self.step, self.size)
        vector = self.seen.x if self.seen.comm.size == 1 else self.method.agreed(self.seen)
        if vector is None:
            raise ValueError(
                f"{type(self.method).__name__} holds no agreed model after step {self.step}: use consensus(), which "
                f"averages the models of all workers"
            )
        own = [tensor.clone() for tensor in self._own_tensors()]
        self._shown = "agreed()"
        try:
            with torch.no_grad():
                self.seen.x.copy_(vector)
                if self._slice is not None:
                    self._slice.gather(self.x)
            yield self.model
        finally:
            self._restore(own)
            self._shown = ""

    @torch.no_grad()
    def average_(self, tensors: Tensor | Iterable[Tensor]) -> None:
        """Averages tensors of any kind over all workers that train, in place: metrics, an average of weights, ….

        All ranks call it, with tensors of the same shapes. A rank without data passes tensors too, whose values do not
        count. An entry that is not finite on every rank stays as it is on each.

        Raises:
            ValueError: a tensor is not of a floating dtype, or the ranks' shapes differ; on every rank.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     accuracy = torch.tensor(0.5)  # of this worker's data
        ...     worker.average_(accuracy)
        """
        self._require_running("average_()")
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with self.tracking.verb("average_"):
            if self._shown != "consensus()":
                self._pause()
            require_same_forms(self.comm, found)
            average_tensors(self._control, found, self._weight())

    def metrics(self, over: Literal["ranks"] | None = None) -> dict[str, float]:
        """Returns numbers that describe this worker, by the same keys for every method (docs/tracking.md).

        Bytes, steps, seconds and exchanges count from the last call, or from the start; `bytes_total` always from the
        start. A key for which the method has no value is NaN.

        Args:
            over: None for this rank alone, which needs no communication. "ranks": the mean and the maximum over all
                ranks, as `KEY_mean` and `KEY_max`; all ranks call it, between the same steps.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     metrics = worker.metrics()
        >>> metrics["bytes_foreground"], metrics["bits"], metrics["members"]
        (0.0, 32.0, 1.0)
        """
        check_choice("over", over, (None, "ranks"))
        if over is None:
            return self.tracking.read()
        self._require_running("metrics(over='ranks')")
        with self.tracking.verb("metrics"):
            if self._shown != "consensus()":
                self._pause()
            return self.tracking.read_over_ranks()

    @torch.no_grad()
    def reset(self) -> None:
        """Makes the present weights the new agreed start, after the same weights were loaded on all ranks.

        All ranks call it. The method drops what is in flight and begins anew; the optimizer's state is kept. Weights
        that are loaded inside the block without it are mixed with what other workers have sent before.

        Raises:
            ValueError: the ranks hold different parameters; names those that differ from the others, on every rank.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> best = {name: value.clone() for name, value in model.state_dict().items()}
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.Divisible()) as worker:
        ...     _ = model.load_state_dict(best)
        ...     worker.reset()
        """
        self._require_local_model("worker.reset()")
        self._require_running("reset()")
        with self.tracking.verb("reset"):
            self._watch.finish()
            self._pause()
            checksums = self.comm.meet("reset()", checksum(*self.model.parameters()))
            self._watch.require_same_parameters(checksums, "reset()")
            self.method.reset(self.seen)
            self._changes.forget()

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in the other ranks' steps on a rank without data, which its method keeps as a dedicated server.

        Returns when the others reach `consensus()`, `save()`, `load()` or the end of the block. This rank must call the
        same next, and may serve again afterwards.
        """
        self._require_running("serve()")
        if self.method.trains(self.rank):
            raise RuntimeError(
                f"worker.serve() is for a rank without data, and rank {self.rank} trains: "
                f"{type(self.method).__name__} must be set to keep it as a server"
            )
        self._require_local_model("worker.serve()")
        while self._await_step():
            with self.tracking.verb("before_step"):
                self.seen.comm.late.receive()
                self._begin_step()
            with self.tracking.verb("after_step"):
                self._finish_step()
            self.tracking.end_step()

    def _await_step(self) -> bool:
        with self.tracking.verb("await_step"):
            return self.method.await_step(self.seen)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Lets ranks make different numbers of steps in a `with` block: those that are done first go on answering.

        All ranks enter it, after the same number of steps, around one pass over their data. A rank whose loop is over
        takes part in the others' steps without training, until all are done. Then all ranks have the same
        `worker.step`. A rank that is done does not count in means: `AllReduce`, `QSGD` and `EfficientAdam` average
        over the ranks that train in the step; `LocalSGD` and `ADPSGD` over those that have trained since the last
        round; `Divisible` over those that have trained within one sweep, in which their last moves are sent. With
        gossip ranks step at their own pace anyway, and this does nothing.

        `consensus()`, `save()` and everything else that all ranks must call is an error inside. A scheduler that steps
        with each batch has made fewer steps on some ranks: let it catch up after the block (docs/uneven.md).

        Raises:
            NotImplementedError: the method does not support it.
            ValueError: ranks enter after different numbers of steps, or one is a dedicated server.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
        ...     for epoch in range(2):
        ...         with worker.join():
        ...             for batch in torch.ones(5, 3):
        ...                 model(batch).backward()
        ...                 optimizer.step()
        >>> worker.step
        10
        """
        self._join = self._enter_join()
        try:
            yield
            if self._join is not None:
                self._stepping.require_complete("the end of join()")
                self._answer_others(self._join)
        finally:
            self._join = None

    def shard(self, dataset: Dataset[Any], **options: Any) -> DistributedSampler[Any]:
        """Returns a sampler for this rank's part of a dataset, for `DataLoader(dataset, sampler=…)`.

        Args:
            dataset: the same on all ranks.
            options: of `torch.utils.data.DistributedSampler`: shuffle, seed, drop_last. Its default repeats some
                samples so that all ranks have equally many. Call `set_epoch` before each epoch.

        Raises:
            RuntimeError: this rank is a server without data.

        >>> import laconic
        >>> model, data = torch.nn.Linear(3, 1), torch.utils.data.TensorDataset(torch.ones(8, 3))
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     list(worker.shard(data, shuffle=False))
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        trainers = [rank for rank in range(self.size) if self.method.trains(rank)]
        if self.rank not in trainers:
            raise RuntimeError(f"shard() is for ranks that train, and rank {self.rank} is a server without data")
        return DistributedSampler(dataset, num_replicas=len(trainers), rank=trainers.index(self.rank), **options)

    def start(self) -> Self:
        """Does what entering the `with` block does, for frameworks with separate hooks for start and end.

        The worker is at work since it was created, so this only returns it. Call `close()` at the end.

        Raises:
            RuntimeError: the worker has ended; create another one.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> worker = laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()).start()
        >>> worker.close()
        """
        self._require_running("start()")
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Does what leaving the `with` block does: all ranks wait for each other and then hold the averaged model.

        Afterwards parameters have memory of their own again. Further calls do nothing.

        Args:
            error: the exception that ended training. The other ranks are told of it, and nothing is averaged.
        """
        if self._end != "no":
            return
        if error is None:
            self._require_local_model("close()")
        self._stepping.remove()
        try:
            if error is None:
                with self.tracking.verb("end"):
                    self._settle("the end of the worker")
                self.tracking.close()
                self.comm.close()
            else:
                self.tracking.close(error)
                self.comm.fail(error)
        except BaseException as late:
            error = late
            self.tracking.close(late)
            self.comm.fail(late)
            raise
        finally:
            self._end = "done" if error is None else "failed"
            self._flat.release()
            self._bare.restore()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def _check_arguments(
    model: object, optimizer: object, timeout: object, seed: object, comm: object, *, in_node: bool
) -> tuple[BareModel, list[torch.optim.Optimizer]]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {model!r}")
    check_number("timeout", timeout, most=MOST_SECONDS, above=0)
    check_seed(seed)
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(f"comm must be None or a laconic.Comm, not {comm!r}")
    return BareModel(model, in_node=in_node), bare_optimizers(optimizer)
