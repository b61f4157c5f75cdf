#!/usr/bin/env python3
"""Checks which folder includes from which: every #include of a project header is a path from the repository root or
from a public include/ folder, and every edge between two folders is in the table below.

    tests/structure/includes.py [REPOSITORY]

One line per violation, then a summary; exit code 0 when there is none, 1 otherwise.
"""
import pathlib
import re
import sys

# Folder -> folders and files it may include from, besides itself. A file belongs to the longest entry that is a prefix of its path; `*`
# matches one folder. If other entries are inside a folder, its entry covers only the files directly in it, so that a new folder there
# needs an entry.
KERNELS_PUBLIC = ["kernels/include/cppool", "kernels/include/kernels", "kernels/include/kernels/attention"]
PROTOCOL_PUBLIC = ["protocol/include", "protocol/base/include"]
RUNTIME_PUBLIC = ["kernels/include/cppool", "kernels/include/kernels"]
ALLOWED = {
    # base includes nothing else of the project, and protocol only base.
    "protocol/base/include": [],
    "protocol/base": ["protocol/base/include"],
    "protocol/include": ["protocol/base/include"],
    "protocol": PROTOCOL_PUBLIC,
    # kernels, public headers.
    "kernels/include/cppool": [],
    "kernels/include/kernels": ["kernels/include/cppool"],
    "kernels/include/kernels/attention": RUNTIME_PUBLIC,
    # kernels, from the lowest layer to the highest.
    "kernels/numerics": ["kernels/include/kernels/dtype.h", "kernels/include/kernels/error.h",
                         "kernels/include/kernels/half.h", "kernels/include/kernels/host_device.h"],
    "kernels/runtime/common": ["kernels/numerics", *RUNTIME_PUBLIC],
    "kernels/runtime/host": ["kernels/runtime/common", "kernels/numerics", *RUNTIME_PUBLIC],
    "kernels/runtime/cuda": ["kernels/runtime/common", "kernels/numerics", *RUNTIME_PUBLIC],
    "kernels/runtime/gloo": RUNTIME_PUBLIC,
    "kernels/attention/problem": ["kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/tensor_ops": ["kernels/attention/problem", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/tensor_ops/host": ["kernels/attention/tensor_ops", "kernels/attention/problem", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/tensor_ops/cuda": ["kernels/attention/tensor_ops", "kernels/attention/problem", "kernels/numerics",
                                          "kernels/runtime/cuda", *KERNELS_PUBLIC],
    "kernels/attention/families/common": ["kernels/attention/problem", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/families": ["kernels/attention/problem", "kernels/attention/tensor_ops", "kernels/numerics", *KERNELS_PUBLIC],
    # A family includes no other family and no schedule.
    "kernels/attention/families/host": ["kernels/attention/families/common", "kernels/attention/problem", "kernels/attention/tensor_ops",
                                        "kernels/attention/tensor_ops/host", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/families/*": ["kernels/attention/families/common", "kernels/attention/problem", "kernels/attention/tensor_ops",
                                     "kernels/attention/tensor_ops/cuda", "kernels/runtime/cuda", "kernels/numerics", *KERNELS_PUBLIC],
    # Schedules use kernel families through the public interface only.
    "kernels/attention/schedules": ["kernels/attention/problem", "kernels/attention/tensor_ops", "kernels/numerics", *KERNELS_PUBLIC],
    # The tensors of a case: below the checks and the run, which both use them.
    "kernels/attention/tensors": ["kernels/numerics", *KERNELS_PUBLIC],
    # Checks depend neither on schedules nor on a kernel family.
    "kernels/attention/checks": ["kernels/attention/tensors", "kernels/attention/problem", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/checks/host": ["kernels/attention/checks", "kernels/attention/problem", "kernels/numerics", *KERNELS_PUBLIC],
    "kernels/attention/checks/cuda": ["kernels/attention/checks", "kernels/attention/problem", "kernels/runtime/cuda", "kernels/numerics",
                                      *KERNELS_PUBLIC],
    "kernels/attention/run": ["kernels/attention/checks", "kernels/attention/tensors", "kernels/attention/schedules",
                              "kernels/attention/problem", "kernels/attention/tensor_ops", "kernels/numerics", *KERNELS_PUBLIC],
    # The module creates every implementation.
    "kernels/module": ["kernels/attention/checks/cuda", "kernels/attention/checks/host", "kernels/attention/families",
                       "kernels/attention/families/host", "kernels/attention/families/*", "kernels/attention/tensor_ops/cuda", "kernels/attention/tensor_ops/host",
                       "kernels/runtime/cuda", "kernels/runtime/gloo", *KERNELS_PUBLIC],
    # A module that nothing else needs. It sees the C header alone.
    "kernels/cudnn": ["kernels/include/cppool"],
    # The daemon includes only public headers of the kernels. The attention case does not depend on the rest of the daemon.
    "daemon/include": ["kernels/include/cppool"],
    "daemon": ["daemon/include", *PROTOCOL_PUBLIC, *KERNELS_PUBLIC],
    "daemon/machines": ["daemon", "daemon/include", *PROTOCOL_PUBLIC, *KERNELS_PUBLIC],
    "daemon/main.cpp": ["daemon", "daemon/attention_case", "daemon/machines", "daemon/include", *PROTOCOL_PUBLIC, *KERNELS_PUBLIC],
    "daemon/attention_case": ["daemon/include", *PROTOCOL_PUBLIC, *KERNELS_PUBLIC],
    # The client includes neither kernels, nor daemon, nor CUDA. Its installed header uses an installed header of the protocol.
    "client/include": ["protocol/include"],
    "client/src": ["client/include", *PROTOCOL_PUBLIC],
    "client/server": ["client/src", "client/include", *PROTOCOL_PUBLIC],
    "client/suite": ["client/src", "client/include", *PROTOCOL_PUBLIC],
    # The command and the C interface use the suites, and nothing of each other.
    "client/command": ["client/server", "client/suite", "client/src", "client/include", *PROTOCOL_PUBLIC],
    "client/c_api": ["client/suite", "client/src", "client/include", *PROTOCOL_PUBLIC],
    # tests may include everything.
    "tests": None,
}

# Third-party headers -> the folders that may include them.
LIBRARIES = {
    r"nlohmann/": ["protocol", "daemon", "client", "tests"],
    r"spdlog/": ["daemon/log.cpp"],
    r"fmt/": ["daemon/trace_file.cpp"],
    r"CLI/": ["daemon/options.cpp", "client/command", "tests"],
    r"catch2/": ["tests"],
    r"cudnn": ["kernels/cudnn"],
    r"(cuda|nccl|cooperative_groups|cub|mma|cute|cutlass)": ["kernels/runtime/cuda", "kernels/attention/tensor_ops/cuda",
                                                             "kernels/attention/checks/cuda", "kernels/attention/families",
                                                             "kernels/module", "tests"],
}

TOP_FOLDERS = ["protocol", "kernels", "daemon", "client", "tests"]
PUBLIC_ROOTS = ["protocol/base/include", "protocol/include", "kernels/include", "daemon/include", "client/include"]
SOURCES = {".h", ".cuh", ".inc", ".c", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def node_of(path, table=ALLOWED):
    """The longest entry of the table that is a prefix of the path, component by component; None when there is none."""
    parts = path.split("/")
    best = None
    for entry in table:
        names = entry.split("/")
        last = len(names) - 1
        if len(names) <= len(parts) and all(
            name == part or (name == "*" and (i < last or len(parts) > len(names))) for i, (name, part) in enumerate(zip(names, parts))
        ):
            rank = (len(names), "*" not in entry)  # the exact name before the wildcard
            if best is None or rank > best[0]:
                best = (rank, entry)
    return best[1] if best else None


def has_entries_below(node):
    """Whether the table has an entry for a folder inside this one. Entries of single files do not count."""
    return any(entry.startswith(node + "/") and not pathlib.PurePosixPath(entry).suffix for entry in ALLOWED)


def folder_of(path, node):
    """The folder that an entry with a wildcard stands for here."""
    return "/".join(path.split("/")[: len(node.split("/"))])


class Checker:
    def __init__(self, root):
        self.files = {
            path.relative_to(root).as_posix(): path
            for top in TOP_FOLDERS
            for path in (root / top).rglob("*")
            if path.suffix in SOURCES and path.is_file()
        }
        self.violations = []
        self.edges = 0

    def resolve(self, include):
        """The project's files that an include may refer to."""
        return [name for name in (include, *(f"{root}/{include}" for root in PUBLIC_ROOTS)) if name in self.files]

    def check(self):
        for name in sorted(self.files):
            if "examples" in name.split("/"):
                continue  # a project of its own, as users write it: a test builds it with an installed prefix
            node = node_of(name)
            if node is None or (has_entries_below(node) and name.count("/") > node.count("/") + 1):
                self.violations.append(f"{name}: its folder is not in the table of tests/structure/includes.py")
                continue
            lines = self.files[name].read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                match = INCLUDE.match(line)
                if match:
                    problem = self.problem(name, node, *match.groups())
                    if problem:
                        self.violations.append(f"{name}:{number}: {line.strip()}: {problem}")

    def problem(self, name, node, quote, include):
        """What is wrong with one include, or None."""
        found = self.resolve(include)
        if quote == "<":
            if found and not include.startswith("cppool/"):
                return "a project header is included with quotes"
            if not found:
                return self.library_problem(name, include)
        else:
            if ".." in include.split("/") or include.startswith(("/", "./")):
                return "an include is a path from the repository root or from a public include/ folder"
            if include.startswith("cppool/"):
                return "an installed header is included as <cppool/...>"
            if not found:
                return "not a path from the repository root or from a public include/ folder"
            if "include" in include.split("/"):
                return "a public header is named without its include/ folder"
        if len(found) > 1:
            return f"ambiguous: {', '.join(found)}"
        self.edges += 1
        target = found[0]
        other = node_of(target)
        if ALLOWED[node] is None or other is None or folder_of(name, node) == folder_of(target, other):
            return None
        if other in ALLOWED[node] or target in ALLOWED[node]:
            return None
        return f"{folder_of(name, node)} may not include from {folder_of(target, other)}"

    def library_problem(self, name, include):
        for pattern, folders in LIBRARIES.items():
            if re.match(pattern, include) and not any(name == f or name.startswith(f + "/") for f in folders):
                return f"only {', '.join(folders)} may include it"
        return None


def cycle():
    """A cycle in the table, or None. With a cycle the folders would have no order of layers."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node) :] + [node]
        if node in done:
            return None
        path.append(node)
        for target in ALLOWED.get(node) or []:
            found = target in ALLOWED and visit(target)
            if found:
                return found
        path.pop()
        done.add(node)
        return None

    return next((found for found in map(visit, ALLOWED) if found), None)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    checker = Checker(root)
    checker.check()
    circle = cycle()
    if circle:
        checker.violations.append(f"the table has a cycle: {' -> '.join(circle)}")
    for violation in checker.violations:
        print(violation)
    print(f"{len(checker.files)} files, {checker.edges} includes of project headers, {len(checker.violations)} violations")
    # A table that matches nothing must not pass.
    return 1 if checker.violations or checker.edges < 500 else 0


if __name__ == "__main__":
    sys.exit(main())
