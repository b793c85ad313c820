"""The versions of this package. No imports: the build reads this file."""

__version__ = "0.33.0+hse.0.3.0"
"""The release of vLLM whose API this package has, then its own version.

Other packages read it to decide whether they can use the API.
"""
API_VERSION, _, VERSION = __version__.partition("+hse.")
PRODUCT = "Hidden-states engine"
"""The name of this program: its package has the name of another project's."""
VALUES_VERSION = 1
"""Raised by a release that computes other bits for the same model on the same kernels."""
