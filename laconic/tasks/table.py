"""The table of tasks."""

from __future__ import annotations

from difflib import get_close_matches

from laconic.tasks.digits import Digits
from laconic.tasks.quadratic import Quadratic
from laconic.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, Quadratic)}


def find_task(name: str) -> type[Task]:
    """The class of a task by its name; ValueError that lists the near misses for an unknown one."""
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(name, TASKS)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"unknown task {name!r}{meant} (tasks: {', '.join(sorted(TASKS))})")
