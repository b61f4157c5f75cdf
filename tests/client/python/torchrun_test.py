"""`cppool torchrun` without torch: what the ranks write arrives. torch_cases_test.py has the groups."""
import os
import subprocess
import sys

import pytest
import support

COMMAND = os.path.join(support.BUILD, "bin", "cppool")


@pytest.fixture(scope="module", params=["own", "attached"])
def torchrun(request, tmp_path_factory):
    """Runs the text of a script."""
    folder = tmp_path_factory.mktemp("torchrun")

    def run(text, *arguments, attach=None, command=(), **options):
        (folder / "script.py").write_text(text)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CPPOOL_PYTHON": sys.executable, "CPPOOL_ATTACH": attach or ""}
        done = subprocess.run([*command, COMMAND, "torchrun", "--preload=", *arguments, str(folder / "script.py")], env=environment,
                              **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 300, **options})
        # A fork server may tell of what a killed daemon of another test has left.
        done.stderr = "".join(line for line in (done.stderr or "").splitlines(True) if "was left by the ranks of a daemon that is gone" not in line)
        return done

    if request.param == "own":
        yield run
    else:
        with support.serving(folder) as socket:
            yield lambda *words, **options: run(*words, attach=socket, **options)


def test_every_line_arrives(torchrun):
    done = torchrun("import os\nfor n in range(100_001): print(os.environ['RANK'], n)\n", "--nproc-per-node=2")
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    for rank in "01":
        assert [line for line in lines if line.startswith(rank)] == [f"{rank} {n}" for n in range(100_001)]


def test_every_line_arrives_though_it_is_read_late(torchrun):
    text = "for n in range(20_000): print(n)\n"
    late = ["/bin/bash", "-c", '"$@" | (sleep 2; cat)', "bash"]
    done = torchrun(text, "--nproc-per-node=1", command=late)
    assert not done.stderr and done.stdout.splitlines() == [str(n) for n in range(20_000)], done.stderr


def test_long_lines_stay_one_line_and_the_last_need_not_end(torchrun):
    text = ("import os, sys\nrank = os.environ['RANK']\nfor size in (4079, 4080, 4081, 4096, 10_000, 300_000): print(rank * size)\n"
            "sys.stdout.write('no end ' + rank)\n")
    for _ in range(2):
        done = torchrun(text, "--nproc-per-node=2")
        assert done.returncode == 0 and not done.stderr, done.stderr
        for rank in "01":
            lines = [line for line in done.stdout.splitlines() if line.endswith(rank)]
            assert lines == [rank * size for size in (4079, 4080, 4081, 4096, 10_000, 300_000)] + [f"no end {rank}"], [len(line) for line in lines]


def test_too_much_output_is_told(torchrun):
    done = torchrun("import os\nif os.environ['RANK'] == '1':\n    for _ in range(65): print('x' * (1 << 20))\n", "--nproc-per-node=2")
    assert done.returncode == 0 and "warning: rank 1: " in done.stderr and "what follows the first 67108864 is left out" in done.stderr, done.stderr
    assert done.stdout.count("\n") > 64


def test_a_module_of_the_folder_it_is_started_in_is_loaded_anew(torchrun, tmp_path, monkeypatch):
    """It is found by PYTHONPATH, and not in the script's folder."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    for value in ("one", "another"):
        (tmp_path / "here" / "of_cwd.py").write_text(f"value = {value!r}\n")
        (tmp_path / "there" / "of_path.py").write_text(f"value = {value!r}\n")
        done = torchrun("import os, sys\nsys.path.insert(0, os.getcwd())\nimport of_cwd, of_path\nprint(of_cwd.value, of_path.value)\n",
                        "--nproc-per-node=1", cwd=tmp_path / "here")
        assert done.stdout == f"{value} {value}\n", done
