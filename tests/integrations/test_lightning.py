"""LaconicStrategy over two emulated hosts, against Lightning's DDPStrategy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from tests.integrations.helpers import STEPS, flat, require_close, sent_nbytes, two_hosts

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'laconic[lightning]'")


def build(width: int) -> Any:
    """Returns a module and the loaders of its data."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2))
            self.losses: list[float] = []
            self.validated: list[tuple[float, torch.Tensor]] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            mean = self.all_gather(loss.detach()).mean()
            self.losses.append(mean.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)
            self.validated.append((loss.item(), flat(self)))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(0)
    x = torch.randn(64, 6)
    data = TensorDataset(x, x[:, :2].sin())
    return Module(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=32)


def fit(
    method: laconic.Method | None, directory: Path, width: int = 8, path: Path | None = None, **settings: Any
) -> Any:
    """Trains, and returns trainer and module."""
    import lightning

    from laconic.integrations.lightning import LaconicStrategy

    module, loader, evaluation = build(width)
    callbacks = [lightning.pytorch.callbacks.ModelCheckpoint(directory, save_last=True, monitor="val_loss")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp" if method is None else LaconicStrategy(method),
            default_root_dir=directory,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks if settings.pop("saves", False) else [],
            enable_checkpointing=None,
            **settings,
        )
        lightning.seed_everything(1)
        trainer.fit(module, loader, evaluation, ckpt_path=path)
    return trainer, module


def compare_with_ddp(directory: Path) -> dict[str, Any]:
    outcome = {}
    for name, method in {"ddp": None, "all_reduce": laconic.AllReduce()}.items():
        trainer, module = fit(method, directory, max_epochs=2, accumulate_grad_batches=2)
        outcome[name] = {"loss": module.losses, "x": flat(module), "val": trainer.callback_metrics["val_loss"].item()}
    return outcome


def save_and_resume(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"saves": True, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    method = laconic.Divisible(period=2)
    first, _ = fit(method, directory / "half", max_epochs=1, **settings)
    whole, module = fit(method, directory / "whole", max_epochs=2, **settings)
    resumed, again = fit(method, directory / "half", path=directory / "half" / "last.ckpt", max_epochs=2, **settings)
    first.strategy.barrier()
    saved = torch.load(directory / "whole" / "last.ckpt")
    return {
        "distance": whole.strategy.worker.consensus_distance,
        "losses": [module.losses[-4:], again.losses[-4:]],
        "x": [flat(module), flat(again)],
        "validated": module.validated[-1],
        "saved": torch.cat([value.reshape(-1) for value in saved["state_dict"].values()]),
        "steps": [whole.strategy.worker.step, saved["laconic"]["step"], resumed.global_step],
        "files": sorted(path.name for path in (directory / "half").iterdir()),
        "metrics": whole.strategy.metrics(),
    }


def count_traffic(directory: Path) -> list[int]:
    counts = []
    for method in (None, laconic.Divisible()):
        before = sent_nbytes()
        fit(method, directory, width=4000, max_steps=STEPS, max_epochs=-1, limit_val_batches=0)
        counts.append(sent_nbytes() - before)
    return counts


def run(directory: Path) -> dict[str, Any]:
    return {
        "comparison": compare_with_ddp(directory),
        "resumed": save_and_resume(directory),
        "traffic": count_traffic(directory),
    }


def test_strategy(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        outcomes = laconic.spawn(run, 2, tmp_path, hosts=hosts)
    ddp, all_reduce = (outcomes[0]["comparison"][name] for name in ("ddp", "all_reduce"))
    require_close(ddp["loss"], all_reduce["loss"])
    assert ddp["val"] == pytest.approx(all_reduce["val"], rel=1e-4)
    torch.testing.assert_close(ddp["x"], all_reduce["x"], rtol=1e-3, atol=1e-5)

    first, second = (outcome["resumed"] for outcome in outcomes)
    assert first["distance"] > 0, "the gradients of all ranks were the same, so something averages them"
    assert first["losses"][0] == first["losses"][1]
    assert torch.equal(first["x"][0], first["x"][1])
    assert torch.equal(first["x"][0], second["x"][0])
    assert torch.equal(first["validated"][1], second["validated"][1])
    assert torch.equal(first["validated"][1], first["saved"])
    assert first["steps"] == [16, 16, 16]
    assert "last.ckpt.laconic" in first["files"]
    files = [name for name in first["files"] if name.startswith("epoch")]
    assert len(files) == 2, "the best checkpoint and its folder; those of the other epoch are removed"
    assert first["metrics"]["laconic_bytes_background"] > 0

    for ddp_nbytes, divisible_nbytes in (outcome["traffic"] for outcome in outcomes):
        assert divisible_nbytes < ddp_nbytes / 2


def fit_on_nodes() -> tuple[int, int, torch.Tensor]:
    import lightning

    from laconic.integrations.lightning import LaconicStrategy

    module, loader, _ = build(8)
    strategy = LaconicStrategy(laconic.LocalSGD(2), nodes="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            num_nodes=2,
            strategy=strategy,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            max_steps=4,
        )
        trainer.fit(module, loader)
    assert strategy.worker is not None
    assert strategy.worker.node is not None
    return strategy.worker.node.index, strategy.worker.node.size, flat(module)


def test_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = laconic.spawn(fit_on_nodes, 4, nodes=2)
    assert [(index, size) for index, size, _ in outcomes] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(torch.equal(x, outcomes[0][2]) for _, _, x in outcomes)


def test_arguments_that_do_not_fit() -> None:
    from laconic.integrations.lightning import LaconicStrategy

    with pytest.raises(ValueError, match="nodes must be None or 'auto', not 2"):
        LaconicStrategy(laconic.AllReduce(), nodes=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="method must be a method of laconic"):
        LaconicStrategy("divisible")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes no argument find_unused_parameters"):
        LaconicStrategy(laconic.AllReduce(), find_unused_parameters=True)


def test_a_failure_ends_the_worker(tmp_path: Path) -> None:
    import lightning

    from laconic.integrations.lightning import LaconicStrategy

    class Failing(lightning.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
            if not trainer.sanity_checking:
                raise ArithmeticError("on purpose")

    module, loader, evaluation = build(8)
    strategy = LaconicStrategy(laconic.AllReduce())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Failing()],
            max_epochs=1,
        )
        with pytest.raises(ArithmeticError, match="on purpose"):
            trainer.fit(module, loader, evaluation)
    assert strategy.worker is not None
    assert strategy.worker.step == 16
    with pytest.raises(RuntimeError, match="has not ended"):
        strategy.worker.reset()
