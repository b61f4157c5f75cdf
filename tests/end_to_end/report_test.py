#!/usr/bin/env python3
"""Opens the page of `cppool report` in a browser, clicks, and compares what it shows with the JSON that it was made of.

    report_test.py ROOT BUILD
"""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

import browser

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
# What the kernel of the test does beside being naive: it is off, refuses, fails with markup, and ends its daemon once.
ODDITIES = """
#include <unistd.h>
static cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  if (c->dim_qk == 256) return snprintf(why, size, "no head dim <b>256</b>"), CPPOOL_UNSUPPORTED;
  if (c->dim_qk == 192) return snprintf(why, size, "%s", HOSTILE), CPPOOL_OUT_OF_MEMORY;
  if (c->dim_v == 64 && c->dim_qk == 128 && unlink(ONCE) == 0) abort();
  return CPPOOL_OK;
}
static cppool_status NaiveSupports("""
OFF = ("sum *= (float)c->scale;", "sum *= (float)c->scale * (c->dim_qk == 64 ? 1.1f : 1);")
BENCH = ["--world-size", "1,2", "--param", "cp_comm_type=p2p,a2a", "--param", "max_seqlen_q=32,64", "--repeat", "12", "--warmup", "0"]
VISIBLE = "[...document.querySelectorAll('.cell')].filter((cell) => cell.checkVisibility({checkVisibilityCSS: true}))"
LINES = """[...document.querySelectorAll('canvas')].map((canvas) => { const chart = Chart.getChart(canvas);
  return [chart.options.plugins.title.text, chart.data.datasets.map(({label, data}) => [label, data])]; })"""


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def ratio_of(record):
    return max((check["ratio"] for check in record["answer"]["checks"] if "ratio" in check), default=None)


class Report(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        path = browser.find()
        if path is None:
            raise unittest.SkipTest("no Chromium that starts: scripts/setup --tests installs it on Debian")
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        once, kernel = cls.file("once"), cls.file("odd.c")
        source = read(os.path.join(ROOT, "kernels/examples/naive.c")).replace("static cppool_status Supports(", ODDITIES, 1).replace(*OFF, 1)
        write(kernel, f"#define HOSTILE {json.dumps(HOSTILE)}\n#define ONCE {json.dumps(once)}\n" + source + "\nvoid* unused_by_tests = (void*)NaiveSupports;\n")
        write(once, "")
        command = os.path.join(BUILD, "bin", "cppool")
        cls.cells = cls.lines(command, "run", "--suite", "smoke", "--param", "dtype=bf16", "--max-seqlen", "64", "--backend", "host", "--kernels", kernel, "--json")
        saved = cls.file("saved")
        cls.lines(command, "bench", "--backend", "host", *BENCH, "--save", saved, "--json")
        cls.bench = cls.lines(command, "bench", "--backend", "host", *BENCH, "--baseline", saved, "--json")
        write(cls.file("run.json"), "\n".join(map(json.dumps, cls.cells)))
        write(cls.file("bench.json"), "\n".join(map(json.dumps, cls.bench)))
        subprocess.run([command, "report", cls.file("run.json"), cls.file("bench.json"), "-o", cls.file("page.html")], check=True, timeout=60, stdout=subprocess.DEVNULL)
        cls.browser = browser.Browser(path)
        cls.addClassCleanup(cls.browser.close)

    @classmethod
    def file(cls, name):
        return os.path.join(cls.folder.name, name)

    @classmethod
    def lines(cls, *command):
        """The objects that a command prints; without the last one, a summary."""
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=False)
        assert done.returncode in (0, 1, 3), done
        return [json.loads(line) for line in done.stdout.splitlines()][:-1]

    def setUp(self):
        self.browser.open(self.file("page.html"))

    def tearDown(self):
        self.assertEqual(self.browser.errors, [])
        self.assertEqual(self.browser.value("document.title"), "cppool report")

    def texts(self, selector):
        return self.browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((element) => element.textContent)")

    def visible(self):
        return sorted(self.browser.value(VISIBLE + ".map((cell) => cell.dataset.name)"))

    def named(self, **members):
        return sorted(record["name"] for record in self.cells if all(record[key] == value for key, value in members.items()))

    def test_grid(self):
        """A field for each cell, at its row, schedule and world size, with its status, ratio and colour."""
        fields = self.browser.value("""[...document.querySelectorAll('.grid tbody tr')].flatMap((row) => [...row.children].flatMap((place, column) =>
            [...place.querySelectorAll('.cell')].map((cell) => [cell.dataset.name, {row: row.firstChild.textContent, column, status: cell.dataset.status, text: cell.textContent,
              colour: getComputedStyle(cell).backgroundColor}])))""")
        shown = dict(fields)
        self.assertEqual(len(fields), 20)
        self.assertEqual(sorted(shown), sorted(record["name"] for record in self.cells))
        self.assertEqual({record["status"] for record in self.cells}, {"passed", "failed", "skipped", "error", "flaky"})
        spans = self.browser.value("[...document.querySelectorAll('.grid thead tr:first-child th')].map((head) => [head.textContent, head.colSpan])")
        schedules = [name for name, span in spans for _ in range(span)]
        sizes = self.texts(".grid thead tr:last-child th")
        for record in self.cells:
            field, schedule = shown[record["name"]], record["params"]["cp_comm_type"]
            self.assertEqual(field["status"], record["status"])
            self.assertEqual((schedules[field["column"]], sizes[field["column"]]), (schedule, f"W={record['world_size']}"))
            self.assertEqual(field["row"], record["name"].replace(f" {schedule}", "").replace(f" W={record['world_size']}", ""))
            if record["status"] == "passed":
                self.assertAlmostEqual(float(field["text"]), ratio_of(record), delta=0.051)
        colours = {status: {field["colour"] for field in shown.values() if field["status"] == status} for status in ("passed", "failed", "flaky")}
        self.assertFalse(colours["passed"] & colours["failed"] or colours["failed"] & colours["flaky"])

    def test_click(self):
        """A cell of each status: its error, its failed checks and its command are those of the JSON."""
        for status in ("failed", "error", "skipped", "flaky", "passed"):
            with self.subTest(status):
                record = next(record for record in self.cells if record["status"] == status)
                self.browser.click(f".cell[data-name={json.dumps(record['name'])}]")
                self.assertEqual(self.texts(".detail .name"), [record["name"]])
                self.assertEqual(self.texts(".detail .error"), [record["error"]] if record["error"] else [])
                self.assertEqual(self.texts(".detail .repeat"), [record["repeat"]])
                self.assertEqual(self.browser.value("document.querySelectorAll('.detail b, .detail img, .detail script').length"), 0)
                failing = [check for check in (record["answer"] or {}).get("checks", []) if not check["ok"]]
                rows = self.browser.value("[...document.querySelectorAll('.checks.failing tbody tr')].map((row) => [...row.children].map((value) => value.textContent))")
                self.assertEqual([(row[0], row[1], int(row[2])) for row in rows], [(check["tensor"], check["against"], check["rank"]) for check in failing])
                for row, check in zip(rows, failing):
                    self.assertTrue(math.isclose(float(row[3]), check["max_abs_err"], rel_tol=0.01), (row, check))
                    self.assertTrue(math.isclose(float(row[4]), check["tolerance"], rel_tol=0.01), (row, check))
                    for axis, index in check["worst"]["index"].items():
                        self.assertIn(f"{axis} {index}", row[6])
                if status == "failed":
                    self.assertTrue(failing)
                    self.assertEqual(self.texts(".detail h4")[-1], f"{len(failing)} of {len(record['answer']['checks'])} checks do not hold")
                if status == "error":
                    self.assertIn(HOSTILE, record["error"])
                if status == "skipped":
                    self.assertIn([str(len(self.named(error=record["error"]))), record["error"]],
                                  self.browser.value("[...document.querySelectorAll('.reasons tbody tr')].map((row) => [...row.children].map((value) => value.textContent))"))
                if status == "flaky":
                    self.assertEqual(self.texts(".detail .flaky-text"), [record["flaky"], *(f"attempt {i + 1}: {lost['error']}" for i, lost in enumerate(record["lost"]))])

    def test_filters(self):
        self.assertEqual(self.visible(), self.named())
        self.browser.click("[data-count=failed]")
        self.assertEqual(self.visible(), self.named(status="failed"))
        self.browser.click("[data-count=flaky]")
        self.assertEqual(self.visible(), sorted(self.named(status="failed") + self.named(status="flaky")))
        self.browser.click("[data-count=failed]")
        self.browser.click("[data-count=flaky]")
        self.browser.click("input[type=search]")
        self.browser.call("Input.insertText", text="a2a+p2p W=4")
        self.assertEqual(self.visible(), [name for name in self.named() if "a2a+p2p" in name and "W=4" in name])

    def test_curves(self):
        if "Chart.js v" not in read(self.file("page.html"))[:20000]:
            self.skipTest("built without Chart.js")
        charts = dict(self.browser.value(LINES))
        self.assertEqual(set(charts), {"forward, W=1", "backward, W=1", "forward, W=2", "backward, W=2", "efficiency, W=2"})
        for row in self.bench:
            params, size = row["params"], row["world_size"]

            def point(kind):
                (data,) = (data for label, data in charts[f"{kind}, W={size}"] if label == params["cp_comm_type"])
                (found,) = (each for each in data if each["x"] == math.log2(params["max_seqlen_q"]))
                return found

            for stage in ("forward", "backward"):
                figures = row["measured"]["stages"][stage]
                self.assertAlmostEqual(point(stage)["y"], figures["tflops"])
                if figures["precision"] is None or figures["precision"] >= 1:  # few samples have no interval
                    self.assertEqual(set(point(stage)), {"x", "y"})
                else:
                    self.assertAlmostEqual(point(stage)["low"], figures["tflops"] / (1 + figures["precision"]))
                    self.assertAlmostEqual(point(stage)["high"], figures["tflops"] / (1 - figures["precision"]))
            if size > 1:
                self.assertAlmostEqual(point("efficiency")["y"], 100 * row["efficiency"]["together"])
        # Without it.
        chart = read(self.file("page.html")).index("<script>") + len("<script>")
        text = read(self.file("page.html"))
        write(self.file("plain.html"), text[:chart] + text[text.index("</script>"):])
        self.browser.open(self.file("plain.html"))
        self.assertIn("built without Chart.js", self.texts(".charts")[0])
        self.assertEqual(self.browser.value("document.querySelectorAll('.rows tbody tr').length"), len(self.bench))

    def test_rows(self):
        rows = self.browser.value("[...document.querySelectorAll('.rows tbody tr')].map((row) => [...row.children].map((value) => value.textContent))")
        self.assertEqual([row[:3] for row in rows], [[str(row["world_size"]), row["params"]["cp_comm_type"], str(row["params"]["max_seqlen_q"])] for row in self.bench])
        for row, record in zip(rows, self.bench):
            self.assertAlmostEqual(float(row[3].split()[0]), record["measured"]["stages"]["forward"]["ms"], delta=0.001 * record["measured"]["stages"]["forward"]["ms"] + 1e-4)
        compared = self.browser.value("[...document.querySelectorAll('.baseline tbody tr')].map((row) => [...row.children].map((value) => value.textContent))")
        wanted = [(row, stage) for row in self.bench for stage in ("forward", "backward")]
        self.assertEqual(len(compared), len(wanted))
        for shown, (row, stage) in zip(compared, wanted):
            self.assertEqual((shown[3], shown[-1]), (stage, row["baseline"]["verdict"]))
            ratio = row["baseline"]["ratio"][stage]
            self.assertTrue(math.isclose(float(shown[4].split()[0]), ratio["value"], rel_tol=0.001), (shown, ratio))
        self.browser.click(".rows tbody tr:nth-child(2)")
        self.assertEqual(self.texts(".command .repeat"), [self.bench[1]["command"]])

    def test_dark(self):
        self.browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        self.browser.open(self.file("page.html"))
        back, text = (sum(map(int, self.browser.value(f"getComputedStyle(document.body).{name}")[4:-1].split(","))) for name in ("backgroundColor", "color"))
        self.browser.call("Emulation.setEmulatedMedia", features=[])
        self.assertLess(back, 200)
        self.assertGreater(text, 500)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    ROOT, BUILD = (os.path.abspath(path) for path in sys.argv[1:3])
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
