#!/usr/bin/env python3
"""Worlds of several processes, which --launch starts: a script of two lines as the launcher, or Open MPI's mpirun where it is.

    machines_test.py CPPOOLD CPPOOL LIBRARY [unittest's arguments]

LIBRARY has a case of the name "odd"; beside it is libcppool_test_kernel_naive.so.
"""
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

from machines_support import SMALL, ByMpirun, Case, Head, Kills, MpirunLaunches, children, rank_list

SCHEDULES = ["p2p", "all_gather", "a2a", "a2a+p2p"]

# Takes the words of an agent, and greets as one or as several.
GREETER = """import hashlib, hmac, json, os, socket, sys, time

def connect():
    host, _, port = sys.argv[-1].partition(":")
    file = socket.create_connection((host, int(port))).makefile("rw")
    return file, json.loads(file.readline())["nonce"]

def greet(connected, index, agents, version, node):
    (file, nonce), own = connected, "0" * 64
    proof = hmac.new(os.environ["CPPOOL_SECRET"].encode(), f"agent {nonce} {own}".encode(), hashlib.sha256).hexdigest()
    about = {"version": version, "node": node, "pid": os.getpid(), "index": index, "agents": agents}
    file.write(json.dumps({"frame": "agent", "nonce": own, "proof": proof, **about}) + "\\n")
    file.flush()
    file.readline()

"""


class Threads(Case):
    def head(self, agents=2, world_size=None, options=(), **more):
        return super().head(agents, world_size, options=["--allow-faults", *options], **more)

    def during(self, do, deadline_ms=60000):
        head = self.head()
        nodes = head.nodes()
        head.send(op="run", params=SMALL, repeat=10000, deadline_ms=deadline_ms)
        time.sleep(0.3)
        do(head, nodes)
        return head, nodes


class Worlds(Threads):
    def test_digests_do_not_depend_on_the_number_of_processes(self):
        cells = [{"cp_comm_type": schedule} for schedule in SCHEDULES]
        cells += [{"cp_comm_type": "all_gather", "qkv_format": "thd", "attn_mask_type": "padding_causal"},
                  {"cp_comm_type": "p2p", "attn_bias_type": "post_scale_bias", "bias_shape": "1hss"},
                  {"cp_comm_type": "a2a", "num_gqa_groups": 2, "softmax_type": "learnable"},
                  *({"cp_comm_type": schedule, "dtype": "fp8", "fp8_dpa": True} for schedule in SCHEDULES)]
        foreign = os.path.join(os.path.dirname(LIBRARY), "libcppool_test_kernel_naive.so")

        def all_digests(head):
            short = {"max_seqlen_q": 64}
            return [self.digests(answer) for answer in [*(head.run({**short, **cell}) for cell in cells), head.run(short, kernels=foreign)]]

        with self.head(None) as one:
            expected = all_digests(one)
        for agents in (1, 2, 4):
            with self.head(agents) as head:
                hello = head.ask(op="hello")
                self.assertEqual(hello["transport"], "host" if agents == 1 else "gloo")
                self.assertEqual([node["ranks"] for node in hello["nodes"]],
                                 [list(range(first, first + 4 // agents)) for first in range(0, 4, 4 // agents)])
                self.assertEqual(all_digests(head), expected)

    def test_a_run_with_sampling_and_repeats(self):
        with self.head(4) as head:
            answer = head.run(repeat=5, warmup=2)
            self.assertEqual(len(answer["ranks"][3]["samples"]["forward"]), 5, answer)
            answer = head.run(sampling={"precision": 0.5, "max_ms": 2000}, repeat=200)
            self.assertIn(answer["stopped"], ("precision", "max_ms", "repeat"))

    def test_the_answer_says_where_heads_are_exchanged(self):
        for agents, size, where in [(1, 2, None), (2, 2, "in_node"), (4, 2, "across_nodes")]:
            with self.head(agents) as head:
                answer = head.run({"cp_comm_type": "a2a+p2p", "a2a_size": size})
                self.assertEqual([rank.get("a2a_groups") for rank in answer["ranks"]], [where] * 4, answer)
                self.assertNotIn("a2a_groups", head.run({"cp_comm_type": "a2a"})["ranks"][0])

    def test_list_stats_validate_and_refusals(self):
        with self.head() as head:
            self.assertEqual([case["name"] for case in head.ask(op="list")["cases"]], ["attention"])
            self.assertEqual([rank["rank"] for rank in head.ask(op="stats")["memory"]], [0, 1, 2, 3])
            self.assertTrue(head.ask(op="validate", params=SMALL)["ok"])
            refused = head.run({"num_heads": 5, "cp_comm_type": "a2a"})
            with self.head(None) as one:
                self.assertEqual(refused["failure"], one.run({"num_heads": 5, "cp_comm_type": "a2a"})["failure"])
            self.assertEqual(head.run({"no_such": 1})["failure"]["kind"], "invalid_request")
            self.assertEqual(head.run({"num_heads": 10**3, "max_seqlen_q": 1 << 24})["failure"]["kind"], "out_of_memory")
            self.assertIn("\"trace\": \"/nowhere/x\" cannot be written", head.run(trace="/nowhere/x")["error"])
            self.assertTrue(head.run()["ok"])

    def test_cancel(self):
        with self.head() as head:
            head.send(op="run", id="long", params=SMALL, repeat=10000)
            time.sleep(0.3)
            answers = [head.ask(op="cancel", cancels="long", id="c"), head.answer()]
            run = next(answer for answer in answers if answer["id"] == "long")
            self.assertEqual(run["failure"]["kind"], "cancelled")
            self.assertNotIn("fatal", run)
            self.assertTrue(head.run()["ok"])

    def test_a_trace_is_a_file_for_each_node(self):
        self.check_clocks([], lambda head, path: head.run(trace=path, repeat=3))

    def test_status_names_all_ranks(self):
        with self.head() as head:
            head.send(op="run", id="run", params=SMALL, fault={"kind": "stall", "rank": 3}, deadline_ms=3000)
            time.sleep(1)
            status = head.ask(op="status", id="s")
            self.assertEqual([rank["rank"] for rank in status["ranks"]], [0, 1, 2, 3])
            self.assertIn("rank 3 on node", status["text"])
            self.assertEqual(head.answer()["failure"]["kind"], "timeout")


class Libraries(Case):
    def test_libraries_are_sent_by_content(self):
        """The head alone finds the files: they are below its working folder. Each agent has a cache of its own."""
        script = os.path.join(self.folder.name, "elsewhere")
        with open(script, "w") as file:
            file.write("#!/bin/sh\nfor i in 0 1; do (cd / && CPPOOL_CACHE=" + self.folder.name +
                       "/cache$i CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i exec \"$@\") & done; wait\n")
        os.chmod(script, 0o700)
        shutil.copy(LIBRARY, os.path.join(self.folder.name, "mine.so"))
        own = os.path.join(self.folder.name, "own.so")
        shutil.copy(os.path.join(os.path.dirname(LIBRARY), "libcppool_test_kernel_naive.so"), own)
        here = os.getcwd()
        os.chdir(self.folder.name)
        try:
            head = Head(script, world_size=2, options=["--kernels=./own.so"])
        finally:
            os.chdir(here)
        self.addCleanup(self.check_end, head)
        mine = "/proc/self/cwd/mine.so"
        self.assertIn("odd", [case["name"] for case in head.ask(op="list", load=[mine])["cases"]])
        for _ in range(2):
            answer = head.ask(op="run", case="odd", load=[mine])
            self.assertTrue(answer["ok"], answer)
        digest = answer["libraries"][0]["digest"]
        for cache in ("cache0", "cache1"):
            copies = os.listdir(os.path.join(self.folder.name, cache, "libraries"))
            self.assertEqual(len([name for name in copies if digest in name]), 1, copies)
        kernels = []
        for _ in range(2):
            answer = head.run()
            self.assertTrue(answer["ok"], answer)
            kernels.append((answer["kernels"]["file"], answer["kernels"]["digest"]))
            with open(own, "ab") as file:
                file.write(b"built again")
        self.assertEqual([file for file, _ in kernels], ["./own.so"] * 2)
        self.assertNotEqual(*kernels)
        self.assertNotIn("file", head.run(kernels="cppool")["kernels"])
        with open(own, "w") as file:
            file.write("no library")
        self.assertTrue(head.ask(op="run", case="odd", load=[mine])["ok"])  # which chooses no kernels
        self.assertRegex(head.run()["error"], "^./own.so.*is no shared library")
        with open(os.path.join(self.folder.name, "mine.so"), "ab") as file:
            file.write(os.urandom(7 << 20))  # more than a frame has
        large = head.ask(op="run", case="odd", load=[mine])
        self.assertTrue(large["ok"], large)
        self.assertNotEqual(large["libraries"][0]["digest"], digest)
        os.remove(os.path.join(self.folder.name, "mine.so"))
        self.assertIn("mine.so", head.ask(op="run", case="odd", load=[mine])["error"])
        self.assertTrue(head.ask(op="run", case="odd", load=[mine], digests={mine: digest})["ok"])
        with open(os.path.join(self.folder.name, "mine.so"), "w") as file:
            file.write("no library")
        self.assertIn("is no shared library", head.ask(op="run", case="odd", load=[mine])["error"])

    def test_a_library_that_could_not_be_sent_is_sent_later(self):
        """The head alone finds the file, as above."""
        caches = [os.path.join(self.folder.name, name) for name in ("later0", "later1", "later")]
        script = self.script_of(f"for i in 0 1; do (cd / && CPPOOL_CACHE={self.folder.name}/later$i CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i "
                                "exec \"$@\") & done; wait\n")
        file, path = os.path.join(self.folder.name, "later.so"), "/proc/self/cwd/later.so"

        def head():
            for cache in caches:
                shutil.rmtree(cache, ignore_errors=True)
            here = os.getcwd()
            os.chdir(self.folder.name)
            try:
                return Head(script, world_size=2, environment={"CPPOOL_CACHE": caches[2]})
            finally:
                os.chdir(here)

        shutil.copy(LIBRARY, file)
        with head() as first:
            digests = {path: first.ask(op="run", case="odd", load=[path])["libraries"][0]["digest"]}
        with head() as second:
            second.nodes()
            os.remove(file)
            self.assertIn("later.so", second.ask(op="run", case="odd", load=[path], digests=digests)["error"])
            shutil.copy(LIBRARY, file)
            answer = second.ask(op="run", case="odd", load=[path], digests=digests)
            self.assertTrue(answer["ok"], answer)

    def test_a_process_that_a_case_forks_ends_with_its_agent(self):
        littering = os.path.join(os.path.dirname(LIBRARY), "libcppool_test_littering.so")
        for killed in (False, True):
            with Head(self.launch(2), world_size=2) as head:
                nodes = head.nodes()
                answer = head.ask(op="run", case="leaves", load=[littering], params={"action": "child"})
                self.assertEqual((answer["status"], len(answer["warnings"])), ("passed", 2), answer)
                if killed:
                    os.kill(answer["ranks"][0]["child"], signal.SIGSTOP)
                    os.kill(nodes[0]["pid"], signal.SIGKILL)
                    self.assertEqual(head.process.wait(60), 3)
            self.assertEqual(head.left, [])
            if killed:  # what the child holds does not hide it
                self.assertIn("is lost: its connection ended", "".join(head.stderr))

    def test_an_exit_within_libc_names_rank_and_stage(self):
        with Head(self.launch(2), world_size=2) as head:
            nodes = head.nodes()
            answer = head.ask(op="run", case="odd", load=[LIBRARY], params={"action": "exit in libc"})
            failure = answer["failure"]
            self.assertIsNotNone(failure["rank"], answer)
            self.assertEqual(failure["node"], nodes[failure["rank"]]["node"])
            self.assertIn("errx", answer["error"])

    def test_libraries_of_the_start(self):
        path = os.path.join(self.folder.name, "given.so")
        shutil.copy(LIBRARY, path)
        with self.head(options=[f"--case={path}"]) as head:
            head.nodes()
            os.remove(path)
            self.assertEqual([case["name"] for case in head.ask(op="list")["cases"]][:1], ["attention"])
            self.assertIn("odd", [case["name"] for case in head.ask(op="list")["cases"]])
            for _ in range(2):
                self.assertTrue(head.ask(op="run", case="odd")["ok"])
            self.assertTrue(head.run()["ok"])
        with open(path, "w") as file:
            file.write("no library")
        for bad, text in [(path, "is no shared library"), (path + "none", "given.sonone")]:
            head = self.head(options=[f"--case={bad}"])
            self.assertEqual(head.end(), 2)
            self.assertIn(text, "".join(head.stderr))
            self.assertIn("--case", "".join(head.stderr))


class Faults:
    def compare_faults(self, kinds, agents, deadline_ms=3000):
        """The answer is that of a world of one process, with the node beside it, and so is what the world can do then."""
        heads = [None, None]
        for kind in kinds:
            with self.subTest(kind):
                fault, ends = {"kind": kind, "rank": self.fault_rank}, []
                heads = [head or self.head(its_agents) for head, its_agents in zip(heads, (None, agents))]
                with ThreadPoolExecutor(self.at_once) as pool:  # some last until the deadline
                    answers = list(pool.map(lambda head: head.run(self.params, fault=fault, deadline_ms=deadline_ms), heads))
                for index, (head, answer) in enumerate(zip(heads, answers)):
                    failure = answer.get("failure") or {"kind": None, "rank": None}
                    # Either of the two ranks may be the first to see it.
                    either = ("wrong_size",) if self.world_size > 2 else ("wrong_size", "skip_collective")
                    rank = None if kind in either else failure["rank"]
                    ends.append((answer["status"], failure["kind"], rank, answer.get("fatal", False)))
                    if answer.get("fatal"):
                        heads[index] = None
                        head.end()
                        self.assertEqual(head.left, [])
                    else:
                        self.assertTrue(head.run(self.params)["ok"])
                self.assertEqual(ends[0], ends[1], answer)
                if failure["rank"] is not None:
                    self.assertEqual(failure["node"].rpartition(":")[2], str(failure["rank"] * agents // self.world_size), answer)

    def test_faults_of_a_case(self):
        self.compare_faults(["throw", "out_of_memory", "stall", "stall_host", "skip_collective", "wrong_size", "flip_bit", "half_line"], 2)

    def test_crashes_name_rank_stage_and_node(self):
        for kind, text in [("segfault", "Segmentation fault"), ("abort", "Aborted"), ("exit", "exit(")]:
            with self.subTest(kind):
                head = self.head(self.most_agents)
                nodes = head.nodes()
                answer = head.run(fault={"kind": kind, "rank": self.fault_rank})
                node = nodes[self.fault_rank * self.most_agents // self.world_size]["node"]
                self.assertTrue(answer["fatal"], answer)
                self.assertEqual((answer["failure"]["kind"], answer["failure"]["rank"], answer["failure"]["node"]),
                                 ("internal", self.fault_rank, node), answer)
                self.assertIn(text, answer["error"])
                self.assertIn("rank", answer["error"])
                self.assertEqual(head.end(), 3)
                self.assertEqual(head.left, [])


class FaultsOnTheHost(MpirunLaunches, Threads):
    compare_faults = Faults.compare_faults

    def test_faults_of_a_case(self):
        self.compare_faults(["flood", "out_of_bounds"], 2, deadline_ms=30000)  # which end by themselves
        head = self.head()
        answer = head.run(fault={"kind": "trap", "rank": self.fault_rank})
        self.assertTrue(answer["fatal"], answer)
        self.assertIn(f"rank {self.fault_rank} crashed by signal 5", answer["error"])

    def test_half_an_answer(self):
        """It is written by the head, in the place of the whole one."""
        head = self.head()
        head.ask(op="hello")
        head.send(op="run", params=SMALL, fault={"kind": "half_answer", "rank": self.fault_rank})
        self.assertTrue(head.lines.get(timeout=30).startswith('{"ok": true, "status": "pas{"checks"'))


class Failures(Kills, Threads):
    def check_lost(self, head, nodes):
        answer = head.answer()
        self.assertTrue(answer["fatal"], answer)
        self.assertEqual(answer["failure"]["node"], nodes[1]["node"], answer)
        self.assertEqual(head.end(), 3)
        self.assertEqual(head.left, [])
        return answer

    def test_an_agent_is_killed(self):
        answer = self.check_lost(*self.during(lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGKILL)))
        self.assertIn(rank_list(self.world_size // 2, self.world_size), answer["error"])
        self.assertEqual(answer["failure"]["kind"], "internal")

    def test_an_agent_is_stopped(self):
        head, nodes = self.during(lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGSTOP), deadline_ms=3000)
        answer = head.answer()
        self.assertEqual(answer["failure"]["kind"], "timeout", answer)
        self.assertEqual(len(answer["ranks"]), self.world_size)
        self.assertIn(f"rank {self.world_size - 1} on node {nodes[1]['node']}", answer["error"])
        self.assertEqual(answer["failure"]["node"], nodes[1]["node"], answer)
        self.assertIn(f"node {nodes[1]['node']} does not answer", answer["error"])
        self.assertEqual(head.end(), 3)
        self.assertEqual(head.left, [])

    def test_an_agent_is_stopped_before_a_run(self):
        head = self.head()
        nodes = head.nodes()
        os.kill(nodes[1]["pid"], signal.SIGSTOP)
        answer = head.run(self.params, deadline_ms=2000)
        self.assertEqual((answer["failure"]["kind"], answer["failure"]["node"], answer["fatal"]), ("timeout", nodes[1]["node"], True), answer)
        self.assertIn(f"node {nodes[1]['node']} ({rank_list(self.world_size // 2, self.world_size)}) has not answered in time", answer["error"])

    def test_the_first_agent_to_go_is_named(self):
        """The other one goes while it is asked for something."""
        def readers(head):
            count = 0
            for task in os.listdir(f"/proc/{head.process.pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{head.process.pid}/task/{task}/comm") as file:
                    count += file.read() == "frames\n"
            return count

        for more in ({}, {"load": [LIBRARY]}):
            with self.subTest(more):
                head = self.head()
                nodes = head.nodes()
                os.kill(nodes[0]["pid"], signal.SIGSTOP)
                head.send(op="validate", params=self.params, **more)
                self.eventually(lambda: head.ask(op="status")["running"])
                os.kill(nodes[1]["pid"], signal.SIGKILL)
                self.eventually(lambda: readers(head) == 1)
                os.kill(nodes[0]["pid"], signal.SIGKILL)
                answer = head.answer()
                self.assertEqual((answer["failure"]["kind"], answer["failure"]["node"]), ("internal", nodes[1]["node"]), answer)
                self.assertEqual(head.end(), 3)

    def stop_others(self):
        """An agent in a run, in requests without ranks, and before the others have come."""
        heads = {"run": self.during(lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGSTOP), deadline_ms=60000)}
        for operation in ("list", "stats", "validate"):
            head = self.head()
            nodes = head.nodes()
            os.kill(nodes[1]["pid"], signal.SIGSTOP)
            head.send(op=operation, **({"params": SMALL} if operation == "validate" else {}))
            heads[operation] = head, nodes
        early = self.with_one_of_two(signal.SIGSTOP)

        def check():
            for operation, (head, nodes) in heads.items():
                with self.subTest(operation):
                    answer = self.check_lost(head, nodes)
                    self.assertIn(answer["failure"]["kind"], ("internal", "timeout"))
                    if operation == "run":
                        self.assertIn("nothing came from it for 10 s", answer["error"])
            self.check_lost_early(early, "nothing came from it for 10 s")
        return check

    def test_an_agent_that_is_lost_before_the_others_come(self):
        self.check_lost_early(self.with_one_of_two(signal.SIGKILL), "its connection ended")

    def with_one_of_two(self, number):
        """A head for which one agent has come, which then gets this signal."""
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 \"$@\" & echo $! >&2; wait; sleep 60\n")
        head = Head(path, environment={"CPPOOL_START_LIMIT_MS": "60000"})
        self.addCleanup(self.check_end, head)
        self.eventually(lambda: any("agent 1 of 2 has come" in line for line in head.stderr))
        os.kill(self.number(head), number)
        return head

    def check_lost_early(self, head, why):
        self.assertEqual(head.end(60), 2)
        self.assertRegex("".join(head.stderr), f"the agent on node .* was lost when 1 of 2 agents had come \\(.*\\): {why}")

    def test_the_launcher_is_killed(self):
        def kill(head, nodes):
            own = [pid for pid in head.marked() if pid != head.process.pid and pid not in [node["pid"] for node in nodes]]
            for pid in own:
                os.kill(pid, signal.SIGKILL)
        head, _ = self.during(kill, deadline_ms=3000)
        answer = head.answer()
        self.assertEqual(answer["status"], "error")
        self.assertEqual(head.end(), 3)
        self.assertEqual(head.left, [])

    def test_the_launcher_is_stopped(self):
        """It is not needed any more: runs go on, and the end does not wait for it."""
        head = self.head()
        nodes = [node["pid"] for node in head.nodes()]
        for pid in head.marked():
            if pid != head.process.pid and pid not in nodes:
                os.kill(pid, signal.SIGSTOP)
        self.assertTrue(head.run()["ok"])
        begin = time.monotonic()
        head.process.stdin.close()
        self.assertEqual(head.process.wait(30), 0)
        self.assertLess(time.monotonic() - begin, 8)
        head.end()
        self.assertEqual(head.left, [])

    def test_the_end_of_stdin_ends_everything(self):
        head = self.head(self.most_agents)
        self.assertTrue(head.run()["ok"])
        begin = time.monotonic()
        self.assertEqual(head.end(), 0)
        self.assertLess(time.monotonic() - begin, 8)


class Disks(Case):
    def test_a_dump_that_cannot_be_written_there(self):
        """Files of at most 4 kB on a node: dumps are on a common file system, which would be full for all."""
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" &\n"
                              "(ulimit -f 4; CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 exec \"$@\") & wait\n")
        head = Head(path)
        self.addCleanup(self.check_end, head)
        answer = head.run(dump=os.path.join(self.folder.name, "dump"))
        self.assertEqual(answer["status"], "error", answer)
        self.assertEqual(answer["failure"]["node"], head.nodes()[1]["node"], answer)
        self.assertIn("File too large", answer["error"])
        self.assertTrue(head.run()["ok"])

    def test_a_full_disk_there(self):
        script, _ = self.full_disk()
        with Head(script) as head:
            node = head.nodes()[1]["node"]
            answer = head.ask(op="run", case="odd", load=[LIBRARY])  # of which each node keeps a copy
            self.assertEqual((answer["status"], answer["failure"]["node"], answer["failure"]["kind"]), ("error", node, "internal"), answer)
            self.assertIn(f"node {node} (ranks 2 and 3): ", answer["error"])
            self.assertIn("No space left on device: free space on its disk, or set CPPOOL_CACHE", answer["error"])
            self.assertIn("No space left on device", head.ask(op="list", load=[LIBRARY])["error"])
            self.assertTrue(head.run()["ok"])


class BadInput(Case):
    def refused(self, launch, text, code=2, **options):
        head = Head(launch, **options)
        self.addCleanup(self.check_end, head)
        self.assertEqual(head.end(), code, "".join(head.stderr))
        self.assertIn(text, "".join(head.stderr))
        self.assertEqual(len([line for line in head.stderr if line.startswith("cppoold: start ")]), 1)

    def greeter(self, text):
        path = os.path.join(self.folder.name, "greeter.py")
        with open(path, "w") as file:
            file.write(GREETER + text)
        return f"{sys.executable} {path}"

    def test_what_is_no_launcher(self):
        self.refused("", "--launch is empty")
        self.refused("   ", "--launch is empty")
        self.refused("'srun", "is not closed")
        self.refused("no-such-launcher -N 2", "no program no-such-launcher on PATH")
        self.refused("/etc/passwd", "is no program")

    def test_a_launcher_that_fails(self):
        self.refused("false", "false exited with code 1 when no agent had come; see its output")
        self.refused("true", "true exited with code 0 when no agent had come")

    def test_a_launcher_that_prints(self):
        path = self.script_of("echo '{\"ok\": true}'; echo more >&2; CPPOOL_AGENTS=1 exec \"$@\"\n")
        with Head(path) as head:
            self.assertEqual(head.ask(op="hello", id=7)["id"], 7)
        self.assertIn('{"ok": true}\n', head.stderr)

    def test_a_world_that_nodes_cannot_share(self):
        self.refused(self.launch(3), "cannot be shared evenly by 3 agents")

    def test_everything_is_started_twice(self):
        path = self.script_of("for i in 1 2; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" & done; wait\n")
        self.refused(path, "does the launcher start everything twice?")
        # One is half-way in when the last one that is missing has come.
        version = subprocess.run([DAEMON, "--version"], stdout=subprocess.PIPE, text=True).stdout.split()[1]
        self.refused(self.greeter(f"third = connect()\nagents = [connect(), connect()]\nfor i in 0, 1: greet(agents[i], i, 2, {version!r}, 'a')\n"
                                  f"time.sleep(0.1)\ngreet(third, 1, 2, {version!r}, 'third')\ntime.sleep(600)\n"),
                     "from node third (others: a, a): does the launcher start everything twice?")

    def test_an_agent_that_does_not_know_how_many_there_are(self):
        self.refused(self.script_of("exec \"$@\"\n"), "CPPOOL_AGENTS")

    def test_a_node_that_never_comes_up(self):
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 \"$@\" & sleep 60\n")
        self.refused(path, "in time: 1 of 2 agents had come (", environment={"CPPOOL_START_LIMIT_MS": "4000"})

    def test_a_long_sentinel(self):
        """It is in a frame to the agents."""
        done = subprocess.run([DAEMON, "--world-size=2", "--backend=host", f"--sentinel={'x' * 5000}", f"--launch={self.launch(2)}"], input='{"op": "hello"}\n',
                              env={**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout[:5001]), (0, "x" * 5000 + "{"), done.stderr)

    def test_a_launcher_that_does_not_end(self):
        """What is known is written before its end is waited for."""
        path = self.script_of("trap '' TERM\nCPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 \"$@\" & sleep 60 & wait; wait\n")
        head = Head(path, environment={"CPPOOL_START_LIMIT_MS": "4000"})
        self.addCleanup(self.check_end, head)
        while not any(line.startswith("cppoold: start ") for line in head.stderr):
            self.assertIsNone(head.process.poll())
            time.sleep(0.01)
        self.assertEqual(len(children(head.process.pid)), 1)
        self.assertIn("in time: 1 of 2 agents had come (", "".join(head.stderr))
        self.assertEqual(head.end(), 2)

    def test_what_a_launcher_leaves_behind_and_what_ignores_sigterm_ends(self):
        """Also when the client dies. One that ends the head gives it 5 s from SIGTERM; this waits for as long as it takes."""
        path = self.script_of("trap '' TERM\nsetsid sh -c 'sleep 600 & sleep 600' &\nCPPOOL_AGENTS=1 \"$@\" &\nwait; sleep 600; sleep 600\n")
        heads = {}
        for way in ("stdin", "SIGTERM", "SIGTERM twice", "parent"):
            # The shell, the head's parent, lets it keep stdin, which shows no end.
            heads[way] = head = Head(path, parent=["sh", "-c", '"$@"; exit', "sh"] if way == "parent" else [])
            self.addCleanup(self.check_end, head)
            head.nodes()
            if way == "stdin":
                head.process.stdin.close()
            elif way == "parent":
                head.process.kill()
            else:
                head.process.send_signal(signal.SIGTERM)
                if way == "SIGTERM twice":
                    time.sleep(0.5)  # it is ending when the second one comes
                    head.process.send_signal(signal.SIGTERM)
        for way, head in heads.items():
            with self.subTest(way):
                if way == "parent":
                    self.eventually(lambda: not head.marked())
                head.process.wait(60)
                head.end()
                self.assertEqual(head.left, [])

    def test_what_a_launcher_leaves_behind_ends_with_a_start_that_is_given_up(self):
        """That the agents then go is no failure of the start."""
        heads = []
        for agent, begun in [("", "begun\n"), ("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 \"$@\" &\n", "agent 1 of 2 has come")]:
            head = Head(self.script_of(f"{agent}trap '' TERM\nsetsid sleep 600 &\necho begun >&2\nwait; sleep 600\n"))
            self.addCleanup(self.check_end, head)
            self.eventually(lambda: any(begun in line for line in head.stderr) and "begun\n" in head.stderr)
            head.process.send_signal(signal.SIGTERM)
            heads.append((begun, head))
        for begun, head in heads:
            with self.subTest(begun):
                self.assertEqual(head.end(60), 128 + signal.SIGTERM)
                self.assertNotIn("cppoold: start ", "".join(head.stderr))

    def test_what_a_launcher_leaves_behind_is_reaped_when_it_ends(self):
        path = self.script_of("(sleep 0.1 & echo $! >&2)\nCPPOOL_AGENTS=1 exec \"$@\"\n")
        with Head(path) as head:
            head.nodes()
            orphan = self.number(head)
            self.eventually(lambda: not os.path.exists(f"/proc/{orphan}"))

    def test_a_node_that_comes_late(self):
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 \"$@\" & sleep 1; CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" & wait\n")
        with Head(path) as head:
            self.assertEqual([node["ranks"] for node in head.nodes()], [[0, 1], [2, 3]])
            self.assertTrue(head.run()["ok"])

    def test_an_agent_that_comes_after_all_others(self):
        """It finds nobody who listens, and says so; the world is as it was."""
        complete = os.path.join(self.folder.name, "complete")
        path = self.script_of("export CPPOOL_AGENTS=2\nfor i in 0 1; do CPPOOL_AGENT_INDEX=$i \"$@\" & done\n"
                              f"while ! [ -e {complete} ]; do sleep 0.1; done; CPPOOL_AGENT_INDEX=1 \"$@\"; wait\n")
        with Head(path) as head:
            self.assertTrue(head.run()["ok"])
            with open(complete, "w"):
                pass
            self.eventually(lambda: any("cannot be reached: Connection refused; it listens until all agents have come" in line for line in head.stderr))
            self.assertTrue(head.run()["ok"])

    def test_more_agents_than_expected(self):
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" & CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=2 \"$@\" & wait\n")
        self.refused(path, "more agents have come than the 2 that there should be")
        path = self.script_of("CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" & CPPOOL_AGENTS=4 CPPOOL_AGENT_INDEX=1 \"$@\" & wait\n")
        self.refused(path, "and others are of")

    def test_another_version_or_build(self):
        """A process with the secret that says what an older agent would."""
        self.refused(self.greeter('greet(connect(), 0, 1, "0.0.1+0123456789ab", "old")\ntime.sleep(600)\n'),
                     "the agent on node old is cppoold 0.0.1+0123456789ab, and this one is ")

    def test_another_secret_is_dropped_and_counted(self):
        path = self.script_of("CPPOOL_SECRET=wrong CPPOOL_AGENTS=1 \"$@\"; sleep 0.2\n")
        self.refused(path, "1 connections were dropped, the last one from 127.0.0.1: it has another secret")
        path = self.script_of("unset CPPOOL_SECRET; CPPOOL_AGENTS=1 \"$@\"; sleep 0.2\n")
        self.refused(path, "-x CPPOOL_SECRET")

    def test_an_agent_by_hand(self):
        for words, text in [(["--agent", "127.0.0.1:1"], "CPPOOL_SECRET is not set"), (["--agent", "x", "--backend=host"], "no other options")]:
            done = subprocess.run([DAEMON, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual((done.returncode, text in done.stdout), (2, True), done.stdout)
        done = subprocess.run([DAEMON, "--agent", "127.0.0.1:1"], env={**os.environ, "CPPOOL_SECRET": "0"}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        self.assertIn("cannot be reached", done.stdout)

    def test_without_gloo(self):
        self.refused(self.launch(2), "libgloo0", environment={"CPPOOL_GLOO_MODULE": "/etc/passwd"})

    def test_an_agent_that_cannot_start_ends_the_start_while_another_is_stuck(self):
        """The first one opens a pipe as gloo's module, into which nobody writes."""
        pipe = os.path.join(self.folder.name, "pipe")
        os.mkfifo(pipe)
        path = self.script_of("i=0; for module in " + pipe + " /etc/passwd; do\n"
                              "CPPOOL_GLOO_MODULE=$module CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i \"$@\" & i=$((i + 1)); done; wait\n")
        begin = time.monotonic()
        self.refused(path, ":1: ", environment={"CPPOOL_START_LIMIT_MS": "40000"})
        self.assertLess(time.monotonic() - begin, 20)

    def test_other_options(self):
        self.refused(self.launch(2), "--case", options=["--case=/x.so", "--python"])
        self.refused(self.launch(2), "--transport", options=["--transport=peer"])

    def test_many_strangers_that_say_nothing_do_not_keep_agents_out(self):
        path = self.script_of("for last; do :; done; echo \"head $last\" >&2; sleep 1\n"
                              "for i in 0 1; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i \"$@\" & done; wait\n")
        head = Head(path, environment={"CPPOOL_START_LIMIT_MS": "16000"})
        self.addCleanup(self.check_end, head)
        host, port = self.address(head)
        strangers = [socket.create_connection((host, port)) for _ in range(250)]
        self.assertTrue(head.run()["ok"], "".join(head.stderr))
        for stranger in strangers:
            stranger.close()

    def address(self, head):
        """What its launcher has written."""
        while not (lines := [line for line in list(head.stderr) if line.startswith("head ")]):
            time.sleep(0.01)
        host, _, port = lines[0].split()[1].partition(":")
        return host, int(port)

    def test_garbage_and_strangers_do_not_disturb_the_start(self):
        """Somebody connects first, with what is no frame, with too much, and with nothing."""
        path = self.script_of("for last; do :; done; echo \"head $last\" >&2; sleep 1\n"
                              "for i in 0 1; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i \"$@\" & done; wait\n")
        head = Head(path)
        self.addCleanup(self.check_end, head)
        host, port = self.address(head)
        silent = socket.create_connection((host, port))
        for text in (b"\x00\xff\n", b'{"frame": "agent"}\n', b'{"frame": "agent", "nonce": "1", "proof": "2"}\n', b"x" * 100000, b"[" * 3000 + b"\n"):
            with socket.create_connection((host, port)) as stranger:
                try:
                    stranger.sendall(text)
                except OSError:
                    pass
        self.assertTrue(head.run()["ok"])
        with self.assertRaises(OSError):
            socket.create_connection((host, port))  # it listens no more
        silent.close()
        self.assertEqual(head.end(), 0)


class Command(Case):
    def run_command(self, *words, code=0):
        done = subprocess.run([COMMAND, *words], env={**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1", "CPPOOL_DAEMON": DAEMON},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout

    def test_run_and_the_line_that_repeats(self):
        cell = ["--world-size", "4", "--backend", "host", "--param", "max_seqlen_q=128", "--param", "num_heads=4"]
        out = self.run_command("run", "--launch", self.launch(2), *cell)
        self.assertRegex(out, "transport gloo, 4 ranks on .*, on nodes .*:0, .*:1\n1 passed, 0 failed")
        out = self.run_command("run", "--launch", "false", *cell, code=1)
        self.assertEqual(out.count("--launch: false exited with code 1"), 1, out)
        self.assertIn("--launch false --param", out)
        self.assertIn("words of a launcher", self.run_command("run", "--launch", " ", *cell, code=2))

    def test_bench(self):
        out = self.run_command("bench", "--launch", self.launch(2), "--world-size", "2", "--backend", "host", "--param", "max_seqlen_q=128",
                               "--param", "num_heads=4", "--repeat", "3")
        self.assertIn("gloo", out)
        self.assertIn("no efficiency, because the run on one GPU failed: one rank cannot be on 2 nodes\n", out)

    def test_doctor_names_nodes_the_allocation_and_settings_of_nccl(self):
        os.environ.update(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="a,b", NCCL_SOCKET_IFNAME="lo")
        try:
            out = self.run_command("doctor", "--backend", "host", "--launch", self.launch(2))
        finally:
            for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "NCCL_SOCKET_IFNAME"):
                del os.environ[name]
        self.assertIn('Slurm: job 7, 2 nodes (a,b): --launch "srun -N 2 --ntasks-per-node=1"', out)
        self.assertIn("NCCL_SOCKET_IFNAME=lo", out)
        self.assertNotIn("other settings", out)
        self.assertRegex(out, "world size 4 .*backend host, transport gloo, 4 ranks on .*, on nodes ")
        self.assertIn("cannot be shared evenly by 2 agents", out)

    def test_doctor_tries_as_many_ranks_as_there_are_agents(self):
        out = self.run_command("doctor", "--backend", "host", "--launch", self.launch(3))
        self.assertRegex(out, "world size 3 .*backend host, transport gloo, 3 ranks on ")

    def test_doctor_names_settings_of_nccl_that_a_launcher_changes(self):
        path = os.path.join(self.folder.name, "settings")
        with open(path, "w") as file:
            file.write("#!/bin/sh\nfor i in 0 1; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i NCCL_DEBUG=$i \"$@\" & done; wait\n")
        os.chmod(path, 0o700)
        out = self.run_command("doctor", "--backend", "host", "--launch", path)
        self.assertRegex(out, "node .*:0 has other settings of NCCL: NCCL_DEBUG=0\n")
        self.assertRegex(out, "node .*:1 has other settings of NCCL: NCCL_DEBUG=1\n")


class OpenMpi(ByMpirun, Faults, Threads):
    def test_the_secret_is_in_no_argument(self):
        head = self.head()
        with open(f"/proc/{head.nodes()[1]['pid']}/environ", "rb") as file:
            secret = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if b"=" in each)[b"CPPOOL_SECRET"]
        for pid in head.marked():
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                self.assertNotIn(secret, file.read())

    def test_the_essential_suite(self):
        def run(agents):
            return subprocess.run([COMMAND, "run", "--suite=essential", "--max-seqlen=16", "--world-size=4", "--backend=host", "--launch",
                                   self.launch(agents)], env={**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1", "CPPOOL_DAEMON": DAEMON},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with ThreadPoolExecutor(2) as pool:
            for done in pool.map(run, (2, 4)):
                self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, "120 passed, 0 failed, 0 skipped"), done.stdout[-4000:])


def take_arguments():
    global DAEMON, COMMAND, LIBRARY
    DAEMON, COMMAND, LIBRARY = (os.path.abspath(sys.argv.pop(1)) for _ in range(3))
    Head.daemon = DAEMON


if __name__ == "__main__":
    take_arguments()
    unittest.main()
