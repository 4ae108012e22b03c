"""Build the C++ library. All other package metadata is in pyproject.toml.

The library has a plain C interface: building it needs a C++ compiler, but neither torch nor Python's headers. Without a
compiler, recurl is installed without the library, and reports this when a run on the CPU begins.
"""

from __future__ import annotations

import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

SETUPTOOLS = 77
"""The oldest setuptools that supports pyproject.toml with a license given as an SPDX expression."""
if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
    sys.exit(
        f"Building recurl needs setuptools {SETUPTOOLS} or newer, found {setuptools.__version__}: pip install "
        f"'setuptools>={SETUPTOOLS}', or omit --no-build-isolation."
    )

from setuptools import Extension, setup  # noqa: E402 - an older setuptools lacks some of these
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

SOURCES = Path("src/recurl/native/src")
LIBRARY = "librecurl_native.so"
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread"]
X86_FLAGS = {
    "avx2.cpp": ["-mavx2", "-mfma"],
    "avx512.cpp": ["-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512vl"],
}


class BuildLibrary(build_ext):
    """Compile each source for its own instruction set; always rebuild, so that the library is never stale."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link ``ext`` as a plain shared library."""
        x86 = self.plat_name.endswith(("x86_64", "amd64"))
        own = shlex.split(os.environ.get("CXXFLAGS", ""))

        def compile_source(source: str) -> list[str]:
            flags = FLAGS + (X86_FLAGS.get(Path(source).name, []) if x86 else []) + own
            return self.compiler.compile([source], self.build_temp, extra_postargs=flags, depends=ext.depends)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_source, ext.sources) for name in names]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"], target_lang="c++"
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Return the same name for every platform and Python version: the library is not an extension module."""
        return str(Path(*fullname.split("."))) + ".so"


class Wheel(bdist_wheel):
    """Wheel for every Python version: for this platform if it has the library, else for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the same tag for every Python version, as nothing is compiled against one."""
        platform_tag = super().get_tag()[2]
        built = any(Path(self.bdist_dir).rglob(LIBRARY))
        return "py3", "none", platform_tag if built else "any"


setup(
    ext_modules=[
        Extension(
            f"recurl.native.{Path(LIBRARY).stem}",
            sources=sorted(map(str, SOURCES.rglob("*.cpp"))),
            depends=sorted(map(str, (*SOURCES.rglob("*.h"), *SOURCES.rglob("*.inc")))),
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
