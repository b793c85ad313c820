"""The version of this package. No imports: the build reads this file."""

__version__ = "0.3.0"
PRODUCT = "Hidden-states engine"
"""What this program calls itself: its package has the name of another project's."""
VALUES_VERSION = 1
"""Raised by a release that computes other bits for the same model on the same kernels."""
