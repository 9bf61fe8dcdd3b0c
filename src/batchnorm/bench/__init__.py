"""``batchnorm bench``: the layers beside torch, torch.compile and the floor, alternating in one process."""
