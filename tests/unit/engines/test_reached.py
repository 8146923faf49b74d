"""What a block reaches of the user's own code: what travels to be imported, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from nnsight_pp.core.block import Block
from nnsight_pp.core.surroundings import check_modes
from nnsight_pp.engines.vllm.imports import modules_in
from nnsight_pp.engines.vllm.message import encoded
from nnsight_pp.engines.vllm.told import told_by
from nnsight_pp.errors import NotSupportedError
from nnsight_pp.interleave.randomness import Randomness
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, is_users


def message(block: str, **names: Any) -> BlockMessage:
    text = "".join(f"    {line}\n" for line in block.splitlines())
    return BlockMessage("t", Block("user.py", 3, text, "run"), names)


def sent(block: str, **names: Any) -> BlockMessage:
    """Return what a rank gets of ``block``."""
    return decode_block(encoded(message(block, **names), lambda obj: None), lambda name: None)


def refused(block: str, **names: Any) -> str:
    with pytest.raises(NotSupportedError) as error:
        encoded(message(block, **names), lambda obj: None)
    return " ".join(str(error.value).split())


# ---- what is refused ----------------------------------------------------------------------------


def reads_variable() -> str:
    return os.environ["HOME"]


def reads_deep() -> Any:
    return [(lambda: reads_variable())() for _ in range(1)]


def sets_printing() -> None:
    torch.set_printoptions(precision=2)


def sets_attribute() -> None:
    import torch.backends.mkldnn as backend

    backend.enabled = True


class Config:
    def __init__(self) -> None:
        self.scale = 2

    def from_variable(self) -> str | None:
        return os.getenv("HOME")

    def scaled(self, value: Any) -> Any:
        return value * self.scale


class Probe(torch.nn.Module):
    def forward(self, value: Any) -> Any:
        return value * len(os.environ["HOME"])


class Setting:
    def __enter__(self) -> None:
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None: ...


class Home:
    @property
    def home(self) -> str | None:
        return os.getenv("HOME")


def closure() -> Any:
    name = "HOME"
    return lambda: os.environ[name]


class Own:
    def setLevel(self, level: int) -> None:
        self.level = level


class OwnLogger(logging.Logger): ...


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("own.setLevel(3)", False),
        ("f = lambda: own.setLevel(3)", False),
        ("log.setLevel(3)", True),
        ("named.setLevel(3)", True),
        ("own.setLevel(3); log.setLevel(4)", True),
        ("own.setLevel(3); [log][0].setLevel(4)", True),
        ("new.setLevel(3)", True),
        ("set_num_threads(3)", True),
    ],
)
def test_a_method_of_an_own_object_may_be_called_as_a_setter_is(text: str, is_refused: bool):
    loggers = {"log": logging.getLogger("a"), "named": OwnLogger("b")}
    if is_refused:
        setter = torch.set_num_threads
        assert "calls `set" in refused(text, own=Own(), set_num_threads=setter, **loggers)
    else:
        encoded(message(text, own=Own()), lambda obj: None)


@pytest.mark.parametrize("text", ["os.environ['A'] = '1'", "(lambda: os.getenv('A'))()"])
def test_environment_variables_in_the_block_are_refused_at_its_line(text: str):
    assert "user.py:4" in refused(f"z = 1\n{text}", os=os)


@pytest.mark.parametrize(
    ("call", "names", "word"),
    [
        ("f()", {"f": reads_variable}, "reads_variable"),
        ("f()", {"f": reads_deep}, "reads_variable"),
        ("f()", {"f": closure()}, "<lambda>"),
        ("made[0]()", {"made": [reads_deep]}, "reads_variable"),
        ("c.from_variable()", {"c": Config()}, "Config.from_variable"),
        ("Config.from_variable(None)", {"Config": Config}, "Config.from_variable"),
        ("probe(z)", {"probe": Probe()}, "Probe.forward"),
        ("with made: pass", {"made": Setting()}, "Setting.__enter__"),
        ("z = home.home", {"home": Home()}, "Home.home"),
        ("m.reads_variable()", {"m": sys.modules[__name__]}, "reads_variable"),
    ],
)
def test_environment_variables_in_what_it_calls_name_both(call: str, names: Any, word: str):
    text = refused(f"z = 1\n{call}", **names)
    assert "user.py:4" in text
    assert word in text
    assert "test_reached.py" in text


def test_a_method_that_nothing_mentions_does_not_count():
    sent("z = c.scaled(2)", c=Config())
    sent("z = c.scaled(2)", c=Config)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("F.gelu = abs", "F.gelu"),
        ("torch.nn.functional.gelu = abs", "torch.nn.functional.gelu"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "allow_tf32"),
        ("torch.backends.cuda.matmul.allow_tf32 |= True", "allow_tf32"),
        ("torch.nn.Linear.forward = abs", "torch.nn.Linear.forward"),
        ("setattr(F, 'gelu', abs)", "`F`"),
        ("del F.gelu", "F.gelu"),
        ("sys.path.append('x')", "sys.path.append"),
        ("sys.modules['x'] = 1", "sys.modules"),
        ("import numpy as n\nn.pi = 3", "n.pi"),
        ("torch.set_num_threads(1)", "set_num_threads"),
        ("torch.use_deterministic_algorithms(True)", "use_deterministic_algorithms"),
        ("warnings.filterwarnings('ignore')", "filterwarnings"),
        ("logging.getLogger('x').setLevel(10)", "setLevel"),
        ("os.chdir('/')", "chdir"),
        ("with mock.patch('torch.relu'): pass", "mock.patch"),
        ("with mock.patch.object(F, 'gelu', abs): pass", "mock.patch"),
        ("import unittest.mock as m\nm.patch.dict(sys.modules)", "m.patch"),
        ("with torch.nn.attention.sdpa_kernel(()): pass", "sdpa_kernel"),
        ("(lambda: torch.set_float32_matmul_precision('high'))()", "set_float32_matmul_precision"),
    ],
)
def test_what_a_block_sets_on_a_library_is_refused_at_its_line(text: str, word: str):
    names = {
        "F": F, "torch": torch, "sys": sys, "warnings": warnings, "logging": logging, "os": os,
        "mock": mock,
    }  # fmt: skip
    found = refused(f"z = 1\n{text}", **names)
    assert word in found
    assert f"user.py:{4 + text.count(chr(10))}" in found


@pytest.mark.parametrize("name", ["sets_printing", "sets_attribute"])
def test_what_a_function_sets_on_a_library_is_refused_where_it_is_named(name: str):
    text = refused("z = 1\ncall()", call=globals()[name])
    assert name in text
    assert "user.py:4" in text


def uses_gelu(value: Any) -> Any:
    return F.gelu(value)


@pytest.mark.parametrize(
    ("target", "name", "text"),
    [
        (F, "gelu", "z = F.gelu(z)"),
        (F, "gelu", "z = torch.nn.functional.gelu(z)"),
        (F, "gelu", "import torch.nn.functional as mine\nz = mine.gelu(z)"),
        (F, "gelu", "call(z)"),
        (torch.Tensor, "relu", "z = z.relu()"),
        (torch.Tensor, "relu", "z = torch.Tensor.relu(z)"),
        (np, "exp", "np.exp(z)"),
    ],
)
def test_a_function_of_a_library_that_the_user_has_replaced_is_refused(
    target: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    names = {"F": F, "torch": torch, "np": np, "z": 1.0, "call": uses_gelu}
    sent(text, **names)
    monkeypatch.setattr(target, name, uses_gelu)
    found = refused(text, **names)
    assert name in found
    assert "uses_gelu" in found
    assert f"user.py:{3 + text.count(chr(10))}" in found
    sent("z = own(z)", own=uses_gelu if target is np else abs)


def test_what_stands_around_a_trace_and_does_not_reach_a_rank_is_refused():
    def modes() -> Iterator[Any]:
        yield torch.autocast("cpu")
        yield FlopCounterMode(display=False)

    block = Block("user.py", 3, "    z = 1\n", "run")
    for mode in modes():
        with mode, pytest.raises(NotSupportedError, match=r"user\.py:2"):
            check_modes(block)
    with torch.device("meta"), torch.no_grad():
        check_modes(block)


def test_what_is_its_own_or_put_back_is_left_alone():
    store = Config()
    sent(
        "with torch.no_grad(), np.errstate(all='ignore'), torch.random.fork_rng():\n"
        "    torch.manual_seed(1)\n"
        "    np.random.seed(1)\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "torch.set_default_dtype(torch.float32)\n"
        "store.scale += 1\n"
        "store.rows = [F.gelu, sys.path, torch.nn.Linear]\n"
        "store.rows.append(torch.backends.cuda.matmul.allow_tf32)\n"
        "F = store\n"
        "sys.stdout.write(logging.__name__)\n",
        store=store, torch=torch, np=np, warnings=warnings, sys=sys, logging=logging,
    )  # fmt: skip


# ---- what travels to be imported ---------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Iterator[str]:
    """A package of the user's, not imported yet."""
    name = f"users_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "counted.py").write_text(
        "import time\n"
        "counter = 0\nrows = []\n"
        "def add():\n    global counter\n    counter += 1\n    return counter\n"
        "def far():\n    from . import other\n    return other.value\n"
    )
    (folder / "other.py").write_text("value = 1\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    yield name
    sys.path.remove(str(tmp_path))
    for one in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[one]


def run(block: str, **names: Any) -> dict[str, Any]:
    """Run ``block`` as a rank does that has not imported any of the user's modules."""
    here = sent(block, **names)
    modules = modules_in(here.names)
    before = dict(sys.modules)
    found: dict[str, Any] = dict(here.names)
    with Randomness(1, python=False, numpy=False, modules=modules):
        exec(here.block.code(), found)
    assert {name: before.get(name) for name in modules} == {
        name: sys.modules.get(name) for name in modules
    }
    assert set(modules.values()).isdisjoint(before.values())
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import PACKAGE.counted\nfound = PACKAGE.counted.counter",
        "import PACKAGE.counted as c\nfound = c.counter",
        "from PACKAGE import counted\nfound = counted.counter",
        "from PACKAGE.counted import counter as found",
        "import importlib\nfound = importlib.import_module('PACKAGE.counted').counter",
        "found = __import__('PACKAGE.counted', fromlist=['x']).counter",
        "import sys\nfound = sys.modules['PACKAGE.counted'].counter",
        "def f():\n    import PACKAGE.counted as c\n    return c.counter\nfound = f()",
        "from PACKAGE.counted import *\nfound = counter",
        "from PACKAGE.counted import add\nfound = add() - 1",
    ],
)
def test_an_import_finds_the_module_as_it_is_here(text: str, package: str):
    module = importlib.import_module(f"{package}.counted")
    module.counter = 5  # type: ignore[attr-defined]
    assert run(text.replace("PACKAGE", package))["found"] == 5
    assert module.counter == 5  # type: ignore[attr-defined]


def test_what_a_function_imports_travels_too(package: str):
    module: Any = importlib.import_module(f"{package}.counted")
    other: Any = importlib.import_module(f"{package}.other")
    other.value = 7
    assert run("found = far()", far=module.far)["found"] == 7
    assert run(f"from {package}.counted import far\nfound = far()")["found"] == 7
    scope: dict[str, Any] = {}
    exec(f"def f():\n    from {package} import other\n    return other.value", scope)
    assert run("found = [f()]", f=scope["f"])["found"] == [7]


def test_a_module_that_is_not_here_is_refused(package: str):
    assert "Import it before" in refused(f"z = 1\nimport {package}.counted")
    importlib.import_module(package)
    for text in (f"from {package} import counted", f"import {package}.counted as c"):
        found = refused(f"z = 1\n{text}")
        assert "Import it before" in found
        assert "user.py:4" in found
    assert f"{package}.counted" not in sys.modules
    assert "main module" in refused("import __main__")


def test_modules_of_libraries_are_left_to_the_ranks():
    block = message("import torch.nn.functional as F, json\nimport wave\nfrom torch import nothing")
    encoded(block, lambda obj: None)
    assert block.names == {}


def test_a_name_that_an_import_binds_is_known():
    code = compile("import a.b\nimport a.b as c\nfrom a.b import d as e, f", "f", "exec")
    assert told_by(code).known_as == {
        "a": ("a", ""), "c": ("a.b", ""), "e": ("a.b", "d"), "f": ("a.b", "f"),
    }  # fmt: skip


def test_a_second_look_is_cheap():
    block = message("found = far() + c.scaled(2)", far=time.time, c=Config())
    told_by(block.block.code())
    with contextlib.suppress(NotSupportedError):
        encoded(block, lambda obj: None)
    hits = told_by.cache_info().hits
    misses = told_by.cache_info().misses
    encoded(block, lambda obj: None)
    assert told_by.cache_info().misses == misses
    assert told_by.cache_info().hits > hits


def test_a_namespace_package_is_the_users(tmp_path: Path):
    module = ModuleType("nowhere")
    module.__path__ = [str(tmp_path)]
    assert is_users(module)
