"""Tests on ranks: `@cppool.ranks` and `pytest --cppool-ranks N`, each in a pytest of its own."""
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree

import _pytest
import iniconfig
import pluggy
import pytest

import support

TESTS = """
import os, time
import cppool, pytest

@pytest.fixture(scope="module")
def shared():
    os.environ["SHARED"] = "1"
    yield 5
    del os.environ["SHARED"]

@cppool.ranks(1, 2)
@pytest.mark.parametrize("n", [1, 2])
def test_passes(world, n, shared, tmp_path):
    assert world.size in (1, 2) and shared == 5 and n and tmp_path.exists()

@cppool.ranks(2)
def test_one_rank_fails(world):
    number = world.rank
    assert number == 0

@cppool.ranks(2)
def test_others_wait(world):
    if world.rank == 1:
        raise ValueError("planted")
    with world.stage("waits"):
        time.sleep(1000)

@cppool.ranks(2)
@pytest.mark.skip(reason="no moon")
def test_skip(): pass

@cppool.ranks(2)
@pytest.mark.xfail
def test_expected(): assert 0

@cppool.ranks(2)
def test_dies(world):
    print("last words")
    if world.rank == 1:
        os._exit(3)
    time.sleep(1000)

@cppool.ranks(2, deadline=5)
def test_hangs(world):
    time.sleep(1000)

def test_here():
    assert "SHARED" not in os.environ and "RANK" not in os.environ

@cppool.ranks(2, env={"OF_TEST": "1"}, fresh=True)
class TestClass:
    def setup_method(self): self.ready = True
    def test_method(self, world): assert self.ready and os.environ["OF_TEST"] == "1"

@cppool.ranks(2)
def test_fixture_of_pools(cppool): pass
"""


def run(folder, *arguments, text=TESTS, gpus="", cache=False):
    """The test cases of the JUnit report by name, and the output. cache: pytest's, for --lf."""
    (folder / "test_of_user.py").write_text(text)
    report = folder / "report.xml"
    done = subprocess.run([sys.executable, "-m", "pytest", *([] if cache else ["-p", "no:cacheprovider"]), "-o", "cppool_preload=decimal",
                           f"--junitxml={report}", "-rA", "test_of_user.py", *arguments], cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=300)
    cases = {case.get("name"): case for case in xml.etree.ElementTree.parse(report).iter("testcase")} if report.exists() else {}
    return cases, done.stdout


def outcome(case):
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def test_ranks(tmp_path):
    cases, output = run(tmp_path)
    assert {name: outcome(case) for name, case in cases.items()} == {
        "test_passes[W1-1]": "passed", "test_passes[W1-2]": "passed", "test_passes[W2-1]": "passed", "test_passes[W2-2]": "passed",
        "test_one_rank_fails[W2]": "failure", "test_others_wait[W2]": "failure", "test_skip[W2]": "skipped", "test_expected[W2]": "skipped",
        "test_dies[W2]": "failure", "test_hangs[W2]": "failure", "test_here": "passed", "test_method[W2]": "passed",
        "test_fixture_of_pools[W2]": "error"}, output
    assert ">       assert number == 0" in output and "E       assert 1 == 0" in output  # rewritten, on rank 1
    assert "cppool: rank 1 of 2 failed first" in output and "ValueError: planted" in output
    assert "it was waits" in output and "exited with code 3" in output and "last words" in output
    assert "not finished after 5000 ms" in output and "in test_hangs" not in output.partition("not finished")[0]
    assert "use the fixture world" in output and "7 passed" not in output
    assert "no moon" in cases["test_skip[W2]"].find("skipped").get("message")


def test_whole_suite_on_ranks(tmp_path):
    text = "import os\ndef test_a(world): assert os.environ['WORLD_SIZE'] == '3' and world.size == 3\ndef test_b(): assert os.environ['RANK'] in '012'\n"
    cases, output = run(tmp_path, "--cppool-ranks", "3", text=text)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_a": "passed", "test_b": "passed"}, output


CHOOSES_BY_WORLD_SIZE = """
import os
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

def pytest_configure(config):
    assert ("RANK" in os.environ) != config.pluginmanager.hasplugin("cppool")  # which ranks do not have

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.get_closest_marker("world_size").args[0] == WORLD_SIZE == int(os.environ.get("WORLD_SIZE", "1"))]
"""


def test_a_suite_that_chooses_by_the_world_size(tmp_path):
    """Where conftest files and test modules are imported and tests are chosen, the variables are those of torchrun's rank 0; a suite that makes
    its group as pytest starts, where it finds them, makes none in a process that is no rank."""
    (tmp_path / "conftest.py").write_text(CHOOSES_BY_WORLD_SIZE)
    text = "import os\nimport pytest\nSIZE = int(os.environ.get('LOCAL_WORLD_SIZE', 1))\n" \
           "@pytest.mark.world_size(1)\ndef test_one(): assert SIZE == 1 and 'RANK' not in os.environ\n" \
           "@pytest.mark.world_size(2)\n@pytest.mark.parametrize('rank', range(SIZE))\ndef test_two(rank, world): assert SIZE == world.size == 2\n"
    cases, output = run(tmp_path, "--cppool-ranks", "2", text=text)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_two[0]": "passed", "test_two[1]": "passed"}, output
    cases, output = run(tmp_path, text=text)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_one": "passed"}, output


SETS_VARIABLES = """
import os
os.environ["LOCAL_WORLD_SIZE"] = "7"

def pytest_sessionfinish(session):
    if session.config.pluginmanager.hasplugin("cppool"):  # which ranks do not have
        print("then", os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE"))
"""


def test_a_suite_that_chooses_keeps_what_it_has_set(tmp_path):
    (tmp_path / "conftest.py").write_text(SETS_VARIABLES)
    cases, output = run(tmp_path, "--cppool-ranks", "2", text="def test_passes(): pass\n")
    assert {name: outcome(case) for name, case in cases.items()} == {"test_passes": "passed"} and "then 7 None" in output, output


def test_whole_suite_on_agents(tmp_path, monkeypatch):
    """--cppool-launch is for Python ranks, too."""
    monkeypatch.setenv("CPPOOL_HEAD_ADDRESS", "127.0.0.1")
    text = "import os\ndef test_a(world): assert [os.environ[name] for name in ('GROUP_RANK', 'LOCAL_RANK')] == [str(world.rank), '0']\n" \
           "def test_b(world): assert world.rank == 0\n"
    cases, output = run(tmp_path, "--cppool-ranks", "2", "--cppool-launch", support.launcher(tmp_path), text=text)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_a": "passed", "test_b": "failure"}, output
    assert "rank 1 of 2 failed first" in output


ONE_FAILS = """
import os
import cppool, pytest

@pytest.fixture(scope="module")
def shared():
    yield int(os.environ["RANK"])

@cppool.ranks(1, 2)
@pytest.mark.parametrize("n", [1, 2])
def test_ranks(world, n, shared):
    assert world.rank == shared
    assert (n, world.rank) != (2, 1)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_last_failed(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    arguments = ["-n", str(workers)] if workers else []
    cases, output = run(tmp_path, *arguments, text=ONE_FAILS, cache=True)
    assert {name: outcome(case) for name, case in cases.items()} == {
        "test_ranks[W1-1]": "passed", "test_ranks[W1-2]": "passed", "test_ranks[W2-1]": "passed", "test_ranks[W2-2]": "failure"}, output
    assert "1 failed, 3 passed" in output and "cppool: rank 1 of 2 failed first" in output
    cases, output = run(tmp_path, "--lf", *arguments, text=ONE_FAILS, cache=True)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_ranks[W2-2]": "failure"} and "cppool: rank 1 of 2 failed first" in output, output


FOLDERS = """
import os, time
import cppool, pytest

def meet(world, folder, step=""):
    (folder / f"{step}{world.rank}").touch()
    while len(list(folder.glob(f"{step}[0-9]"))) < world.size:
        time.sleep(0.005)

@cppool.ranks(1, 3)
@pytest.mark.parametrize("n", [1, 2])
def test_one_for_all(world, tmp_path, n):
    assert world.size > 1 or os.listdir(tmp_path) == []
    meet(world, tmp_path)

@cppool.ranks(2)
def test_one_for_each(world, tmp_path, rank_tmp_path):
    assert rank_tmp_path.parent == tmp_path and os.listdir(rank_tmp_path) == []
    meet(world, tmp_path)
    (rank_tmp_path / "mine").touch()
    meet(world, tmp_path, "then")
    assert len(list(tmp_path.glob("*/mine"))) == 2 and os.listdir(rank_tmp_path) == ["mine"]

@cppool.ranks(2)
def test_again(world, tmp_path):
    assert not list(tmp_path.glob("failed*"))
    meet(world, tmp_path)
    meet(world, tmp_path, "failed")
    assert False
"""


def test_temporary_folders(tmp_path):
    """They are those of the pytest that has chosen the tests."""
    cases, output = run(tmp_path, f"--basetemp={tmp_path}/base", text=FOLDERS)
    assert [outcome(case) for case in cases.values()] == ["passed"] * 5 + ["failure"] and "assert False" in output, output
    names = os.listdir(tmp_path / "base")
    assert len(names) == 7 and len([name for name in names if name.startswith("test_again")]) == 2, names  # on fresh ranks, too


def test_temporary_folders_of_a_whole_suite(tmp_path):
    """As under torchrun: each rank has its own."""
    text = "def test_it(world, tmp_path, rank_tmp_path):\n    (tmp_path / 'x').mkdir()\n    assert rank_tmp_path.parent == tmp_path\n"
    cases, output = run(tmp_path, "--cppool-ranks=2", text=text)
    assert [outcome(case) for case in cases.values()] == ["passed"], output


OPTIONS_CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--experimental", action="store_true")
    parser.addoption("--size", type=int, default=1)

def pytest_configure(config):
    config.seen = config.getoption("--experimental"), config.getoption("--size")
"""


@pytest.mark.parametrize("where", ["command", "ini", "environment"])
def test_options_and_plugins_reach_the_ranks(tmp_path, monkeypatch, where):
    words = ["--experimental", "--size=3", "-p", "of_user", "-p", "no:not_wanted", "-p", "no:capture", "--cppool-ranks=2", "--tb=short", "-m", "not slow", "--runxfail"]
    (tmp_path / "conftest.py").write_text(OPTIONS_CONFTEST)
    (tmp_path / "of_user.py").write_text("import pytest\n@pytest.fixture\ndef of_plugin(): return 7\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    settings = "\nmarkers = slow\nfilterwarnings = error\nfaulthandler_timeout = 60\n"  # of a plugin that ranks are without
    (tmp_path / "pytest.ini").write_text("[pytest]" + settings)
    if where == "ini":
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = " + " ".join(map(repr, words)) + settings)
    elif where == "environment":
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(map(repr, words)))
    cases, output = run(tmp_path, *(words if where == "command" else []), text="import os, pytest\n"
                        "def test_it(request, of_plugin, world):\n    assert request.config.seen == (True, 3) and of_plugin == 7 and world.size == 2\n"
                        "    assert request.config.pluginmanager.is_blocked('not_wanted')\n"
                        "@pytest.mark.xfail\ndef test_expected(): assert 0\n@pytest.mark.slow\ndef test_slow(): pass\n")
    assert {name: outcome(case) for name, case in cases.items()} == {"test_it": "passed", "test_expected": "failure"}, output


MOST_VERBOSE = """
import logging
import cppool

@cppool.ranks(2)
def test_differs():
    logging.debug("close to it")
    assert list(range(50)) == list(range(1, 51))
"""


def test_verbosity_reaches_the_ranks(tmp_path):
    _, output = run(tmp_path, "-vv", "--log-level=DEBUG", text=MOST_VERBOSE)
    assert re.search(r"E +- +50,", output) and "Use -v" not in output and "close to it" in output, output
    cases, output = run(tmp_path, "--setup-plan", text=MOST_VERBOSE)
    assert [outcome(case) for case in cases.values()] == ["passed"], output  # it was not run


CACHE = """
import cppool, pytest

@cppool.ranks(2)
def test_it(request, cache, world, tmp_path):
    assert request.config.cache is cache and request.config.of_caller == "from here"
    before = cache.get("of_user/runs", [])
    if world.rank == 0:
        cache.set("of_user/runs", [*before, (0, len(before))])
        cache.set("of_user/runs/below", 1)  # which is no folder
    (tmp_path / str(world.rank)).touch()
    while len(list(tmp_path.iterdir())) < world.size:
        pass
    if world.rank == 1:
        assert cache.get("of_user/runs", []) == before
        cache.set("of_user/runs", [*before, (1, len(before))])
    assert cache.get("of_user/runs", None) == [*before, [world.rank, len(before)]] and cache.mkdir("of_user").is_dir()

@cppool.ranks(2)
def test_after(cache):
    assert cache.get("of_user/runs", None)[-1][0] == 0
    cache.set("of_user/long", "x" * (1 << 20))
"""


def test_cache(tmp_path):
    """That of the pytest that has chosen the tests, which writes what rank 0 has set when the test has ended."""
    (tmp_path / "conftest.py").write_text("import os\ndef pytest_configure(config):\n    if 'RANK' not in os.environ:\n"
                                          "        config.cache.set('of_user/caller', 'from here')\n    config.of_caller = config.cache.get('of_user/caller', None)\n")
    for _ in range(2):
        cases, output = run(tmp_path, "-o", "cache_dir=of_run", "-W", "error", text=CACHE, cache=True)
        assert [outcome(case) for case in cases.values()] == ["passed"] * 2, output
        assert output.count("what the test has set in pytest's cache is left out: it has 10") == 1 and "PytestCacheWarning: could not create cache path" in output, output
    assert json.loads((tmp_path / "of_run/v/of_user/runs").read_text()) == [[0, 0], [0, 1]]


WARNINGS = """
import warnings
import cppool

class OddWarning(Warning): pass

@cppool.ranks(2)
def test_warns(world):
    warnings.warn("careful")
    warnings.warn(f"rank {world.rank} is odd", OddWarning)

@cppool.ranks(2)
def test_is_an_error():
    warnings.warn("planted")

@cppool.ranks(2)
def test_warns_much():
    warnings.warn("x" * (1 << 20))

@cppool.ranks(2)
def test_warns_often(world):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(10000):
            warnings.warn("again and again")
    number = 5
    assert number == 6
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_warnings(tmp_path, workers):
    """They are in the summary, each distinct one once."""
    if workers:
        pytest.importorskip("xdist")
    cases, output = run(tmp_path, "-W", "error:planted", *(["-n", str(workers)] if workers else []), text=WARNINGS)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_warns[W2]": "passed", "test_is_an_error[W2]": "failure", "test_warns_much[W2]": "passed",
                                                                     "test_warns_often[W2]": "failure"}, output
    assert "UserWarning: planted" in cases["test_is_an_error[W2]"].find("failure").text
    lines = [line.strip().partition("test_of_user.py:")[2] for line in output.partition("warnings summary")[2].partition("-- Docs")[0].splitlines()]
    assert [line for line in lines if "Warning: " in line and "cppool: " not in line] == [
        "9: UserWarning: careful", "10: OddWarning: rank 0 is odd", "10: OddWarning: rank 1 is odd", "25: UserWarning: again and again"], output
    assert "cppool: rank 0: warnings are left out: pytest's reports have 10" in output and ">       assert number == 6" in output, output


LONG_REPORTS = """
import logging, warnings
import cppool

@cppool.ranks(2)
def test_logs_much():
    logging.warning("x" * (1 << 20))

@cppool.ranks(2)
def test_after():
    logging.warning("said after it")
"""


def test_warnings_of_the_answer_are_no_errors(tmp_path):
    cases, output = run(tmp_path, "-W", "error", text=LONG_REPORTS)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_logs_much[W2]": "passed", "test_after[W2]": "passed"}, output
    assert "cppool: rank 0: logs, warnings and all but the end of a failure are left out: pytest's reports have 2" in output, output
    assert "said after it" in output and "INTERNALERROR" not in output
    assert "cppool: rank" not in run(tmp_path, "-W", "ignore", text=LONG_REPORTS)[1]


WRITERS = """
import logging, os, sys
import cppool, pytest

@cppool.ranks(2)
def test_writes(world):
    os.system(f"echo by a child of rank {world.rank}")
    print("to stderr by rank", world.rank, file=sys.stderr)
    logging.warning("logged by rank %d", world.rank)

@cppool.ranks(2)
def test_is_silent(): pass
"""


def test_output_of_tests_that_pass(tmp_path):
    cases, output = run(tmp_path, "-o", "junit_logging=all", text=WRITERS)
    written = [f"{what} rank {rank}" for what in ("by a child of", "to stderr by", "logged by") for rank in (0, 1)]
    for text in (output, cases["test_writes[W2]"].findtext("system-out")):
        assert all(each in text for each in written), text
    assert "rank" not in cases["test_is_silent[W2]"].findtext("system-out")
    assert all(f"Captured stdout of rank {rank}" in output and f"[rank {rank}]" not in output for rank in (0, 1)), output
    _, output = run(tmp_path, "-s", text=WRITERS)
    assert all(f"[rank {rank}] {what} rank {rank}\n" in output for what in ("by a child of", "to stderr by") for rank in (0, 1)), output
    assert "Captured stdout" not in output


STOPS = """
import os, time
import cppool, pytest

@pytest.fixture(scope="module")
def shared():
    yield
    with open(f"ended{os.environ['RANK']}", "w"): pass

@cppool.ranks(2)
def test_before(shared): pass

@cppool.ranks(2, deadline=300)
def test_stops(request, world, shared):
    if world.rank == 1:
        STOP
        return
    time.sleep(WAITS)

@cppool.ranks(2)
def test_after(shared): pass
"""


WRITES_STATUS = """
import os

def pytest_sessionfinish(exitstatus):
    if "RANK" not in os.environ:
        with open("status", "w") as file:
            file.write(str(int(exitstatus)))
"""


@pytest.mark.parametrize("stop, waits, words", [("pytest.exit('enough', 5)", 1000, "Exit: enough"), ("request.session.shouldstop = 'enough'", 0, "Interrupted: enough !"),
                                                ("request.session.shouldfail = 'enough'", 0, "! enough !")])
def test_a_rank_ends_the_session(tmp_path, stop, waits, words):
    """With its reason, as a test without ranks; ranks of a server serve the next session."""
    (tmp_path / "conftest.py").write_text(WRITES_STATUS)
    with support.serving(tmp_path) as socket:
        for _ in range(2):
            cases, output = run(tmp_path, "--cppool-attach", socket, text=STOPS.replace("STOP", stop).replace("WAITS", str(waits)))
            ended = {"test_before[W2]": "passed", **({} if waits else {"test_stops[W2]": "passed"})}
            assert {name: outcome(case) for name, case in cases.items()} == ended and words in output, output
            assert (tmp_path / "status").read_text() == ("5" if waits else "1" if "fail" in stop else "2")
            for rank in (1,) if waits else (0, 1):  # one that waited has been killed
                (tmp_path / f"ended{rank}").unlink()


def test_a_pytest_that_is_in_pythonpath_alone(tmp_path, monkeypatch):
    """It is no code of the user's, which the second session on the same ranks would load anew."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for module in (pytest, _pytest, pluggy, iniconfig):
        (folder / module.__name__).symlink_to(os.path.dirname(module.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    text = f"import _pytest, cppool, pytest\n@cppool.ranks(2)\ndef test_it(world, tmp_path): assert pytest.__file__ == '{folder}/pytest/__init__.py'\n"
    with support.serving(tmp_path) as socket:
        for _ in range(2):
            cases, output = run(tmp_path, "--cppool-attach", socket, text=text)
            assert {name: outcome(case) for name, case in cases.items()} == {"test_it[W2]": "passed"}, output


EXITS = """
import cppool, pytest

@pytest.fixture(scope="module")
def broken_at_its_end():
    yield
    raise KeyError("planted")

@cppool.ranks(2)
def test_one_fails(world):
    assert world.rank == 0, "rank 1 is the cause"
    list(world.iterations())  # the daemon lets them begin when rank 1 has ended
    pytest.exit("enough", 5)

@cppool.ranks(2)
def test_fixture_fails(broken_at_its_end):
    pytest.exit("enough", 5)
"""


def test_the_failure_of_another_rank_is_reported_before_an_exit(tmp_path):
    cases, output = run(tmp_path, "-k", "one_fails", text=EXITS)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_one_fails[W2]": "failure"}, output
    assert "AssertionError: rank 1 is the cause" in output and "cppool: rank 1 of 2 failed first" in output and "Exit: enough" in output, output


def test_a_fixture_that_fails_after_an_exit(tmp_path):
    """The exit counts, with its code; ranks of a server serve the next session."""
    (tmp_path / "conftest.py").write_text(WRITES_STATUS)
    with support.serving(tmp_path) as socket:
        for _ in range(2):
            cases, output = run(tmp_path, "--cppool-attach", socket, "-k", "fixture_fails", text=EXITS)
            assert not cases and "Exit: enough" in output and "a fixture failed after pytest.exit: KeyError: 'planted'" in output, output
            assert (tmp_path / "status").read_text() == "5"


POOLS_ON_RANKS = """
import os, cppool, pytest

@pytest.fixture
def of_user(cppool): return cppool

@cppool.ranks(2)
def test_before(world):
    with open(f"rank{world.rank}", "w") as file:
        file.write(str(os.getppid()))

@cppool.ranks(2)
def test_fixture(cppool): cppool.run()

@cppool.ranks(2)
def test_through_a_fixture(world, of_user): pass

@cppool.ranks(2)
def test_after(world):
    with open(f"rank{world.rank}") as file:
        assert file.read() == str(os.getppid())  # the fork server is that of the same daemon
"""


def test_the_fixture_of_pools_and_the_module_in_one_test(tmp_path):
    """`cppool` is the module in the mark, and the fixture among the arguments."""
    cases, output = run(tmp_path, text=POOLS_ON_RANKS)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_before[W2]": "passed", "test_fixture[W2]": "error",
                                                                     "test_through_a_fixture[W2]": "error", "test_after[W2]": "passed"}, output
    for name, line in (("test_fixture[W2]", 12), ("test_through_a_fixture[W2]", 15)):
        text = cases[name].find("error").text
        assert "the fixture cppool is for tests that ask a pool" in text and "use the fixture world" in text
        assert f"test_of_user.py:{line}: " in text, text


def test_selection_and_first_failure(tmp_path):
    cases, output = run(tmp_path, "-k", "one_rank or others_wait", "-x")
    assert list(cases) == ["test_one_rank_fails[W2]"] and "stopping after 1 failures" in output


@pytest.mark.parametrize("values, found", [
    ("range(2 + r)", "found 3 items on this rank and 2 on rank 0; number 3 is NAME[W2-2] here and none there"),
    ("range(3 - r)", "found 2 items on this rank and 3 on rank 0; number 3 is none here and NAME[W2-2] there"),
    ("(7, r)", "found 2 items on this rank and as many on rank 0; number 2 is NAME[W2-1] here and NAME[W2-0] there")])
def test_tests_that_differ_between_ranks(tmp_path, values, found):
    text = ("import os, cppool, pytest\nr = int(os.environ.get('RANK', '0'))\n@cppool.ranks(2)\n"
            f"@pytest.mark.parametrize('n', {values})\ndef test_it(n): pass\n")
    _, output = run(tmp_path, text=text)
    found = re.sub(r"NAME(\S*)", r'"test_of_user.py::test_it\1"', found)
    assert f"pytest has {found}" in output and "names of tests must not depend on the rank" in output and "passed" not in output


@pytest.mark.parametrize("mark, error", [("cppool.ranks()", "takes world sizes from 1 to 64"), ("cppool.ranks(0)", "takes world sizes from 1 to 64"),
                                         ("cppool.ranks(2, dedline=3)", "not dedline")])
def test_wrong_marks(tmp_path, mark, error):
    _, output = run(tmp_path, text=f"import cppool\n@{mark}\ndef test_it(): pass\n")
    assert error in output


@pytest.mark.parametrize("option, error", [
    ("env={'OMP_NUM_THREADS': 1}", 'with env: the value of "OMP_NUM_THREADS" in "env" must be a string'),
    ("env={'LONG': '1' * (1 << 20)}", "with env: the line has"),
    ("deadline=0", "with deadline: deadline is a number of seconds"), ("deadline='60'", "with deadline: deadline is a number of seconds"),
    ("seed=-1", 'with seed: the "seed" of "python" must be an integer from 0 to 18446744073709551615, not -1'),
    ("seed=2**64", 'with seed: the "seed" of "python" must be an integer from 0 to 18446744073709551615, not 1.8446744073709552e+19')])
def test_wrong_options(tmp_path, option, error):
    """They fail the item, which is named, and the session goes on."""
    cases, output = run(tmp_path, text=f"import cppool\n@cppool.ranks(2, {option})\ndef test_it(): pass\n@cppool.ranks(2)\ndef test_after(): pass\n")
    assert {name: outcome(case) for name, case in cases.items()} == {"test_it[W2]": "failure", "test_after[W2]": "passed"}, output
    assert "test_of_user.py::test_it[W2]: cppool.ranks " + error in output


ODD_ITEMS = """
import cppool, pytest, unittest

@cppool.ranks(2)
class TestOfUnittest(unittest.TestCase):
    def test_method(self): pass

class TestMarkedMethod(unittest.TestCase):
    @cppool.ranks(2)
    def test_marked(self): pass
    def test_here(self): pass

def test_marked_late(): pass

def documented():
    '''
    >>> 1
    1
    '''

@cppool.ranks(2)
def test_after(): pass
"""


def test_items_that_cannot_have_the_mark(tmp_path):
    """They never run in pytest's own process, where they would pass."""
    (tmp_path / "conftest.py").write_text("import cppool\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
                                          "        if 'late' in item.name or 'documented' in item.name:\n            item.add_marker(cppool.ranks(2))\n")
    cases, output = run(tmp_path, "--doctest-modules", text=ODD_ITEMS)
    assert {name: outcome(case) for name, case in cases.items()} == {
        "test_of_user.documented": "failure", "test_method": "failure", "test_marked": "failure", "test_here": "passed", "test_marked_late": "failure",
        "test_after[W2]": "passed"}, output
    assert "test_of_user.py::TestOfUnittest::test_method: cppool.ranks marks functions" in output and "without the mark" in output


def test_wrong_world_size(tmp_path):
    assert "--cppool-ranks is a world size" in run(tmp_path, "--cppool-ranks", "0")[1]


def test_deadline_of_a_suite(tmp_path):
    """A mark says otherwise."""
    text = "import cppool, time\ndef test_hangs(): time.sleep(1000)\n@cppool.ranks(1, deadline=3)\ndef test_marked(): time.sleep(1000)\n"
    cases, output = run(tmp_path, "--cppool-ranks=1", "--cppool-deadline=2.5", text=text)
    assert [outcome(case) for case in cases.values()] == ["failure"] * 2, output
    assert "not finished after 2500 ms" in output and "not finished after 3000 ms" in output
    assert "--cppool-deadline is a number of seconds from 0.001 to 86400" in run(tmp_path, "--cppool-deadline", "0")[1]


POLLUTED = """
import cppool, math

@cppool.ranks(2)
def test_pollutes(): math.of_before = 1

@cppool.ranks(2)
def test_polluted():
    kept = getattr(math, "of_before", 0)
    assert kept == 0

@cppool.ranks(2)
def test_after(): pass
"""


def test_polluted_item(tmp_path):
    """It fails, with its assert and what it is, and the session goes on."""
    cases, output = run(tmp_path, text=POLLUTED)
    assert {name: outcome(case) for name, case in cases.items()} == {"test_pollutes[W2]": "passed", "test_polluted[W2]": "failure",
                                                                     "test_after[W2]": "passed"}, output
    assert "polluted: it passes on fresh ranks" in output and "assert 1 == 0" in output


EXPECTED_FAILURES = """
import os, time
import cppool, pytest

def process(world):
    return os.path.join(os.path.dirname(__file__), f"rank{world.rank}")

@cppool.ranks(2)
@pytest.mark.xfail
def test_all(world):
    with open(process(world), "w") as file:
        file.write(str(os.getpid()))
    assert 0

@cppool.ranks(2)
def test_same_ranks(world):
    with open(process(world)) as file:
        assert file.read() == str(os.getpid())

@cppool.ranks(2, deadline=300)
@pytest.mark.xfail
def test_others_wait(world):
    assert world.rank == 0
    time.sleep(1000)

@cppool.ranks(2)
@pytest.mark.xfail(raises=ValueError)
def test_unexpected(world):
    raise ValueError("expected") if world.rank == 0 else KeyError("planted")

@cppool.ranks(2)
@pytest.mark.xfail(strict=True)
def test_strict_of_one(world): assert world.rank == 0

@cppool.ranks(2)
@pytest.mark.xfail
def test_of_one(world): assert world.rank == 0

@cppool.ranks(2)
def test_in_the_body(world):
    if world.rank == 1:
        pytest.xfail("known")

@cppool.ranks(2)
@pytest.mark.xfail(strict=True)
def test_strict_of_none(): pass

@cppool.ranks(2)
@pytest.mark.xfail
def test_of_none(): pass

@pytest.fixture
def broken_at_its_end():
    yield
    raise KeyError("planted")

@cppool.ranks(2)
@pytest.mark.xfail(raises=AssertionError)
def test_end_fails(broken_at_its_end): assert 0

@cppool.ranks(2)
@pytest.mark.xfail(run=False)
def test_not_run(): os._exit(1)
"""


def test_expected_failures(tmp_path):
    """Of all ranks or of one, which the others wait for."""
    cases, output = run(tmp_path, text=EXPECTED_FAILURES)
    expected = dict.fromkeys(["all", "others_wait", "strict_of_one", "of_one", "in_the_body", "not_run"], "XFAIL")
    expected.update(same_ranks="PASSED", unexpected="FAILED", strict_of_none="FAILED", of_none="XPASS", end_fails="ERROR")
    words = dict(re.match(r"(\w+) .*::test_(\w+)\[W2\]", line).group(2, 1) for line in output.splitlines()
                 if re.match(r"(XFAIL|XPASS|PASSED|FAILED|ERROR|SKIPPED) .*::test_", line))
    assert words == expected, output
    assert "[XPASS(strict)]" in cases["test_strict_of_none[W2]"].find("failure").get("message")


EXPECTED_FAILURES_OF_UNITTEST = """
import os, time, unittest

class TestIt(unittest.TestCase):
    @unittest.expectedFailure
    def test_all(self): self.fail()
    @unittest.expectedFailure
    def test_of_one(self): self.assertEqual(os.environ["RANK"], "0")
    @unittest.expectedFailure
    def test_of_first(self): self.assertEqual(os.environ["RANK"], "1")
    @unittest.expectedFailure
    def test_others_wait(self):
        self.assertEqual(os.environ["RANK"], "0")
        time.sleep(1000)
    @unittest.expectedFailure
    def test_of_none(self): pass
    def test_says_so(self):
        if os.environ["RANK"] == "0":
            self.fail("Unexpected success")
"""


def test_expected_failures_of_unittest(tmp_path):
    cases, output = run(tmp_path, "--cppool-ranks=2", text=EXPECTED_FAILURES_OF_UNITTEST)
    expected = dict.fromkeys(["test_all", "test_of_one", "test_of_first", "test_others_wait"], "skipped")
    assert {name: outcome(case) for name, case in cases.items()} == {**expected, "test_of_none": "failure", "test_says_so": "failure"}, output
    assert "4 xfailed" in output and "Unexpected success" in cases["test_of_none"].find("failure").get("message")


FIXTURES_OF_SIZES = """
import os
import cppool, pytest

def note(world_size, text):
    if os.environ["RANK"] == "0":
        with open(f"notes{world_size}", "a") as file:
            file.write(text + "\\n")

@pytest.fixture(scope="session")
def of_session():
    note(os.environ["WORLD_SIZE"], "session begins")
    yield
    note(os.environ["WORLD_SIZE"], "session ends")

@pytest.fixture(scope="module")
def of_module(of_session):
    note(os.environ["WORLD_SIZE"], "module begins")
    yield
    note(os.environ["WORLD_SIZE"], "module ends")

@pytest.fixture(autouse=True)
def of_item(request, of_module):
    note(os.environ["WORLD_SIZE"], request.node.name.partition("[")[0])
"""


def test_fixtures_live_on_between_world_sizes(tmp_path):
    """Each world sets them up once, and ends them with its last item that needs them."""
    (tmp_path / "conftest.py").write_text(FIXTURES_OF_SIZES)
    (tmp_path / "test_other.py").write_text("import cppool\n@cppool.ranks(2, 1)\ndef test_d(): pass\n@cppool.ranks(2)\ndef test_e(): pass\n")
    cases, output = run(tmp_path, "test_other.py", text="import cppool\n@cppool.ranks(1, 2)\ndef test_a(): pass\n@cppool.ranks(1, 2)\ndef test_b(): pass\n"
                        "@cppool.ranks(1, 2, deadline=0)\ndef test_not_run(): pass\n")
    assert [outcome(case) for case in cases.values()] == ["passed"] * 4 + ["failure"] * 2 + ["passed"] * 3, output
    begin = ["session begins", "module begins", "test_a", "test_b", "module ends", "module begins", "test_d"]
    for size, more in ((1, []), (2, ["test_e"])):
        assert (tmp_path / f"notes{size}").read_text().splitlines() == [*begin, *more, "module ends", "session ends"], output


def test_fixtures_end_where_their_next_item_does_not_come(tmp_path):
    (tmp_path / "conftest.py").write_text(FIXTURES_OF_SIZES)
    cases, output = run(tmp_path, "-x", text="import cppool\n@cppool.ranks(1, 2)\ndef test_a(): pass\n"
                        "@cppool.ranks(2, deadline=0)\ndef test_b(): pass\n@cppool.ranks(1, 2)\ndef test_c(): pass\n")
    assert [outcome(case) for case in cases.values()] == ["passed", "passed", "failure"], output
    for size in (1, 2):
        assert (tmp_path / f"notes{size}").read_text().splitlines() == ["session begins", "module begins", "test_a", "module ends", "session ends"], output


@pytest.mark.parametrize("workers, visible", [(2, "2,3"), (1, "0,1"), (8, None)])
def test_workers_of_xdist_share_out_the_gpus(tmp_path, monkeypatch, workers, visible):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    text = f"import os, cppool\n@cppool.ranks(2)\ndef test_it(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '{visible}'\ndef test_here(): pass\n"
    cases, output = run(tmp_path, text=text, gpus="0,1,2,3")
    assert {name: outcome(case) for name, case in cases.items()} == {"test_it[W2]": "passed" if visible else "failure", "test_here": "passed"}, output
    assert visible or "there are 8 workers of pytest-xdist and 4 GPUs" in output


TORCHRUN_TESTS = """
import os, subprocess

def torchrun(*words):
    return subprocess.run(["torchrun", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)

def run(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    return torchrun("--preload=", "--nproc-per-node=2", str(script), "word")

TEXT = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.getppid(), sys.argv[1])"

def printed(ran):  # by ranks: a fork server may tell of processes of another test's daemon
    return sorted(line.split() for line in ran.stdout.splitlines() if line.endswith(" word"))

def test_script(tmp_path):
    ran = run(tmp_path, TEXT)
    lines = printed(ran)
    assert ran.returncode == 0 and [line[:2] + line[3:] for line in lines] == [["0", "2", "word"], ["1", "2", "word"]], ran.stdout
    assert lines == printed(run(tmp_path, TEXT))  # of the same fork server
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(os.environ["CPPOOL_ATTACH"] + "\\n")

def test_failure(tmp_path):
    ran = run(tmp_path, "import os; assert os.environ['RANK'] == '0'")
    assert ran.returncode == 1 and "assert os.environ['RANK'] == '0'" in ran.stdout
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_torchrun(tmp_path, workers):
    (tmp_path / "test_torchrun.py").write_text(TORCHRUN_TESTS)
    if workers:
        pytest.importorskip("xdist")
    environment = {**os.environ, "SEEN": str(tmp_path / "seen")}
    environment.pop("CPPOOL_ATTACH", None)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "cppool.torchrun", *(["-n", str(workers)] if workers else []), str(tmp_path)],
                          env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    attached, = set((tmp_path / "seen").read_text().split())
    assert not os.path.exists(attached) and not os.path.exists(os.path.dirname(attached))
