"""Builds what pyproject.toml cannot describe: the C kernel is an optional shared library, not a Python extension.

It is loaded with ctypes and does not use Python. The C call path to it (call.c) is an optional extension for Python's
stable ABI, so one wheel (tag py3-none-<platform>) serves every version. If either fails to compile, the install
continues: torch's operators replace the kernel, and Python code calls it without call.c.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HEADERS = sorted(map(str, Path("src/batchnorm/kernels").glob("*.h")))
KERNEL = Extension(
    "batchnorm.kernels._bn",
    sources=["src/batchnorm/kernels/bn.c"],
    depends=HEADERS,
    # Nobody reads errno or floating-point traps; without them, loops with sqrt and comparisons become vector code.
    extra_compile_args=[
        "-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
        "-Wno-unused-function",  # of the shared ones, a unit needs a few
    ],
    libraries=["m"],
)  # fmt: skip
CALL = Extension(
    "batchnorm.kernels._call",
    sources=["src/batchnorm/kernels/call.c"],
    depends=HEADERS,
    extra_compile_args=["-std=gnu11", "-O2", "-g0"],
    py_limited_api=True,
)
WITHOUT = {
    KERNEL.name: "the C kernel could not be built; torch's own operators will be used, which are slower",
    CALL.name: "the C call path to the kernel could not be built (are Python's headers there?); every call will take "
    "some microseconds longer",
}


class BuildKernel(build_ext):
    """Build the library under its plain name; a failure costs speed, not the install."""

    def get_ext_filename(self, fullname):
        if CALL.name.endswith(fullname):  # it is asked for by the last part of the name, too
            return super().get_ext_filename(fullname)
        return "/".join(fullname.split(".")) + ".so"

    def get_export_symbols(self, ext):
        return super().get_export_symbols(ext) if ext is CALL else []

    def build_extension(self, ext):
        compiler, self.compiler.compile = (
            self.compiler.compile,
            self.side_by_side if ext is KERNEL else self.compiler.compile,
        )
        try:
            super().build_extension(ext)
        except Exception as error:
            self.leave_out([ext], error)
        finally:
            self.compiler.compile = compiler

    def side_by_side(self, sources, output_dir, **options):
        """Compile the units of the kernel (see bn.c) at the same time, on as many cores as there are."""
        (source,) = sources

        def compiled(unit):
            folder = Path(output_dir, f"unit{unit}")
            folder.mkdir(parents=True, exist_ok=True)
            macros = [*(options.get("macros") or ()), ("BN_UNIT", str(unit))]
            return type(self.compiler).compile(self.compiler, [source], str(folder), **{**options, "macros": macros})

        units = int(re.search(r"#define BN_UNITS (\d+)", Path(source).read_text())[1])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [unit for made in pool.map(compiled, range(units)[::-1]) for unit in made]

    def run(self):
        try:
            super().run()
        except Exception as error:
            self.leave_out(self.extensions, error)

    def leave_out(self, extensions, error):
        for ext in extensions:
            print(f"batchnorm: {WITHOUT[ext.name]} ({error}).")
        self.extensions = [ext for ext in self.extensions if ext not in extensions]

    def get_outputs(self):
        return super().get_outputs() if self.extensions else []

    def copy_extensions_to_source(self):
        if self.extensions:
            super().copy_extensions_to_source()


class AnyPython(bdist_wheel):
    """Tag the wheel for any Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[KERNEL, CALL], cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython})
