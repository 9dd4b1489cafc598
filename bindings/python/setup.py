"""The compiled module by the project's CMake, so that there is one build; the rest stands in
pyproject.toml."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TOP = Path(__file__).resolve().parent.parent.parent


def version() -> str:
    """The one place of the version: include/rollstore/error.h."""
    header = (TOP / "include/rollstore/error.h").read_text()
    parts = (
        re.search(rf"#define RST_VERSION_{part} (\d+)", header)
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    return ".".join(found.group(1) for found in parts if found)


class BuildWithCMake(build_ext):
    """Build CMake's target rollstore-python, and take the module it makes."""

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        module.parent.mkdir(parents=True, exist_ok=True)
        cmake = os.environ.get("CMAKE", "cmake")
        subprocess.run(
            [
                cmake,
                "-S",
                TOP,
                "-B",
                build,
                "-DCMAKE_BUILD_TYPE=Release",
                "-DROLLSTORE_TESTS=OFF",
                "-DROLLSTORE_TOOL=OFF",
                "-DROLLSTORE_PYTHON=ON",
                f"-DPython3_EXECUTABLE={sys.executable}",
                f"-DPython3_NumPy_INCLUDE_DIR={numpy.get_include()}",
            ],
            check=True,
        )
        jobs = str(os.cpu_count() or 1)
        subprocess.run(
            [cmake, "--build", build, "--target", "rollstore-python", "--parallel", jobs],
            check=True,
        )
        built = build / "python" / "rollstore" / module.name
        self.copy_file(str(built), str(module))


# What a build leaves behind, a later wheel would pick up again: each has a folder of its own.
with tempfile.TemporaryDirectory() as scratch:
    setup(
        version=version(),
        options={"build": {"build_base": scratch}},
        ext_modules=[Extension("rollstore._rollstore", sources=[])],
        cmdclass={"build_ext": BuildWithCMake},
    )
