#!/usr/bin/env python3
"""Checks real traffic against protocol/schema/: requests that cppoold accepts, its answers, and requests that cppool sends.

    schema_test.py ROOT CPPOOLD CPPOOL

Needs Python's jsonschema (`scripts/setup --tests`). With the option `--world-size` this program acts as cppool's daemon: it forwards lines
to and from the program $CPPOOL_REAL_DAEMON and logs both directions in the file $CPPOOL_TRAFFIC.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest

try:
    import jsonschema
except ImportError:
    if os.path.realpath(sys.executable) != os.path.realpath("/usr/bin/python3") and os.access("/usr/bin/python3", os.X_OK):
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])  # the Python that Debian's packages are installed for
    sys.exit("schema_test.py needs Python's jsonschema: `scripts/setup --tests` installs it")

SENTINEL = "[CP_POOL_RESP] "
TINY = {"max_seqlen_q": 16, "num_heads": 4}


def pass_on():
    """Forwards lines between cppool and a daemon and logs them."""
    log = open(os.environ["CPPOOL_TRAFFIC"], "a", encoding="utf-8")
    lock = threading.Lock()
    environment = {k: v for k, v in os.environ.items() if k != "CPPOOL_PARENT_PID"}  # the parent is this process
    daemon = subprocess.Popen([os.environ["CPPOOL_REAL_DAEMON"], *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=environment)

    def copy_lines(source, target, name):
        for line in source:
            with lock:
                log.write(json.dumps([name, line.decode()]) + "\n")
                log.flush()
            target.write(line)
            target.flush()
        target.close()

    answers = threading.Thread(target=copy_lines, args=(daemon.stdout, sys.stdout.buffer, "answer"))
    answers.start()
    copy_lines(sys.stdin.buffer, daemon.stdin, "request")
    answers.join()
    return daemon.wait()


def strict(schema):
    """The schema in which a member that it does not list is an error, except in objects whose members are stages."""
    if isinstance(schema, dict):
        closed = {key: strict(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict):
            closed.setdefault("additionalProperties", False)
        return closed
    return [strict(value) for value in schema] if isinstance(schema, list) else schema


def validator(schema):
    """A validator that takes only numbers without a fraction as integers; JSON Schema also takes 2.0."""
    types = jsonschema.Draft7Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool))
    return jsonschema.validators.extend(jsonschema.Draft7Validator, type_checker=types)(schema)


def load(name):
    with open(os.path.join(ROOT, "protocol", "schema", name), encoding="utf-8") as file:
        schema = json.load(file)
    jsonschema.Draft7Validator.check_schema(schema)
    return schema


class Daemon:
    def __init__(self, world_size=2, *arguments):
        self.process = subprocess.Popen([CPPOOLD, "--world-size", str(world_size), "--backend", "host", *arguments], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ask(self, request):
        line = request if isinstance(request, str) else json.dumps(request)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.startswith(SENTINEL), (line[:200], answer)
        return json.loads(answer[len(SENTINEL):])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


class Traffic(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.request = validator(load("request.schema.json"))
        response = load("response.schema.json")
        cls.response = validator(response)
        closed = strict(response)
        cls.answers = {}
        for op in ("hello", "list", "run", "validate", "stats", "shutdown", "cancel", "status", "progress_line", "refused"):
            cls.answers[op] = validator({"definitions": closed["definitions"], "$ref": "#/definitions/" + op})

    def assertFits(self, schema, value):
        error = jsonschema.exceptions.best_match(schema.iter_errors(value))
        self.assertIsNone(error, f"{error}\nin {json.dumps(value)[:2000]}")

    def assertAnswers(self, request, answer):
        """Checks that the answer fits the op of the request, and has no member that the schema does not have."""
        self.assertFits(self.response, answer)
        self.assertFits(self.answers[request["op"]], answer)
        self.assertEqual(answer.get("id", "none"), request.get("id", "none"))

    def ask(self, daemon, request):
        """The checked answer to a request, which must fit the schema."""
        self.assertFits(self.request, request)
        answer = daemon.ask(request)
        self.assertAnswers(request, answer)
        return answer

    def test_good_requests(self):
        with tempfile.TemporaryDirectory() as folder, Daemon() as daemon:
            for op in ("hello", "list", "stats", "status"):
                self.assertIs(self.ask(daemon, {"op": op, "id": {"any": ["value", None, 1.5]}})["ok"], True)
            runs = [
                {"params": TINY},
                {"params": {**TINY, "is_training": False}, "checks": False, "id": None},
                {"params": {**TINY, "deterministic": True}, "case": "attention", "warmup": 1, "repeat": 3},
                {"params": {**TINY, "qkv_format": "thd", "attn_bias_type": "post_scale_bias", "softmax_type": "learnable",
                            "return_max_logit": True, "cp_comm_type": "a2a", "pad_between_seqs": True}},
                {"params": TINY, "deadline_ms": 86400000, "perturb": 2**63 - 1, "dump": folder + "/out"},
                {"params": TINY, "inputs": folder + "/out"},
                {"params": TINY, "checks": False, "warmup": 1, "sampling": {"precision": 0.5, "max_ms": 50}},
                {"params": TINY, "checks": False, "repeat": 2, "waits": True, "profile": True, "trace": folder + "/trace.json"},
                {"kwargs": {"max_seqlen_q": "16", "num_heads": "4", "is_training": "False", "window_size": "(-1, 0)",
                            "softmax_scale": "None", "log_level": "10", "fp8_bwd": "True"}},
                {"params": {"max_seqlen_q": 64, "num_heads": 4, "dtype": "fp8", "fp8_dpa": True}},
                {"kwargs": {"max_seqlen_q": "16", "num_heads": "4", "dtype": "fp8", "fp8_dpa": "False"}},  # runs as bf16, with a warning
            ]
            for run in runs:
                self.assertEqual(self.ask(daemon, {"op": "run", **run})["status"], "passed", run)
                os.makedirs(folder + "/out", exist_ok=True)
                self.assertIs(self.ask(daemon, {"op": "validate", **run})["runs"], True)
            stats = self.ask(daemon, {"op": "stats"})
            self.assertEqual(stats["passed"], len(runs))
            self.assertEqual(self.ask(daemon, {"op": "shutdown", "id": 7}), {"ok": True, "id": 7})
        self.assertEqual(daemon.process.returncode, 0)

    def test_overtaking(self):
        with Daemon() as daemon:
            run = {"op": "run", "id": 1, "params": {**TINY, "max_seqlen_q": 64}, "repeat": 10000, "progress": True}
            self.assertFits(self.request, run)
            self.assertFits(self.answers["progress_line"], daemon.ask(run))
            requests = {2: {"op": "status", "id": 2}, 3: {"op": "cancel", "id": 3, "cancels": "none"}, 4: {"op": "cancel", "id": 4, "cancels": 1}}
            for request in requests.values():
                self.assertFits(self.request, request)
                daemon.process.stdin.write(json.dumps(request) + "\n")
            daemon.process.stdin.flush()
            answers = {}
            while 1 not in answers:
                answer = json.loads(daemon.process.stdout.readline()[len(SENTINEL):])
                if "progress" in answer:
                    self.assertFits(self.answers["progress_line"], answer)
                else:
                    answers[answer["id"]] = answer
            for number, request in {1: run, **requests}.items():
                self.assertAnswers(request, answers[number])
            self.assertEqual([answers[number]["ok"] for number in (1, 2, 3, 4)], [False, True, False, True])
            self.assertEqual(len(answers[2]["ranks"]), 2)
            self.assertEqual(answers[1]["failure"]["kind"], "cancelled")

    def test_requests_that_are_not_run(self):
        with Daemon() as daemon:
            for params, status, kind in [
                    ({"dtype": "fp8"}, "error", "invalid_request"),
                    ({"head_dim_qk": 72}, "skipped", "unsupported"),
                    ({"num_head": 4}, "error", "invalid_request"),
                    ({"max_seqlen_q": 31}, "error", "invalid_request"),
                    ({"max_seqlen_q": 30}, "skipped", "inapplicable"),
                    ({"cp_comm_type": "a2a+p2p"}, "skipped", "inapplicable"),
                    ({"batch_size": 65536, "max_seqlen_q": 2**24, "num_heads": 1024}, "error", "out_of_memory")]:
                for op in ("run", "validate"):
                    answer = self.ask(daemon, {"op": op, "id": 1, "params": params})
                    self.assertEqual((answer["status"], answer["failure"]["kind"]), (status, kind))

    def test_failures(self):
        for fault, status, kind, fatal in [
                ({"kind": "flip_bit", "rank": 1}, "failed", "mismatch", False),
                ({"kind": "throw", "stage": "backward/"}, "error", "internal", False),
                ({"kind": "out_of_memory"}, "error", "out_of_memory", False),
                ({"kind": "stall", "rank": 1, "count": 2}, "error", "timeout", True),
                ({"kind": "stall_host"}, "error", "timeout", True)]:
            with Daemon(2, "--allow-faults") as daemon:
                run = {"op": "run", "params": TINY, "fault": fault, "deadline_ms": 500 if fatal else 60000}
                answer = self.ask(daemon, run)
                self.assertEqual((answer["status"], answer["failure"]["kind"], answer.get("fatal", False)), (status, kind, fatal), fault)
                if fatal:
                    self.assertTrue(any(rank.get("stack") for rank in answer["ranks"]), answer)
            self.assertEqual(daemon.process.returncode, 3 if fatal else 0)
        with Daemon(2, "--allow-faults") as daemon:
            answer = daemon.ask({"op": "run", "params": TINY, "fault": {"kind": "none"}})
            known = re.search(r"\(known: (.*)\)", answer["error"]).group(1).split(", ")
            kinds = load("request.schema.json")["definitions"]["run"]["properties"]["fault"]["properties"]["kind"]["enum"]
            self.assertEqual(known, kinds)

    def test_form(self):
        """Schema and daemon agree on the form of requests: every key with many values, in every op."""
        keys = list(load("request.schema.json")["definitions"]["run"]["properties"]) + ["parms"]
        fault_keys = ["kind", "rank", "stage", "count", "ranks"]
        values = [None, True, False, 0, 1, -1, 2, 1000, 1001, 10000, 10001, 1000000, 1000001, 86400000, 86400001, 2**63 - 1, 2**63,
                  2.0, 1.5, -1e300, "", "attention", "throw", "a\0b", "\u00e9", [], [1], {}, {"a": 1}, {"a": "1"}, {"a": None}]
        requests = [42, "run", None, [], [{"op": "hello"}], {}]
        requests += [{"op": value} for value in values + ["hello", "list", "stats", "RUN"]]
        requests += [{"op": op, key: value} for op in ("hello", "list", "stats", "validate") for key in keys if key != "op"
                     for value in values]
        requests += [{"op": "validate", "fault": {"kind": "throw", key: value}} for key in fault_keys for value in values]
        requests += [{"op": "validate", "sampling": {key: value}} for key in ("precision", "max_ms", "min_ms") for value in values]
        requests += [{"op": "validate", "fault": {"rank": 0}}]
        requests += [{"op": "validate", "params": {}, "kwargs": {}}, {"op": "validate", "case": "other", "kwargs": {}},
                     {"op": "validate", "case": "attention", "kwargs": {}}, {"op": "validate", "case": "other", "params": {}}]
        refused = 0
        with Daemon(1, "--allow-faults") as daemon:
            for request in requests:
                answer = daemon.ask(request)
                self.assertFits(self.response, answer)
                if self.request.is_valid(request):
                    if not answer["ok"] and request["op"] == "list":
                        self.assertIn("there is no such file", answer["error"])  # the form is right, the library is not there
                        continue
                    self.assertTrue(answer["ok"] or "ranks" in answer, (request, answer))  # no ranks: the form was refused
                    self.assertAnswers(request, answer)
                else:
                    refused += 1
                    self.assertFalse(answer["ok"], (request, answer))
                    self.assertEqual(answer["failure"]["kind"], "invalid_request", request)
            self.assertGreater(refused, 500)
            self.assertGreater(len(requests) - refused, 100)

    def test_lines_that_are_no_request(self):
        with Daemon(1) as daemon:
            for line in ("\n \t\nno JSON", '{"op": "hello"', '{"op": "hello", "op": "hello"}', '{"op": "hello", "id": 1e999}',
                         '{"op": "hello", "id": ' + "[" * 64 + "]" * 64 + "}", '{"op": "hello", "id": "' + "x" * 2**20 + '"}'):
                answer = daemon.ask(line)
                self.assertFits(self.answers["refused"], answer)
                self.assertNotIn("id", answer)
            self.ask(daemon, {"op": "hello", "id": "empty lines have no answer"})

    def test_failed_start(self):
        """The start line, the last line of stderr, of daemons with the feature start_line."""
        with Daemon(1) as daemon:
            if "start_line" not in daemon.ask({"op": "hello"}).get("features", []):
                self.skipTest("this daemon has no start_line")
        schema = validator(strict(load("start.schema.json")))
        for arguments, stage in [(["--world-size", "0"], "arguments"), (["--world-size", "2", "--sentinel"], "arguments"),
                                 (["--world-size", "2", "--backend", "host", "--transport", "nccl", "--case", "/nonexistent.so"], None),
                                 (["--world-size", "1", "--backend", "host", "--case", "/nonexistent.so"], "cases")]:
            done = subprocess.run([CPPOOLD, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            line = done.stderr.splitlines()[-1]
            self.assertTrue(line.startswith("cppoold: start {"), line)
            self.assertLessEqual(len(line), 4000)
            start = json.loads(line[len("cppoold: start "):])
            self.assertFits(schema, start)
            if stage:
                self.assertEqual(start["stage"], stage)

    def test_libraries(self):
        """Requests that name libraries which cannot be loaded, and a good one where a compiler is there."""
        with Daemon(1) as daemon:
            for op in ("run", "validate", "list"):
                answer = self.ask(daemon, {"op": op, "load": ["/nonexistent.so"]})
                self.assertEqual(answer["failure"]["kind"], "invalid_request")
                self.assertIn("/nonexistent.so", answer["error"])

    def test_leaks(self):
        library = os.path.join(os.path.dirname(CPPOOLD), "../lib/libcppool_test_littering.so")
        if not os.path.exists(library):
            self.skipTest("cppool_test_littering is not built")
        with Daemon(1) as daemon:
            for action in ("allocations", "descriptors"):
                answer = self.ask(daemon, {"op": "run", "case": "leaves", "load": [library], "params": {"action": action}})
                self.assertTrue(answer["ok"] and answer["leaks"], answer)

    def test_crash(self):
        """The line of a daemon that crashes."""
        schema = validator(strict(load("crash.schema.json")))
        request = {"op": "run", "params": TINY, "fault": {"kind": "segfault", "rank": 1, "stage": "forward/"}}
        done = subprocess.run([CPPOOLD, "--world-size", "2", "--backend", "host", "--allow-faults"], input=json.dumps(request) + "\n",
                              capture_output=True, text=True)
        lines = [line for line in done.stderr.splitlines() if line.startswith("cppoold: crash {")]
        self.assertEqual((len(lines), done.stdout), (1, ""), done.stderr)
        crash = json.loads(lines[0][len("cppoold: crash "):])
        self.assertFits(schema, crash)
        self.assertEqual((crash["rank"], crash["case"], crash.get("library")), (1, "attention", None))
        self.assertTrue(crash["stack"])
        self.assertTrue(crash["stage"].startswith("forward/"), crash)

    def test_cppool(self):
        """The requests that the command sends, and their answers."""
        with tempfile.TemporaryDirectory() as folder:
            traffic = os.path.join(folder, "traffic")
            environment = {**os.environ, "CPPOOL_TRAFFIC": traffic, "CPPOOL_REAL_DAEMON": CPPOOLD}
            daemon = ["--backend", "host", "--daemon", os.path.abspath(__file__)]
            suite = [CPPOOL, "run", "--suite", "smoke", "--filter", "world_size=2", "--max-seqlen", "32", *daemon]
            for command in (suite, suite + ["--list"], [CPPOOL, "run", "--param", "max_seqlen_q=16", "--perturb", "3", *daemon],
                            [CPPOOL, "run", "--param", "max_seqlen_q=16", "--fault", "throw:1:forward/", *daemon],
                            [CPPOOL, "bench", "--param", "max_seqlen_q=16", "--repeat", "2", *daemon]):
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                self.assertEqual(done.returncode, 1 if "--fault" in command else 0, done.stdout)
            with open(traffic, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        waiting, ops = [], []
        for name, line in lines:  # a daemon answers in order, and cppool uses one daemon at a time
            if name == "request":
                waiting.append(json.loads(line))
                ops.append(waiting[-1]["op"])
                self.assertFits(self.request, waiting[-1])
            elif line.startswith(SENTINEL):
                self.assertAnswers(waiting.pop(0), json.loads(line[len(SENTINEL):]))
        self.assertEqual(waiting, [])
        for op in ("hello", "run", "validate"):
            self.assertIn(op, ops)

    def test_documents(self):
        """protocol/README.md describes every member of the schemas, and daemon/attention.md every parameter of attention."""

        def text(name):
            with open(os.path.join(ROOT, name), encoding="utf-8") as file:
                return file.read()

        def members(schema):
            if isinstance(schema, list):
                return set().union(*map(members, schema)) if schema else set()
            if not isinstance(schema, dict):
                return set()
            own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
            return own.union(*(members(value) for value in schema.values()))

        protocol = text("protocol/README.md")
        for file in ("request.schema.json", "response.schema.json", "start.schema.json", "crash.schema.json"):
            for member in members(load(file)):
                self.assertIn(f"`{member}`", protocol, f"protocol/README.md does not describe {member} of {file}")
        with Daemon(1, "--allow-faults") as daemon:
            for feature in daemon.ask({"op": "hello"}).get("features", []):
                self.assertIn(f"`{feature}`", protocol, "protocol/README.md does not describe this feature")
            cases = {case["name"]: case for case in daemon.ask({"op": "list"})["cases"]}
        table = text("daemon/attention.md")
        for parameter in cases["attention"]["parameters"]:
            self.assertIn(f"| `{parameter['name']}` |", table, "daemon/attention.md has no row for this parameter")


if __name__ == "__main__":
    if "--world-size" in sys.argv:
        sys.exit(pass_on())
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    ROOT, CPPOOLD, CPPOOL = sys.argv[1:4]
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
