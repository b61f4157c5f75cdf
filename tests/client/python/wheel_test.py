"""The wheel: made from the build, installed into a fresh virtual environment, and used as README.md says."""
import glob
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from support import BUILD, ROOT


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    output = run(sys.executable, os.path.join(ROOT, "scripts", "wheel"), "--build", BUILD, folder)
    (path,) = folder.iterdir()
    assert output.startswith(str(path) + ": ")
    return path


class Installed:
    """A virtual environment with the wheel and the pytest of this one, and with no other variable than HOME and PATH."""

    def __init__(self, folder, wheel):
        venv.create(folder, with_pip=True, system_site_packages=True)
        self.bin = os.path.join(folder, "bin")
        self.environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        self.run("python", "-m", "pip", "install", "--no-index", "--no-deps", str(wheel))
        self.package = os.path.dirname(self.run("python", "-c", "import cppool; print(cppool.__file__)").strip())

    def run(self, program, *arguments, **options):
        return run(os.path.join(self.bin, program), *arguments, env=self.environment, **options)


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("venv"), wheel)


def test_tag_and_content(wheel):
    assert re.fullmatch(r"cppool-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {"cppool/bin/cppoold", "cppool/bin/cppool", "cppool/lib/libcppool_client.so.0.1", "cppool/lib/libcppool_client.a",
                "cppool/lib/cmake/cppool/cppoolConfig.cmake", "cppool/include/cppool/case.h", "cppool/include/cppool/runtime.h",
                "cppool/include/cppool/client.h", "cppool/include/cppool/pool.h", "cppool/pytest_plugin.py", "cppool/py.typed",
                "cppool/share/cppool/_ranks/__main__.py", "cppool/share/cppool/_ranks/rank.py"} <= names
        assert ("cppool/lib/libcppool_cuda.so" in names) == os.path.exists(os.path.join(BUILD, "lib", "libcppool_cuda.so"))
        plugins = {"cppool/pytest_plugin.py", "cppool/_pytest_ranks.py", "cppool/torch_testing.py", "cppool/deepspeed.py",
                   "cppool/torchrun.py"}
        assert plugins <= names and not any("test" in name and name not in plugins and "/share/doc/" not in name for name in names)
        assert {"cppool/share/doc/cppool/copyright", "cppool/share/doc/cppool/client/README.md"} <= names
        (notices,) = (name for name in names if name.endswith(".dist-info/copyright"))
        assert all(holder in archive.read(notices).decode() for holder in ("Niels Lohmann", "Chart.js Contributors"))
        assert archive.read("cppool/lib/libcppool_client.so") == b"INPUT(libcppool_client.so.0.1)\n"  # for the linker
        assert archive.getinfo("cppool/share/cppool/shims/torchrun").external_attr >> 16 & 0o111


def test_twine(wheel):
    if shutil.which("twine") is None:
        pytest.skip("no twine: scripts/setup --tests installs it on Debian")
    run("twine", "check", "--strict", wheel)


def test_libraries_that_it_needs(installed):
    """Only what every system has that the tag names: above all no spdlog, fmt, CUDA or NCCL."""
    files = glob.glob(os.path.join(installed.package, "bin", "*")) + [
        file for file in glob.glob(os.path.join(installed.package, "lib", "*.so*")) if not file.endswith("libcppool_client.so")]
    assert len(files) >= 3
    for file in files:
        dynamic = run("readelf", "-W", "--dynamic", file)
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        assert needed <= {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, file
        if "libcppool_client.so" in file:
            assert not {"libstdc++.so.6", "libgcc_s.so.1"} & needed  # another process's may be older
        if file.endswith("libcppool_cuda.so"):
            (path,) = re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic)
            assert os.path.normpath(path.replace("$ORIGIN", os.path.dirname(file))) == os.path.join(os.path.dirname(installed.package), "nvidia", "nccl", "lib")


def test_programs(installed, tmp_path):
    assert "1 passed, 0 failed, 0 skipped" in installed.run("cppool", "run", "--param", "max_seqlen_q=64", "--backend", "host")
    assert "cppoold" in installed.run("cppoold", "--help")
    doctor = installed.run("python", "-m", "cppool", "doctor", cwd=tmp_path)
    assert os.path.join(installed.package, "bin", "cppoold") in doctor
    module = os.path.join(os.path.realpath(installed.package), "bin", "..", "lib", "libcppool_cuda.so")
    assert f"CUDA module: {module if os.path.exists(module) else 'the CUDA module was not found'}" in doctor


def test_example(installed, tmp_path):
    """The wheel's example, in a process that has nothing but the wheel and pytest."""
    example = os.path.join(installed.package, "share", "doc", "cppool", "examples", "python", "test_attention.py")
    output = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", example, cwd=tmp_path)
    assert re.search(r"^21 passed", output, re.M), output


def test_program_in_c(installed, tmp_path):
    """client.h's program, against the headers and the library of the wheel."""
    with open(os.path.join(installed.package, "include", "cppool", "client.h"), encoding="utf-8") as file:
        (program,) = re.findall(r"\n \*\n((?: \*     .*\n| \*\n)+?) \*\n \* Text", file.read())
    (tmp_path / "program.c").write_text(re.sub(r"^ \*(     )?", "", program, flags=re.M))
    library = os.path.join(installed.package, "lib")
    run("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-I", os.path.join(installed.package, "include"), "program.c", "-o", "program",
        os.path.join(library, "libcppool_client.so"), "-Wl,-rpath," + library, cwd=tmp_path)
    assert run("./program", cwd=tmp_path, env=installed.environment).startswith('0 {"answer":')


def test_build_without_the_library(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "wheel"), "--build", tmp_path], stderr=subprocess.PIPE, text=True,
                          check=False)
    assert done.returncode == 1 and "has no libcppool_client.so: build its target cppool_programs first" in done.stderr
