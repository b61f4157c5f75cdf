#!/usr/bin/env python3
"""Worlds of two processes with a GPU each, and NCCL between them: by access to each other's memory, and by its network on loopback.

    machines_gpu_test.py CPPOOLD CPPOOL LIBRARY [unittest's arguments]

The launcher is a script of two lines, which gives each process a GPU. On a machine with fewer than two GPUs nothing is tested.
"""
import os
import subprocess
import unittest

import machines_support
import machines_test
from machines_support import Case

# NCCL's way is its own choice, or its network, as between machines.
NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
CELLS = [{"cp_comm_type": "p2p"}, {"cp_comm_type": "all_gather", "attn_mask_type": "causal"},
         {"cp_comm_type": "a2a", "num_gqa_groups": 2, "softmax_type": "learnable"},
         {"cp_comm_type": "p2p", "attn_bias_type": "post_scale_bias", "bias_shape": "1hss"},
         {"cp_comm_type": "all_gather", "qkv_format": "thd", "attn_mask_type": "padding_causal"}]

machines_support.SCRIPT = """#!/bin/sh
agents=$1; shift
for index in $(seq 0 $((agents - 1))); do CUDA_VISIBLE_DEVICES=${GPU:-$index} CPPOOL_AGENTS=$agents CPPOOL_AGENT_INDEX=$index "$@" & done
wait
"""


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


class TwoGpus(Case):
    backend, world_size, most_agents, fault_rank = "cuda", 2, 2, 1


class Worlds(TwoGpus):
    def test_outputs_are_those_of_one_process(self):
        def outputs(head):
            answers = [head.run({"transfers": "comm", **cell}) for cell in CELLS]
            return [self.digests(answer) for answer in answers]

        expected = outputs(self.head(None))
        for environment in ({}, NETWORK):
            head = self.head(environment=environment)
            hello = head.ask(op="hello")
            self.assertEqual((hello["backend"], hello["transport"]), ("cuda", "nccl"))
            self.assertEqual([(device["rank"], device["ordinal"]) for device in hello["devices"]], [(0, 0), (1, 0)])
            self.assertEqual(len({device["uuid"] for device in hello["devices"]}), 2)
            for name, value in environment.items():
                self.assertEqual([node["nccl"].get(name) for node in hello["nodes"]], [value] * 2)
            self.assertEqual(outputs(head), expected)

    def test_one_agent_has_both_gpus(self):
        head = self.head(1, environment={"GPU": "0,1"})
        self.assertEqual([device["ordinal"] for device in head.ask(op="hello")["devices"]], [0, 1])
        self.assertTrue(head.run()["ok"])

    def test_auto_is_nccl_and_copies_are_refused(self):
        head = self.head()
        self.assertEqual([rank["transfers"] for rank in head.run()["ranks"]], ["comm"] * 2)
        refused = head.run({"transfers": "peer"})
        self.assertEqual(refused["failure"]["kind"], "unsupported", refused)
        self.assertIn("ranks are in several processes", refused["error"])
        self.assertTrue(head.run()["ok"])

    def test_the_essential_suite(self):
        for environment in ({}, NETWORK):
            done = subprocess.run([machines_test.COMMAND, "run", "--suite", "essential", "--world-size", "2", "--backend", "cuda",
                                   "--launch", self.launch(2)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1", "CPPOOL_DAEMON": machines_test.DAEMON, **environment})
            self.assertEqual(done.returncode, 0, done.stdout[-4000:])
            print(done.stdout.splitlines()[-1])


class BadWorlds(TwoGpus):
    def refused(self, *texts, **options):
        head = self.head(**options)
        self.assertEqual(head.end(), 2, "".join(head.stderr))
        for text in texts:
            self.assertIn(text, "".join(head.stderr))

    def test_more_ranks_than_gpus(self):
        self.refused("2 of 4 ranks would be here, each needs a device of its own, and CUDA sees 1 device", "node ", world_size=4)

    def test_two_agents_on_one_gpu(self):
        self.refused("CUDA_VISIBLE_DEVICES", "node ", environment={"GPU": "0"})

    def test_an_agent_without_a_gpu(self):
        self.refused("CUDA sees no device", "node ", environment={"GPU": "9"})

    def test_an_interface_that_is_not_there(self):
        self.refused("making the communicators' id", "node ", environment={"NCCL_SOCKET_IFNAME": "none0"})


class Failures(machines_test.Faults, machines_test.Failures):
    backend, world_size, most_agents, fault_rank, at_once = "cuda", 2, 2, 1, 1
    params = {"transfers": "comm"}  # in one process, too

    def test_a_world_after_a_lost_one(self):
        self.test_an_agent_is_killed()
        self.assertTrue(self.head().run()["ok"])


class FailuresByNetwork(Failures):
    environment = NETWORK


if __name__ == "__main__":
    machines_test.take_arguments()
    if gpus() < 2:
        print("skipped: two GPUs are needed, and there are", gpus())
    else:
        unittest.main()
