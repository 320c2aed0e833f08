"""Real training runs, compared: methods and PyTorch's own alternatives on the same task, data order and network."""
