"""The tasks that comparisons train: `find_task(name)` gives the class, whose fields are its settings."""

from laconic.tasks.digits import Digits
from laconic.tasks.quadratic import Quadratic
from laconic.tasks.table import TASKS, find_task
from laconic.tasks.task import Batch, Shard, Task

__all__ = ["TASKS", "Batch", "Digits", "Quadratic", "Shard", "Task", "find_task"]
