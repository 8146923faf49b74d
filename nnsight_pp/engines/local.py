"""The local engine: a torch module in this process.

How a run goes is `envoys.local_run`, because every node of a tree can start one.
"""

from __future__ import annotations

from nnsight_pp.envoys.envoy import Envoy


class NNsight(Envoy):
    """A torch module of this process, with blocks beside its forward. The root of a tree."""
