#!/usr/bin/env python3
"""A headless Chromium for tests of pages, over the pipe of its DevTools protocol: no driver, no port, no network.

    browser.py PAGE PICTURE.png [WIDTH [HEIGHT]]    takes a picture of a page
"""
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60  # for each command, and for a page to load


def find():
    """The browser's path; None where there is none that starts (Ubuntu's package is a link to a snap)."""
    for path in filter(None, map(shutil.which, NAMES)):
        if subprocess.run([path, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS, check=False).returncode == 0:
            return path
    return None


class Browser:
    """One page. `errors` has the exceptions that its scripts did not catch, and what its policy refused."""

    def __init__(self, path, width=1440, height=1000):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        self.process = subprocess.Popen(  # it reads descriptor 3 and writes descriptor 4
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", path, "--headless", "--remote-debugging-pipe", *sandbox,
             "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--user-data-dir=" + self.folder.name, "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.sent, self.left, self.session, self.errors, self.events = 0, b"", None, [], []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(domain + ".enable")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        os.close(self.writer)  # it ends then
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.reader)
        self.folder.cleanup()

    def receive(self, deadline):
        while b"\0" not in self.left:
            if not select.select([self.reader], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser did not answer")
            piece = os.read(self.reader, 1 << 20)
            if not piece:
                raise EOFError("the browser has ended")
            self.left += piece
        message, self.left = self.left.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])
        elif "method" in message:
            self.events.append(message["method"])
        return message

    def call(self, method, **parameters):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters, **({"sessionId": self.session} if self.session else {})}
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        deadline = time.monotonic() + SECONDS
        while "Page.loadEventFired" not in self.events:
            self.receive(deadline)

    def value(self, expression):
        """Of a JavaScript expression, as JSON has it."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def click(self, selector):
        """Presses the mouse in the middle of the first element that the selector finds."""
        x, y = self.value(f"""(() => {{ const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}}); const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    FOUND = find() or sys.exit("there is no Chromium: scripts/setup --tests installs it on Debian")
    with Browser(FOUND, *map(int, sys.argv[3:])) as browser:
        browser.open(sys.argv[1])
        browser.picture(sys.argv[2])
