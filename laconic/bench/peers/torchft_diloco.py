"""torchft's DiLoCo and streaming DiLoCo, as shipped."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic.bench.baseline import Baseline, count_payload
from laconic.bench.strategies import Session
from laconic.comm.wire import own_address
from laconic.extras import need
from laconic.rules import check_count, check_number

TIMEOUT = datetime.timedelta(seconds=300)


@dataclass
class TorchftDiLoCo(Baseline):
    """DiLoCo and streaming DiLoCo as torchft ships them, with its manager and lighthouse; needs the extra `peers`.

    Each worker is a replica group of one process over torchft's gloo. Fragments have whole parameters, so they differ
    in size. Messages are in fp32: torchft's 8-bit messages need a GPU.

    Args:
        period: `sync_every`, a multiple of `fragments`: every parameter is sent once in so many steps.
        outer_lr: The learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum; 0 for none.
        fragments: The number of fragments. 1 with a delay of 0 is DiLoCo.
        delay: `fragment_sync_delay`: steps from sending a fragment to applying it, less than period / fragments.
        mixing: `fragment_update_alpha`: the share of local parameters that an applied fragment keeps.

    References:
        https://github.com/meta-pytorch/torchft; Douillard et al. 2025, https://arxiv.org/abs/2501.18512
    """

    apart = True
    needs = "torchft"
    paper: ClassVar[str] = "arXiv 2501.18512"

    period: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 2
    delay: int = 8
    mixing: float = 0.0

    def __post_init__(self) -> None:
        need("torchft", "peers")
        check_count("period", self.period)
        check_number("outer_lr", self.outer_lr, above=0)
        check_number("outer_momentum", self.outer_momentum, least=0, most=1)
        check_count("fragments", self.fragments)
        check_count("delay", self.delay, least=0)
        check_number("mixing", self.mixing, least=0, most=1)
        if self.period % self.fragments:
            raise ValueError(f"period must be a multiple of fragments={self.fragments}, not {self.period}")
        if self.delay >= self.period // self.fragments:
            raise ValueError(
                f"delay must be less than period / fragments = {self.period // self.fragments}, not {self.delay}"
            )

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        os.environ.setdefault("RUST_LOG", "warn")
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        # Emulated hosts share the machine's name, by which torchft's replicas would look for each other.
        address = own_address((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        with patch("socket.gethostname", return_value=address), super().join(model, optimizer) as session:
            rank, size = dist.get_rank(), dist.get_world_size()
            lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=size) if rank == 0 else None
            ports: list[Any] = [None if lighthouse is None else lighthouse.address().rpartition(":")[2]]
            addresses: list[Any] = [address]
            dist.broadcast_object_list(ports)
            dist.broadcast_object_list(addresses)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            manager = Manager(
                pg=ProcessGroupGloo(timeout=TIMEOUT),
                load_state_dict=None,
                state_dict=None,
                min_replica_size=size,
                use_async_quorum=False,
                timeout=TIMEOUT,
                quorum_timeout=TIMEOUT,
                rank=0,
                world_size=1,
                store_addr=address,
                store_port=store.port,
                lighthouse_addr=f"http://{addresses[0]}:{ports[0]}",
                replica_id=f"worker{rank}_",
                hostname=address,
                init_sync=False,
            )
            fragments = _fragments(model, self.fragments)
            outer = [
                torch.optim.SGD(
                    fragment.parameters(),
                    lr=self.outer_lr,
                    momentum=self.outer_momentum,
                    nesterov=self.outer_momentum > 0,
                )
                for fragment in fragments
            ]
            with DiLoCo(
                manager,
                fragments,
                optimizer,
                outer,
                sync_every=self.period,
                fragment_sync_delay=self.delay,
                fragment_update_alpha=self.mixing,
            ) as diloco:
                session.agreed = partial(_agreed, diloco, fragments)
                yield session
                dist.barrier()  # nobody closes its manager while others still need it
            manager.shutdown(wait=False)
            dist.barrier()
            if lighthouse is not None:
                lighthouse.shutdown()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        d = sum(p.numel() for p in model.parameters() if p.requires_grad)
        sizes = [sum(p.numel() for p in one.parameters()) for one in _fragments(model, self.fragments)]
        every = self.period // self.fragments

        def nbytes_of_step(step: int) -> float:
            rounds, into = divmod(step + self.delay, every)
            return 0.0 if into else allreduce_nbytes / d * sizes[(rounds - 1) % self.fragments]

        return Session(model, optimizer, count_payload(optimizer, nbytes_of_step))


def _agreed(diloco: Any, fragments: list[nn.Module]) -> Tensor:
    """Returns the outer parameters, which torchft keeps by fragment."""
    kept = [fragment.original_parameters for fragment in diloco._fragments]
    names = [[name for name, _ in fragment.named_parameters()] for fragment in fragments]
    return torch.cat([one[name].flatten() for one, of in zip(kept, names, strict=True) for name in of])


def _fragments(model: nn.Module, number: int) -> list[nn.Module]:
    """Returns modules that share the model's parameters: consecutive ones, of similar total size."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if number > len(parameters):
        raise ValueError(f"fragments must be at most the number of parameters, {len(parameters)}, not {number}")
    d, seen = sum(p.numel() for p in parameters), 0
    groups: list[list[nn.Parameter]] = [[]]
    for i, parameter in enumerate(parameters):
        left = number - len(groups)  # fragments that are still to be begun
        is_full = 2 * seen + parameter.numel() > 2 * d * len(groups) / number
        if groups[-1] and left and (is_full or len(parameters) - i == left):
            groups.append([])
        groups[-1].append(parameter)
        seen += parameter.numel()
    return [nn.ParameterList(group) for group in groups]
