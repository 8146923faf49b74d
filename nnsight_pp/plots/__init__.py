"""Pictures of what a trace has saved: values in, a matplotlib figure out.

* `logit_lens_grid`: what each layer would say next, at each position.
* `patching_heatmap`: what a patch at each layer and position does, with its noise floor.
* `norm_by_layer`: how long the residual stream is at each layer.

They take plain tensors and token texts, so they work on any engine's saves. Nothing here touches
pyplot or a setting of matplotlib: a figure is drawn by the backend of whoever saves or shows it.
"""

from __future__ import annotations

try:
    import matplotlib as _matplotlib  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise ImportError(
        "`nnsight_pp.plots` needs matplotlib, which is not installed. "
        "Install it with `pip install nnsight_pp[plots]`."
    ) from error

from nnsight_pp.plots.heatmap import patching_heatmap
from nnsight_pp.plots.lens_grid import logit_lens_grid
from nnsight_pp.plots.norms import norm_by_layer
from nnsight_pp.plots.picture import Picture

__all__ = ["Picture", "logit_lens_grid", "norm_by_layer", "patching_heatmap"]
