"""Finds tasks by name."""

from __future__ import annotations

from laconic.names import look_up
from laconic.tasks.cifar10 import Cifar10
from laconic.tasks.digits import Digits
from laconic.tasks.fashion import Fashion
from laconic.tasks.quadratic import Quadratic
from laconic.tasks.shakespeare import Shakespeare
from laconic.tasks.task import Task
from laconic.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Digits, Quadratic, Fashion, Cifar10, Shakespeare, Translate)
}


def find_task(name: str) -> type[Task]:
    """Returns the class of the task called `name`.

    Raises:
        ValueError: No task has this name; the message lists similar names.

    Example:
        >>> find_task("digits")(model="mlp").batch_size
        32
    """
    return look_up("task", name, TASKS)
