"""Methods by others for slow networks, for comparisons: as their authors ship them, or written here after the paper.

Each says in its docstring which of the two it is, and has the settings that its authors recommend as defaults.
"""

from __future__ import annotations

from laconic.bench.baseline import Baseline
from laconic.bench.peers.demo import DeMo as DeMo
from laconic.bench.peers.sparseloco import SparseLoCo as SparseLoCo
from laconic.bench.peers.torchft_diloco import TorchftDiLoCo as TorchftDiLoCo

PEERS: dict[str, type[Baseline]] = {"torchft_diloco": TorchftDiLoCo, "sparseloco": SparseLoCo, "demo": DeMo}
