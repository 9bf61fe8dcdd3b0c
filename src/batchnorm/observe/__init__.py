"""Observe a network while it trains (``watch``), and measure it at one moment (``probe``)."""
