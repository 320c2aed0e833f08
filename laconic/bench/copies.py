"""Copies of all workers' models, written during training and averaged after it.

The average of a method that quantizes `consensus()` is quantized too: what is evaluated is the model that the workers
would have had.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic.consensus import mean_near


def write_copies(
    folder: Path, step: int, rank: int, model: nn.Module, agreed: Tensor | None, *, is_reference: bool = False
) -> None:
    """Writes this rank's model after a step and, on rank 0, the parameters that all ranks hold, if there are any.

    Args:
        folder: Where to write.
        step: The step.
        rank: This rank.
        model: Its model.
        agreed: The trained parameters that all ranks hold.
        is_reference: Whether `consensus()` sends quantized differences to them.
    """
    write_tensors(folder / f"{rank}-{step}", model.state_dict().values())
    if rank == 0 and agreed is not None:
        write_tensors(folder / f"{'reference' if is_reference else 'agreed'}-{step}", [agreed])


def read_agreed(model: nn.Module, folder: Path, step: int) -> bool:
    """Sets a model of the same kind to rank 0's copy of a step with the parameters that all ranks held.

    Returns:
        Whether there were any.
    """
    found = [path for kind in ("reference", "agreed") if (path := folder / f"{kind}-{step}").exists()]
    if not found:
        return False
    state = model.state_dict()
    for target, value in zip(state.values(), read_tensors(folder / f"0-{step}", state.values()), strict=True):
        target.copy_(value)
    parameters = [p for p in model.parameters() if p.requires_grad]
    (agreed,) = read_tensors(found[0], [torch.empty(sum(p.numel() for p in parameters))])
    with torch.no_grad():
        nn.utils.vector_to_parameters(agreed, parameters)
    return True


def _reference(folder: Path, step: int) -> Path:
    return folder / f"reference-{step}"


def write_tensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Writes tensors as plain bytes: a few milliseconds for a million entries, which are on the clock."""
    with path.open("wb") as file:
        for value in tensors:
            file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path, like: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors that `write_tensors` wrote, with the shapes and dtypes of `like`."""
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    like = list(like)
    parts = data.split([value.numel() * value.element_size() for value in like])  # type: ignore[no-untyped-call]
    return [part.clone().view(value.dtype).view(value.shape) for part, value in zip(parts, like, strict=True)]


def average_copies(model: nn.Module, folder: Path, step: int, ranks: int) -> bool:
    """Sets a model of the same kind to the average of the copies of a step, from rank 0 on.

    Returns:
        Whether the parameters of the ranks differed.
    """
    state = model.state_dict()
    names = [name for name, _ in model.named_parameters()]
    copies = [
        dict(zip(state, read_tensors(folder / f"{rank}-{step}", state.values()), strict=True)) for rank in range(ranks)
    ]
    for name, target in state.items():
        values = [copy[name] for copy in copies]
        target.copy_(torch.stack(values).mean(dim=0) if target.is_floating_point() else values[0])
    differs = not all(torch.equal(copy[name], copies[0][name]) for copy in copies for name in names)
    if differs and _reference(folder, step).exists():
        flat = [torch.cat([copy[name].flatten() for name in names]) for copy in copies]
        (reference,) = read_tensors(_reference(folder, step), [flat[0].float()])
        with torch.no_grad():
            nn.utils.vector_to_parameters(mean_near(flat, reference), list(model.parameters()))
    return differs
