"""The version of this package. No imports: the build reads this file."""

__version__ = "0.1.0"
PRODUCT = "Hidden-states engine"
"""What this program calls itself: its package has the name of another project's."""
