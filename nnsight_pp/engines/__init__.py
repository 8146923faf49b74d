"""Engines: where blocks meet a model."""
