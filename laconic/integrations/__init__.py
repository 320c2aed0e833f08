"""Adapters for training frameworks: `transformers`, `lightning` and `accelerate`, one module each.

Nothing is imported here. A module raises an ImportError that names its extra if its framework is missing or too old.
"""
