"""Runs the tests that depend on torch on another release of torch: `make test-torch TORCH=2.10.0`.

PyPI's builds of torch for Linux cannot be imported without NVIDIA's libraries, 2 to 4 GB. On a CPU
torch calls almost none of their functions. So the environment has torch itself, Triton, CUDA's
runtime and profiling interface (`REAL`). In place of the other libraries it has stubs: files with
the same names and functions, where each function aborts the process. All other packages come from
the environment that runs this program. The download is 0.8 to 1.1 GB instead of 5 GB.

Usage: python -m tests.other_torch VERSION FOLDER [FILE ...]
"""

import collections
import concurrent.futures
import functools
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
REAL = "nvidia-cuda-runtime", "nvidia-cuda-cupti"
"""NVIDIA packages that are installed without stubs, because `import torch` and profiling on the CPU
call their functions.
"""
TESTS = (
    "tests/test_torch_private.py",
    "tests/run",
    "tests/trainer",
    "tests/model",
    "tests/parallel/test_documents.py",
    "tests/parallel/test_groups.py",
    "tests/parallel/test_collectives.py",
    "tests/parallel/test_compile.py",
    "tests/parallel/test_parity.py",
    "tests/engines/test_fake_gpu.py",
    "tests/test_train.py",
)
"""Tests of code that depends on the torch release: checkpoints, process groups, DTensor, FSDP2,
pipelining, compilation, the profiler, and attention within documents."""


def main(version: str, folder: str, arguments: list[str]) -> int:
    """Makes the environment if it is missing, runs the tests in it, and returns 1 if a test failed.

    Each test file runs in a separate process. A CUDA build of torch cannot fork ranks after a
    backward pass of the same process has started its threads. Two processes run at a time.
    """
    python = installed(version, Path(folder).absolute())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = pool.map(functools.partial(run_file, python), arguments or TESTS)
        return max([*runs], default=0)


def run_file(python: Path, file: str) -> int:
    """Runs the tests of a file or folder, prints their output, and returns 1 if a test failed."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"{file}\n{done.stdout}{done.stderr}", flush=True)
    return int(done.returncode != 0)


def installed(version: str, folder: Path) -> Path:
    """Returns the path of the Python in an environment with this torch release."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        site = next(folder.glob("lib/python3*/site-packages"))
        pip_install(python, f"torch=={version}")
        # Triton is needed by the tests that check the code generated for a GPU.
        needs = next(site.glob("torch-*.dist-info/METADATA")).read_text()
        triton = re.findall(r"^Requires-Dist: (triton==[\w.]+)", needs, re.M)
        if triton:
            pip_install(python, *triton)
        cuda = re.search(r"^cuda.*= '(\d+)\.(\d+)", (site / "torch/version.py").read_text(), re.M)
        if cuda is not None:
            major, minor = int(cuda[1]), int(cuda[2])
            suffix = f"-cu{major}" if major < 13 else ""
            pip_install(python, *(f"{name}{suffix}=={major}.{minor}.*" for name in REAL))
            write_stubs(site)
        # Folders on sys.path, in this order: the project, the environment with its torch, the other
        # packages.
        (site / "a_project.pth").write_text(f"{ROOT}\n")
        (site / "b_packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        done.touch()
    return python


def pip_install(python: Path, *packages: str) -> None:
    """Installs packages without their dependencies."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    subprocess.run([python, "-m", "pip", "install", *options, *packages], check=True)


def write_stubs(site: Path) -> None:
    """Writes a stub for each missing NVIDIA library that torch's libraries are linked with."""
    folder = site / "torch" / "lib"
    files = [*folder.glob("*.so*"), *site.glob("nvidia/**/*.so*")]
    needed: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    owners: dict[str, str] = {}
    for file in files:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", file)))
        owners |= version_owners(file)
        for line in output("nm", "-D", file).splitlines():
            *_, kind, symbol = line.split()
            if kind in "Uw":
                undefined.add(symbol)
            else:
                defined.add(symbol.partition("@")[0])
    missing = sorted(needed - {file.name for file in files})
    missing = [name for name in missing if re.match(r"lib(cu|nccl|nv)", name)]
    stubs: dict[str, dict[str, list[str]]] = {
        name: collections.defaultdict(list) for name in missing
    }
    for symbol in sorted(undefined):
        name, _, version = symbol.replace("@@", "@").partition("@")
        if name in defined:
            continue
        if version:
            if owners.get(version) in stubs:
                stubs[owners[version]][version].append(name)
        elif re.match(r"cu[A-Za-z]|nccl|nvshmem|nvrtc|nvtx", name):
            # This symbol names no library, so any stub may define it.
            stubs[missing[0]][""].append(name)
    for name in missing:
        write_stub(folder / name, stubs[name])


def version_owners(file: Path) -> dict[str, str]:
    """Returns a dict from each symbol version that a library requires to the name of the library
    that must define the version.
    """
    owners: dict[str, str] = {}
    library = ""
    for line in output("readelf", "-VW", file).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)\s+Flags", line)):
            owners[found[1]] = library
    return owners


def write_stub(file: Path, symbols: dict[str, list[str]]) -> None:
    """Writes a shared library that defines functions with the given names. `symbols` maps a symbol
    version to the names of its functions.
    """
    names = [name for versioned in symbols.values() for name in versioned]
    source, versions = file.with_suffix(".c"), file.with_suffix(".map")
    source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
    versions.write_text(
        "".join(
            f"{version} {{ global: {'; '.join(versioned)}; }};\n"
            for version, versioned in symbols.items()
            if version
        )
    )
    script = [f"-Wl,--version-script={versions}"] if versions.stat().st_size else []
    options = ["-w", "-shared", "-nostdlib", "-fPIC", f"-Wl,-soname,{file.name}"]
    subprocess.run(["gcc", *options, "-o", file, source, *script], check=True)
    source.unlink()
    versions.unlink()


def output(*command: str | Path) -> str:
    """Returns the standard output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
