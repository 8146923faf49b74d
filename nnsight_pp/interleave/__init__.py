"""Turns: workers, and who runs when."""
