"""pytest items: a rank keeps a session of pytest for what was loaded, and each run is one item of it, with its fixtures."""
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys

import _pytest.assertion.rewrite
import _pytest.cacheprovider
import pytest

from .code import CannotLoad
from .rank import text_of

# The daemon captures output and asks for stacks; rewritten bytecode of the same second and size could be that of another text.
OPTIONS = ["--capture=no", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-p", "no:cppool"]
MAX_REPORTS = 1 << 20
if hasattr(_pytest.assertion.rewrite, "_read_pyc"):
    _pytest.assertion.rewrite._read_pyc = lambda *_, **__: None


def size_of(members):
    return len(json.dumps(members, default=str))


def is_unexpected_success(item, report):
    """The daemon is not told of it as a failure: another rank may fail as expected. Where none does, the reports say it."""
    of_unittest = any(getattr(getattr(item, name, None), "__unittest_expecting_failure__", False) for name in ("obj", "cls"))
    return report.failed and str(report.longrepr).startswith(("[XPASS(strict)]", "Unexpected success") if of_unittest else "[XPASS(strict)]")


class Cache(_pytest.cacheprovider.Cache):
    """That of the pytest that has chosen the items. It writes what rank 0 has set when the item has ended, so that all ranks read the same until then."""

    def __init__(self, folder, config):
        super().__init__(pathlib.Path(folder), config, _ispytest=True)
        self.own = {}  # JSON of what this rank has set

    def get(self, key, default):
        return json.loads(self.own[key]) if key in self.own else super().get(key, default)

    def set(self, key, value):
        self.own[key] = json.dumps(value)


class Items:
    def __init__(self, rank, frame):
        self.rank, self.frame = rank, frame
        self.world = None  # of the item that runs
        self.items, self.wrong, self.following, self.begun, self.stopped = {}, [], None, False, False
        self.alive, self.ending = set(), {}  # fixtures of several items; the state as one of them began to end

    def main(self, begin):
        """Returns the `load` that has ended the session. begin(members): is called when the items are there. Throws CannotLoad before that."""
        self.begin = begin
        self.addopts = os.environ.pop("PYTEST_ADDOPTS", None)  # its values are among those of --cppool-options
        code = pytest.main([*OPTIONS, *self.frame["pytest"]], plugins=[self])
        if not self.begun:
            raise CannotLoad("\n".join(self.wrong) or f"pytest ended with exit code {int(code)} before it had collected: see the output")
        if self.following is None:
            os._exit(1)  # an error of pytest's own, which it has printed
        return self.following

    def serves(self, frame):
        """Whether the session is what `frame` would load."""
        same = all(frame.get(name) == self.frame.get(name) for name in ("pytest", "path", "cwd", "roots", "env"))
        return same and not self.stopped and not self.rank.code.changed()

    def members(self, names=False):
        digest = hashlib.sha256("\n".join(self.items).encode("utf-8", "replace")).hexdigest()
        sizes = itertools.accumulate(len(json.dumps(name)) for name in self.items)
        known = {"items": [name for name, size in zip(self.items, sizes) if size <= MAX_REPORTS]} if names else {}
        return {"collected": len(self.items), "digest": digest, **known}

    def run(self, frame, world):
        """Runs one item; what it raised has been told by `told`. Returns its outcome, further members of the report, and whether fixtures are alive."""
        if frame["nodeid"] not in self.items:
            raise CannotLoad(f"pytest has collected no item {frame['nodeid']}")
        item, self.world = self.items[frame["nodeid"]], world
        session, end, notes = item.session, {}, []
        self.reports, self.warnings, self.failure, self.skip = [], {}, {}, {}
        try:
            session._setupstate.teardown_exact(item)  # where the item that was to come has not come
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=self.items.get(frame.get("next")))
        except pytest.exit.Exception as error:
            end["exit"] = [error.msg, error.returncode]
            self.mark_skip(f"pytest.exit: {error.msg}")
            try:
                session._setupstate.teardown_exact(None)
            except BaseException as of_fixture:  # the exit is what happened first
                notes.append(f"a fixture failed after pytest.exit: {text_of(of_fixture)}")
        finally:
            self.world = None
            own = getattr(getattr(item.config, "cache", None), "own", {})
            cached = dict(own) if self.rank.rank == 0 else {}
            own.clear()
        end.update((name, str(getattr(session, name))) for name in ("shouldstop", "shouldfail") if getattr(session, name))
        self.stopped = bool(end)  # the next run needs a session that goes on
        texts = [item.config.hook.pytest_report_to_serializable(config=item.config, report=report) for report in self.reports]
        members = {"pytest": {"reports": texts, "warnings": list(self.warnings.values()), **end}}
        size = size_of(members)
        if size > MAX_REPORTS:
            members["pytest"]["warnings"], left_out = [], "warnings"
            if size_of(members) > MAX_REPORTS:
                for text in texts:
                    text.update(sections=[], longrepr=str(text["longrepr"])[-8000:] if text.get("longrepr") else None)
                left_out = "logs, warnings and all but the end of a failure"
            notes.append(f"{left_out} are left out: pytest's reports have {size} bytes, of at most {MAX_REPORTS}")
        if size_of(cached) <= MAX_REPORTS:
            members["pytest"]["cache"] = cached
        else:
            notes.append(f"what the test has set in pytest's cache is left out: it has {size_of(cached)} bytes, of at most {MAX_REPORTS}")
        members["warnings"] = notes
        told = [report for report in self.reports if report.failed and not is_unexpected_success(item, report)]
        skipped = next((report for report in self.reports if report.skipped), None)
        if not self.failure and told:  # as another plugin has judged it
            self.failure = self.outcome("failed", "mismatch", str(told[0].longrepr))
        elif not self.failure and not self.skip and skipped:
            self.skip = self.outcome("skipped", "unsupported", skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else str(skipped.longrepr))
        return self.failure or self.skip, json.loads(json.dumps(members, default=str)), bool(self.alive)

    def mark_skip(self, why):
        """At once, since other ranks may wait for this one. It is a skip: what they then fail of is not the cause, and no rank is hurt."""
        self.skip = self.outcome("skipped", "unsupported", why)
        self.rank.channel.send("mark", id=self.world.id, **self.skip)

    def outcome(self, status, kind, error):
        """Members of a report."""
        return {"status": status, "kind": kind, "error": error[:8000], "culprit": self.rank.rank, "stage": "", "traceback": ""}

    # Hooks and fixtures.

    @pytest.fixture(name="world")
    def world_fixture(self):
        """The ranks, seen from this one."""
        return self.world

    @pytest.fixture(name="cache")
    def cache_fixture(self, request):
        return request.config.cache

    @pytest.fixture
    def tmp_path(self, request):
        """With the mark, a folder that all ranks of a machine share: of the pytest that has chosen the item, which removes it as its own."""
        base = request.config.getoption("--cppool-tmp")
        if base is None or request.node.get_closest_marker("cppool_ranks") is None:
            return request.getfixturevalue("tmp_path")
        path = pathlib.Path(base, re.sub(r"\W", "_", request.node.name)[:30] + f"-{self.rank.port}-{self.world.id}")
        path.mkdir(0o700, parents=True, exist_ok=True)
        return path

    @pytest.fixture
    def rank_tmp_path(self, tmp_path):
        """A folder of this rank's own."""
        path = tmp_path / f"rank{self.rank.rank}"
        path.mkdir(0o700, exist_ok=True)
        return path

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """What a fixture of several items changes is right as long as it is alive. Those of pytest change nothing, but for setup_module and the like."""
        of_pytest = str(getattr(fixturedef.func, "__module__", "")).startswith("_pytest") and not fixturedef.argname.startswith("_")
        if fixturedef.scope == "function" or of_pytest:
            yield
            return
        snapshot = self.rank.snapshot
        before = snapshot.read()
        self.alive.add(fixturedef)
        yield
        snapshot.expect_changes(before)
        fixturedef.addfinalizer(lambda: self.ending.update({fixturedef: snapshot.read()}))  # the last one added is the first to run

    def pytest_fixture_post_finalizer(self, fixturedef):
        if fixturedef in self.ending:
            self.rank.snapshot.expect_changes(self.ending.pop(fixturedef))
        self.alive.discard(fixturedef)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if "cppool" in getattr(item, "fixturenames", ()):
            pytest.fail(f"{item.path}:{item.location[1] + 1}: the fixture cppool is for tests that ask a pool; this one runs on the ranks themselves: "
                        "use the fixture world", pytrace=False)

    def pytest_generate_tests(self, metafunc):
        """As cppool/_pytest_ranks.py does where the items are chosen."""
        marker = metafunc.definition.get_closest_marker("cppool_ranks")
        if marker is not None and marker.args:
            metafunc.fixturenames.append("cppool_world_size")
            metafunc.parametrize("cppool_world_size", marker.args, ids=[f"W{size}" for size in marker.args])

    def pytest_addoption(self, parser):
        parser.addoption("--cppool-options", type=json.loads, default={}, help="values of options of the pytest that has chosen the items")
        parser.addoption("--cppool-tmp", help="where it keeps temporary folders")
        parser.addoption("--cppool-cache", help="the folder of its cache")
        parser.addini("cppool_preload", "of the plugin, which is not here", "args")
        for name in ("faulthandler_timeout", "faulthandler_exit_on_timeout", "cache_dir"):
            parser.addini(name, "of a plugin that OPTIONS switches off")

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config):
        """Before any pytest_configure reads them."""
        for name, value in config.getoption("--cppool-options").items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if config.getoption("--cppool-cache"):
            config.cache = Cache(config.getoption("--cppool-cache"), config)
        if self.addopts is not None:
            os.environ["PYTEST_ADDOPTS"] = self.addopts

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        for mark in ("cppool", "cppool_ranks"):
            config.addinivalue_line("markers", f"{mark}: of the plugin, which is not here")
        reporter = config.pluginmanager.get_plugin("terminalreporter")  # its options are needed, as that of assertions
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
            config.get_terminal_writer = lambda: reporter._tw  # pytest 8 and later highlight comparisons with it

    def pytest_internalerror(self, excrepr):
        print(excrepr, file=sys.stderr)

    def pytest_collectreport(self, report):
        if report.failed:
            self.wrong.append(report.longreprtext)

    def pytest_runtestloop(self, session):
        if session.testsfailed:
            return True  # collection errors, which main() reports
        self.items, self.begun = {item.nodeid: item for item in session.items}, True
        self.begin(self.members())
        self.following = self.rank.serve(self)
        return True

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # after pytest has told expected failures from others
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if self.world is not None and call.excinfo is not None and report.skipped and hasattr(report, "wasxfail"):
            self.mark_skip(f"expected failure: {call.excinfo.exconly()}")

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    def pytest_warning_recorded(self, warning_message):
        if self.world is not None:
            category = warning_message.category
            warning = {"message": str(warning_message.message), "module": category.__module__, "category": category.__name__,
                       **{name: getattr(warning_message, name) for name in ("filename", "lineno", "line")}}
            self.warnings[json.dumps(warning)] = warning  # once, also of a loop

    def pytest_exception_interact(self, node, call, report):
        if self.world is not None and not self.failure and report.when != "collect" and not is_unexpected_success(node, report):
            self.failure = self.rank.tell(call.excinfo.value, self.world)
