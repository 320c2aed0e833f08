"""Small image models: MLP, CNN and ResNet."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Returns a multi-layer perceptron over flattened images, with ReLU between layers.

    Args:
        *widths: The number of inputs, the widths of hidden layers, the number of logits.

    Example:
        >>> sum(p.numel() for p in mlp(64, 128, 10).parameters())
        9610
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int, side: int, widths: tuple[int, ...], hidden: int, classes: int = 10) -> nn.Sequential:
    """Returns a CNN for side × side images: 3×3 convolutions, each followed by a 2×2 max-pool, then a hidden layer.

    Args:
        channels: The channels of the image.
        side: Its height and width in pixels.
        widths: The output channels of each convolution.
        hidden: The width of the hidden layer.
        classes: The number of logits.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *widths)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        side //= 2
    layers += [nn.Flatten(), nn.Linear(widths[-1] * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (He et al. 2016, option B: 1×1 where the shape changes)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.branch(x) + self.shortcut(x))
        return out


def resnet(blocks: int, width: int, classes: int = 10) -> nn.Sequential:
    """Returns the CIFAR ResNet of depth 6 · blocks + 2 (He et al. 2016).

    Args:
        blocks: Residual blocks per stage; there are three stages.
        width: The channels of the first stage; each later stage has twice as many as the one before.
        classes: The number of logits.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for block in range(blocks):
            outputs = width * 2**stage
            layers.append(ResidualBlock(inputs, outputs, stride=2 if stage > 0 and block == 0 else 1))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)
