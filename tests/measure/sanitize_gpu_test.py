#!/usr/bin/env python3
"""Tests of sanitize_gpu with a daemon that refuses products of payloads, and a tool that finds nothing: sanitize_gpu_test.py PROGRAM."""
import os
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
TOOL = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
echo "========= ERROR SUMMARY: 0 errors" >"$2"
shift 2
exec "$@"
"""
DAEMON = """#!{python}
import json, sys
word = lambda name: sys.argv[sys.argv.index(name) + 1]
for line in sys.stdin:
    request = json.loads(line)
    answer = {{"ok": True, "id": request["id"]}}
    if request["op"] == "hello":
        world_size = int(word("--world-size"))
        answer.update(protocol=1, world_size=world_size, devices=[{{"rank": rank, "capability": "{capability}"}} for rank in range(world_size)])
    elif request["op"] == "run" and request["params"].get("fp8_products") == "native":
        answer.update(ok=False, status="skipped", error="no such products", checks=[], ranks=[], failure={{"kind": "unsupported", "rank": None, "stage": None, "detail": ""}})
    elif request["op"] == "run":
        answer.update(status="passed", checks=[], ranks=[])
    print(word("--sentinel") + json.dumps(answer), flush=True)
    if request["op"] == "shutdown":
        break
"""


class SanitizeGpuTest(unittest.TestCase):
    def sanitize(self, capability):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("tool", TOOL), ("daemon", DAEMON.format(python=sys.executable, capability=capability))):
                with open(os.path.join(folder, name), "w") as file:
                    file.write(text)
                os.chmod(file.name, 0o755)
            return subprocess.run([PROGRAM, "--tool", "memcheck", "--transport", "peer", "--filter", "suite=fp8", "--filter", "world_size=2", "--logs",
                                   os.path.join(folder, "logs"), "--sanitizer", os.path.join(folder, "tool"), "--daemon", os.path.join(folder, "daemon")],
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def test_refused_native_products_are_not_run_on_other_gpus(self):
        ran = self.sanitize("8.0")
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertIn("memcheck peer W=2: not run, no GPU of Hopper: d128 fp8 a2a", ran.stdout)
        self.assertIn(": no such products\n", ran.stdout)
        self.assertIn("passed, 0 failed\n", ran.stdout)

    def test_refused_native_products_fail_on_hopper(self):
        ran = self.sanitize("9.0")
        self.assertEqual(ran.returncode, 1, ran.stdout)
        self.assertIn("FAILED memcheck peer W=2: d128 fp8 a2a", ran.stdout)
        self.assertIn("  skipped: no such products\n", ran.stdout)
        self.assertNotIn("not run", ran.stdout)


if __name__ == "__main__":
    unittest.main()
