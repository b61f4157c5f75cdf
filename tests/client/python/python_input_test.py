"""Bad input of cases in Python: each is an error that names what is wrong and what to do, and the pool's next case passes."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import cppool
import pytest

from support import BUILD, children_of, eventually, is_running

CASES = str(pathlib.Path(__file__).with_name("ranks_cases.py"))


@pytest.fixture(scope="module")
def pools():
    with cppool.Pools(python=True, backend="host", start_limit=60.0) as pools:
        yield pools


@pytest.fixture
def pool(pools):
    pool = pools.at(2)
    pid = pool.hello()["pid"]
    yield pool
    assert pool.call(function("passes")).ok and pool.hello()["pid"] == pid


def function(name):
    return f"{CASES}:{name}"


def write(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def script(file, interpreter, text=""):
    write(file, f"#!{interpreter}\n{text}")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("first", ["CPPOOL_PYTHON", "VIRTUAL_ENV", "PATH"])
def test_which_python_is_taken(tmp_path, first):
    """By `--python` without a path, where those before it are not set. The wrong ones would not start."""
    names = ["CPPOOL_PYTHON", "VIRTUAL_ENV", "PATH"]
    files = [tmp_path / "own", tmp_path / "venv" / "bin" / "python", tmp_path / "path" / "python3"]
    for name, file in zip(names, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        script(file, "/bin/sh", f"exec {sys.executable} \"$@\"\n" if name == first else "exit 7\n")
    known = dict(zip(names, map(str, (files[0], tmp_path / "venv", tmp_path / "path"))))
    environment = {**os.environ, **{name: value if names.index(name) >= names.index(first) else "" for name, value in known.items()}}
    command = [os.path.join(BUILD, "bin", "cppoold"), "--world-size", "1", "--backend", "host", "--sentinel", "", "--python"]
    done = subprocess.run(command, env=environment, text=True, input='{"op": "hello"}\n', stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["python"]["path"] == str(files[names.index(first)]), done
    files[names.index(first)].unlink()
    done = subprocess.run(done.args, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "--python" in done.stderr and first.replace("PATH", "python3 on PATH") in done.stderr, done
    assert "give the path of a Python 3.9 or later" in done.stderr


def test_a_python_without_torch(tmp_path):
    """Runs cases; what needs torch says so."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    with cppool.Pool(1, python=environment / "bin" / "python", backend="host") as pool:
        assert pool.call(function("passes")).ok and pool.hello()["python"]["torch"] is None
        result = pool.call(write(tmp_path / "of_torch.py", "import torch\ndef case(): pass\n") + ":case")
        assert result.failure.kind == "internal" and "No module named 'torch'" in result.error, result.describe()
        assert "of_torch.py\", line 1" in result.ranks[0].traceback and pool.call(function("passes")).ok
        test = write(tmp_path / "test_it.py", "def test_it(): pass\n")
        result = pool.run_python({"pytest": [test], "nodeid": "test_it.py::test_it"})
        assert (result.status, result.failure.kind) == ("error", "invalid_request") and not result.replaced, result.describe()
        assert f"{environment}/bin/python cannot import pytest (No module named '_pytest'): install it there" in result.error
    for options, text in (({"preload": ["torch"]}, f"--preload torch: it cannot be imported by {environment}/bin/python: ModuleNotFoundError: "
                                                   "No module named 'torch': mend or install it there, or leave it out"),
                          ({"backend": "cuda"}, "--preload torch")):
        with pytest.raises(cppool.PoolError) as caught:
            cppool.Pool(1, python=environment / "bin" / "python", **options).hello()
        assert caught.value.kind == "start" and text in str(caught.value)


def test_another_module_than_the_preloaded_one(tmp_path, monkeypatch):
    """The one that is imported stays, so a case that would find another must not run with it unawares."""
    for folder in ("first", "second"):
        write(tmp_path / folder / "library.py", f"version = '{folder}'\n")
    case = write(tmp_path / "case.py", "import library\ndef version(): return library.version\n") + ":version"
    with cppool.Pool(2, python=True, backend="host", preload=["library"], environment={"PYTHONPATH": str(tmp_path / "first")}) as pool:
        for _ in range(2):
            assert pool.call(case).ranks[1].extra["value"] == "first"
            with monkeypatch.context() as changes:
                changes.syspath_prepend(tmp_path / "second")
                result = pool.call(case)
            assert (result.status, result.failure.kind) == ("error", "invalid_request"), result.describe()
            assert f"{tmp_path}/second/library.py is another library than the one that is preloaded, {tmp_path}/first/library.py" in result.error
            assert "PYTHONPATH" in result.error and not result.replaced


def test_an_environment_that_is_gone(tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    with cppool.Pool(2, python=environment / "bin" / "python", backend="host") as pool:
        assert pool.call(function("passes")).ok
        pid = pool.hello()["pid"]
        shutil.rmtree(environment)
        server = server_of(pid)
        fork_server, = children_of(server)
        ranks = children_of(fork_server)
        assert len(ranks) == 2
        os.kill(server, signal.SIGKILL)
        assert eventually(lambda: not any(map(is_running, ranks)))
        result = pool.call(function("passes"))
        assert result.status == "error" and f"{environment}/bin/python" in result.error and "cannot be started" in result.error, result.describe()
        assert pool.hello()["pid"] == pid and pool.call(function("passes")).error == result.error
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        assert pool.call(function("passes")).ok and pool.hello()["pid"] == pid


def test_a_preloaded_module_that_breaks(tmp_path):
    write(tmp_path / "broken_later.py", "")
    with cppool.Pool(1, python=True, backend="host", preload=["broken_later"], environment={"PYTHONPATH": str(tmp_path)}) as pool:
        assert pool.call(function("passes")).ok
        pid = pool.hello()["pid"]
        write(tmp_path / "broken_later.py", "def:\n")
        result = pool.call(function("passes"), fresh=True)
        assert result.status == "error" and "no fresh ranks: --preload broken_later" in result.error, result.describe()
        assert pool.stats()["memory"] == [] and pool.hello()["pid"] == pid
        write(tmp_path / "broken_later.py", "mended = True\n")
        assert pool.call(function("passes"), fresh=True).ok and pool.hello()["pid"] == pid


def server_of(daemon):
    server, = [child for child in children_of(daemon) if "_ranks" in pathlib.Path(f"/proc/{child}/cmdline").read_text()]
    return server


# As the process sees itself after the driver has been started: a descriptor of a device.
OPENS_CUDA = """import os
device, read = os.open("/dev/null", os.O_RDONLY), os.readlink
os.readlink = lambda path, **more: "/dev/nvidiactl" if path == f"/proc/self/fd/{device}" else read(path, **more)
imported_by = os.getpid()
"""


def test_a_module_that_opens_cuda_at_import(tmp_path):
    """Ranks cannot be forked with it: it is named, and each rank imports it."""
    write(tmp_path / "opens_cuda.py", OPENS_CUDA)
    write(tmp_path / "harmless.py", "import os\nimported_by = os.getpid()\n")
    case = write(tmp_path / "case.py", "import os, harmless, opens_cuda\ndef who(): return [harmless.imported_by, opens_cuda.imported_by, os.getpid()]\n")
    lines = []
    with cppool.Pool(2, python=True, backend="host", preload=["opens_cuda", "harmless"], environment={"PYTHONPATH": str(tmp_path)},
                     on_stderr=lines.append) as pool:
        assert pool.hello()["python"]["preloaded"] == ["harmless"]
        assert pool.hello()["python"]["deferred"] == [{"module": "opens_cuda", "why": "it opens /dev/nvidiactl"}]
        values = [rank.extra["value"] for rank in pool.call(f"{case}:who").ranks]
        assert [value[1] for value in values] == [value[2] for value in values] and values[0][0] == values[1][0] != values[0][2]
    assert any("opens_cuda cannot be imported before the fork, since it opens /dev/nvidiactl; each rank imports it" in line for line in lines), lines


def test_a_syntax_error(pool, tmp_path):
    for target, error in ((":case", "invalid syntax"), ("", "invalid syntax")):
        result = pool.call(write(tmp_path / "wrong.py", "def case(): pass\ndef f(: pass\n") + target)
        assert (result.status, result.failure.kind) == ("error", "invalid_request") and error in result.error, result.describe()
        assert "wrong.py\", line 2" in result.error


def test_a_path_with_a_colon(pool, tmp_path):
    folder = tmp_path / "a:b"
    case = write(folder / "my:case.py", "import os, beside\ndef name(): return beside.name\nassert __name__ != '__main__' or os.environ['RANK']\n")
    write(folder / "beside.py", "name = 'beside'\n")
    assert pool.call(f"{case}:name").ranks[1].extra["value"] == "beside"
    assert pool.call(case).ok
    result = pool.call(f"{folder}/my:other.py")
    assert result.failure.kind == "invalid_request" and f"there is no file {folder}/my:other.py" in result.error, result.describe()
    # PATH cannot have such a folder.
    (folder / "bin").mkdir()
    (folder / "share" / "cppool" / "shims").mkdir(parents=True)
    (folder / "share" / "cppool" / "shims" / "torchrun").touch()
    shutil.copy(os.path.join(BUILD, "bin", "cppool"), folder / "bin")
    done = subprocess.run([folder / "bin" / "cppool", "shims"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0 and "cannot be in PATH" in done.stderr and not done.stdout


@pytest.mark.parametrize("what", [{"function": function("passes")}, {"script": CASES}, {"pytest": [CASES], "nodeid": "x"}])
def test_a_folder_that_is_not_there(pool, tmp_path, what):
    assert pool.call(function("passes")).ok
    for folder, why in ((tmp_path / "gone", "No such file or directory"), (write(tmp_path / "file", ""), "Not a directory")):
        result = pool.run_python({**what, "cwd": str(folder)})
        assert (result.status, result.failure.kind) == ("error", "invalid_request") and not result.replaced, result.describe()
        assert f'the "cwd" of the request, {folder}, cannot be entered ({why})' in result.error


@pytest.mark.parametrize("target, text", [("{}:none", "has no function none"), ("{}:not_callable", "not_callable"), ("{}:coroutine", "coroutine"),
                                          ("/nonexistent.py:x", "there is no file /nonexistent.py"), ("/nonexistent.py", "there is no file")])
def test_what_cannot_be_run(pool, target, text):
    result = pool.call(target.format(CASES))
    assert (result.status, result.failure.kind) == ("error", "invalid_request") and text in result.error, result.describe()
    assert pool.call(function("passes")).ok


def test_arguments_that_are_no_json(pool):
    with pytest.raises(TypeError, match=r"\[.text.\] is a builtins.object, which JSON cannot express"):
        pool.call(function("passes"), {"text": object()})
    with pytest.raises(ValueError, match="which takes kwargs"):
        pool.call(function("passes"), argv=["a"])
    with pytest.raises(ValueError, match=r'must be "FILE.py:NAME", not ".*ranks_cases.py:"'):  # and not run as a script
        pool.call(function(""))
    with pytest.raises(TypeError, match=r"kwargs is a mapping of names to arguments, not \[1\]"):
        pool.call(function("passes"), [1])


def test_text_that_is_no_utf8(pool, monkeypatch, tmp_path):
    """The member is named, and no value: it may be a secret. A folder of such a name holds up no call."""
    secret = "s3cret-value\udc80"
    for ask, where in ((lambda: pool.call(function("passes"), env={"TOKEN": secret}), r"python\['env'\]\['TOKEN'\]"),
                       (lambda: pool.call(function("passes"), {"text": secret}), r"python\['kwargs'\]\['text'\]"),
                       (lambda: cppool.Pool(2, python=True, environment={"TOKEN": secret}), r"environment\['TOKEN'\]")):
        with pytest.raises(ValueError, match=where) as caught:
            ask()
        assert "UTF-8" in str(caught.value) and "s3cret" not in str(caught.value)
    monkeypatch.syspath_prepend(os.fsdecode(os.fsencode(tmp_path) + b"/\x80"))
    assert pool.call(function("passes"), {"text": "h\u00e9, \U0001f642"}).ok


@pytest.mark.parametrize("what", ["file", "deep", "long"])
def test_a_result_that_cannot_be_sent(pool, what):
    result = pool.call(function("unsendable"), {"what": what})
    assert result.status == "error" and "result" in result.error, result.describe()


def test_the_other_kind_is_refused(pool):
    result = pool.run({"max_seqlen_q": 64})
    assert (result.status, result.failure.kind) == ("error", "invalid_request") and "--python" in result.error
    with cppool.Pool(2, backend="host") as threads:
        result = threads.call(function("passes"))
        assert (result.status, result.failure.kind) == ("error", "invalid_request") and "--python" in result.error


@pytest.mark.parametrize("member, text", [({"fresh": True}, "needs \"python\""), ({"python": {}}, "none of"), ({"python": {"function": "x"}}, "FILE.py:NAME"),
                                          ({"python": {"script": "/x"}, "kernels": "cppool"}, "for cases of libraries"),
                                          ({"python": {"script": "/x", "kwargs": {}}}, "is for"), ({"python": {"script": "/x", "env": {"A=": "secret"}}}, "no variable"),
                                          ({"python": {"script": "/x", "env": {"A": 3}}}, "a string without NUL"), ({"python": {"scrip": "/x"}}, "script")])
def test_bad_requests(pool, member, text):
    with pytest.raises(ValueError) as caught:
        pool._ask(json.dumps({"op": "run", **member}).encode())
    assert text in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("options, text", [({"python": "/nonexistent/python"}, "is no program"),
                                           ({"python": "/bin/true"}, "--python /bin/true exited with code 0 before it was ready: is it a Python 3.9 or later?"),
                                           ({"python": "WITHOUT_INTERPRETER"}, "No such file or directory: give the path of a Python 3.9 or later"),
                                           ({"python": True, "preload": ["no_such_module"]}, "No module named 'no_such_module': mend or install it there"),
                                           ({"python": True, "preload": ["ends"]}, "exited with code 3 before it was ready: is it a Python 3.9 or later? "
                                            "A module of --preload may have ended it"),
                                           ({"python": True, "backend": "cuda"}, "torch"), ({"python": True, "case_files": ["/x.so"]}, "--case"),
                                           ({"python": True, "transport": "peer"}, "--transport"),
                                           ({"python": True, "backend": "host", "transport": "nccl"}, "this is host"),
                                           ({"python": True, "transport": "nccl"}, "the backend nccl needs")])
def test_a_pool_that_cannot_start(tmp_path, options, text):
    write(tmp_path / "ends.py", "import os\nos._exit(3)\n")
    if options["python"] == "WITHOUT_INTERPRETER":
        options = {"python": script(tmp_path / "python", "/nonexistent/sh")}
    with pytest.raises(cppool.PoolError) as caught:
        cppool.Pool(1, environment={"PYTHONPATH": str(tmp_path)}, **options).hello()
    assert caught.value.kind == "start" and text in str(caught.value)
    with pytest.raises(ValueError, match="python=True"):
        cppool.Pool(1, preload=["torch"])
    with pytest.raises(ValueError, match="python is the path of an interpreter, True"):
        cppool.Pool(1, python="")
