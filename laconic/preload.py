"""Loads the kernels in numba's cache when it is imported, in the fork server from which `laconic.spawn` forks workers.

The fork server can be prepared only by naming modules for it to import, so this module is the one exception to the
rule that importing laconic does nothing. `spawn(…, preload=["laconic.preload"])` names it. It compiles nothing: each
worker compiles what its method needs.
"""

from laconic.kernels import load_cached

load_cached()
