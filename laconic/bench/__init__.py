"""Compares methods and baselines in real training runs on the same task, data order and network."""
