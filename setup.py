"""Lists the packages, and compiles the codec's kernels where there is a C++ compiler; pyproject.toml has all else.

Without one, umbel installs all the same and computes with torch: slower, the same to the last bit.
"""

from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PARTS = ("aggregation", "client", "server", "sim")
KERNELS = Path("aggregation", "kernels")


class BuildKernels(build_ext):
    """A library for ctypes, not a module: no name that Python would import, and nothing of Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".native.so"))


setup(
    packages=["umbel", *(f"umbel.{name}" for part in PARTS for name in (part, *find_packages(include=[f"{part}.*"])))],
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "umbel.aggregation.kernels.kernels",
            sources=[str(KERNELS / "kernels.cpp")],
            depends=[str(header) for header in sorted(KERNELS.glob("kernels_*.h"))],
            language="c++",
            # No contraction: a fused multiply-add rounds once where torch rounds twice.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-exceptions",
                "-fno-rtti",
                "-fvisibility=hidden",
                "-Wno-psabi",
                "-Wno-uninitialized",  # inside GCC 12's own header
            ],
            optional=True,
        )
    ],
)
