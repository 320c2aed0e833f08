"""LaconicWorker over two emulated hosts, against Accelerate with DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from tests.integrations.helpers import STEPS, flat, require_close, sent_nbytes, two_hosts

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'laconic[accelerate]'")


def train(
    method: laconic.Method | None,
    epochs: int,
    *,
    width: int = 8,
    clip: float | None = None,
    save: Path | None = None,
    load: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains like a user of Accelerate, and returns losses, parameters and the worker.

    Args:
        save: where to save the state after half of the epochs.
        load: from where to continue, after half of the epochs.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from laconic.integrations.accelerate import LaconicWorker

    AcceleratorState._reset_state()  # else the precision of the first run would be that of all
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    x = torch.randn(64, 6)
    loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, rates = [], []
    block: Any = nullcontext() if method is None else LaconicWorker(accelerator, model, optimizer, method)
    with block as worker:
        if load is not None:
            accelerator.load_state(str(load))
        for epoch in range(epochs // 2 if load is not None else 0, epochs):
            if save is not None and epoch == epochs // 2:
                accelerator.save_state(str(save))
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    if clip is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                rates.append(schedule.get_last_lr()[0])
        distance = None
        if worker is not None:
            with worker.consensus():
                distance = worker.consensus_distance
    return {
        "losses": losses,
        "rates": rates,
        "x": flat(model),
        "distance": distance,
        "ends": None if method is None else model.require_backward_grad_sync,
    }


def saved_models(directory: Path) -> list[Any]:
    """Saves within a run, and returns the averaged model at that moment and the one in the file."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    from laconic.integrations.accelerate import LaconicWorker

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model, optimizer = accelerator.prepare(built := nn.Linear(6, 2), torch.optim.SGD(built.parameters(), lr=0.1))
    with LaconicWorker(accelerator, model, optimizer, laconic.LocalSGD(period=10)) as worker:
        for _ in range(3):
            accelerator.backward(model(torch.full((4, 6), 1.0 + accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(directory))
        own = flat(model)
        with worker.consensus():
            averaged = flat(model)
        for p in model.parameters():
            p.data.zero_()
        accelerator.load_state(str(directory))
        loaded = flat(model)
    accelerator.wait_for_everyone()
    saved = load_file(directory / "model.safetensors")
    return [own, averaged, torch.cat([value.reshape(-1) for value in reversed(saved.values())]), loaded]


def count_traffic() -> list[int]:
    counts = []
    for method in (None, laconic.Divisible()):
        before = sent_nbytes()
        train(method, STEPS // 8, width=4000)
        counts.append(sent_nbytes() - before)
    return counts


def run(directory: Path) -> dict[str, Any]:
    divisible = laconic.Divisible(period=2)
    accumulated: dict[str, Any] = {"gradient_accumulation_steps": 2}
    return {
        "ddp": train(None, 4, **accumulated),
        "all_reduce": train(laconic.AllReduce(), 4, **accumulated),
        "whole": train(divisible, 4, clip=0.5, save=directory / "half", mixed_precision="bf16", **accumulated),
        "resumed": train(divisible, 4, clip=0.5, load=directory / "half", mixed_precision="bf16", **accumulated),
        "saved": saved_models(directory / "saved"),
        "traffic": count_traffic(),
    }


def test_worker(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        outcomes = laconic.spawn(run, 2, tmp_path, hosts=hosts)
    ddp, all_reduce = outcomes[0]["ddp"], outcomes[0]["all_reduce"]
    require_close(ddp["losses"], all_reduce["losses"])
    assert ddp["rates"] == all_reduce["rates"]
    torch.testing.assert_close(ddp["x"], all_reduce["x"], rtol=1e-3, atol=1e-5)
    assert all_reduce["ends"] is True

    for outcome in outcomes:
        whole, resumed = outcome["whole"], outcome["resumed"]
        assert whole["distance"] > 0, "the gradients of all ranks were the same, so something averages them"
        assert whole["losses"][len(resumed["losses"]) :] == resumed["losses"]
        assert whole["rates"][len(resumed["rates"]) :] == resumed["rates"]
        assert torch.equal(whole["x"], resumed["x"])
        own, averaged, saved, loaded = outcome["saved"]
        assert not torch.equal(own, averaged)
        assert torch.equal(saved, averaged)
        assert torch.equal(loaded, own)
        ddp_nbytes, divisible_nbytes = outcome["traffic"]
        assert divisible_nbytes < ddp_nbytes / 2


def test_arguments_that_do_not_fit() -> None:
    from laconic.integrations.accelerate import LaconicWorker

    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"accelerator must be an accelerate\.Accelerator"):
        LaconicWorker("accelerator", model, torch.optim.SGD(model.parameters()), laconic.AllReduce())
