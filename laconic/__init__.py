"""laconic: data-parallel training over slow networks. Train together, talk less."""

from laconic.version import __version__ as __version__
