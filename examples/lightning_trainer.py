"""Trains on scikit-learn's digits with Lightning; only the two lines marked (*) are laconic's.

python examples/lightning_trainer.py                                       two workers, which Lightning launches
python examples/lightning_trainer.py --resume lightning_logs/…/last.ckpt
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laconic  # (*)
from laconic.integrations.lightning import LaconicStrategy  # (*)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--resume")
arguments = parser.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        correct = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", correct, sync_dist=True)  # of the averaged model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(labels)) % 5 == 0
    train, test = (TensorDataset(pixels[part], labels[part]) for part in (~held_out, held_out))
    trainer = lightning.Trainer(
        strategy=LaconicStrategy(laconic.Divisible()),  # (*)
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max", save_last=True)],
    )
    trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(test, 64), ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print(f"epoch {trainer.current_epoch}: accuracy {trainer.callback_metrics['accuracy']:.1%}")
