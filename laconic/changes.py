"""Notices changes of parameters outside `optimizer.step()`, by the version counters of torch's tensors.

Changes through `parameter.data` do not count as versions, and are not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from laconic.flat import FlatParameters
from laconic.log import warn
from laconic.method import Method
from laconic.watch import checksum


class Changes:
    """Compares the version counters of a model's parameters with those after the last step.

    Args:
        model: whose parameters are looked at.
        flat: the trained parameters. Others that require gradients must not change: nobody averages them.
        method: knows whether changes of trained parameters are harmless.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, method: Method) -> None:
        trained = set(map(id, flat.parameters))
        self._untrained = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in trained}
        self._trained: list[Tensor] = [flat.x, *flat.parameters]
        self._method = method
        self._warned = False
        if self._untrained:
            warn(
                f"{_names(self._untrained)} of the model require gradients and are not in the optimizer: they keep "
                f"rank 0's values, and would not be averaged if another optimizer trained them. Give the worker all "
                f"optimizers, Worker(model, [one, other], method), or call requires_grad_(False) on these parameters",
                stacklevel=4,
            )
        self.forget()

    def forget(self) -> None:
        """Takes the present parameters for those after the last step."""
        self._found = False  # trained parameters have changed since then
        self._versions = _versions(self._trained)
        self._untrained_versions = _versions(list(self._untrained.values()))
        self._checksum = checksum(*self._untrained.values())

    def end_step(self) -> None:
        """Notes the versions after a step, with all of its hooks."""
        self._versions = _versions(self._trained)

    def check(self, step: int, size: int, *, is_agreed: bool = False) -> None:
        """Looks for changes since the last step.

        Args:
            step: the last step.
            size: the number of workers; alone, a worker may do what it likes.
            is_agreed: all ranks hold the same x, at a meeting.

        Raises:
            RuntimeError: parameters that are not in the optimizer have other values than at the start.

        Warns:
            UserWarning: once, of a change of trained parameters that the method does not carry to the others.
        """
        if size == 1:
            return
        self._require_untrained_unchanged(step)
        versions = _versions(self._trained)
        self._found |= versions != self._versions
        self._versions = versions
        hazard = self._method.changed_outside()
        if hazard is None or self._warned or is_agreed or not self._found:
            return
        self._warned = True
        warn(
            f"parameters were changed outside optimizer.step() after step {step}, and with "
            f"{type(self._method).__name__} {hazard}. If all ranks have loaded the same weights, call worker.reset() "
            f"then; to evaluate other weights, exchange them inside consensus(); to change them in every step, do it "
            f"in a hook: optimizer.register_step_post_hook",
            stacklevel=4,
        )

    def _require_untrained_unchanged(self, step: int) -> None:
        versions = _versions(list(self._untrained.values()))
        if versions == self._untrained_versions:
            return
        self._untrained_versions = versions
        if checksum(*self._untrained.values()) != self._checksum:
            raise RuntimeError(
                f"{_names(self._untrained)} of the model: something has changed them before step {step + 1}, and they "
                f"are not in the worker's optimizer, so they are not averaged and differ between ranks. Give the "
                f"worker all optimizers: Worker(model, [one, other], method)"
            )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _names(parameters: dict[str, nn.Parameter]) -> str:
    names = [repr(name.replace("_orig_mod.", "")) for name in parameters]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"
