"""A package, so that none of the same name installed elsewhere takes its place."""
