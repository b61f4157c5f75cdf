"""The programs of this package: `cppool` (also `python -m cppool`) and `cppoold`."""
import os
import sys

from ._library import prefix


def _execute(name: str) -> None:
    path = os.path.join(prefix(), "bin", name)
    try:
        os.execv(path, [sys.argv[0] if os.path.basename(sys.argv[0]) == name else name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: {path} cannot be started: {error.strerror}")


def cppool() -> None:
    _execute("cppool")


def cppoold() -> None:
    _execute("cppoold")


if __name__ == "__main__":
    cppool()
