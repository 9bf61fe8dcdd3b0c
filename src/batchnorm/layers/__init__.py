"""Layers: small modules over ``functional.py``."""
