"""The table of tasks."""

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
    """The class of a task by its name; ValueError that lists the near misses for an unknown one."""
    return look_up("task", name, TASKS)
