"""What the tests of worlds of several processes share: a daemon over pipes, and a launcher of two lines."""
import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

SCRIPT = """#!/bin/sh
agents=$1; shift
for index in $(seq 0 $((agents - 1))); do CPPOOL_AGENTS=$agents CPPOOL_AGENT_INDEX=$index "$@" & done
wait
"""
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none -x CPPOOL_SECRET"
SMALL = {"max_seqlen_q": 128, "num_heads": 4, "deterministic": True}


def children(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # the thread has ended
            found += map(int, file.read().split())
    return found


def rank_list(first, end):
    """As messages list so many ranks: "rank 1", "ranks 2 and 3"."""
    return f"rank {first}" if end - first == 1 else f"ranks {first} and {end - 1}"


class Head:
    """A cppoold over pipes. `mark` is in the environment of all that it starts, and `parent` the words of what starts it in place of this."""
    daemon = None  # the program

    def __init__(self, launch, world_size=4, options=(), environment=(), backend="host", parent=()):
        self.mark = f"CPPOOL_TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        command = [*parent, Head.daemon, f"--world-size={world_size}", f"--backend={backend}", "--sentinel=", "--log-level=info", *options]
        if launch is not None:
            command.append(f"--launch={launch}")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "CPPOOL_HEAD_ADDRESS": "127.0.0.1", **dict(environment), name: value})
        self.lines, self.stderr = queue.Queue(), []
        self.threads = [threading.Thread(target=self.read), threading.Thread(target=self.read_stderr)]
        for thread in self.threads:
            thread.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def read_stderr(self):
        for line in self.process.stderr:
            self.stderr.append(line)

    def send(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds=30):
        line = self.lines.get(timeout=seconds)
        if line is None:
            raise AssertionError("the daemon has closed stdout:\n" + "".join(self.stderr[-40:]))
        return json.loads(line)

    def ask(self, seconds=30, **request):
        self.send(**request)
        return self.answer(seconds)

    def run(self, params=None, **request):
        return self.ask(op="run", params={**SMALL, **(params or {})}, **request)

    def call(self, function, kwargs=None, **request):
        """Of a case in Python, "file.py:name"."""
        python = {"function": function, "kwargs": kwargs or {}, "cwd": os.getcwd(), "path": []}
        return self.ask(op="run", python=python, **request)

    def nodes(self):
        return self.ask(op="hello")["nodes"]

    def marked(self):
        """The pids of all living processes that it has started, itself too."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if self.mark.encode() in file.read().split(b"\0"):
                        found.append(int(pid))
            except OSError:
                pass
        return found

    def end(self, seconds=20):
        if not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.left = []
            for _ in range(100):
                self.left = self.marked()
                if not self.left:
                    break
                time.sleep(0.1)
            for pid in self.left:
                os.kill(pid, signal.SIGKILL)
            for thread in self.threads:
                thread.join()
            self.process.stdout.close()
            self.process.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


class Case(unittest.TestCase):
    # Other worlds for machines_gpu_test.py. A fault or a kill hits a rank of the second of two agents.
    backend, world_size, most_agents, fault_rank, at_once = "host", 4, 4, 2, 2
    environment, params = {}, {}

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.script = os.path.join(cls.folder.name, "launch")
        with open(cls.script, "w") as file:
            file.write(SCRIPT)
        os.chmod(cls.script, 0o700)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def launch(self, agents):
        return f"'{self.script}' {agents}"

    def eventually(self, holds, pause=0.01):
        limit = time.monotonic() + 60
        while not holds():
            self.assertLess(time.monotonic(), limit, "it did not come about within a minute")
            time.sleep(pause)

    def head(self, agents=2, world_size=None, environment=(), **options):
        head = Head(None if agents is None else self.launch(agents), world_size or self.world_size, backend=self.backend,
                    environment={**self.environment, **dict(environment)}, **options)
        self.addCleanup(self.check_end, head)
        return head

    def check_end(self, head):
        if head.process.poll() is None or not hasattr(head, "left"):
            head.end()
        self.assertEqual(head.left, [], "processes were left behind")

    def digests(self, answer):
        self.assertTrue(answer["ok"], answer.get("error"))
        return [rank["digest"] for rank in answer["ranks"]]

    def check_traces(self, head, run):
        """run(path): an answer to a request with a trace. A file for each node has its ranks, and the offset of its clock."""
        nodes = head.nodes()
        path = os.path.join(self.folder.name, "trace.json")
        answer = run(path)
        self.assertTrue(answer["ok"], answer)
        self.assertFalse(os.path.exists(path))
        begins = []
        for node in nodes:
            own = os.path.join(self.folder.name, f"trace.{node['node'].replace(':', '-')}.json")
            with open(own) as file:
                trace = json.load(file)
            os.remove(own)
            about = trace["otherData"]
            self.assertEqual((about["node"], about["world_size"]), (node["node"], 4))
            names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
            self.assertEqual(names, {"cppoold", *(f"rank {rank}" for rank in node["ranks"])})
            slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
            # All of one request: nothing lies before its beginning or after its end, but for what the clocks are wrong by.
            slack = 1 + about["clock_offset_error_ns"] / 1e3
            whole = [event for event in slices if event["name"] == "run on all ranks"]
            self.assertEqual(len(whole), 1)
            for event in slices:
                if event["pid"] > 1:
                    self.assertGreaterEqual(event["ts"], whole[0]["ts"] - slack, event)
                    self.assertLessEqual(event["ts"] + event["dur"], whole[0]["ts"] + whole[0]["dur"] + slack, event)
            self.assertGreater(len([event for event in slices if event["pid"] > 1 and event["cat"] == "stage"]), 0)
            begins.append((about["begin_monotonic_ns"] - about["clock_offset_ns"], about["clock_offset_ns"], about["clock_offset_error_ns"]))
        self.assertEqual(len({begin for begin, _, _ in begins}), 1)  # of the head
        return [(offset, error) for _, offset, error in begins]

    def check_clocks(self, options, run):
        """This machine's processes have one clock, but for those in a time namespace of their own, which root may make."""
        head = Head(self.launch(2), options=options)
        self.addCleanup(self.check_end, head)
        for offset, error in self.check_traces(head, lambda path: run(head, path)):
            self.assertLessEqual(abs(offset), error)
        ahead = ["unshare", "--time", "--monotonic", "5000", "--fork", "--kill-child"]
        if subprocess.run([*ahead, "true"], stderr=subprocess.DEVNULL).returncode != 0:
            return
        script = self.script_of(f"CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=0 \"$@\" &\nCPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=1 {' '.join(ahead)} \"$@\" &\nwait\n")
        with Head(script, options=options) as head:
            (_, _), (offset, error) = self.check_traces(head, lambda path: run(head, path))
            self.assertLessEqual(abs(offset - 5000 * 10**9), error)

    def full_disk(self):
        """(launcher, folder): of two agents, of which the second one has at the folder a file system of its own, which is full."""
        folder = os.path.join(self.folder.name, "full")
        os.makedirs(folder, exist_ok=True)
        mount = f"mount -t tmpfs -o size=64k tmpfs '{folder}'"
        own = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
        if subprocess.run([*own, mount], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
            self.skipTest("no file system can be mounted here, not even in a user namespace")
        script = f"{mount} && ! head -c 1M /dev/zero > '{folder}/all' 2>&1 && CPPOOL_AGENT_INDEX=1 CPPOOL_CACHE='{folder}/cache' exec \"$@\""
        return self.script_of(f"export CPPOOL_AGENTS=2\nCPPOOL_AGENT_INDEX=0 CPPOOL_CACHE='{self.folder.name}/cache' \"$@\" &\n"
                              f"{shlex.join([*own, script])} sh \"$@\" &\nwait\n"), folder

    def number(self, head):
        """A pid that its launcher has written, perhaps after what the head has."""
        self.eventually(lambda: any(line.strip().isdigit() for line in head.stderr))
        return next(int(line) for line in head.stderr if line.strip().isdigit())

    def script_of(self, text):
        path = os.path.join(self.folder.name, "odd")
        with open(path, "w") as file:
            file.write("#!/bin/sh\n" + text)
        os.chmod(path, 0o700)
        return path


class Kills:
    """Tests for threads and for Python processes alike. `during(do, deadline_ms)` begins a case, calls do(head, nodes), and returns both."""
    def test_the_head_is_killed(self):
        head = self.during(lambda head, nodes: head.process.kill())[0]
        head.end()
        self.assertEqual(head.left, [])

    def stop_others(self):
        """Returns what checks that they are missed, too."""
        return lambda: None

    def test_what_is_stopped_is_missed_by_its_heartbeat(self):
        """All at once, since it takes 10 s."""
        head = self.during(lambda head, nodes: head.process.send_signal(signal.SIGSTOP), deadline_ms=60000)[0]
        check_others = self.stop_others()
        self.eventually(lambda: set(head.marked()) == {head.process.pid}, pause=0.1)
        head.process.kill()
        head.end()
        check_others()

    def test_an_agent_is_killed_between_requests(self):
        head = self.head()
        nodes = head.nodes()
        os.kill(nodes[0]["pid"], signal.SIGKILL)
        self.assertEqual(head.process.wait(10), 3)
        self.assertIn(f"node {nodes[0]['node']} ({rank_list(0, self.world_size // 2)}) is lost", "".join(head.stderr))


class MpirunLaunches:
    """The launcher is Open MPI's, where it is."""
    def launch(self, agents):
        return f"{MPIRUN} -n {agents}" if shutil.which("mpirun") else super().launch(agents)


class ByMpirun(MpirunLaunches):
    """Tests for threads and for Python processes alike, with `during` as for Kills."""
    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun")
    def test_kills(self):
        kills = {"agent": lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGKILL),
                 "stopped agent": lambda head, nodes: os.kill(nodes[1]["pid"], signal.SIGSTOP),
                 "launcher": lambda head, nodes: [os.kill(pid, signal.SIGKILL) for pid in children(head.process.pid)],
                 "head": lambda head, nodes: head.process.kill()}
        heads = {what: self.during(kill, deadline_ms=3000) for what, kill in kills.items()}
        for what, (head, nodes) in heads.items():
            with self.subTest(what):
                if what != "head":
                    answer = head.answer()
                    self.assertTrue(answer["fatal"], answer)
                    lost = nodes if what == "launcher" else nodes[1:]
                    self.assertIn(answer["failure"]["node"], [node["node"] for node in lost], answer)
                    if what == "launcher":
                        self.assertRegex(answer["error"], "the launcher mpirun was killed by signal 9")
                head.end()
                self.assertEqual(head.left, [])
