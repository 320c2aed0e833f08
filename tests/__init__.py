"""The tests. Run them from the root of the repository: they import each other as `tests.…`."""

import os

# Before torch is imported: on two cores, the threads of several test processes would wait for each other, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
