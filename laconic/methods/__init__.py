"""The table of methods: a new one is one file and one line here."""

from __future__ import annotations

from laconic.method import Method
from laconic.methods.a2cid2 import A2CiD2 as A2CiD2
from laconic.methods.adpsgd import ADPSGD as ADPSGD
from laconic.methods.allreduce import AllReduce as AllReduce
from laconic.methods.diloco import DiLoCo as DiLoCo
from laconic.methods.divisible import Divisible as Divisible
from laconic.methods.efficient_adam import EfficientAdam as EfficientAdam
from laconic.methods.local_sgd import LocalSGD as LocalSGD
from laconic.methods.qsgd import QSGD as QSGD

METHODS: dict[str, type[Method]] = {
    "allreduce": AllReduce,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "qsgd": QSGD,
    "adpsgd": ADPSGD,
    "efficient_adam": EfficientAdam,
    "divisible": Divisible,
    "a2cid2": A2CiD2,
}
