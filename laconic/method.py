"""Defines what a communication method is: settings, state, and code that runs around each optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import dataclass_transform

from laconic.comm import Comm
from laconic.compress import Compressor, Uniform
from laconic.forms import Fields, Form, Plain, form_of
from laconic.rules import check_choice as check_choice
from laconic.rules import check_count as check_count
from laconic.rules import check_flag as check_flag
from laconic.rules import check_number as check_number
from laconic.rules import check_seed as check_seed

Merge = Literal["same", "mean", "method"]
# Of what `consensus()` sends where a method has a reference: an eighth of the bytes of fp32. It changed the accuracy of
# the averaged model by at most 0.09 points (benchmarks/comm/consensus.md).
DIFFERENCE = Uniform(4)


class Replica(Protocol):
    """One worker's copy of the model, as a method sees it.

    Vectors are flat and in the order of `parameters`; `d` is the number of trained entries. Where several ranks form a
    node, each runs the method on its slice of x with the same slice of the other nodes: `x`, gradients and moments are
    those of the slice, `d` is its length, and `comm` is with one rank of every other node (`laconic.nodes`).
    """

    @property
    def x(self) -> Tensor:
        """The trained parameters (d). This is the model's own memory: writing to it changes the model."""

    @property
    def x_and_scalar(self) -> Tensor:
        """x and one more entry (d + 1) in the same memory, so that a number can be sent with x without copying x."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order in which x holds them."""

    @property
    def numels(self) -> list[int]:
        """How many entries of each of `parameters` x holds: all of them, or in a node those in the slice."""

    @property
    def comm(self) -> Comm:
        """The communication with the other workers; methods use no other network, threads or clock."""

    @property
    def step(self) -> int:
        """The current step, counted from 1; the same number in `before_step` and in `after_step`."""

    @property
    def lr(self) -> float:
        """The current learning rate; the largest one if the parameter groups differ."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The user's optimizers, mostly one. Methods may read their settings, and reach their state by `moments`."""

    @property
    def counted(self) -> list[int]:
        """The ranks that count in the means of this step: all, or inside `worker.join()` those that have trained."""

    @property
    def anyone_done(self) -> bool:
        """Whether a rank has run out of data, inside `worker.join()`."""

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Averages x as `comm.mean` does, over the ranks that count."""

    @property
    def generator(self) -> torch.Generator:
        """Random numbers that are the same on every rank. The worker's checkpoint includes their state."""

    def pack_gradient(self) -> Tensor:
        """Returns the gradient (d) followed by one flag per parameter: 1 if it has a gradient, else 0.

        The entries of a parameter without a gradient are 0.
        """

    def unpack_gradient(self, packed: Tensor) -> None:
        """Sets the gradients that the optimizer will use. A parameter whose flag is 0 gets no gradient."""

    def gradients(self) -> list[Tensor | None]:
        """Returns each parameter's gradient, or None. Writing to it changes what the optimizer will use."""

    def views(self, vector: Tensor) -> list[Tensor]:
        """Returns the part of a vector (d) that belongs to each parameter, in the shape of its gradient.

        That is the parameter's shape, or in a node a vector: a slice may end inside a parameter.
        """

    def moments(self) -> dict[str, Tensor]:
        """Returns the optimizers' state that has the parameters' shapes, each as one vector (d), by name.

        For Adam these are exp_avg and exp_avg_sq. The names are the same on all ranks; before the first step there are
        none. The vectors are the optimizers' own memory. Entries of parameters without such a state are 0. To average
        one, use `mean(vector, out=vector)`, which in a node also gathers the slices.
        """

    def gather_slices(self, values: Sequence[float]) -> list[Sequence[float]]:
        """Returns these numbers of every rank of this node; only this worker's, if its node is one rank.

        For numbers that describe all of x: a squared norm is the sum over slices. All ranks call it in the same step.
        """


def state(
    default: Any = None, *, form: Form | None = None, merge: Merge | None = None, init: Literal[False] = False
) -> Any:
    """Declares a field of a method as state: it is no setting, and is saved and loaded with the worker.

    Args:
        default: the value before `setup`.
        form: what a saved value must look like (`laconic.forms`); by default of the same kind as the present value.
            Nothing is loaded unless everything has its form.
        merge: how the values of all ranks become one, for a checkpoint of another number of workers. "same": all ranks
            have the same value, which loading verifies. "mean": the mean over the ranks that train. "method": the
            method's own `merge` does it. None: the values must happen to be equal.
        init: always False; tells type checkers that the field is no argument of the constructor.

    >>> import laconic
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Counting(laconic.Method):
    ...     every: int = 10
    ...     steps: int = laconic.state(0, merge="same")
    >>> Counting(every=5)
    Counting(every=5)
    >>> Counting(every=5).state_dict()
    {'steps': 0}
    """
    return field(
        default=default, init=init, repr=False, compare=False, metadata={"state": True, "form": form, "merge": merge}
    )


@dataclass_transform(field_specifiers=(state, field))
@dataclass
class Method:
    """Base class of all communication methods.

    A method is a dataclass. Its fields are settings, checked in `__post_init__`; fields declared with `state()` are
    saved in checkpoints and may hold tensors, numbers, strings, None, and lists or dicts of these. All ranks use the
    same settings: the worker compares them.

    >>> import laconic
    >>> class LocalSGDEvery8(laconic.Method):
    ...     def after_step(self, worker):
    ...         if worker.step % 8 == 0:
    ...             worker.comm.mean(worker.x, out=worker.x)
    """

    paper: ClassVar[str] = ""
    # Whether the optimizers of all ranks make the same steps, so that their state is the same.
    steps_alike: ClassVar[bool] = False

    def kernels(self, numel: int, workers: int) -> set[str]:
        """Returns the numba kernels that this method may call, which the worker compiles before it connects.

        By default those of the compressors among the settings.

        Args:
            numel: the number of entries of the model; small models do without some kernels.
            workers: their number; one worker alone may need none.

        Returns:
            Keys of `laconic.kernels.SETS`.

        >>> import laconic
        >>> from laconic.compress import Uniform
        >>> laconic.LocalSGD(period=8, compressor=Uniform(4)).kernels(numel=1000, workers=4)
        {'uniform'}
        """
        return kernels_of(*(value for value in self.settings().values() if isinstance(value, Compressor)))

    def setup(self, worker: Replica) -> None:
        """Allocates state. Runs once, when all workers hold the same parameters.

        Runs again, and then `reset`, when parameters were unfrozen or added to an optimizer.
        """

    def before_step(self, worker: Replica) -> None:
        """Runs when the gradients are computed and the optimizer has not changed the parameters yet."""

    def after_step(self, worker: Replica) -> None:
        """Runs when the optimizer has changed `worker.x` by this worker's local step."""

    def drain(self, worker: Replica) -> None:
        """Waits for all messages in flight and applies them. Runs after the last step, on every rank."""

    def reset(self, worker: Replica) -> None:
        """Drops messages in flight, residuals and the like, and begins anew from the present x.

        Runs between two steps, on all ranks, when all hold the same x. What it drops stays as `setup` made it.
        """

    def common(self, worker: Replica) -> Literal["nothing", "step", "x"]:
        """Returns what all ranks have in common after `after_step`, so that the worker can compare them.

        "nothing": ranks step at their own pace, and are compared only in `consensus()`, `save()` and at the end.
        "step": all ranks take part in this step. "x": they do, and then hold the same x, bit for bit.
        """
        return "nothing"

    def reference(self) -> Tensor | None:
        """Returns a vector near x that is bit-identical on all ranks (d), if `consensus()` may quantize x − reference.

        By default None: `consensus()` averages x in fp32. Methods that quantize averages return their agreed model.
        """
        return None

    def agreed(self, worker: Replica) -> Tensor | None:
        """Returns the newest x that all ranks hold, bit-identical (d), for `worker.agreed()`; None if there is none.

        By default x where `common` says that it is the same on all ranks, else `reference()`.
        """
        return worker.x if self.common(worker) == "x" else self.reference()

    def changed_outside(self) -> str | None:
        """Returns what goes wrong if x is changed outside optimizer.step(), between two steps.

        None: nothing does. The change counts as a part of this worker's next step.
        """
        return None

    def unsliceable(self) -> str | None:
        """Returns why this method cannot run on slices of x, as the ranks of a node do (docs/nodes.md); None if it can.

        A method can if it treats every entry of x by itself, or sums over entries by `worker.gather_slices`.
        """
        return "it does not say that it can (Method.unsliceable)"

    def metrics(self) -> dict[str, float]:
        """Returns numbers that describe the method's current behaviour, by name, for plots over the steps."""
        return {}

    def trains(self, rank: int) -> bool:
        """Returns whether this rank has data. A rank without data calls `worker.serve()` while the others train."""
        return True

    def await_step(self, worker: Replica) -> bool:
        """Waits, on a rank without data, until the others start a step (returns True) or pause (returns False)."""
        raise NotImplementedError(f"{type(self).__name__} has no rank that does not train")

    def pause(self, worker: Replica) -> None:
        """Runs between two steps, before all ranks meet in consensus(), save(), load() or at the end of the block."""

    def sends(self, worker: Replica) -> bool:
        """Returns whether ranks communicate in the next step. For `worker.join()`; the same on all ranks."""
        return True

    def sent_until(self, worker: Replica) -> int:
        """Returns the last step of which everything that a rank did has been sent before the next step.

        For `worker.join()`: a rank counts in a mean if it has trained since then. A method that supports it averages
        with `worker.mean`, or passes `worker.counted` on; it has no gradients where a rank does not train.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not support join(): give all ranks the same number of steps, or use a method "
            f"that does, such as AllReduce, LocalSGD or Divisible"
        )

    def resolve(self, x: Tensor) -> None:
        """Sets settings that were left open to what suits the model, before ranks and checkpoints are compared.

        Args:
            x: all parameters, on their device.
        """

    def settings(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields declared with `state()` by name."""
        return {f.name: getattr(self, f.name) for f in _state_fields(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Tensors are copied into those that `setup` allocated."""
        for name, value in saved.items():
            mine = getattr(self, name)
            if isinstance(mine, Tensor) and isinstance(value, Tensor):
                mine.copy_(value)
            else:
                setattr(self, name, value)

    def state_forms(self, step: int) -> dict[str, Form]:
        """Returns what each entry of a saved state must look like, by name; the state is of after step `step`."""
        return {f.name: f.metadata["form"] or form_of(getattr(self, f.name)) for f in _state_fields(self)}

    def check_state(self, saved: Any, step: int) -> None:
        """Raises a ValueError if `load_state_dict` must not load this. Changes nothing."""
        forms = dict.fromkeys(self.state_dict(), Plain()) | self.state_forms(step)
        Fields(forms).check("method", saved)

    def agreed_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a saved state that must be the same on all ranks."""
        return {f.name: saved[f.name] for f in _state_fields(self) if f.metadata["merge"] == "same"}

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        """Makes the state of this rank from a checkpoint of another number of workers.

        All new workers start from the mean of the saved x. Methods extend this with their own rules, which keep what
        training conserves. Messages in flight are applied or dropped.

        Args:
            saved: what `Worker.state_dict` returned on each rank of the checkpoint.
            worker: this worker, whose `comm` has the new rank and size.

        Returns:
            x, and the state that `load_state_dict` takes.

        Raises:
            ValueError: a field does not say how it is merged, and its values differ.
        """
        trained = [one for rank, one in enumerate(saved) if self.trains(rank)]
        state = {}
        for f in _state_fields(self):
            values = [one["method"][f.name] for one in trained]
            state[f.name] = merged(f"{type(self).__name__}.{f.name}", values, f.metadata["merge"])
        return mean_of([one["x"] for one in trained]), state


def kernels_of(*compressors: Compressor | None) -> set[str]:
    """Returns the names of the compressors' kernels; None sends fp32, without kernels."""
    return {one.kernels for one in compressors if one is not None and one.kernels is not None}


def merged(what: str, values: list[Any], merge: Merge | None) -> Any:
    """Returns the value that the values of all ranks become, by the rule declared with `state(merge=…)`."""
    if merge is None and not all(_equal(values[0], value) for value in values):
        raise ValueError(
            f"{what} differs between the ranks of the checkpoint and does not say how to merge it: declare it with "
            f"laconic.state(merge='same' or 'mean'), extend the method's merge(), or use as many workers as saved it"
        )
    if merge == "mean" and isinstance(values[0], Tensor):
        return mean_of(values)
    if merge == "mean" and values[0] is not None:
        mean = sum(values) / len(values)
        return round(mean) if isinstance(values[0], int) else mean
    return values[0]


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the mean, computed in fp64; entries that are the same in all tensors keep their bits.

    >>> mean_of([torch.tensor([0.1, 1.0]), torch.tensor([0.1, 2.0])])
    tensor([0.1000, 1.5000])
    """
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    same = torch.ones(tensors[0].shape, dtype=torch.bool)
    for tensor in tensors:
        total += tensor
        same &= tensor == tensors[0]
    return torch.where(same, tensors[0], total.div_(len(tensors)).to(tensors[0].dtype))


def _state_fields(method: Method) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(method) if f.metadata.get("state")]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def fresh(method: Method) -> Method:
    """Returns a copy of a method with the same settings and without state.

    Raises:
        ValueError: `method` is no instance of a method, or its class has fields and is no dataclass.
    """
    if not isinstance(method, Method):
        raise ValueError(f"method must be an instance of a laconic.Method, such as LocalSGD(8), not {method!r}")
    kind = type(method)
    if "__annotations__" in vars(kind) and "__dataclass_fields__" not in vars(kind):
        raise ValueError(f"{kind.__name__} has fields, so it must be decorated with @dataclass")
    return dataclasses.replace(method)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested dicts and lists in which each tensor is replaced by `change(tensor)`.

    >>> with_tensors({"a": [torch.ones(2), 3]}, lambda t: t + 1)
    {'a': [tensor([2., 2.]), 3]}
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_tensors(entry, change) for entry in value]
    return value
