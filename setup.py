"""The one thing pyproject.toml cannot say: the C kernel is an optional shared library, not a Python extension.

It is loaded with ctypes and knows nothing of Python, so one wheel (tag py3-none-<platform>) serves every version. If
it cannot be compiled, the install goes on without it and torch's operators do the work.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNEL = Extension(
    "batchnorm.kernels._bn",
    sources=["src/batchnorm/kernels/bn.c"],
    depends=sorted(map(str, Path("src/batchnorm/kernels").glob("*.h"))),
    # Nobody reads errno or floating-point traps; without them, loops with sqrt and comparisons become vector code.
    extra_compile_args=[
        "-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
    ],
    libraries=["m"],
)  # fmt: skip


class BuildKernel(build_ext):
    """Build the library under its plain name; a failure costs speed, not the install."""

    def get_ext_filename(self, fullname):
        return "/".join(fullname.split(".")) + ".so"

    def get_export_symbols(self, ext):
        return []

    def run(self):
        try:
            super().run()
        except Exception as error:
            print(f"batchnorm: the C kernel could not be built ({error}).")
            print("batchnorm: installing without it; torch's own operators will be used, which are slower.")
            self.extensions = []

    def get_outputs(self):
        return super().get_outputs() if self.extensions else []

    def copy_extensions_to_source(self):
        if self.extensions:
            super().copy_extensions_to_source()


class AnyPython(bdist_wheel):
    """Tag the wheel for any Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[KERNEL], cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython})
