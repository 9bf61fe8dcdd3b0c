"""The race of residual networks: steps to the plain network's best, against depth."""
