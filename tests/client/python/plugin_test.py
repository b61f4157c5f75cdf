"""The pytest plugin as its users have it: found by its entry point, in a pytest of its own, with the fake daemon or the real one on the
host backend."""
import os
import re
import xml.etree.ElementTree as ElementTree

import pytest

from support import BUILD, FAKE, ROOT, SHORT, serving

pytest_plugins = ["pytester"]

HOST = "import pytest\n@pytest.fixture(scope='session')\ndef cppool_options():\n    return {'backend': 'host'}\n"


def fake(*start, **options):
    options = {**SHORT, "arguments": ["--start", *start] if start else [], **options}
    return f"import pytest\n@pytest.fixture(scope='session')\ndef cppool_options():\n    return {options!r}\n"


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs a suite of these tests, and returns pytest's result."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CUDA_VISIBLE_DEVICES", "CPPOOL_ATTACH"):
        monkeypatch.delenv(name, raising=False)

    def run(conftest, tests, *arguments):
        pytester.makeconftest(conftest)
        pytester.makepyfile(tests)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA", *arguments)

    return run


def test_example(suite):
    example = (ROOT / "client/python/examples/test_attention.py").read_text(encoding="utf-8")
    result = suite(HOST, example, "-k", "p2p and not a2a or my_problem")
    result.assert_outcomes(passed=result.parseoutcomes()["passed"], deselected=result.parseoutcomes()["deselected"])
    assert result.parseoutcomes()["passed"] >= 3
    result.stdout.re_match_lines([r".*test_attention\[mha_128-fp16-bshd-p2p-W2\].*", ".*::test_my_problem.*"])


def test_outcomes(suite):
    result = suite(fake(), """
        def test_passes(cppool):
            assert cppool.run({"do": "pass"}).status == "passed"
        def test_is_skipped(cppool):
            cppool.run({"do": "skip"})
            assert False, "not reached"
        def test_fails(cppool):
            cppool.run({"do": "say_and_fail", "text": "its own words\\n"})
        def test_dies(cppool):
            cppool.run({"do": "die"}, world_size=4)
        def test_hangs(cppool):
            cppool.run({"do": "spin"}, deadline=0.3)
        def test_goes_on(cppool):
            cppool.run({"do": "pass"})
    """)
    result.assert_outcomes(passed=2, skipped=1, failed=3)
    text = result.stdout.str()
    assert re.search(r"SKIPPED .* because of unsupported", text)
    assert "During handling of the above exception" not in text
    assert re.search(r"failed: because of mismatch\n.*dq +oracle +1 +nan", text, re.S) and "1 of 2 checks hold" in text
    assert f"repeat: cppool run --world-size 2 --daemon {FAKE} --param do=say_and_fail " in text
    assert re.search(r"--param do=say_and_fail .*\n-+ Captured cppoold stderr call -+\n(.*\n)*?its own words\n", text)
    assert re.search(r"Captured cppoold stderr call -+\n(.*\n)*?the last words", text)
    assert re.search(r"Captured cppool diagnosis call -+\nin its last .* of CPU; its threads: ", text)
    assert f"repeat: cppool run --world-size 4 --daemon {FAKE} --param do=die\n" in text


def test_hang_that_the_daemon_reports(suite):
    result = suite("import pytest\n@pytest.fixture(scope='session')\n"
                   "def cppool_options():\n    return {'backend': 'host', 'arguments': ['--allow-faults']}\n", """
        import pytest
        @pytest.mark.cppool(deadline=1)
        def test_stalls(cppool):
            cppool.run({"max_seqlen_q": 64}, fault={"kind": "stall", "rank": 1})
    """)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "repeat: cppool run --world-size 2 --backend host --deadline 1 --fault stall:1 --param max_seqlen_q=64" in text
    assert "Captured cppool diagnosis call" in text and re.search(r"\nrank 1: .*\n  \S+", text.partition("Captured cppool diagnosis")[2])


def test_a_timeout_says_where_the_ranks_are_and_cancels_before_it_kills(suite):
    """pytest-timeout's method `signal` is a handler of SIGALRM that fails the test."""
    result = suite("import pytest\n@pytest.fixture(scope='session')\n"
                   "def cppool_options():\n    return {'backend': 'host', 'arguments': ['--allow-faults']}\n", """
        import signal
        import pytest
        @pytest.fixture
        def limit():
            def fail(*_):
                pytest.fail("Timeout >0.5s")
            before = signal.signal(signal.SIGALRM, fail)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        pids = []
        def test_starts(cppool):
            pids.append(cppool.at(2).hello()["pid"])
        def test_takes_too_long(cppool, limit):
            cppool.run({"max_seqlen_q": 64, "num_heads": 4}, repeat=10000)
        def test_has_the_same_daemon(cppool):
            assert cppool.at(2).hello()["pid"] == pids[0]
        def test_cannot_be_cancelled(cppool, limit):
            cppool.run({"max_seqlen_q": 64}, fault={"kind": "stall", "rank": 1})
        def test_goes_on(cppool):
            cppool.run({"max_seqlen_q": 64})
    """)
    result.assert_outcomes(passed=3, failed=2)
    for report in re.split(r"\n_+ test_", result.stdout.str())[1:3]:
        assert "Timeout >0.5s" in report
        assert re.search(r"Captured stderr call -+\n(.*\n)*?cppool: rank 0: .*; rank 1: ", report)


def test_raw_results_and_errors(suite):
    """`at` returns every result, and what it saw is reported all the same."""
    result = suite(fake(), """
        import cppool as package
        import pytest
        def test_result(cppool):
            assert cppool.at(2).run({"do": "fail"}).status == "failed"
        def test_error(cppool):
            with pytest.raises(package.PoolError, match="the last words"):
                cppool.at(2).run({"do": "die"})
        def test_error_escapes(cppool):
            cppool.at(2).run({"do": "die"})
    """)
    result.assert_outcomes(passed=2, failed=1)
    assert "Captured cppoold stderr call" in result.stdout.str()


FLAKY = """
    from cppool import Cell
    def test_cell(cppool, tmp_path):
        cppool.run(Cell("mine", params={"do": "crash_once", "marker": str(tmp_path / "marker")}))
    def test_raw(cppool, tmp_path):
        assert cppool.at(2).run({"do": "crash_once", "marker": str(tmp_path / "marker")}).ok
    def test_that_is_skipped_at_last(cppool, tmp_path):
        cppool.run({"do": "crash_once", "then": "skip", "marker": str(tmp_path / "marker")})
    def test_steady(cppool):
        cppool.run()
"""
CRASH = "attempt 1: cppoold (pid *, world size 2) exited with code 3: rank 1 crashed in stage 'forward/attend', stack: Attend < Run"


def test_flaky_results_fail_their_tests(suite, pytester):
    result = suite(fake(), FLAKY, "--junit-xml", "report.xml")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["mine: passed", "  flaky (passed at attempt 2)", "  " + CRASH])
    result.stdout.fnmatch_lines(["*= cppool: 3 flaky =*", "*::test_cell: flaky (passed at attempt 2)", CRASH,
                                 "*::test_raw: flaky (passed at attempt 2)", CRASH, "*: flaky (skipped at attempt 2)", CRASH])
    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "report.xml").iter("testcase")}
    assert cases["test_raw"].find("failure") is not None
    properties = {p.get("name"): p.get("value") for p in cases["test_cell"].iter("property")}
    assert properties["cppool.flaky"] == "flaky (passed at attempt 2)"


def test_a_crash_and_then_no_answer_is_flaky(suite):
    result = suite(fake(), """
        def test_hangs(cppool, tmp_path):
            cppool.run({"do": "crash_once", "then": "hang", "marker": str(tmp_path / "marker")}, deadline=0.2)
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*= cppool: 1 flaky =*", "*::test_hangs: flaky (timeout at attempt 2)", CRASH])


def test_flaky_results_of_fixtures_fail_their_tests(suite):
    result = suite(fake(), """
        import pytest
        def flaky(pools, folder):
            assert pools.at(2).run({"do": "crash_once", "marker": str(folder / "marker")}).ok
        @pytest.fixture
        def base(cppool, tmp_path):
            flaky(cppool, tmp_path)
        def test_in_setup(base):
            pass
        def test_named_late(request, tmp_path):
            flaky(request.getfixturevalue("cppool"), tmp_path)
        @pytest.fixture
        def after(cppool, tmp_path):
            yield
            flaky(cppool, tmp_path)
        def test_in_teardown(after):
            pass
        @pytest.fixture
        def hangs(cppool, tmp_path):
            cppool.run({"do": "crash_once", "then": "hang", "marker": str(tmp_path / "marker")}, deadline=0.2)
        def test_hangs_in_setup(hangs):
            pass
        def test_steady(cppool):
            cppool.run()
    """)
    result.assert_outcomes(passed=2, failed=2, errors=2)
    result.stdout.fnmatch_lines(["*  flaky (passed at attempt 2)", "*" + CRASH])
    assert len(re.findall("-- Captured cppool flaky call --", result.stdout.str())) == 4
    result.stdout.fnmatch_lines(["*= cppool: 4 flaky =*"])
    result.stdout.fnmatch_lines_random([
        *(f"*::{test}: flaky (passed at attempt 2)" for test in ("test_in_setup", "test_named_late", "test_in_teardown")),
        "*::test_hangs_in_setup: flaky (timeout at attempt 2)"])


def test_a_flaky_result_in_the_last_teardown_fails_its_test(suite):
    result = suite(fake(), """
        import pytest
        @pytest.fixture
        def after(cppool, tmp_path):
            yield
            assert cppool.at(2).run({"do": "crash_once", "marker": str(tmp_path / "marker")}).ok
        def test_last(after):
            pass
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_last*", "  flaky (passed at attempt 2)", "ERROR *::test_last"])


def test_no_skip_and_no_expected_failure_hides_a_flaky_result(suite, pytester):
    result = suite(fake(), """
        import pytest
        @pytest.fixture
        def flaky(cppool, tmp_path):
            return lambda: cppool.at(2).run({"do": "crash_once", "marker": str(tmp_path / "marker")})
        def test_skips(flaky):
            flaky()
            pytest.skip("later")
        def test_unsupported(cppool, flaky):
            flaky()
            cppool.run({"do": "skip"})
        @pytest.fixture
        def skips(flaky):
            flaky()
            pytest.skip("later")
        def test_skips_in_setup(skips):
            pass
        @pytest.mark.xfail
        def test_fails_as_expected(flaky):
            flaky()
            assert False
        @pytest.mark.xfail
        def test_passes_unexpectedly(flaky):
            flaky()
        def test_expects_it_late(flaky):
            flaky()
            pytest.xfail("later")
        @pytest.mark.xfail
        def test_steady(cppool):
            cppool.run({"do": "fail"})
    """, "--junit-xml", "report.xml")
    result.assert_outcomes(failed=5, errors=1, xfailed=1)
    report = ElementTree.parse(pytester.path / "report.xml")
    assert len(list(report.iter("failure"))) == 5 and len(list(report.iter("error"))) == 1


def test_retries_allow_flaky_passes(suite):
    result = suite(fake(), FLAKY, "--cppool-retries", "1", "-q")
    result.assert_outcomes(passed=3, failed=1)  # what did not pass in the end is no pass
    result.stdout.fnmatch_lines(["*= cppool: 3 flaky =*", "*::test_cell: flaky (passed at attempt 2)", CRASH])
    result = suite(fake(), FLAKY, "--cppool-retries", "0")
    result.assert_outcomes(passed=1, failed=3)
    assert "flaky (" not in result.stdout.str() and "rank 1 crashed" in result.stdout.str()
    assert suite(fake(), FLAKY, "--cppool-retries", "-1").ret == pytest.ExitCode.USAGE_ERROR
    result = suite(fake(retries=3), "def test(cppool):\n    cppool.run({'do': 'die'})")
    assert "(attempt 4)" in result.stdout.str()


def test_flaky_results_of_workers(suite, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = suite(fake(), FLAKY, "-n", "2")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["*= cppool: 3 flaky =*"])


def test_the_fixture_and_the_module_in_one_test(suite):
    result = suite(fake(), """
        import cppool, pytest
        from cppool import PoolError
        pids = []
        def test_first(cppool):
            pids.append(cppool.at(2).hello()["pid"])
        def test_both(cppool):
            with pytest.raises(cppool.PoolError):
                pass
        def test_neither(cppool):
            cppool.rum({"do": "pass"})
        def test_goes_on(cppool):
            assert cppool.run({"do": "pass"}).ok and pids == [cppool.at(2).hello()["pid"]] and not hasattr(cppool, "PoolError")""")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["E*AttributeError: the fixture cppool, which has no PoolError, hides the module cppool in this test: "
                                 "write `from cppool import PoolError`", "test_the_fixture_and_the_module_in_one_test.py:7: AttributeError",
                                 "E*AttributeError: the fixture cppool has no 'rum'"])


def test_start_counts_as_setup(suite):
    result = suite(fake(), """
        import pytest, time
        from cppool import Cell
        started = {}
        @pytest.fixture(autouse=True)
        def worlds(cppool):
            yield
        @pytest.mark.cppool(world_size=4)
        def test_marked(cppool):
            assert 4 in cppool._hello and 2 not in cppool._hello
        @pytest.mark.parametrize("cell", [Cell("one", world_size=3, params={"do": "pass"})])
        def test_cell(cppool, cell):
            assert 3 in cppool._hello
            cppool.run(cell)
    """)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_cell?one?*"])


def test_daemon_that_does_not_start(suite):
    result = suite(fake(daemon="/nonexistent/cppoold"), """
        import pytest
        def test_in_the_call(cppool):
            cppool.run()
        @pytest.mark.cppool(world_size=2)
        def test_in_the_setup(cppool):
            assert False, "not reached"
        def test_other():
            pass
    """)
    result.assert_outcomes(passed=1, failed=1, errors=1)
    assert "the daemon of world size 2 does not start: " in result.stdout.str() and "/nonexistent/cppoold" in result.stdout.str()
    assert "No such file or directory (the option `daemon` names it)" in result.stdout.str()
    assert "During handling of the above exception" not in result.stdout.str()


def test_unknown_world_size_and_marker(suite):
    result = suite(fake(), """
        import pytest
        @pytest.mark.cppool(world_size=99)
        def test_world(cppool):
            pass
        @pytest.mark.cppool(world=2)
        def test_name(cppool):
            pass
        @pytest.mark.cppool(require="gpu")
        def test_require(cppool):
            pass
        def test_in_the_call(cppool):
            cppool.run(world_size=0)
        def test_not_a_number(cppool):
            cppool.run({"softmax_scale": float("nan")})
    """)
    result.assert_outcomes(errors=3, failed=2)
    text = result.stdout.str()
    assert 'must be an integer from 1 to 64, not 99' in text
    assert "the marker cppool takes world_size, require and deadline by name, not world" in text
    assert 'must be an integer from 1 to 64, not 0' in text
    assert "require of the marker cppool is cuda, cuda:N (at least N GPUs) or host, not 'gpu'" in text
    assert "params['softmax_scale'] is nan, which JSON cannot express: give a finite number" in text
    # The reports end at the user's line, and do not go on through the package and Python's JSON.
    for inner in ("_library.py", "_pool.py", "pytest_plugin.py:", "encoder.py", "During handling of the above exception"):
        assert inner not in text, inner


REQUIRING = """
    import pytest
    @pytest.mark.cppool(world_size=2, require="cuda:2")
    def test_needs_two(cppool):
        pass
    @pytest.mark.cppool(world_size=4, require="cuda:4")
    def test_needs_four(cppool):
        pass
    def test_any(cppool):
        cppool.run({"max_seqlen_q": 64})
"""


def test_lack_of_hardware_skips(suite):
    result = suite(HOST, REQUIRING)
    result.assert_outcomes(passed=1, skipped=2)
    assert re.search(r"SKIPPED .* cuda:2 is required, and the daemon of world size 2 runs on the backend host", result.stdout.str())


def test_required_hardware_makes_errors(suite):
    result = suite(HOST, REQUIRING, "--cppool-require", "cuda:2")
    text = result.stdout.str()
    # Also the test that would run, but on another backend.
    assert result.parseoutcomes() == {"failed": 1, "errors": 2}, text
    assert "--cppool-require cuda:2 is required, and the daemon of world size 2 runs on the backend host" in text


def test_too_few_devices(suite):
    tests = """
        import pytest
        @pytest.mark.cppool(world_size=4)
        def test_four(cppool):
            cppool.run({"do": "pass"})
    """
    conftest = fake("two_devices")
    result = suite(conftest, tests)
    result.assert_outcomes(skipped=1)
    assert "world size 4 needs as many GPUs, and there are 2" in result.stdout.str()
    result = suite(conftest, tests, "--cppool-require", "cuda:4")
    result.assert_outcomes(errors=1)
    result = suite(conftest, tests, "--cppool-require", "cuda:2")  # nobody says that there are four
    result.assert_outcomes(skipped=1)


@pytest.mark.parametrize("value", ["cuda:0", "cuda:x", "gpu", "host:2", ""])
def test_requirement_that_is_none(suite, value):
    result = suite(HOST, "def test(): pass", "--cppool-require", value)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--cppool-require is cuda, cuda:N (at least N GPUs) or host, not " in result.stderr.str()


def test_junit_properties(suite, pytester):
    result = suite(HOST, """
        def test_two(cppool):
            cppool.run({"max_seqlen_q": 64})
            cppool.run({"max_seqlen_q": 64, "cp_comm_type": "a2a"})
    """, "--junit-xml", "report.xml")
    result.assert_outcomes(passed=1)
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse(pytester.path / "report.xml").iter("property")}
    assert properties["cppool.status"] == "passed" and properties["cppool.backend"] == "host" and properties["cppool.world_size"] == "2"
    assert float(properties["cppool.worst_ratio"]) > 0 and float(properties["cppool.wall_ms"]) > 0
    assert properties["cppool.command"] == "cppool run --world-size 2 --backend host --param max_seqlen_q=64"
    assert properties["cppool.2.command"].endswith("--param cp_comm_type=a2a --param max_seqlen_q=64")
    assert float(properties["cppool.tflops.forward"]) > 0


XDIST = """
    import os, pytest
    @pytest.mark.parametrize("i", range(8))
    def test_many(cppool, i):
        seen = cppool.at(2).run({"do": "echo"}).json["surroundings"]["environment"]["CUDA_VISIBLE_DEVICES"]
        with open(f"seen-{os.environ['PYTEST_XDIST_WORKER']}", "w") as file:
            file.write(seen or "all")
"""


def seen(pytester):
    return {path.name.partition("-")[2]: path.read_text() for path in pytester.path.glob("seen-*")}


def test_workers_share_out_the_gpus(suite, pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-7,6,1")
    suite(fake(), XDIST, "-n", "2").assert_outcomes(passed=8)
    assert seen(pytester) == {"gw0": "3,5", "gw1": "GPU-7,6,1"}


def test_workers_share_out_what_the_driver_lists(suite, pytester, monkeypatch):
    pytest.importorskip("xdist")
    lister = pytester.path / "bin" / "nvidia-smi"
    lister.parent.mkdir()
    lister.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: NVIDIA H200 (UUID: GPU-$i)\"; done\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(lister.parent), prepend=":")
    suite(fake(), XDIST, "-n", "2").assert_outcomes(passed=8)
    assert seen(pytester) == {"gw0": "0,1", "gw1": "2,3"}


def test_more_workers_than_gpus(suite, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = suite(fake(), XDIST, "-n", "4")
    result.assert_outcomes(errors=8)
    assert "there are 4 workers of pytest-xdist and 1 GPU (0), and each worker needs one for itself: run with -n 1, or set " \
           "CUDA_VISIBLE_DEVICES= to run without GPUs" in result.stdout.str()


def test_workers_without_gpus(suite, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    suite(fake(), XDIST, "-n", "4").assert_outcomes(passed=8)


def test_warnings_of_the_daemon(suite):
    result = suite(HOST, """
        def test_fp8_without_a_recipe(cppool):
            result = cppool.run(kwargs={"dtype": "fp8", "max_seqlen_q": "64", "fp8_mha": "True", "scaling_mode": "mxfp8"})
            assert "  warning: " + result.warnings[0] in result.describe().splitlines()
            assert result.warnings[0] in result._repr_html_().replace("&#x27;", "'").replace("&quot;", '"')
        def test_without_any(cppool):
            result = cppool.run({"max_seqlen_q": 64})
            assert (result.warnings, result.leaks) == ([], {})
    """)
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.re_match_lines([r".*PytestWarning: cppool: .*ran as bf16.*"])


def test_a_server(suite, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    tests = f"""
        def test_pid(cppool):
            assert cppool.run({{"do": "pass"}}).ok
            with open({str(pids)!r}, "a") as file:
                print(cppool.at(2).hello()["pid"], file=file)
    """
    with serving(tmp_path) as socket:
        suite(fake(), tests, "--cppool-attach", socket).assert_outcomes(passed=1)
        monkeypatch.setenv("CPPOOL_ATTACH", socket)
        suite(fake(), tests).assert_outcomes(passed=1)
        suite(fake(), tests, "--cppool-attach", "").assert_outcomes(passed=1)  # its own
    first, second, own = pids.read_text().split()
    assert first == second != own
    result = suite(fake(), tests)
    result.assert_outcomes(failed=1)
    assert "there is no server at" in result.stdout.str()


@pytest.mark.skipif(not os.path.exists(os.path.join(BUILD, "lib/libcppool_gloo.so")), reason="built without gloo")
def test_launch(suite, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nfor i in 0 1; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i "$@" & done; wait\n')
    launcher.chmod(0o700)
    tests = """
        def test_it(cppool):
            assert [node["ranks"] for node in cppool.at(2).hello()["nodes"]] == [[0], [1]]
            assert cppool.run({"max_seqlen_q": 128, "num_heads": 4}, world_size=2).ok
    """
    suite(HOST, tests, "--cppool-launch", f"'{launcher}'").assert_outcomes(passed=1)
    suite(HOST, tests).assert_outcomes(failed=1)  # without nodes
