#!/usr/bin/env python3
"""Runs the examples of the READMEs as they are printed: README.md's C++ program with an installed prefix, its requests over pipes, and
daemon/README.md's case. kernels/README.md's kernel is a file that user_case_test builds.

    examples_test.py ROOT BUILD CMAKE
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest


def block(readme, language, part):
    """The fenced block of a README that contains `part`."""
    with open(os.path.join(ROOT, readme), encoding="utf-8") as file:
        found = [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", file.read(), re.M | re.S) if name == language and part in body]
    if len(found) != 1:
        raise AssertionError(f"{readme} has {len(found)} {language} blocks with {part!r}")
    return found[0]


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.prefix = os.path.join(cls.folder.name, "prefix")
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", cls.prefix], check=True, stdout=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_in(self, folder, *command, **more):
        environment = {**os.environ, "PATH": os.path.join(self.prefix, "bin") + os.pathsep + os.environ["PATH"]}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def build(self, name, files, *options):
        folder = os.path.join(self.folder.name, name)
        os.makedirs(folder)
        for file, text in files.items():
            with open(os.path.join(folder, file), "w", encoding="utf-8") as written:
                written.write(text)
        self.run_in(folder, CMAKE, "-S", ".", "-B", "build", "-DCMAKE_PREFIX_PATH=" + self.prefix, "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror", *options)
        self.run_in(folder, CMAKE, "--build", "build")
        return folder

    def test_program(self):
        cmake = ("cmake_minimum_required(VERSION 3.22)\nproject(example LANGUAGES CXX)\nfind_package(cppool REQUIRED)\n"
                 "add_executable(example example.cpp)\ntarget_link_libraries(example PRIVATE cppool::client)\n")
        folder = self.build("program", {"CMakeLists.txt": cmake, "example.cpp": block("README.md", "cpp", "int main")})
        self.assertEqual(self.run_in(folder, "build/example"), "2 ranks: passed \n4 ranks: passed \n")

    def test_pipes(self):
        folder = os.path.join(self.folder.name, "pipes")
        os.makedirs(os.path.join(folder, "build"))
        os.symlink(os.path.join(self.prefix, "bin"), os.path.join(folder, "build", "bin"))
        shell = block("README.md", "sh", "printf").rstrip() + " 2>log"
        answers = [json.loads(line) for line in self.run_in(folder, "bash", "-c", shell).splitlines()]
        self.assertEqual([answer["id"] for answer in answers], [1, 2, 3])
        self.assertEqual([answer.get("status") for answer in answers], [None, "passed", "error"])
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            self.assertIn("`" + answers[2]["error"] + "`", " ".join(file.read().split()), "README.md quotes the error")

    def test_components(self):
        """What find_package says of a component that there is not, and of a missing dependency."""
        for name, package, option, said in (("component", "cppool REQUIRED COMPONENTS cases", [], "no component \"cases\""),
                                            ("dependency", "cppool REQUIRED", ["-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON"],
                                             "nlohmann_json")):
            folder = os.path.join(self.folder.name, name)
            os.makedirs(folder)
            with open(os.path.join(folder, "CMakeLists.txt"), "w", encoding="utf-8") as file:
                file.write(f"cmake_minimum_required(VERSION 3.22)\nproject(x LANGUAGES CXX)\nfind_package({package})\n")
            done = subprocess.run([CMAKE, "-S", folder, "-B", folder + "/build", "-DCMAKE_PREFIX_PATH=" + self.prefix, *option],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, " ".join(done.stdout.split()))

    def test_licence(self):
        with open(os.path.join(ROOT, "LICENSE"), encoding="utf-8") as here, \
                open(os.path.join(self.prefix, "share/doc/cppool/LICENSE"), encoding="utf-8") as installed:
            self.assertEqual(installed.read(), here.read())

    def test_case(self):
        folder = self.build("case", {"CMakeLists.txt": block("daemon/README.md", "cmake", "my_case"),
                                     "my_case.cpp": block("daemon/README.md", "cpp", "cppool_cases")},
                            "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON")  # a case needs no JSON library
        for world_size in (1, 4):
            out = self.run_in(folder, "cppool", "run", "--load", "build/libmy_case.so", "--case", "sum", "--world-size", str(world_size))
            self.assertIn("1 passed, 0 failed, 0 skipped", out)


class KernelOfOnesOwn(unittest.TestCase):
    def test_readme_has_the_example(self):
        with open(os.path.join(ROOT, "tests/end_to_end/user_kernel/forward.cu"), encoding="utf-8") as file:
            code = file.read()
        self.assertEqual(block("kernels/README.md", "cuda", "cppool_attention"), code, "user_case_test builds and runs the file")
        self.assertLess(len(code.splitlines()), 60)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, BUILD, CMAKE = (os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3])
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
