"""The landscape of the loss along the gradient, over training, with Batch Normalization and without."""
