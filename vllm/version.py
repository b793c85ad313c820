"""The version of this package. No imports: the build reads this file."""

__version__ = "0.1.0"
