"""The race of the user's own network, with Batch Normalization put into it and without."""
