"""`pytest -p cppool.torchrun`: where a test starts `torchrun`, its script runs on warm ranks (`cppool torchrun`), of a server that lives as
long as the session, or of $CPPOOL_ATTACH."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

import pytest

from ._library import prefix

_START_LIMIT = 20.0  # seconds


def _command() -> str:
    own = os.path.join(prefix(), "bin", "cppool")
    return own if os.path.exists(own) else "cppool"


class _Server:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="cppool-")  # of this user alone
        self.socket = os.path.join(self._folder, "cppool.sock")
        self._log = open(os.path.join(self._folder, "log"), "w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen([_command(), "serve", "--socket", self.socket], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        limit = time.monotonic() + _START_LIMIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                self._log.seek(0)
                text = self._log.read()
                self.stop()
                raise pytest.UsageError(f"cppool serve does not start: {text.strip()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self.socket) == 0

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Plugin:
    """Changes the environment that the tests' programs inherit."""

    def __init__(self) -> None:
        self._before: dict[str, Optional[str]] = {}
        shims = subprocess.run([_command(), "shims"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if shims.returncode != 0:
            raise pytest.UsageError(shims.stderr.strip())
        self._server = None if os.environ.get("CPPOOL_ATTACH") else _Server()
        self._set("PATH", shims.stdout.strip() + os.pathsep + os.environ.get("PATH", ""))
        if self._server is not None:
            self._set("CPPOOL_ATTACH", self._server.socket)
        if "CPPOOL_PYTHON" not in os.environ:
            self._set("CPPOOL_PYTHON", sys.executable)

    def _set(self, name: str, value: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = value

    def pytest_unconfigure(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._server is not None:
            self._server.stop()


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the environment
        config.pluginmanager.register(_Plugin(), "cppool-torchrun")
