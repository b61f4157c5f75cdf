#!/usr/bin/env python3
"""Cases in Python on several machines: `--launch` with `--python`. What one machine has as well is in python_cases_test.py, which runs on
agents, too.

    machines_python_test.py CPPOOLD CPPOOL [unittest's arguments]
"""
import fcntl
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest

from machines_support import ByMpirun, Case, Head, Kills, children

PYTHON = sys.executable if importlib.util.find_spec("pytest") else "/usr/bin/python3"  # with pytest
CASES = """
import os, signal, sys, time
NAMES = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"

def place(world):
    return [os.environ[name] for name in NAMES]

def interface(world):
    return os.environ["GLOO_SOCKET_IFNAME"]

def fault(world, rank, kind, others=0):
    with world.stage("before"):
        pass
    with world.stage("there"):
        if world.rank != rank:
            time.sleep(others)
        elif kind == "fails":
            assert world.rank == -1
        elif kind == "exits":
            os._exit(5)
        elif kind == "aborts":
            os.abort()
        elif kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(100)
        elif kind == "hangs":
            time.sleep(100)

def pollutes(world):
    sys.modules["of_case"] = sys

def polluted(world):
    assert world.rank != 3 or "of_case" not in sys.modules

def writes(world, path):
    with open(path, "w") as file:
        file.write("x" * (1 << 20))

def iterates(world):
    for _ in world.iterations():
        with world.stage("step"):
            time.sleep(0.001)
"""


class Python(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cases = os.path.join(cls.folder.name, "cases.py")
        with open(cls.cases, "w") as file:
            file.write(CASES)

    def head(self, agents=2, world_size=4, options=(), **more):
        return super().head(agents, world_size, options=["--python", PYTHON, *options], **more)

    def call(self, head, function, kwargs=None, **request):
        return head.call(f"{self.cases}:{function}", kwargs, **request)

    def check_passes(self, head):
        self.assertTrue((answer := self.call(head, "place"))["ok"], answer)

    def during(self, do, deadline_ms=60000):
        head = self.head()
        nodes = head.nodes()
        python = {"function": f"{self.cases}:fault", "kwargs": {"rank": -1, "kind": "hangs", "others": 100}}
        head.send(op="run", python=python, deadline_ms=deadline_ms)
        time.sleep(0.7)
        do(head, nodes)
        return head, nodes


def address_of(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", interface.encode()))[20:24])  # SIOCGIFADDR
        except OSError:
            return None


class Places:
    def test_each_rank_knows_its_place(self):
        for agents, size in ((1, 4), (2, 4), (4, 4), (2, 2)):
            with self.head(agents, size) as head:
                hello = head.ask(op="hello")
                local = size // agents
                self.assertEqual([node["ranks"] for node in hello["nodes"]], [list(range(at, at + local)) for at in range(0, size, local)])
                self.assertEqual([device["node"] for device in hello["devices"]], [hello["nodes"][rank // local]["node"] for rank in range(size)])
                self.assertGreater(hello["devices"][-1]["total_bytes"], 0)
                self.assertEqual((hello["ranks"], hello["python"]["path"]), ("processes", PYTHON))
                values = [rank["value"] for rank in self.call(head, "place")["ranks"]]
                self.assertEqual([value[:7] for value in values],
                                 [[str(each) for each in (rank, rank % local, size, local, rank // local, agents)] + ["127.0.0.1"] for rank in range(size)])
                self.assertEqual(len({value[7] for value in values}), 1)


class Worlds(Python):
    def test_torch_is_told_the_interface_that_reaches_the_head(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
            except OSError:
                self.skipTest("this machine has no network")
            address = probe.getsockname()[0]
        for agents, value, wanted in ((2, None, address), (2, "any", "any"), (1, None, "127.0.0.1")):
            environment = {"CPPOOL_HEAD_ADDRESS": address, **({"GLOO_SOCKET_IFNAME": value} if value else {})}
            with self.head(agents, environment=environment) as head:
                names = {rank["value"] for rank in self.call(head, "interface")["ranks"]}
            self.assertEqual(names, {wanted if value else next(name for _, name in socket.if_nameindex() if address_of(name) == wanted)})

    def test_iterations_are_those_of_all_ranks(self):
        with self.head() as head:
            answer = self.call(head, "iterates", repeat=200, warmup=2, sampling={"precision": 0.5, "max_ms": 3000})
            self.assertTrue(answer["ok"], answer)
            self.assertEqual(len({len(rank["samples"]["step"]) for rank in answer["ranks"]}), 1, answer)

    def test_a_trace_is_a_file_for_each_node(self):
        self.check_clocks(["--python", PYTHON], lambda head, path: self.call(head, "iterates", trace=path, repeat=3))

    def test_cancel(self):
        with self.head() as head:
            python = {"function": f"{self.cases}:fault", "kwargs": {"rank": 2, "kind": "hangs", "others": 100}}
            head.send(op="run", id="long", python=python)
            time.sleep(0.5)
            answers = [head.ask(op="cancel", cancels="long", id="c"), head.answer()]
            self.assertEqual(next(answer for answer in answers if answer["id"] == "long")["failure"]["kind"], "cancelled")
            self.check_passes(head)


class Faults:
    def test_answers_are_those_of_one_machine_with_the_node(self):
        heads = [self.head(agents) for agents in (None, 2)]
        node = heads[1].nodes()[1]["node"]
        for kind in ("fails", "exits", "aborts", "is killed", "stops", "hangs"):
            with self.subTest(kind):
                ends = []
                python = {"function": f"{self.cases}:fault", "kwargs": {"rank": 2, "kind": kind, "others": 100 if kind == "aborts" else 0}}
                for head in heads:  # both at once: some last until the deadline
                    head.send(op="run", python=python, deadline_ms=2000 if kind in ("stops", "hangs") else 30000)
                for head in heads:
                    answer = head.answer()
                    failure = answer["failure"]
                    ends.append((answer["status"], failure["kind"], failure["rank"], failure["stage"], answer.get("fatal", False), answer["replaced"]))
                    self.check_passes(head)
                self.assertEqual(ends[0], ends[1])
                self.assertEqual(failure["node"], node)

    def test_a_fork_server_is_killed(self):
        """Its agent lives, and starts another."""
        def kill(_, nodes):
            for server in children(nodes[1]["pid"]):
                os.kill(server, signal.SIGKILL)
        head, nodes = self.during(kill)
        answer = head.answer()
        self.assertFalse(answer.get("fatal", False), answer)
        self.assertEqual(answer["failure"]["node"], nodes[1]["node"])
        self.assertIn(answer["failure"]["rank"], nodes[1]["ranks"])
        self.assertIn("the fork server was killed by signal 9", answer["error"])
        self.check_passes(head)
        self.assertEqual([node["pid"] for node in head.nodes()], [node["pid"] for node in nodes])


class Failures(Kills, Python):
    def test_the_report_of_a_deadline_has_all_ranks_and_what_they_do(self):
        with self.head() as head:
            answer = self.call(head, "fault", {"rank": 3, "kind": "stops", "others": 100}, deadline_ms=2000)
            nodes = [node["node"] for node in head.nodes()]
        self.assertEqual(answer["failure"]["kind"], "timeout")
        for rank in range(4):
            self.assertIn(f"rank {rank} on node {nodes[rank // 2]}: there, ", answer["error"])
        self.assertIn("it is stopped", answer["ranks"][3]["error"])
        for rank in range(3):
            self.assertIn("cases.py", answer["ranks"][rank]["stack"][0])

    def test_a_polluted_case(self):
        with self.head() as head:
            self.call(head, "pollutes")
            answer = self.call(head, "polluted")
            if answer["status"] == "passed":  # the state was put back
                self.skipTest("nothing stays")
            self.assertEqual((answer["failure"]["kind"], answer["failure"]["rank"]), ("polluted", 3), answer)
            self.assertEqual(answer["failure"]["node"], head.nodes()[1]["node"])

    def test_a_rank_that_died_while_it_waited_is_replaced(self):
        with self.head() as head:
            for _ in range(2):
                pids = self.ranks_of(head)
                self.assertEqual(len(pids), 4)
                os.kill(pids[-1], signal.SIGKILL)
                time.sleep(0.3)
                answer = self.call(head, "place")
                self.assertTrue(answer["ok"], answer)
                self.assertIn("was killed by signal 9", answer["replaced"])

    def ranks_of(self, head):
        """The pids of its rank processes."""
        found = []
        for node in head.ask(op="hello")["nodes"]:
            for server in children(node["pid"]):
                found += children(server)
        return found

    def test_an_agent_is_killed(self):
        head, nodes = self.during(lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGKILL))
        answer = head.answer(10)
        self.assertTrue(answer["fatal"], answer)
        self.assertEqual(answer["failure"]["node"], nodes[1]["node"])
        self.assertIn(f"is lost with node {nodes[1]['node']} (ranks 2 and 3): its connection ended", answer["error"])
        self.assertEqual(head.end(), 3)

    def stop_others(self):
        """An agent before a deadline, without a client and with one."""
        head, nodes = self.during(lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGSTOP), deadline_ms=2000)
        client = self.client_of_a_stopped_agent()

        def check():
            answer = head.answer()
            self.assertEqual((answer["failure"]["kind"], answer["fatal"]), ("timeout", True), answer)
            self.assertIn(f"rank 1 on node {nodes[0]['node']}: there, ", answer["error"])
            self.assertIn(f"rank 3 on node {nodes[1]['node']}: the runtime does not say where", answer["error"])
            self.assertEqual(answer["failure"]["node"], nodes[1]["node"])
            self.assertEqual(head.end(), 3)
            out = client.communicate(timeout=60)[0]
            self.assertEqual(out.splitlines()[-1:], ["timeout True"], out)
        return check

    def client_of_a_stopped_agent(self):
        """It is told before it gives up on the daemon, which waits for ranks that cannot end."""
        script = ("import cppool, os, signal, sys, threading\n"
                  f"with cppool.Pool(4, backend='host', launch={self.launch(2)!r}, python={PYTHON!r}) as pool:\n"
                  "    nodes = pool.hello()['nodes']\n"
                  "    threading.Timer(0.5, os.kill, (nodes[1]['pid'], signal.SIGSTOP)).start()\n"
                  f"    result = pool.call({self.cases + ':fault'!r}, {{'rank': 0, 'kind': 'hangs', 'others': 100}}, deadline=3)\n"
                  "    print(result.failure.kind, result.failure.node == nodes[1]['node'])\n")
        build = os.path.dirname(os.path.dirname(Head.daemon))
        return subprocess.Popen([PYTHON, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, "CPPOOL_DAEMON": Head.daemon, "CPPOOL_HEAD_ADDRESS": "127.0.0.1",
                                     "PYTHONPATH": os.path.join(build, "python")})

    def test_an_agent_is_killed_while_ranks_are_replaced(self):
        with self.head() as head:
            nodes = head.nodes()
            self.call(head, "fault", {"rank": 0, "kind": "exits"})
            time.sleep(0.05)
            os.kill(nodes[1]["pid"], signal.SIGKILL)
            self.assertEqual(head.process.wait(60), 3)


class OpenMpi(ByMpirun, Places, Faults, Python):
    pass


class Files(Python):
    def setUp(self):
        """Two folders, which the agents take for their working folders, as nodes without a common file system have files of one name."""
        self.here = os.getcwd()
        self.folders = [os.path.join(self.folder.name, name) for name in ("node0", "node1")]
        for folder in self.folders:
            os.makedirs(folder, exist_ok=True)
            self.write(folder, "cases.py", "import helper\ndef case(): return helper.VALUE\n")
            self.write(folder, "helper.py", "VALUE = 1\n")
            self.write(folder, "script.py", "import helper\n")
            self.write(folder, "test_it.py", "import helper\ndef test_it(): assert helper.VALUE == 1\n")
        self.odd = self.script_of(f"for i in 0 1; do (cd {self.folder.name}/node$i && CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i exec \"$@\") & done; wait\n")
        os.chdir(self.folders[0])
        self.addCleanup(os.chdir, self.here)

    @staticmethod
    def write(folder, name, text):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)

    def run_here(self, head, **python):
        return head.ask(op="run", python={"path": ["/proc/self/cwd"], "roots": ["/proc/self/cwd"], **python})

    def test_files_that_differ_are_named_with_the_node(self):
        head = Head(self.odd, options=["--python", PYTHON])
        self.addCleanup(self.check_end, head)
        node = head.nodes()[1]["node"]
        function, ways = "/proc/self/cwd/cases.py:case", {}
        answer = self.run_here(head, function=function)
        self.assertTrue(answer["ok"], answer)
        ways["function"] = {"function": function}
        ways["pytest"] = {"pytest": ["/proc/self/cwd/test_it.py", "--rootdir=/proc/self/cwd", "-p", "no:cacheprovider"],
                          "nodeid": "test_it.py::test_it"}
        for way, python in ways.items():
            with self.subTest(way):
                self.write(self.folders[1], "helper.py", "VALUE = 2\n")
                answer = self.run_here(head, **python)
                self.assertEqual((answer["status"], answer["failure"]["kind"]), ("error", "invalid_request"), answer)
                self.assertIn(f"node {node} has another ", answer["error"])
                self.assertIn("/helper.py than the head on ", answer["error"])
                self.assertIn("a file system that all nodes and the head share", answer["error"])
                self.assertEqual(answer["failure"]["node"], node)
                self.write(self.folders[1], "helper.py", "VALUE = 1\n")
                self.assertTrue((answer := self.run_here(head, **python))["ok"], answer)
        os.remove(os.path.join(self.folders[1], "script.py"))
        answer = self.run_here(head, script="/proc/self/cwd/script.py")
        self.assertIn(f"node {node} does not have the file /proc/self/cwd/script.py of the head on ", answer["error"])
        os.remove(os.path.join(self.folders[0], "cases.py"))
        self.assertIn("there is no file", self.run_here(head, function=function)["error"])

    def test_preloaded_files_too(self):
        self.write(self.folders[1], "helper.py", "VALUE = 3\n")
        head = Head(self.odd, options=["--python", PYTHON, "--preload", "helper"], environment={"PYTHONPATH": "/proc/self/cwd"})
        self.addCleanup(self.check_end, head)
        answer = self.run_here(head, script="/proc/self/cwd/script.py")
        self.assertIn("has another /proc/self/cwd/helper.py than the head", answer["error"])


class BadInput(Python):
    def refused(self, launch, text, options=(), **more):
        head = Head(launch, options=["--python", PYTHON, *options], **more)
        self.addCleanup(self.check_end, head)
        self.assertEqual(head.end(), 2, "".join(head.stderr))
        self.assertIn(text, "".join(head.stderr))
        start = [line for line in head.stderr if line.startswith("cppoold: start ")]
        self.assertEqual(len(start), 1)
        return json.loads(start[0].partition("start ")[2])

    def test_what_a_node_lacks(self):
        only_first = self.script_of("for i in 0 1; do PYTHONPATH=" + self.folder.name + "/path$i CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i \"$@\" & done; wait\n")
        os.makedirs(os.path.join(self.folder.name, "path0"), exist_ok=True)
        with open(os.path.join(self.folder.name, "path0", "only_there.py"), "w"):
            pass
        self.refused(only_first, ":1: --preload only_there: it cannot be imported by", ["--preload", "only_there"])
        self.refused(self.launch(2), "nccl needs torch", backend="cuda")

    def test_other_options(self):
        self.refused(self.launch(2), "--transport", ["--transport=peer"])
        self.refused(self.launch(2), "--allow-faults", ["--allow-faults"])

    def test_requests_of_another_kind(self):
        with self.head() as head:
            self.assertIn("Python processes (--python)", head.run()["error"])
            self.assertIn("load no libraries", head.ask(op="list", load=["/x.so"])["error"])
            self.assertTrue(head.ask(op="validate", python={"function": f"{self.cases}:place"})["ok"])
            self.assertIn("there is no file", head.ask(op="validate", python={"function": "/nowhere.py:x"})["error"])
            self.assertEqual(self.call(head, "no_such")["failure"]["kind"], "invalid_request")

    def test_a_full_disk(self):
        script, folder = self.full_disk()
        with Head(script, options=["--python", PYTHON]) as head:
            answer = self.call(head, "writes", {"path": os.path.join(folder, "large")})
            self.assertEqual(answer["failure"]["node"], head.nodes()[1]["node"], answer)
            self.assertIn(answer["failure"]["rank"], (2, 3))
            self.assertIn("No space left on device", answer["error"])
            self.check_passes(head)


class Doors(Python):
    def test_torchrun_and_attached_clients_by_a_server(self):
        """`cppool serve --launch`: whatever reaches the server has its ranks through the launcher."""
        address = os.path.join(self.folder.name, "socket")
        environment = {**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1", "CPPOOL_DAEMON": Head.daemon, "CPPOOL_PYTHON": sys.executable}
        server = subprocess.Popen([COMMAND, "serve", "--socket", address, "--launch", self.launch(2)], stderr=subprocess.PIPE, text=True,
                                  env=environment)
        try:
            self.assertIn("serves at", server.stderr.readline())
            script = os.path.join(self.folder.name, "places.py")
            with open(script, "w") as file:
                file.write("import os\nprint('I am', os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'])\n")
            done = subprocess.run([COMMAND, "torchrun", "--attach=" + address, "--preload=decimal", "--nproc-per-node=4", script], env=environment,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(done.returncode, 0, done.stdout)
            for place in ("0 0 0", "1 1 0", "2 0 1", "3 1 1"):
                self.assertIn("I am " + place, done.stdout)
            done = subprocess.run([COMMAND, "run", "--attach=" + address, "--world-size=4", "--backend=host", "--param=max_seqlen_q=128"],
                                  env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertRegex(done.stdout, "on nodes .*:0, .*:1\n1 passed")
            own = subprocess.run([COMMAND, "run", "--attach=" + address, "--launch", "./launch 1", "--world-size=4", "--backend=host",
                                  "--param=max_seqlen_q=128"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 cwd=self.folder.name)  # the client's
            self.assertRegex(own.stdout, "transport host, .*\n1 passed")
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                client.sendall(b'{"op": "attach", "folder": "/", "pool": [1]}\n')
                error = json.loads(client.makefile().readline())["error"]
                self.assertIn("pool", error)
                self.assertNotIn("json.exception", error)
            done = subprocess.run([COMMAND, "ps", "--json", "--socket", address], env=environment, stdout=subprocess.PIPE, text=True)
            self.assertEqual(sorted(pool["transport"] for pool in json.loads(done.stdout)["pools"]), ["gloo", "host", "none"])
        finally:
            server.terminate()
            self.assertIn("has ended", server.communicate()[1])


if __name__ == "__main__":
    Head.daemon, COMMAND = (os.path.abspath(sys.argv.pop(1)) for _ in range(2))
    unittest.main()
