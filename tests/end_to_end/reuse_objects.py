#!/usr/bin/env python3
"""A compiler launcher (CMAKE_CXX_COMPILER_LAUNCHER) that takes the object of another build where that has compiled the same source with the
same command, but for warnings as errors and optimisation. It compiles everything else. The other build must be up to date: headers are not
compared.

    reuse_objects.py BUILD FOLDER COMPILER ARGUMENT ...    # FOLDER: what corresponds to BUILD in this build
"""
import json
import os
import shlex
import shutil
import sys


def same(arguments, folder):
    """What must be the same in both builds."""
    kept = [argument for argument in arguments if argument not in ("-Werror", "-DNDEBUG", "-MD") and not argument.startswith("-O")]
    for option in ("-MT", "-MF", "-o"):
        if option in kept:
            at = kept.index(option)
            del kept[at:at + 2]
    return [argument.replace(folder, "BUILD") for argument in kept]


def text(path, folder):
    with open(path, encoding="utf-8") as file:
        return file.read().replace(folder, "BUILD")


def object_of(build, folder, command):
    """The object of the other build, or None."""
    output = os.path.relpath(command[command.index("-o") + 1], folder)
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = [entry for entry in json.load(file) if f" -o {output} " in entry["command"]]
    for entry in entries:
        other = shlex.split(entry["command"])
        if command[0] in other and same(other[other.index(command[0]):], build) == same(command, folder) \
                and text(other[-1], build) == text(command[-1], folder):
            return os.path.join(build, output)
    return None


def main(build, folder, *command):
    found = object_of(build, folder, command) if "-c" in command else None
    if found is None or not os.path.exists(found):
        os.execvp(command[0], command)
    output = command[command.index("-o") + 1]
    shutil.copyfile(found, output)
    if "-MF" in command:
        with open(command[command.index("-MF") + 1], "w", encoding="utf-8") as file:
            file.write(f"{output}: {command[-1]}\n")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
