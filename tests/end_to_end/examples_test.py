#!/usr/bin/env python3
"""Installs a prefix and runs the examples in it: those of the client library, over pipes, and the case that daemon/own_case.md quotes.
user_case_test runs the larger case and the kernels, plugin_test.py the pytest file. docs_test.py compares them with the documents.

    examples_test.py ROOT BUILD CMAKE
"""
import functools
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.prefix = os.path.join(cls.folder.name, "prefix")
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", cls.prefix], check=True, stdout=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def example(cls, name):
        return os.path.join(cls.prefix, "share/doc/cppool/examples", name)

    @classmethod
    def run_command(cls, *command, environment=()):
        """Runs it as a user would, with the installed programs in PATH, and returns its stdout. Its stderr is for the error."""
        environment = {**os.environ, **dict(environment), "PATH": os.path.join(cls.prefix, "bin") + os.pathsep + os.environ["PATH"]}
        done = subprocess.run(command, cwd=cls.folder.name, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    @classmethod
    @functools.lru_cache(maxsize=None)
    def build(cls, name, *options):
        """Builds the example's folder, once, and returns the build folder."""
        build = os.path.join(cls.folder.name, name)
        cls.run_command(CMAKE, "-S", cls.example(name), "-B", build, "-DCMAKE_PREFIX_PATH=" + cls.prefix,
                        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror", *options)
        cls.run_command(CMAKE, "--build", build)
        return build

    def harness(self, name, framework):
        """A test program; the test is skipped where CMake has not found its framework."""
        program = os.path.join(self.build("client"), name)
        if not os.path.exists(program):
            print(f"skipped: {name}: CMake finds no {framework}", flush=True)
            self.skipTest(f"CMake finds no {framework}")
        return program

    def with_wrong_kernels(self, program):
        """The output of a test program, which fails, on a daemon whose kernels store what they have computed 1.5 times too large."""
        kernels = os.path.join(self.folder.name, "wrong.so")
        if not os.path.exists(kernels):
            with open(self.example("kernels/naive.c"), encoding="utf-8") as file:
                source, planted = re.subn(r"(uint32_t bits;\n)(  memcpy\(&bits, &value)", r"\1  value *= 1.5f;\n\2", file.read())
            self.assertEqual(planted, 1)
            with open(kernels + ".c", "w", encoding="utf-8") as file:
                file.write(source)
            self.run_command("cc", "-shared", "-fPIC", "-O2", "-I", os.path.join(self.prefix, "include"), kernels + ".c", "-o", kernels, "-lm")
        daemon = os.path.join(self.folder.name, "wrong_daemon")
        with open(daemon, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec "{self.prefix}/bin/cppoold" --kernels "{kernels}" "$@"\n')
        os.chmod(daemon, 0o755)
        done = subprocess.run(program, env={**os.environ, "CPPOOL_DAEMON": daemon}, stdout=subprocess.PIPE, text=True, check=False)
        self.assertGreater(done.returncode, 0, done.stdout)
        return done.stdout

    def assert_describes(self, text):
        """That a failure shows the result: the checks that do not hold, and the command that repeats it."""
        self.assertRegex(text, r"tensor +against +rank +max_abs_err +rel_err +tolerance +worst at +got +wanted +bad +where\n")
        self.assertRegex(text, r"\n *out +oracle +0 .* token ")
        self.assertRegex(text, r"\n *repeat: cppool run --world-size 2 .*--param cp_comm_type=")

    def test_program(self):
        build = self.build("client")
        self.assertEqual(self.run_command(os.path.join(build, "program")), "2 ranks: passed\n4 ranks: passed\n")

    def test_own_daemon(self):
        """A program finds the cppoold of the prefix that it was built with, which has been moved from the configured one."""
        done = subprocess.run([os.path.join(self.build("client"), "program")], env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True,
                              check=False)
        self.assertEqual(done.stdout, "2 ranks: passed\n4 ranks: passed\n")

    def test_program_that_fails(self):
        out = self.with_wrong_kernels([os.path.join(self.build("client"), "program")])
        self.assertTrue(out.startswith("2 ranks: failed\n"), out)
        self.assertIn("\n  dk      oracle   ", out)

    def test_catch2(self):
        program = self.harness("catch2_test", "Catch2 2")
        self.assertRegex(self.run_command(program), r"All tests passed \(\d+ assertions in 2 test cases\)")
        self.assert_describes(self.with_wrong_kernels([program, "ring*"]))

    def test_googletest(self):
        program = self.harness("googletest_test", "GoogleTest")
        out = self.run_command(program)
        self.assertRegex(out, r"\[  PASSED  \] 20 tests")
        self.assertNotIn("SKIPPED", out)
        out = self.with_wrong_kernels([program, "--gtest_filter=*mqa_256_bf16_bshd_p2p_W2"])
        self.assert_describes(out)
        self.assertIn("GetParam() = mqa_256 bf16 bshd p2p W=2", out)

    def test_ctest_on_warm_pools(self):
        """The tests that ctest discovers, each in a process of its own, use the daemons of the one server that ctest starts and ends."""
        build = self.build("client")
        names = [name for name in ("catch2_test", "googletest_test") if os.path.exists(os.path.join(build, name))]
        if not names:
            self.skipTest("CMake finds neither Catch2 2 nor GoogleTest")

        def ctest(*options):
            out = self.run_command("ctest", "--test-dir", build, "--output-on-failure", *options)
            self.assertIn("100% tests passed", out)
            return out

        def pools():
            out = self.run_command("cppool", "ps", "--json", "--socket", os.path.join(build, "cppool.sock"))
            return sorted((pool["world_size"], pool["pid"]) for pool in json.loads(out)["pools"])

        ctest("-FC", "pools", "-E", "pools_end")  # the server stays
        first = pools()
        self.assertEqual([world_size for world_size, _ in first], [2, 4])
        ctest("-FA", "pools", "-E", "pools_")
        self.assertEqual(pools(), first)
        ctest("-R", "pools_end")
        out = ctest("-j", "2", "--output-junit", "report.xml")
        self.assertRegex(out, r"tests failed out of 2[0-9]" if "googletest_test" in names else "tests failed out of 4")
        with self.assertRaisesRegex(AssertionError, "there is no server"):
            pools()
        with open(os.path.join(build, "report.xml"), encoding="utf-8") as file:
            report = file.read()
        if "googletest_test" in names:
            self.assertIn('name="Smoke/Attention.Holds/mha_128_fp16_bshd_p2p_W2"', report)

    def test_pkg_config(self):
        """Both libraries without CMake, moved with their prefix."""
        if shutil.which("pkg-config") is None:
            self.skipTest("no pkg-config")
        (folder,) = glob.glob(os.path.join(self.prefix, "lib*", "**", "pkgconfig"), recursive=True)
        c_program = os.path.join(self.folder.name, "program.c")
        with open(c_program, "w", encoding="utf-8") as file:
            file.write("#include <cppool/client.h>\n#include <stdio.h>\nint main(void) { return puts(cppool_client_version()) < 0; }\n")
        for package, compiler, source, text in (("cppool_client", ["c++", "-std=c++20"], self.example("client/program.cpp"), "2 ranks: passed"),
                                                ("cppool_client_c", ["cc"], c_program, "0.")):
            flags = self.run_command("pkg-config", "--cflags", "--libs", package, environment={"PKG_CONFIG_PATH": folder}).split()
            self.assertIn("-I" + self.prefix + "/include", [os.path.normpath(flag) if flag.startswith("-I") else flag for flag in flags])
            out = os.path.join(self.folder.name, package)
            self.run_command(*compiler, source, "-o", out, *flags, "-Wl,-rpath," + os.path.dirname(folder))
            self.assertIn(text, self.run_command(out))

    def test_pipes(self):
        answers = [json.loads(line) for line in self.run_command(self.example("client/pipes.sh")).splitlines()]
        self.assertEqual([answer["id"] for answer in answers], [1, 2, 3])
        self.assertEqual([answer.get("status") for answer in answers], [None, "passed", "error"])
        self.assertIn('did you mean "a2a"?', answers[2]["error"])

    def test_components(self):
        """What find_package says of a component that there is not, and of a missing dependency."""
        for name, package, option, text in (("component", "cppool REQUIRED COMPONENTS cases", [], "no component \"cases\""),
                                            ("dependency", "cppool REQUIRED", ["-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON"],
                                             "nlohmann_json")):
            folder = os.path.join(self.folder.name, name)
            os.makedirs(folder)
            with open(os.path.join(folder, "CMakeLists.txt"), "w", encoding="utf-8") as file:
                file.write(f"cmake_minimum_required(VERSION 3.22)\nproject(x LANGUAGES CXX)\nfind_package({package})\n")
            done = subprocess.run([CMAKE, "-S", folder, "-B", folder + "/build", "-DCMAKE_PREFIX_PATH=" + self.prefix, *option],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(text, " ".join(done.stdout.split()))

    def test_version(self):
        with open(os.path.join(self.prefix, "include/cppool/version.h"), encoding="utf-8") as file:
            (version,) = re.findall(r'^#define CPPOOL_VERSION "(.*)"$', file.read(), re.M)
        self.assertRegex(version, r"^\d+\.\d+\.\d+$")
        self.assertEqual(self.run_command("cppool", "--version"), f"cppool {version}\n")
        self.assertRegex(self.run_command("cppoold", "--version"), rf"^cppoold {re.escape(version)}(\+[0-9a-f]{{12}})?\n")
        with open(os.path.join(self.prefix, "share/doc/cppool/CHANGELOG.md"), encoding="utf-8") as file:
            self.assertTrue(f"\n## {version}\n" in file.read(), f"CHANGELOG.md has no section {version}")

    def test_licence(self):
        with open(os.path.join(ROOT, "LICENSE"), encoding="utf-8") as here, \
                open(os.path.join(self.prefix, "share/doc/cppool/LICENSE"), encoding="utf-8") as installed:
            self.assertEqual(installed.read(), here.read())

    def test_case(self):
        build = self.build("daemon/sum", "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON")  # a case needs no JSON library
        for world_size in (1, 4):
            out = self.run_command("cppool", "run", "--load", os.path.join(build, "libsum_case.so"), "--case", "sum",
                                   "--world-size", str(world_size))
            self.assertIn("1 passed, 0 failed, 0 skipped", out)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, BUILD, CMAKE = (os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3])
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
