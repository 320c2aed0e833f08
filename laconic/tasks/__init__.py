"""Training tasks for comparisons. `find_task(name)` returns a task's class; its fields are the task's settings."""

from laconic.tasks.cifar10 import Cifar10
from laconic.tasks.data import DATASETS, DatasetError, fetch
from laconic.tasks.digits import Digits
from laconic.tasks.fashion import Fashion
from laconic.tasks.quadratic import Quadratic
from laconic.tasks.shakespeare import Shakespeare
from laconic.tasks.table import TASKS, find_task
from laconic.tasks.task import Batch, Shard, Task
from laconic.tasks.translate import Translate

__all__ = [
    "DATASETS",
    "TASKS",
    "Batch",
    "Cifar10",
    "DatasetError",
    "Digits",
    "Fashion",
    "Quadratic",
    "Shakespeare",
    "Shard",
    "Task",
    "Translate",
    "fetch",
    "find_task",
]
