"""Seeing the signal: what flows through a network while it trains, and what its loss looks like around it."""
