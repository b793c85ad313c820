"""Names of communicators between devices; there are none."""
