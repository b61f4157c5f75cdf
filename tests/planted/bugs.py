#!/usr/bin/env python3
"""Applies tests/planted/bugs.patch to copies of the sources, and rewrites it after the sources have changed.

    tests/planted/bugs.py check             # fails unless every hunk applies and every bug has a hunk
    tests/planted/bugs.py apply FOLDER      # writes patched copies of the sources to FOLDER
    tests/planted/bugs.py refresh FOLDER    # applies what it can in a new folder; rewrites the patch if every hunk has a place
    tests/planted/bugs.py save FOLDER       # rewrites the patch from the copies in FOLDER

check and apply are strict: the old lines of a hunk, context included, must occur exactly once in the file that the hunk
names. Line numbers are not used. Exit code 0, or 1 with the hunks that do not apply on stderr.
"""
import difflib
import pathlib
import re
import sys
from dataclasses import dataclass, field

HERE = pathlib.Path(__file__).resolve().parent
SUFFIXES = {".cpp", ".cuh", ".h"}


class PatchError(Exception):
    """Its text has one line per problem."""


@dataclass
class Hunk:
    file: str
    number: int  # within the file, from 1
    old: list = field(default_factory=list)  # context and removed lines
    new: list = field(default_factory=list)  # context and added lines
    text: list = field(default_factory=list)  # the lines of the patch

    def bugs(self):
        return bugs_in(line for line in self.text if line.startswith("+"))

    def __str__(self):
        names = ", ".join(self.bugs())
        return f"hunk {self.number} of {self.file}" + (f" ({names})" if names else "")


def bugs_in(lines):
    return list(dict.fromkeys(re.findall(r"Bug::(k\w+)", "\n".join(lines))))


def parse(patch):
    """The hunks of a unified diff."""
    hunks, file = [], None
    for number, line in enumerate(patch.splitlines(), 1):
        if line.startswith("+++ "):
            file = line[4:].removeprefix("b/")
        elif line.startswith("@@ "):
            hunks.append(Hunk(file, 1 + sum(hunk.file == file for hunk in hunks)))
        elif line.startswith("--- "):
            file = None
        elif file and line[:1] in {" ", "-", "+"}:
            hunk = hunks[-1]
            hunk.text.append(line)
            if line[0] != "+":
                hunk.old.append(line[1:])
            if line[0] != "-":
                hunk.new.append(line[1:])
        else:
            raise PatchError(f"line {number} of the patch is not part of a hunk: {line!r}")
    return hunks


def occurrences(wanted, lines):
    return [i for i in range(len(lines) - len(wanted) + 1) if lines[i : i + len(wanted)] == wanted]


def replace(lines, places):
    """`lines` with each (start, old, new) of `places` replaced, or PatchError if two overlap."""
    result, done = [], 0
    for start, old, new in sorted(places):
        if start < done:
            raise PatchError("two hunks change the same lines")
        result += lines[done:start] + new
        done = start + len(old)
    return result + lines[done:]


class Sources:
    def __init__(self, root):
        self.root, self.read = root, {}

    def lines(self, file):
        """Without line ends; None if there is no such file."""
        if file not in self.read:
            path = self.root / file
            self.read[file] = path.read_text().split("\n") if path.is_file() else None
        return self.read[file]

    def files_beside(self, file):
        """All sources under the same top folder."""
        folder = self.root / pathlib.PurePath(file).parts[0]
        return sorted(str(path.relative_to(self.root)) for path in folder.rglob("*") if path.suffix in SUFFIXES)


def apply(hunks, sources):
    """{file: patched lines}; PatchError names every hunk that does not apply."""
    places, problems = {}, []
    for hunk in hunks:
        lines = sources.lines(hunk.file)
        found = occurrences(hunk.old, lines) if lines else []
        if len(found) == 1:
            places.setdefault(hunk.file, []).append((found[0], hunk.old, hunk.new))
        elif lines is None:
            problems.append(f"{hunk}: there is no such file")
        else:
            problems.append(f"{hunk}: its old lines occur {len(found)} times, not once:\n" + "\n".join(hunk.text))
    if problems:
        raise PatchError("\n".join(problems))
    return {file: replace(sources.lines(file), found) for file, found in places.items()}


def with_less_context(hunk):
    """Yields (old, new, cut) with less context (none, or one side only); `cut`: removed lines at the start."""
    before = after = 0
    while hunk.text[before].startswith(" "):
        before += 1
    while hunk.text[-1 - after].startswith(" "):
        after += 1
    for cut_before, cut_after in [(before, after), (before, 0), (0, after)]:
        old = hunk.old[cut_before : len(hunk.old) - cut_after]
        if any(line.strip() for line in old):
            yield old, hunk.new[cut_before : len(hunk.new) - cut_after], cut_before


def find_place(hunk, sources):
    """(file, (start, old, new), remark) of the place where the hunk fits, or None unless there is exactly one."""
    for candidates, remark in [([(hunk.old, hunk.new, 0)], ""), (list(with_less_context(hunk)), "with less context")]:
        for files, moved in [([hunk.file], ""), (sources.files_beside(hunk.file), "moved to ")]:
            places = {}  # key: where the whole hunk would start; all candidates must give the same key
            for old, new, cut in candidates:
                found = [(file, i) for file in files for i in occurrences(old, sources.lines(file) or [])]
                if len(found) == 1:
                    file, start = found[0]
                    places.setdefault((file, start - cut), (file, (start, old, new)))
            if len(places) == 1:
                file, place = next(iter(places.values()))
                return file, place, ", ".join(filter(None, [moved and moved + file, remark]))
    return None


def pieces(hunk):
    """Splits the hunk: one hunk for each of its changes, with the context on both sides."""
    spans, i = [], 0
    while i < len(hunk.text):
        begin = i
        while i < len(hunk.text) and hunk.text[i].startswith(" ") == hunk.text[begin].startswith(" "):
            i += 1
        spans.append(hunk.text[begin:i])
    for j, span in enumerate(spans):
        if not span[0].startswith(" "):
            text = [line for near in spans[max(j - 1, 0) : j + 2] for line in near]
            yield Hunk(hunk.file, hunk.number, *([line[1:] for line in text if line[0] != not_in] for not_in in "+-"), text)


def apply_what_fits(hunks, sources):
    """({file: patched lines}, remarks on hunks that were placed elsewhere, hunks without a place)."""
    places, remarks, lost = {}, [], []
    hunks = [part for hunk in hunks for part in ([hunk] if find_place(hunk, sources) else pieces(hunk))]
    for hunk in hunks:
        place = find_place(hunk, sources)
        if place is None:
            lost.append(hunk)
            continue
        places.setdefault(place[0], []).append(place[1])
        if place[2]:
            remarks.append(f"{hunk}: {place[2]}")
    for file in {hunk.file for hunk in lost if sources.lines(hunk.file)}:
        places.setdefault(file, [])  # a copy to edit by hand
    return {file: replace(sources.lines(file), found) for file, found in places.items()}, remarks, lost


def write_copies(copies, folder):
    for file, lines in copies.items():
        path, text = folder / file, "\n".join(lines)
        if path.is_file() and path.read_text() == text:
            continue  # keeps its modification time, so that it is not compiled again
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_copies(folder, sources):
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in SUFFIXES)
    unknown = [file for file in files if sources.lines(file) is None]
    if unknown:
        raise PatchError("\n".join(f"{file} is in {folder} but not among the sources" for file in unknown))
    return {file: (folder / file).read_text().split("\n") for file in files}


def hunk_ranges(old, new):
    """[old_begin, old_end, new_begin, new_end] of each hunk, with as many lines of context as make it unique, at least one."""
    ranges = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            ranges.append([a, b, c, d])
    grown = []
    for a, b, c, d in ranges:
        context = 1
        while True:
            before, after = min(context, a), min(context, len(old) - b)
            if len(occurrences(old[a - before : b + after], old)) == 1:
                break
            context += 1
        begin, end = a - before, b + after
        new_begin = c - before
        while grown and begin <= grown[-1][1]:
            joined = grown.pop()
            if joined[0] < begin:
                begin, new_begin = joined[0], joined[2]
            end = max(end, joined[1])
        grown.append([begin, end, new_begin, d + end - b])
    return grown


def diff(file, old, new):
    text = []
    for a, b, c, d in hunk_ranges(old, new):
        body = []
        for tag, i, j, k, m in difflib.SequenceMatcher(None, old[a:b], new[c:d], autojunk=False).get_opcodes():
            if tag == "equal":
                body += [" " + line for line in old[a + i : a + j]]
            else:
                body += ["-" + line for line in old[a + i : a + j]] + ["+" + line for line in new[c + k : c + m]]
        text += [f"@@ -{a + 1},{b - a} +{c + 1},{d - c} @@", *body]
    return [f"--- a/{file}", f"+++ b/{file}", *text] if text else []


def patch_of(copies, sources):
    """The patch that turns the sources into `copies`; asserts that it does."""
    text = [line for file in sorted(copies) for line in diff(file, sources.lines(file), copies[file])]
    patch = "".join(line + "\n" for line in text)
    made = apply(parse(patch), sources)
    assert all(lines == made.get(file, sources.lines(file)) for file, lines in copies.items())
    return patch


def check_bugs(hunks, switch):
    """Every bug of planted_bug.cpp is in a hunk, and every hunk's bug is in planted_bug.cpp."""
    known = bugs_in(re.findall(r"^ *\{Bug::k\w+", switch, re.MULTILINE))
    planted = bugs_in(line for hunk in hunks for line in hunk.text if line.startswith("+"))
    problems = [f"{bug} is in planted_bug.cpp and in no hunk" for bug in known if bug not in planted]
    problems += [f"{bug} is in a hunk and not in planted_bug.cpp" for bug in planted if bug not in known]
    if problems:
        raise PatchError("\n".join(problems))


def save(copies, sources, patch_file, switch):
    patch = patch_of(copies, sources)
    check_bugs(parse(patch), switch)
    patch_file.write_text(patch)
    print(f"{patch_file}: {len(parse(patch))} hunks. Read `git diff` before you commit it.")


def main(command, folder, root, patch_file, switch):
    sources = Sources(root)
    hunks = parse(patch_file.read_text())
    if command == "check":
        apply(hunks, sources)
        check_bugs(hunks, switch)
    elif command == "apply":
        write_copies(apply(hunks, sources), folder)
    elif command == "refresh":
        if folder.exists() and any(folder.iterdir()):  # `save` would treat files in it as edited copies
            raise PatchError(f"{folder} is not empty")
        copies, remarks, lost = apply_what_fits(hunks, sources)
        write_copies(copies, folder)
        for remark in remarks:
            print(remark)
        if lost:
            raise PatchError("".join(f"{hunk} has no place:\n" + "\n".join(hunk.text) + "\n" for hunk in lost) +
                             f"The other hunks are applied in {folder}. Add these by hand there, in copies of further sources where\n"
                             f"the code has moved, and run: tests/planted/bugs.py save {folder}")
        save(copies, sources, patch_file, switch)
    elif command == "save":
        save(read_copies(folder, sources), sources, patch_file, switch)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments != ["check"] and not (len(arguments) == 2 and arguments[0] in {"apply", "refresh", "save"}):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        switch = (HERE / "planted_bug.cpp").read_text()
        main(arguments[0], pathlib.Path(*arguments[1:]), HERE.parent.parent, HERE / "bugs.patch", switch)
    except PatchError as error:
        print(f"{error}\ntests/planted/bugs.patch: {arguments[0]} failed (tests/planted/README.md says how to refresh it)", file=sys.stderr)
        sys.exit(1)
