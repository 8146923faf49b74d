"""Places: which stage owns what, and how a value gets from one stage to another."""
