"""The version of laconic."""

__version__ = "0.1.0"
