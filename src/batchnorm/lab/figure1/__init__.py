"""Figure 1 of the paper: sigmoids with and without Batch Normalization, what they read and what they are given."""
