"""The compiled core, which is optional: where it cannot be built, kvd installs and runs on the reference."""

import sys
from glob import glob

from setuptools import Extension, setup

CORE = Extension(
    "kvd.core._native",
    ["kvd/core/_native.pyx"],
    include_dirs=["kvd/core"],
    depends=[*glob("kvd/core/native*"), "kvd/core/vendor/xxhash/xxhash.h"],
    extra_compile_args=["-O3", "-fno-strict-aliasing"],
)


def extensions():
    """None on big-endian machines, whose words are not the ones that are hashed, and without Cython."""
    if sys.byteorder != "little":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    made = cythonize([CORE], build_dir="build")
    for extension in made:
        extension.optional = True  # Cython does not take this over
    return made


setup(ext_modules=extensions())
