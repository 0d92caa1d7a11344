"""Builds the CPU kernels where torch and a C++20 compiler are at hand, else a pure-Python package.

Everything else about the package is in pyproject.toml. The extension uses torch's stable ABI (2.10) and links to no
Python, so one build serves every Python and every later torch: the wheel's tag is py3-none-<platform>.

`REPLAYSTATE_EXTENSION` decides: "auto" (the default) as above, "require" fails the build where the extension cannot be
built (release wheels) and brings torch into an isolated build, "skip" never builds it.
`REPLAYSTATE_SANITIZE=address,undefined` makes a sanitizer build.
"""

import importlib.util
import os
import platform
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools._distutils.ccompiler import new_compiler
from setuptools._distutils.sysconfig import customize_compiler
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "replaystate._cpu_kernels"
TARGET_TORCH = "0x020a000000000000"  # 2.10: the oldest torch that the build runs with
MODE = os.environ.get("REPLAYSTATE_EXTENSION", "auto")
SANITIZE = os.environ.get("REPLAYSTATE_SANITIZE", "")

X86 = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    # GCC 12's own AVX-512 headers warn about registers that they leave undefined on purpose.
    "kernels_avx512.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
        *("-mprefer-vector-width=512", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    ],
}
ARM = {"kernels_neon.cpp": []}


def architecture() -> str:
    """The machine built for: macOS names it in ARCHFLAGS when it differs from this one."""
    flags = os.environ.get("ARCHFLAGS", "")
    machine = "arm64" if "arm64" in flags else "x86_64" if "x86_64" in flags else platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def sources() -> dict[str, list[str]]:
    """Each source with the flags of its own."""
    common: dict[str, list[str]] = {"binding.cpp": [], "dispatch.cpp": [], "kernels_scalar.cpp": []}
    return common | {"x86_64": X86, "aarch64": ARM}.get(architecture(), {})


def torch_root() -> Path | None:
    """Where torch is installed, without importing it; None when it is not, or is too old to have the stable ABI."""
    spec = importlib.util.find_spec("torch")
    root = Path(spec.origin).parent if spec and spec.origin else None
    return root if root and (root / "include/torch/csrc/stable/library.h").exists() else None


@lru_cache(maxsize=1)
def missing() -> str | None:
    """What keeps the extension from being built here, None when nothing does."""
    if torch_root() is None:
        return (
            "torch >= 2.10 is not in the build environment (pip install torch, then pip install --no-build-isolation; "
            "or REPLAYSTATE_EXTENSION=require with a PIP_CONSTRAINT that pins torch, for an isolated build)"
        )
    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.cpp")
        probe.write_text("#include <optional>\nint main() { return std::optional<int>(0).value(); }\n")
        try:
            compiler.compile([str(probe)], output_dir=scratch, extra_postargs=["-std=c++20"])
        except Exception as error:
            return f"no working C++20 compiler ({error})"
    return None


class BuildExtension(build_ext):
    """Compiles each source with its own ISA flags, and names the library without a Python ABI tag."""

    def get_ext_filename(self, fullname: str) -> str:
        """One name on every platform: torch.ops.load_library does not care about the suffix."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: the library registers itself when it is loaded."""
        return []

    def run(self) -> None:
        """Build; only called when there is something to build with, or it is required."""
        reason = missing()
        if reason is not None:
            raise SystemExit(f"replaystate: the CPU kernels cannot be built: {reason}")
        super().run()

    def get_source_files(self) -> list[str]:
        """For the source distribution."""
        return [str(path) for path in sorted(Path("csrc").iterdir())]

    def build_extension(self, ext: Extension) -> None:
        """Compile every file with the common flags and its own, and link to libtorch_cpu alone."""
        root = torch_root()
        assert root is not None
        flags = ["-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra"]
        link = []
        if SANITIZE:
            flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-g1", "-O1"]
            link += [f"-fsanitize={SANITIZE}"]
        objects = []
        for name, own in sources().items():
            includes = ["csrc"]
            if name == "binding.cpp":
                own = [*own, f"-DTORCH_TARGET_VERSION={TARGET_TORCH}", f"-isystem{root / 'include'}"]
            objects += self.compiler.compile(
                [str(Path("csrc", name))],
                output_dir=self.build_temp,
                include_dirs=includes,
                extra_postargs=[*flags, *own],
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["torch_cpu"],
            library_dirs=[str(root / "lib")],
            extra_postargs=link,
            target_lang="c++",
        )


class Wheel(bdist_wheel):
    """py3-none-<platform> with the extension, py3-none-any without."""

    def finalize_options(self) -> None:
        """A wheel with the extension is bound to its platform."""
        super().finalize_options()
        self.root_is_pure = not self.distribution.has_ext_modules()

    def get_tag(self) -> tuple[str, str, str]:
        """Bound to no Python."""
        _, _, platform_tag = super().get_tag()
        return "py3", "none", "any" if self.root_is_pure else platform_tag


class Package(Distribution):
    """Decides before the wheel gets its name whether there is an extension."""

    def has_ext_modules(self) -> bool:
        """Whether the extension will be (or was) built; says so when not."""
        reason = "REPLAYSTATE_EXTENSION=skip" if MODE == "skip" else missing()
        if reason is not None and MODE != "require" and not hasattr(self, "_told"):
            self._told = True
            sys.stderr.write(f"replaystate: a pure-Python package, without CPU kernels: {reason}\n")
        return MODE == "require" or reason is None


setup(
    distclass=Package,
    ext_modules=[Extension(NAME, [])],
    # Asked of pip by an isolated build, whose environment has nothing but setuptools; elsewhere torch is there.
    setup_requires=["torch>=2.10"] if MODE == "require" and torch_root() is None else [],
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": Wheel},
)
