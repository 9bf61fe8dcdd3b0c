"""The doctor: finds the classic Batch Normalization bugs in a model, a training run or a checkpoint."""
