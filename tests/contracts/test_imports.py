"""What an import pulls in."""

import json
import subprocess
import sys

from contracts.sources import ROOT, sources

HEAVY = ("vllm", "transformers")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_the_package_pulls_in_neither_vllm_nor_transformers():
    code = (
        "import sys, nnsight_pp\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "assert nnsight_pp.__file__, 'a namespace package, its __init__.py is gone'"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


IMPORT_WITHOUT_VLLM = """
import importlib, json, sys, traceback

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "transformers"):
            raise ModuleNotFoundError(f"{name} (hidden by this test)", name=name)

sys.meta_path.insert(0, NotInstalled())
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc(limit=-2)
print(json.dumps(failed))
"""


def test_every_module_but_two_engines_imports_without_vllm_and_transformers():
    engines = ("nnsight_pp.engines.vllm", "nnsight_pp.engines.hf", "nnsight_pp.engines.language")
    names = [source.module for source in sources() if not source.module.startswith(engines)]
    done = run_python(IMPORT_WITHOUT_VLLM, json.dumps(names))
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())
