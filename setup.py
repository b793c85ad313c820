"""Builds the native CPU kernels with CMake; everything else stands in pyproject.toml.

There is a library for each instruction set of the machine's kind, of operators that torch loads
through its stable ABI, so they carry no Python ABI in their names. Torch's headers are those of
the environment that builds. Without a working C++ compiler the installation still succeeds: the
package then runs on torch alone, slower, and says so at run time.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
ISAS = {
    "x86_64": ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    "amd64": ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    "aarch64": ("neon",),
    "arm64": ("neon",),
}
"""Those that CMakeLists.txt builds."""
LIBRARIES = [f"vllm.ops._cpu_{isa}" for isa in ISAS.get(platform.machine().lower(), ())]


def find_compiler() -> str:
    """The C++ compiler CMake will use. Raises CompileError when there is none."""
    wanted = os.environ.get("CXX")
    for name in [wanted.split()[0]] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise CompileError(f"no C++ compiler ({f'CXX={wanted}' if wanted else 'c++, g++, clang++'})")


def find_torch() -> Path:
    """The folder of the installed torch. Raises CompileError when there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError("torch, whose headers the kernels are compiled with, is not installed")
    return Path(spec.origin).parent


def run(*command: str) -> None:
    """Run a build tool; its failure is a CompileError that carries its last lines."""
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    print(result.stdout)
    if result.returncode:
        last_lines = "\n".join(result.stdout.splitlines()[-20:])
        raise CompileError(f"{' '.join(command[:2])} failed:\n{last_lines}")


class BuildKernels(build_ext):
    """Runs CMake, once for all libraries."""

    is_built = False

    def run(self) -> None:
        if self.inplace:  # into the source tree, as an editable installation has it
            for library in (ROOT / "vllm" / "ops").glob("_cpu_*.so"):
                library.unlink()  # of other sources: nobody is to use it when this build fails
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        if self.is_built:
            return
        try:
            self._build(Path(self.get_ext_fullpath(ext.name)).resolve().parent)
            self.is_built = True
        except CompileError as error:
            print(
                f"vllm: the native CPU kernels are not built, the slow path will be used: {error}"
            )
            raise  # the extension is optional: setuptools goes on without it

    def _build(self, output: Path) -> None:
        find_compiler()
        torch = find_torch()
        build = str(Path(self.build_temp).resolve() / "kernels")
        # --fresh: pip's isolated environment, whose tools a cache names, is gone next time.
        configure = ["cmake", "--fresh", "-S", str(ROOT), "-B", build]
        configure += [f"-DKERNELS_OUTPUT_DIRECTORY={output}", f"-DTORCH_DIRECTORY={torch}"]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        run(*configure)
        run("cmake", "--build", build, "--parallel", str(os.cpu_count() or 1))


def write_commit(package: Path) -> None:
    """Write commit.txt, which `vllm --version` shows, if this is a git repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        done = subprocess.run([*command, "--exclude=*"], stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            (package / "commit.txt").write_text(done.stdout, encoding="utf-8")


class BuildPython(build_py):
    """Adds the commit to a wheel. An editable installation asks git when it runs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib) / "vllm")


class SourceArchive(sdist):
    """Adds the commit to a source archive, from which a wheel gets it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "vllm")


class Wheel(bdist_wheel):
    """For any Python 3: the kernels know torch's stable ABI only; without them, any machine."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform_tag = super().get_tag()
        has_kernels = any(Path(self.bdist_dir or ".").glob("vllm/ops/_cpu_*.so"))
        return "py3", "none", platform_tag if has_kernels else "any"


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in LIBRARIES],
    cmdclass={
        "build_ext": BuildKernels,
        "build_py": BuildPython,
        "bdist_wheel": Wheel,
        "sdist": SourceArchive,
    },
)
