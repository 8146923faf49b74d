"""What pyproject.toml cannot say: csrc/ travels inside a wheel, and is compiled on request.

Nothing is compiled by default: the extension must fit the torch that it meets, so it is built on
first use (nnsight_pp/interleave/extension.py). NNSIGHT_PP_PREBUILD=1 builds it now, warnings
being errors, for the torch of this environment: use it with --no-build-isolation.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCES = sorted([*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc").glob("*.hpp")])
PREBUILD = os.environ.get("NNSIGHT_PP_PREBUILD") == "1"


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        # An editable install finds csrc/ beside the package.
        package = (ROOT if self.editable_mode else Path(self.build_lib)) / "nnsight_pp"
        if not self.editable_mode:
            (package / "csrc").mkdir(parents=True, exist_ok=True)
            for source in SOURCES:
                shutil.copy(source, package / "csrc")
        if PREBUILD:
            sys.path.insert(0, str(ROOT))
            extension = importlib.import_module("nnsight_pp.interleave.extension")
            extension.build(package, strict=True)
            (package / "lock").unlink()

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(str(s.relative_to(ROOT)) for s in SOURCES)]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return PREBUILD


setup(cmdclass={"build_py": BuildPackage}, distclass=PlatformDistribution)
