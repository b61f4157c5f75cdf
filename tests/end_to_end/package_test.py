#!/usr/bin/env python3
"""Makes the Debian package, checks it with lintian, and uses it in a Debian root that has nothing else.

    package_test.py ROOT BUILD CPACK
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

READY = "the bare root is there"
# What mmdebstrap runs when the root is there: the commands of client/ci.md, which install and use the package, and its removal.
USES = f"""
set -eu
echo '{READY}'
cp "$PACKAGE" "$1"
chroot "$1" sh -euc "$COMMANDS"
chroot "$1" ldconfig -p
chroot "$1" apt-get purge -qq -y cppool
echo "left: $(find "$1/usr" "$1/etc" -name '*cppool*')"
"""


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for program in ("dpkg-shlibdeps", "file", "help2man"):
            if shutil.which(program) is None:
                raise unittest.SkipTest(f"no {program}: scripts/setup --tests installs it on Debian")
        cls.folder = tempfile.TemporaryDirectory()
        run(CPACK, "--config", os.path.join(BUILD, "CPackConfig.cmake"), "-B", cls.folder.name)
        (cls.package,) = glob.glob(os.path.join(cls.folder.name, "cppool_*.deb"))
        cls.root = os.path.join(cls.folder.name, "content")
        run("dpkg-deb", "--extract", cls.package, cls.root)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def file(self, *path):
        return os.path.join(self.root, "usr", *path)

    def test_lintian(self):
        if shutil.which("lintian") is None:
            self.skipTest("no lintian")
        run("lintian", "--allow-root", "--fail-on", "error", self.package)

    def test_bare_root(self):
        if shutil.which("mmdebstrap") is None:
            self.skipTest("no mmdebstrap")
        with open(os.path.join(ROOT, "client/ci.md"), encoding="utf-8") as file:
            commands = re.findall(r"- run: (.*)\n", file.read().split("  gpu:")[0])
        self.assertEqual(len(commands), 2)
        hook = os.path.join(self.folder.name, "hook")
        with open(hook, "w", encoding="utf-8") as file:
            file.write(USES)
        done = subprocess.run(["mmdebstrap", "--variant=apt", f'--customize-hook=sh {hook} "$1"', "bookworm", "/dev/null"],
                              env={**os.environ, "PACKAGE": self.package, "COMMANDS": "\n".join(commands)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0 and READY not in done.stdout:
            self.skipTest("mmdebstrap cannot make a root here: " + done.stdout[-400:])
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(" passed, 0 failed, 0 skipped", done.stdout)
        self.assertRegex(done.stdout, r"libcppool_client\.so\.\d+\.\d+ \(libc6")
        self.assertIn("left: \n", done.stdout)

    def test_man_pages(self):
        commands = re.findall(r"^  ([a-z]+) ", run(self.file("bin/cppool"), "--help").split("Subcommands:")[1], re.M)
        self.assertIn("run", commands)
        pages = {name + ".1.gz" for name in ("cppool", "cppoold", *("cppool-" + command for command in commands))}
        self.assertEqual(set(os.listdir(self.file("share/man/man1"))), pages)
        self.assertIn(r"\-\-max\-seqlen", run("zcat", self.file("share/man/man1/cppool-run.1.gz")))

    def test_notices(self):
        with open(self.file("share/doc/cppool/copyright"), encoding="utf-8") as file:
            text = file.read()
        for name, holder in (("nlohmann/json", "Niels Lohmann"), ("spdlog", "Gabi Melman"), ("fmt", "Victor Zverovich"),
                             ("CLI11", "University of Cincinnati"), ("Chart.js", "Chart.js Contributors")):
            stanza = [part for part in text.split("\n\n") if f"\nComment: {name}" in part or f"({name})" in part]
            self.assertEqual(len(stanza), 1, name)
            self.assertIn(holder, stanza[0])

    def test_documents(self):
        """Links from one document to another hold in the installed folder, too."""
        folder = self.file("share/doc/cppool")
        links = 0
        for path in glob.glob(os.path.join(folder, "**", "*.md"), recursive=True):
            with open(path, encoding="utf-8") as file:
                text = file.read()
            for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
                target = os.path.normpath(os.path.join(os.path.dirname(path), link))
                if not re.match(r"(tests|scripts|cmake)/|CONTRIBUTING", os.path.relpath(target, folder)):
                    self.assertTrue(os.path.exists(target), f"{path}: {link}")
                    links += 1
        self.assertGreater(links, 50)

    def test_no_path_of_this_machine(self):
        for path in [*glob.glob(self.file("bin/*")), *glob.glob(self.file("lib/*.so*"))]:
            paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", run("readelf", "-W", "--dynamic", path))
            for each in ":".join(paths).split(":"):
                self.assertTrue(each == "" or each.startswith("$ORIGIN"), f"{path}: {each}")

    def test_completion(self):
        def complete(*words):
            script = 'PATH=$1:$PATH; . "$2"; shift 2; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _cppool "$1"; echo "${COMPREPLY[@]}"'
            return run("bash", "-c", script, "bash", self.file("bin"), self.file("share/bash-completion/completions/cppool"), *words).split()

        self.assertEqual(complete("cppool", "be"), ["bench"])
        self.assertEqual(complete("cppool", "run", "--ba"), ["--backend"])
        self.assertEqual(complete("cppool", "run", "--backend", ""), ["auto", "cuda", "host"])
        self.assertEqual(complete("cppoold", "--log-level", "w"), ["warn"])
        self.assertEqual(complete("cppool", "run", "--suite", "s"), [])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, BUILD, CPACK = (os.path.abspath(path) for path in sys.argv[1:4])
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
