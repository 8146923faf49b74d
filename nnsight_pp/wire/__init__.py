"""Bytes: how blocks, values and reports travel between processes."""
