"""Stores the parameters of a model in one flat vector, and reads gradients and optimizer state as flat vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import TypeIs

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


class FlatParameters:
    """Moves the memory of the parameters that the optimizers train into one vector `x`, in the order of the model.

    The `Parameter` objects stay the same and become views of `x`. So the model, its optimizers and its compiled form
    keep working, and writing to `x` changes the model. `laconic.method.Replica` documents the methods.

    Raises:
        ValueError: model and optimizers do not fit together, or the parameters cannot form one vector.

    >>> model = nn.Linear(2, 1)
    >>> flat = FlatParameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    >>> _ = flat.x.fill_(7.0)
    >>> model.bias.item()
    7.0
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        named, owners = _trained_parameters(model, optimizers)
        self.names = list(named)
        self.parameters = list(named.values())
        self.has_read_gradients = False  # since it was last set to False
        self._optimizers = optimizers
        self._owners = [owners[id(p)] for p in self.parameters]  # each parameter's optimizer
        first = self.parameters[0]
        d = sum(p.numel() for p in self.parameters)
        self.x_and_scalar = torch.zeros(d + 1, dtype=first.dtype, device=first.device)
        self.x = self.x_and_scalar[:d]
        # The gradient (d) and one flag per parameter; allocated when a method first calls pack_gradient.
        self._packed: Tensor | None = None
        self._packed_views: list[Tensor] = []
        self._flags: list[float] = []  # as packed last
        self._flags_tensor = self.x[:0]
        self._moments: dict[str, tuple[Tensor, list[Tensor]]] = {}  # by name: the vector (d) and its views
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views(self.x), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._inside = {id(parameter) for parameter in self.parameters}

    def views(self, vector: Tensor) -> list[Tensor]:
        """Returns the part of a vector (≥ d) that belongs to each parameter, in its shape and memory order."""
        views, offset = [], vector.storage_offset()
        for p in self.parameters:
            stride = p.stride() if _is_dense(p) else torch.empty(p.shape, device="meta").stride()
            views.append(vector.as_strided(p.shape, stride, offset))
            offset += p.numel()
        return views

    def check(self) -> None:
        """Raises a RuntimeError if a trained parameter is not stored in x: it would silently train on its own."""
        for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"parameter {name!r} has left worker.x: its memory was replaced (by model.to, .half, "
                    f"load_state_dict(assign=True), parameter.data = …); do that before creating the Worker"
                )
        for parameter in self._optimized():
            if parameter.grad is not None and not parameter.requires_grad and id(parameter) not in self._inside:
                raise RuntimeError(
                    f"a frozen parameter of shape {tuple(parameter.shape)} has a gradient, by which the optimizer "
                    f"would change it on this rank alone: set its .grad to None"
                )

    def has_new_parameters(self) -> bool:
        """Returns whether the optimizers train parameters that are not in x: unfrozen, or added to an optimizer."""
        return any(p.requires_grad and id(p) not in self._inside for p in self._optimized())

    def _optimized(self) -> Iterator[nn.Parameter]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @torch.no_grad()
    def release(self) -> None:
        """Gives parameters and optimizer state memory of their own again. x stays as it is."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        for name, (_, views) in self._moments.items():
            for state, view in zip(map(self._state, range(len(views))), views, strict=True):
                if state.get(name) is view:
                    state[name] = view.clone()

    def gradients(self) -> list[Tensor | None]:
        self.has_read_gradients = True
        found = [parameter.grad for parameter in self.parameters]
        for name, gradient in zip(self.names, found, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(
                    f"gradients must be dense, and the gradient of parameter {name!r} is {gradient.layout}"
                )
        return found

    def pack_gradient(self) -> Tensor:
        d = self.x.numel()
        if self._packed is None:
            self._packed = self.x.new_empty(d + len(self.parameters))
            self._packed_views = self.views(self._packed)
        packed, flags = self._packed, [0.0] * len(self.parameters)
        for i, (gradient, view) in enumerate(zip(self.gradients(), self._packed_views, strict=True)):
            if gradient is None:
                view.zero_()
                continue
            flags[i] = 1.0
            # After zero_grad(set_to_none=False) the gradient still is the view that unpack_gradient set.
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        if flags != self._flags:  # a copy to a device makes the host wait, and they seldom change
            self._flags, self._flags_tensor = flags, torch.tensor(flags, dtype=packed.dtype, device=packed.device)
        packed[d:] = self._flags_tensor
        return packed

    def unpack_gradient(self, packed: Tensor) -> None:
        # With a gradient of every parameter here, no flag of any average is 0, and the host need not read them.
        flags = self._flags if self._flags and all(self._flags) else packed[self.x.numel() :].tolist()
        views = self._packed_views if packed is self._packed else self.views(packed)
        for parameter, view, flag in zip(self.parameters, views, flags, strict=True):
            parameter.grad = view if flag > 0 else None

    def moment_names(self) -> list[str]:
        """Returns the names of the optimizer's state tensors that have the shape of their parameter."""
        # Adam's step counter is a scalar, as is a parameter that is a single number; but it is no moment.
        found = {
            name
            for i, p in enumerate(self.parameters)
            for name, value in self._state(i).items()
            if _is_moment(value, p)
        }
        return sorted(found - {"step"})

    def moments(self, names: list[str]) -> dict[str, Tensor]:
        """Returns each named state as one vector (d), which becomes the optimizer's own memory.

        Entries are 0 for parameters that have no such state yet.
        """
        for name in names:
            if name not in self._moments:
                vector = torch.zeros_like(self.x)
                self._moments[name] = vector, self.views(vector)
        views = [self._moments[name][1] for name in names]
        for i, (parameter, *own) in enumerate(zip(self.parameters, *views, strict=True)):
            state = self._state(i)
            for name, view in zip(names, own, strict=True):
                value = state.get(name)
                if value is view:  # from the second call on
                    continue
                if not _is_moment(value, parameter):
                    view.zero_()
                elif value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    state[name] = view
        return {name: self._moments[name][0] for name in names}

    def _state(self, i: int) -> dict[str, Tensor]:
        """Returns the state that its optimizer has for parameter number `i`."""
        # .get, because the optimizer's state is a defaultdict: [parameter] would create an entry.
        found: dict[str, Tensor] = self._owners[i].state.get(self.parameters[i], {})
        return found


def _is_moment(value: object, parameter: Tensor) -> TypeIs[Tensor]:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype


def _is_dense(p: Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps or overlaps, in any order (channels last, …)."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _trained_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, nn.Parameter], dict[int, torch.optim.Optimizer]]:
    """Checks that model and optimizers fit.

    Returns:
        The parameters that the optimizers train, by name, in the model's order; and the optimizer of each, by its id.
    """
    for module in model.modules():
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in WRAPPERS), None)
        if wrapper:
            raise ValueError(
                f"model must be a bare module or in one DistributedDataParallel, and a part of it is in {wrapper}: "
                f"pass the bare module"
            )
    # torch.compile prefixes names; a compiled and a bare replica are the same model.
    of_model = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    known = {id(p): name for name, p in of_model.items()}
    trained: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(
                        f"the optimizer's parameters must be the model's, and number {i} of group {g} of "
                        f"{type(optimizer).__name__}, of shape {tuple(parameter.shape)}, is not: create the optimizer "
                        f"with parameters of this model"
                    )
                if trained.setdefault(id(parameter), optimizer) is not optimizer:
                    raise ValueError(f"each parameter must be in one optimizer, and {known[id(parameter)]!r} is in two")
    missing = [name for name, p in of_model.items() if p.requires_grad and id(p) not in trained]
    if missing and len(missing) == sum(p.requires_grad for p in of_model.values()):
        raise ValueError(f"the optimizer has no trainable parameter of the model, which has {_some(missing)}")
    named = {name: p for name, p in of_model.items() if p.requires_grad and id(p) in trained}
    if not named:
        raise ValueError(
            f"the model must have a trainable parameter, and none of its {len(of_model)} has requires_grad"
        )
    for name, p in named.items():
        if is_lazy(p):
            raise ValueError(f"parameter {name!r} has no shape yet: run the model once before creating the Worker")
        if not p.dtype.is_floating_point:
            raise ValueError(f"parameters must be real floating point numbers, and {name!r} is {p.dtype}")
    for what in ("dtype", "device"):
        kinds = {str(getattr(p, what)): name for name, p in named.items()}
        if len(kinds) > 1:
            raise ValueError(
                f"trained parameters must all have one {what}, not "
                + " and ".join(f"{kind} ({name!r})" for kind, name in kinds.items())
            )
    return named, trained


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
