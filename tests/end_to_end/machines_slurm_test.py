#!/usr/bin/env python3
"""Worlds that srun starts, on a Slurm of two nodes. By hand, as root: the time limit alone takes two minutes.

    tests/end_to_end/slurm tests/end_to_end/machines_slurm_test.py build/bin/cppoold [unittest's arguments]
"""
import os
import subprocess
import sys
import time
import unittest

import machines_python_test
import machines_test
from machines_support import SMALL, Head

SRUN = "srun -N 2 --ntasks-per-node=1"


class BySrun:
    def launch(self, agents):
        assert agents == 2
        return SRUN

    def test_two_nodes(self):
        with self.head() as head:
            self.assertEqual([(node["node"], node["ranks"]) for node in head.nodes()], [("n1", [0, 1]), ("n2", [2, 3])])
            self.check_passes(head)

    def check_ended_by_slurm(self, head, seconds):
        answer = head.answer(seconds)
        self.assertTrue(answer["fatal"], answer)
        self.assertIn(answer["failure"]["node"], ("n1", "n2"))
        print(answer["error"].splitlines()[0])
        head.end()
        self.assertEqual(head.left, [])
        self.check_passes(self.head())

    def test_scancel(self):
        def cancel(*_):
            for job in subprocess.check_output(["squeue", "-h", "-o", "%i"], text=True).split():
                subprocess.check_call(["scancel", job])
        begin = time.monotonic()
        self.check_ended_by_slurm(self.during(cancel, deadline_ms=60000)[0], 60)
        print(f"with the next world after {time.monotonic() - begin:.1f} s")

    def test_a_time_limit(self):
        self.launch = lambda agents: SRUN + " --time=1"
        head = self.during(lambda *_: None, deadline_ms=300000)[0]
        self.check_ended_by_slurm(head, 240)


class Threads(BySrun, machines_test.Threads):
    def during(self, do, deadline_ms):
        head = self.head()
        head.nodes()  # the job may have had to wait for the one before it
        head.send(op="run", params=SMALL, fault={"kind": "stall", "rank": 3}, deadline_ms=deadline_ms)
        time.sleep(0.7)
        do()
        return (head,)

    def check_passes(self, head):
        self.assertTrue((answer := head.run())["ok"], answer)


class Processes(BySrun, machines_python_test.Python):
    pass


if __name__ == "__main__":
    Head.daemon = os.path.abspath(sys.argv.pop(1))
    unittest.main()
