"""Measurements of a network at one moment, after the papers that asked why Batch Normalization works; one a file."""
