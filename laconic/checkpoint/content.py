"""What a rank's file contains: collected from a worker, checked before anything is changed, put back, merged."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laconic.agreement import Fingerprint
from laconic.checkpoint.optimizers import check_optimizers, collect_optimizers, load_optimizers, merge_optimizers
from laconic.comm import Comm
from laconic.forms import Fields, Plain, Vector, Whole, form_of, short
from laconic.method import Method, Replica, mean_of, with_tensors
from laconic.nodes import Node
from laconic.slices import NodeSlice


class Saveable(Replica, Protocol):
    """The parts of a `laconic.Worker` that a checkpoint is made of."""

    comm: Comm
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    method: Method
    step: int
    fingerprint: Fingerprint
    generator: torch.Generator
    node: Node | None

    @property
    def seen(self) -> Replica: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


def collect(worker: Saveable, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of this rank's file."""
    return {
        "model": bare(worker.model).state_dict(),
        "optimizer": collect_optimizers(worker.optimizers),
        "worker": worker.state_dict(),
        "random": _random_state(worker.x.device),
        "extra": extra,
    }


def check_content(worker: Saveable, content: Any) -> None:
    """Raises a ValueError if the content cannot be put into the worker as a whole. Changes nothing."""
    anything = Plain()
    names = ("model", "optimizer", "worker", "random")
    if not isinstance(content, dict) or content.keys() != {*names, "extra"}:
        raise ValueError(f"the file must have the keys {[*names, 'extra']}, not {short(list(content))}")
    _check_model(bare(worker.model), content["model"])
    check_optimizers(worker.optimizers, content["optimizer"])
    check_worker(worker, content["worker"])
    random = content["random"]
    device = worker.x.device
    known = {*random} & {"cuda", "xpu", "mps", device.type} if isinstance(random, dict) else set()
    Fields(dict.fromkeys({"cpu", *known}, anything)).check("random", random)
    for kind in {"cpu", device.type} & {*random}:  # those of other devices are not used
        _check_generator(f"random.{kind}", random[kind], kind)
    if not isinstance(content["extra"], dict):
        raise ValueError(f"extra must be a dict, not {short(content['extra'])}")


def check_worker(worker: Saveable, saved: Any) -> None:
    """Raises a ValueError if `Worker.load_state_dict` must not load this. Changes nothing."""
    anything = Plain()
    forms = {"x": form_of(worker.x), "step": Whole(), "method": anything, "generator": anything}
    Fields(forms).check("worker", saved)
    _check_generator("worker.generator", saved["generator"], "cpu")
    worker.method.check_state(saved["method"], saved["step"])


def _check_model(model: nn.Module, saved: Any) -> None:
    own = model.state_dict()
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        raise ValueError(f"model must have the entries {short(list(own))}, not {short(list(saved))}")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, mine in own.items():
        theirs, what = saved[name], f"model.{name}"
        if not isinstance(mine, Tensor):
            continue  # the extra state of a module, which only the module understands
        if name in parameters:
            form_of(mine).check(what, theirs)
            continue
        # A buffer may have infinities (an attention mask), but no NaN, unless this model has one too.
        if isinstance(theirs, Tensor) and theirs.shape == mine.shape and theirs.is_floating_point():
            if bool(theirs.isnan().logical_and(mine.cpu().isnan().logical_not()).any()):
                raise ValueError(f"{what} must be numbers, and has NaN")
            theirs = torch.zeros_like(theirs)
        Vector(tuple(mine.shape), mine.dtype).check(what, theirs)


def _check_generator(what: str, state: Any, device: str) -> None:
    """Raises a ValueError if this is no state of a random number generator."""
    try:
        torch.Generator(device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{what} must be the state of a random number generator: {error}") from error


@torch.no_grad()
def apply(worker: Saveable, content: dict[str, Any]) -> None:
    """Puts checked content into the worker."""
    bare(worker.model).load_state_dict(content["model"])
    load_optimizers(worker.optimizers, content["optimizer"])
    worker.load_state_dict(content["worker"])
    torch.set_rng_state(content["random"]["cpu"])
    device = worker.x.device
    if device.type != "cpu" and device.type in content["random"]:
        torch.get_device_module(device).set_rng_state(content["random"][device.type], *_index(device))


def snapshot(worker: Saveable) -> dict[str, Any]:
    """Returns a copy in main memory of everything that `apply` changes."""
    content = collect(worker, {})
    copied: dict[str, Any] = with_tensors(content, lambda tensor: tensor.detach().to("cpu", copy=True))
    return copied | {"model": _with_values(content["model"], copied["model"])}


def digest(worker: Saveable, content: dict[str, Any]) -> str:
    """Returns a checksum of what must be the same on all ranks."""
    saved = content["worker"]
    checksum = hashlib.sha256()
    _feed(checksum, [worker.method.agreed_state(saved["method"]), saved["generator"]])
    return checksum.hexdigest()


def _feed(checksum: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        checksum.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for name in sorted(value):
            checksum.update(repr(name).encode())
            _feed(checksum, value[name])
    elif isinstance(value, list | tuple):
        for entry in value:
            checksum.update(b",")
            _feed(checksum, entry)
    else:
        checksum.update(repr(value).encode())


def merge(worker: Saveable, saved: list[dict[str, Any]], places: list[Any]) -> dict[str, Any]:
    """Returns the content for this rank, made of the files of another number of workers.

    Parameters and method state follow `Method.merge`. Moments of the optimizer and floating-point buffers are averaged
    over the ranks that trained, as are buffers in `consensus()`. `extra` is that of the first rank. A rank that was
    there keeps its random numbers, and a new one those of its process: two ranks must not draw the same.

    In nodes, a rank merges the slices of x and of the method's state of the ranks that had its place. The rest of its x
    is right only after the slices are gathered.

    Args:
        worker: this rank.
        saved: the content of every file, in the order of ranks.
        places: of these ranks in their nodes; 0 without nodes.
    """
    rails: dict[Any, list[dict[str, Any]]] = {}
    for place, one in zip(places, saved, strict=True):
        rails.setdefault(place, []).append(one)
    if rails.keys() != set(range(worker.fingerprint["ranks per node"])) or len(set(map(len, rails.values()))) > 1:
        raise ValueError(f"the ranks' places in their nodes must be the same in each node, not {short(places)}")
    if any(len({digest(worker, one) for one in rail}) > 1 for rail in rails.values()):
        raise ValueError(DIFFERENT)
    trained = [one for rank, one in enumerate(saved) if worker.method.trains(rank)]
    x, state = _merged_state(worker, rails, [one["worker"]["x"] for one in trained])
    first, models = saved[0]["worker"], [one["model"] for one in trained]
    rank, device = worker.comm.rank, worker.x.device
    return {
        "model": _with_values(models[0], {name: _merged([one[name] for one in models]) for name in models[0]}),
        "optimizer": merge_optimizers([one["optimizer"] for one in trained]),
        "worker": {
            "x": x,
            "step": max(one["worker"]["step"] for one in saved),
            "method": state,
            "generator": first["generator"],
        },
        "random": saved[rank]["random"] if rank < len(saved) else _random_state(device),
        "extra": saved[0]["extra"],
    }


def _merged_state(
    worker: Saveable, rails: dict[Any, list[dict[str, Any]]], xs: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Returns x and the method's state; in a node all of `xs` is averaged, and the slice follows the method's rule."""
    seen = worker.seen
    if worker.node is None or not isinstance(seen, NodeSlice):
        return worker.method.merge([one["worker"] for one in rails[0]], seen)
    rail = [one["worker"] for one in rails[worker.node.rank]]
    x = mean_of(xs)
    x[seen.own], state = worker.method.merge([one | {"x": one["x"][seen.own]} for one in rail], seen)
    return x, state


DIFFERENT = "the ranks' files differ in state that must be the same on all ranks"


def _merged(values: list[Any]) -> Any:
    if not isinstance(values[0], Tensor) or not values[0].is_floating_point():
        return values[0]
    mean = mean_of(values)
    return torch.where(mean.isfinite(), mean, values[0])


def _with_values(state_dict: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a model's state_dict with other values; it keeps the versions of modules, an attribute."""
    changed = copy.copy(state_dict)
    changed.update(values)
    return changed


def _random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of torch's default generators, which dropout draws from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def _index(device: torch.device) -> list[torch.device]:
    """Returns the argument by which torch's functions choose a device; MPS has one device, and they have none there."""
    return [] if device.type == "mps" else [device]


def bare(model: nn.Module) -> nn.Module:
    """Returns the module inside torch.compile's wrapper."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found
