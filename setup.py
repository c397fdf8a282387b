"""Compiles the integer codec's kernels where there is a C++ compiler; pyproject.toml says all else.

Without one, umbel installs all the same and computes with torch: slower, the same to the last bit.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CODEC = Path("aggregation", "codec")


class BuildKernels(build_ext):
    """A library for ctypes, not a module: no name that Python would import, and nothing of Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".native.so"))


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "umbel.aggregation.codec.kernels",
            sources=[str(CODEC / "kernels.cpp")],
            depends=[str(header) for header in sorted(CODEC.glob("kernels_*.h"))],
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
