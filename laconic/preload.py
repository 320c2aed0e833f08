"""Loads all kernels when it is imported, in the fork server from which `laconic.spawn` forks its workers.

The fork server can be prepared only by naming modules for it to import, so this module is the one exception to the
rule that importing laconic does nothing. `spawn(…, preload=["laconic.preload"])` names it.
"""

from laconic.kernels import warm_up

warm_up()
