"""Picaflor: Mixture-of-Experts models larger than memory, on one machine, exactly."""

__version__ = "0.1.0"
