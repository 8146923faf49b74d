"""Frames: from the user's `with` to a block, and from a report back into the user's names."""
