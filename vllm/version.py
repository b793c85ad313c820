"""The versions of this package. Imports nothing, because the build reads this file."""

__version__ = "0.33.0+hse.0.3.0"
"""The release of vLLM whose API this package has, then its own version.

Other packages read it to decide whether they can use the API.
"""
API_VERSION, _, VERSION = __version__.partition("+hse.")
PRODUCT = "Hidden-states engine"
"""Name of this program; its package shares its name with another project."""
VALUES_VERSION = 1
"""Raised by a release that computes different bits for the same model on the same kernels."""
