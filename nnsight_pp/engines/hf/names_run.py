"""The check of the standard names on a model of this process: one forward on a few tokens.

It runs when a block first uses a standard name, on the loaded model, beside whatever run is on:
nothing of it is served to a block, and it draws no random numbers of the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nnsight_pp.core.location import ROOT
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.engines.hf.prompt_rows import PromptRows
from nnsight_pp.envoys.architectures import location_of
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.names_check import NamesCheck
from nnsight_pp.envoys.serve_point import install_serve_points
from nnsight_pp.envoys.standard_names import StandardNames, seen_at

if TYPE_CHECKING:
    from nnsight_pp.core.lens import Lens
    from nnsight_pp.core.location import Location

_NUM_TOKENS = 4
_CHECKED = (("", "residual_in"), ("attn", "output"), ("mlp", "output"), ("", "residual"))


def has_numbers(module: torch.nn.Module) -> bool:
    """Whether ``module`` computes numbers now, and not shapes alone."""
    is_faked = isinstance(torch.empty(0), FakeTensor)
    return not is_faked and not any(one.is_meta for one in module.parameters())


def untrue_names(root: StandardNames) -> dict[str, str]:
    """Return why standard names of the model below ``root`` are untrue, by location."""
    module: Any = root._module
    num_layers = len(root.layers)
    places: dict[Location, list[tuple[Location, Lens]]] = {}
    names = [(index, part, name) for index in range(num_layers) for part, name in _CHECKED]
    for index, part, name in (*names, (None, "", "final_norm"), (None, "", "logits")):
        seen = seen_at(root, index, part, name, PromptRows(None))
        assert seen is not None
        places.setdefault(seen.place, []).append((location_of(index, part, name), seen.lens))
    check = NamesCheck(num_layers)

    def note(location: Location, value: Any) -> Any:
        for standard, lens in places.get(location, ()):
            check.note(standard, lens.read(value, WholeCut()))
        return value

    # Goes with this function, and its serve points with it.
    gate = Gate()
    install_serve_points({one.path: _at(module, one.path) for one in places}, gate)
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    embedding = module.get_input_embeddings()
    ids = torch.arange(_NUM_TOKENS, device=embedding.weight.device) % embedding.num_embeddings
    gate.serve = note
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            module(input_ids=ids[None], use_cache=False)
            gate.serve = None
            norm = _at(module, f"{ROOT}.{root._family('layers').norm}")
            logits = check.value(location_of(None, "", "logits"))
            end = check.untrue_end(norm, module.get_output_embeddings(), logits)
    except Exception as error:
        why = f"The check of it failed: {type(error).__name__}: {error}"
        return {str(one): why for listed in places.values() for one, _ in listed}
    finally:
        gate.serve = None
    return {**check.untrue_parts(), **end}


def _at(module: torch.nn.Module, path: str) -> Any:
    return module.get_submodule(path[len(ROOT) + 1 :])
