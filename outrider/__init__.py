"""Outrider: speculative decoding as a distributed service, exact by construction."""

__version__ = "0.1.0"
