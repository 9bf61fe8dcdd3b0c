"""Seeing the signal while a network trains: what is watched, what is measured of it, where it is written."""
