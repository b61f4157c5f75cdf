#!/usr/bin/env python3
"""Checks the project's Markdown files: README.md and introductions are short, targets of links and named files exist, code is quoted from
examples, drawings have the form of Mermaid.

    docs_test.py [ROOT]
"""
import os
import re
import sys
import unittest

ROOT = os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 and os.path.isdir(sys.argv[1]) else os.path.join(os.path.dirname(__file__), "../.."))
README_LINES, README_COLUMNS = 100, 120
INTRODUCTIONS, INTRODUCTION_LINES = ("kernels/README.md", "daemon/README.md"), 200
SHORT = 7  # lines; longer blocks of code are quotes of examples, which tests build and run
CODE = ("c", "cpp", "cuda", "cmake", "python")
TOP_FOLDERS = ("client", "cmake", "daemon", "kernels", "protocol", "scripts", "tests")


def is_source(folder):
    return not folder.startswith((".", "build"))


def markdown_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(filter(is_source, folders))
        for file in sorted(files):
            if file.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, file), ROOT)


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as opened:
        return opened.read()


def blocks(text):
    """The fenced blocks: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def quotes(text):
    """The fenced blocks with a language: language, text, and the file that the block is a part of. That is the last file below an
    examples/ folder to which the paragraph before the block has a link, or None."""
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        paragraph = text[:block.start()].rstrip("\n").rpartition("\n\n")[2]
        links = re.findall(r"\]\(((?:[^)\s]*/)?examples/[^)\s]*[^)\s/])\)", paragraph)
        yield block.group(1), block.group(2), links[-1] if links else None


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text):
    """The anchors that GitHub makes from the headings, and those that the text has itself."""
    made = set(re.findall(r'<a id="([\w-]+)"></a>', prose(text)))
    for heading in re.findall(r"^#+ +(.*?) *$", prose(text), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = 0
        while (slug if not count else f"{slug}-{count}") in made:
            count += 1
        made.add(slug if not count else f"{slug}-{count}")
    return made


class Docs(unittest.TestCase):
    def test_readme_is_short(self):
        lines = read("README.md").splitlines()
        self.assertLessEqual(len(lines), README_LINES)
        self.assertEqual([line for line in lines if len(line) > README_COLUMNS], [])
        self.assertEqual([file for file in INTRODUCTIONS if len(read(file).splitlines()) > INTRODUCTION_LINES], [])

    def test_every_top_folder_has_a_readme(self):
        for folder in TOP_FOLDERS:
            self.assertTrue(os.path.exists(os.path.join(ROOT, folder, "README.md")), folder)

    def test_targets_of_links_exist(self):
        links = 0
        for file in markdown_files():
            for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(file))):
                if re.match(r"[a-z]+:", target):
                    continue  # a link to another site
                links += 1
                path, _, anchor = target.partition("#")
                linked = os.path.normpath(os.path.join(os.path.dirname(file), path)) if path else file
                self.assertTrue(os.path.exists(os.path.join(ROOT, linked)), f"{file}: {target}: there is no {linked}")
                if anchor:
                    self.assertIn(anchor, anchors(read(linked)), f"{file}: {target}: {linked} has no such heading")
        self.assertGreater(links, 20)

    def test_named_files_exist(self):
        """A name in backquotes that begins with a top folder, such as `tests/fuzz/run`, is an existing file or folder."""
        named = 0
        for file in markdown_files():
            for name in re.findall(r"`((?:%s)/[\w./+-]*)`" % "|".join(TOP_FOLDERS), prose(read(file))):
                here = os.path.join(ROOT, os.path.dirname(file), name)
                named += 1
                self.assertTrue(os.path.exists(os.path.join(ROOT, name)) or os.path.exists(here), f"{file}: there is no {name}")
        self.assertGreater(named, 20)

    def test_quotes_of_examples(self):
        quoted = set()
        for file in markdown_files():
            for language, body, link in quotes(read(file)):
                first = f"{file}: the block that begins with {body.splitlines()[0]!r}"
                if link is None:
                    self.assertFalse(language in CODE and len(body.splitlines()) > SHORT,
                                     f"{first} has more than {SHORT} lines: quote an example, with a link to its file just before the block")
                    continue
                path = os.path.normpath(os.path.join(os.path.dirname(file), link))
                quoted.add(path)
                self.assertIn("\n" + body, "\n" + read(path), f"{first} is not a part of {path}")
        self.assertGreaterEqual(len(quoted), 7, quoted)

    def test_drawings(self):
        kinds = ("flowchart ", "sequenceDiagram", "gantt", "block-beta", "stateDiagram-v2")
        drawings = 0
        for file in markdown_files():
            text = read(file)
            self.assertEqual(len(re.findall(r"^```", text, re.M)) % 2, 0, f"{file}: a fenced block is left open")
            for language, body in blocks(text):
                if language != "mermaid":
                    continue
                drawings += 1
                self.assertTrue(body.startswith(kinds), f"{file}: a drawing begins with {body.splitlines()[0]}")
                if body.startswith("sequenceDiagram"):  # a semicolon would end a statement there
                    self.assertNotIn(";", body, file)
                    opened = len(re.findall(r"^\s*(?:alt|opt|loop|par|rect|critical)\b", body, re.M))
                    self.assertEqual(opened, len(re.findall(r"^\s*end$", body, re.M)), f"{file}: blocks and ends differ")
                if body.startswith("flowchart "):
                    opened = len(re.findall(r"^\s*subgraph\b", body, re.M))
                    self.assertEqual(opened, len(re.findall(r"^\s*end$", body, re.M)), f"{file}: subgraphs and ends differ")
        self.assertGreaterEqual(drawings, 5)


if __name__ == "__main__":
    unittest.main()
