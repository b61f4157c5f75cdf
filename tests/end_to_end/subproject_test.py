#!/usr/bin/env python3
"""Builds a project that has cppool as a part, by FetchContent, and runs its test. Objects that BUILD has from the same commands are taken
from there (reuse_objects.py).

    subproject_test.py ROOT BUILD CMAKE
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

PROJECT = """cmake_minimum_required(VERSION 3.22)
project(harness LANGUAGES CXX)
include(FetchContent)
FetchContent_Declare(cppool GIT_REPOSITORY https://example.org/cppool.git)
FetchContent_MakeAvailable(cppool)
enable_testing()
add_executable(program ${cppool_SOURCE_DIR}/client/examples/program.cpp)
target_link_libraries(program PRIVATE cppool::client)
target_compile_definitions(program PRIVATE DAEMON="$<TARGET_FILE:cppool::cppoold>")
add_test(NAME program COMMAND program)
install(TARGETS program)
"""


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


class Subproject(unittest.TestCase):
    def test_fetch_content(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "CMakeLists.txt"), "w", encoding="utf-8") as file:
                file.write(PROJECT)
            build, prefix = os.path.join(folder, "build"), os.path.join(folder, "prefix")
            reuse = ";".join([os.path.join(ROOT, "tests/end_to_end/reuse_objects.py"), BUILD, os.path.join(build, "_deps/cppool-build")])
            run(CMAKE, "-S", folder, "-B", build, "-DFETCHCONTENT_SOURCE_DIR_CPPOOL=" + ROOT, "-DCPPOOL_CUDA=OFF",
                "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_CXX_COMPILER_LAUNCHER=" + reuse)
            with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
                commands = [entry["command"] for entry in json.load(file)]
            self.assertFalse([command for command in commands if "-Werror" in command or "/tests/" in command])
            with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as file:
                self.assertIn("\nCMAKE_BUILD_TYPE:STRING=\n", file.read())

            run(CMAKE, "--build", build, "--target", "program")  # and cppoold with it
            self.assertFalse({"bin", "lib", "include", "share", "python"} & set(os.listdir(build)))
            environment = {"PATH": "/usr/bin:/bin", "HOME": folder}  # no variable, and no installation
            out = run("ctest", "--test-dir", build, "--output-on-failure", env=environment)
            self.assertRegex(out, r"100% tests passed, 0 tests failed out of 1\n")

            run(CMAKE, "--install", build, "--prefix", prefix)
            installed = [name for _, _, names in os.walk(prefix) for name in names]
            self.assertEqual(installed, ["program"])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, BUILD, CMAKE = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3]
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
