"""Frames, which are lines of JSON, and descriptors on a socket; the page that a rank shares with the daemon. README.md says what they mean."""
import collections
import json
import math
import mmap
import os
import socket
import struct
import threading
import time

MAX_FRAME = 4 << 20
IDLE, LOAD, CASE, WAITS, RESET = range(5)  # phases of the page


class BrokenFrame(Exception):
    """What has arrived is no frame."""


class LongFrame(ValueError):
    """A frame would be longer than MAX_FRAME."""


MAX_DEPTH = 60


def finite(value, words=True, depth=MAX_DEPTH):
    """A copy of `value` that every JSON parser reads: numbers that are not finite are the words "nan", "inf" and "-inf", or None. Throws ValueError
    for integers of more than 64 bits, and for what is nested deeper than MAX_DEPTH."""
    if depth == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if words else None
    if isinstance(value, int) and not -2**63 <= value < 2**64:
        raise ValueError("it has an integer of more than 64 bits")
    if isinstance(value, dict):
        return {key: finite(each, words, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each, words, depth - 1) for each in value]
    return value


def cut(text, limit):
    """At most `limit` characters of `text`: its two ends."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} characters ...]\n"
    half = (limit - len(mark)) // 2
    return text[:half] + mark + text[-half:]


def frame_of(line):
    try:
        frame = json.loads(line)
        frame["frame"]
        return frame
    except (ValueError, TypeError, KeyError) as error:
        raise BrokenFrame(f"no frame: {line[:80]!r}: {error}") from None


class Channel:
    """Frames on a stream socket. Any thread may send; one thread reads."""

    def __init__(self, connection):
        self.socket = connection
        self.descriptors = collections.deque()  # those received, in order; the reader owns them
        self._lock = threading.Lock()
        self._partial, self._size = [], 0  # the line that has not ended

    def send(self, frame, **members):
        try:
            line = json.dumps({"frame": frame, **members}, allow_nan=False, ensure_ascii=False)
        except ValueError:
            line = json.dumps({"frame": frame, **finite(members)}, allow_nan=False, ensure_ascii=False)
        data = line.encode("utf-8", "replace") + b"\n"  # Python's text may have halves of surrogates
        if len(data) > MAX_FRAME:
            raise LongFrame(f"what this rank has to report has {len(data)} bytes, of at most {MAX_FRAME}: names of stages and checks, and times of "
                            "iterations")
        with self._lock:
            self.socket.sendall(data)

    def receive(self):
        """Waits until something arrives, and returns the frames that are whole now, in order; at the end of the socket the last one is None.
        Throws BrokenFrame."""
        try:
            received, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return [None]  # the other side has ended with frames unread
        self.descriptors.extend(descriptors)
        if not received:
            return [None]
        lines = received.split(b"\n")
        self._partial.append(lines[0])
        self._size += len(lines[0])
        if self._size > MAX_FRAME:
            raise BrokenFrame(f"a frame of more than {MAX_FRAME} bytes")
        if len(lines) == 1:
            return []
        lines[0] = b"".join(self._partial)
        self._partial, self._size = [lines.pop()], 0
        return [frame_of(line) for line in lines]


class Page:
    """Where a rank is, in memory that the daemon reads whatever the rank is stuck in."""
    SIZE = 4096
    _SEQUENCE, _REST = struct.Struct("=I"), struct.Struct("=IQqI")

    def __init__(self, descriptor):
        self._memory = mmap.mmap(descriptor, self.SIZE)
        os.close(descriptor)
        self._sequence = 0

    def write(self, phase, stage="", iteration=0):
        text = stage.encode("utf-8", "replace")[:256]
        self._SEQUENCE.pack_into(self._memory, 0, self._sequence + 1)
        self._REST.pack_into(self._memory, 4, phase, time.monotonic_ns(), iteration, len(text))
        self._memory[28:28 + len(text)] = text
        self._sequence += 2
        self._SEQUENCE.pack_into(self._memory, 0, self._sequence)

    def read(self):
        """(phase, stage, iteration), or None while it is written."""
        sequence, = self._SEQUENCE.unpack_from(self._memory, 0)
        phase, _, iteration, length = self._REST.unpack_from(self._memory, 4)
        stage = self._memory[28:28 + min(length, 256)]
        return None if sequence % 2 or self._SEQUENCE.unpack_from(self._memory, 0)[0] != sequence else (phase, stage.decode("utf-8", "replace"), iteration)
