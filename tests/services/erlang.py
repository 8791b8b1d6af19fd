"""As much of Erlang's distribution protocol as it takes to call functions of a RabbitMQ node.

A call takes milliseconds; RabbitMQ's own command starts a virtual machine for each, and takes a
second. Strings stand for Erlang's binaries, ``Atom`` for its atoms; ``true``, ``false`` and
``undefined`` are the values of Python that mean them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import socket
import struct
from typing import Any, Callable, Union

TIMEOUT_S = 20.0
"""How long an answer may take."""

FLAGS = (
    0x4  # extended references
    | 0x10  # fun tags
    | 0x80  # new fun tags
    | 0x100  # extended pids and ports
    | 0x200  # exported functions
    | 0x400  # bit strings
    | 0x800  # new floats
    | 0x1_0000  # atoms in UTF-8
    | 0x2_0000  # maps
    | 0x4_0000  # big creations
    | 0x100_0000  # this handshake
    | 0x200_0000  # unlinking with ids
    | 0x4_0000_0000  # pids and ports of 64 bits
)
"""What a node must understand that talks to Erlang 25 and newer, and no more."""

REG_SEND = 6
PASS_THROUGH = 112
VERSION = 131

_numbers = itertools.count(1)


class Atom(str):
    """A name in Erlang."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Atom({str(self)!r})"


class Opaque(bytes):
    """A process, a reference or the like: it can be handed back, and nothing else."""

    __slots__ = ()


Term = Union[None, bool, int, str, bytes, tuple[Any, ...], list[Any]]


class ErlangError(Exception):
    """A call failed in the node."""


class Node:
    """A connection to a node, for one call after the other.

    Args:
        address: Where the node listens for other nodes.
        cookie: The secret that nodes share.

    Raises:
        OSError: It is not there, or does not take the cookie.
    """

    def __init__(self, address: tuple[str, int], cookie: str) -> None:
        self._name = f"tests-{os.getpid()}-{next(_numbers)}@localhost"
        self._creation = secrets.randbelow(2**31) + 4
        self._socket = socket.create_connection(address, TIMEOUT_S)
        try:
            self._introduce(cookie.encode())
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *details: object) -> None:
        self._socket.close()

    def call(self, module: str, function: str, *arguments: Term) -> Any:  # noqa: ANN401
        """Call a function and return its result.

        Raises:
            ErlangError: It raised an error.
            OSError: The node did not answer.
        """
        pid = self._pid()
        request = Opaque(
            encode((pid, (Atom("call"), Atom(module), Atom(function), [*arguments], Atom("user"))))
        )
        control = encode((REG_SEND, pid, Atom(""), Atom("rex")))
        head = bytes([PASS_THROUGH, VERSION]) + control + bytes([VERSION])
        self._send(head + request, 4)
        while True:
            message = self._receive(4)
            if not message:  # it asks whether this side is alive
                self._send(b"", 4)
                continue
            _control, after = decode(message, 2)
            if after < len(message):
                answer, _ = decode(message, after + 1)
                break
        assert isinstance(answer, tuple), answer
        assert answer[0] == "rex", answer
        result = answer[1]
        if isinstance(result, tuple) and result and result[0] == "badrpc":
            message_of = f"{module}:{function} failed: {result[1]!r}"
            raise ErlangError(message_of)
        return result

    def _pid(self) -> Opaque:
        return Opaque(b"X" + encode(Atom(self._name)) + struct.pack(">III", 1, 0, self._creation))

    def _introduce(self, cookie: bytes) -> None:
        name = self._name.encode()
        self._send(b"N" + struct.pack(">QIH", FLAGS, self._creation, len(name)) + name, 2)
        status = self._receive(2)
        if not status.startswith(b"sok"):
            message = f"the node answered {status!r}"
            raise ConnectionError(message)
        theirs = struct.unpack_from(">I", self._receive(2), 9)[0]
        mine = secrets.randbits(32)
        self._send(b"r" + struct.pack(">I", mine) + _digest(cookie, theirs), 2)
        if self._receive(2) != b"a" + _digest(cookie, mine):
            message = "the node has another cookie"
            raise ConnectionError(message)

    def _send(self, data: bytes, width: int) -> None:
        self._socket.sendall(len(data).to_bytes(width, "big") + data)

    def _receive(self, width: int) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(width), "big"))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = self._socket.recv(size - len(data))
            if not received:
                message = "the node has closed the connection: it stops, or has another cookie"
                raise ConnectionError(message)
            data += received
        return data


def _digest(cookie: bytes, challenge: int) -> bytes:
    return hashlib.md5(cookie + str(challenge).encode()).digest()


# -- terms ---------------------------------------------------------------------------------------

_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "undefined": None}
_NAMES = {value: name for name, value in _CONSTANTS.items()}


def encode(term: Term) -> bytes:
    """Return a term in Erlang's external format, without the leading version."""
    return next(write(term) for kind, write in _WRITERS if isinstance(term, kind))


def _write_atom(name: str) -> bytes:
    encoded = name.encode()
    return b"w" + bytes([len(encoded)]) + encoded


def _write_number(value: int) -> bytes:
    size = (abs(value).bit_length() + 7) // 8
    return b"n" + bytes([size, value < 0]) + abs(value).to_bytes(size, "little")


def _write_text(text: Union[str, bytes]) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return b"m" + struct.pack(">I", len(encoded)) + encoded


def _write_tuple(terms: tuple[Any, ...]) -> bytes:
    return b"h" + bytes([len(terms)]) + b"".join(map(encode, terms))


def _write_list(terms: list[Any]) -> bytes:
    if not terms:
        return b"j"
    return b"l" + struct.pack(">I", len(terms)) + b"".join(map(encode, terms)) + b"j"


# What is special stands before what it is a kind of.
_WRITERS: list[tuple[Any, Callable[[Any], bytes]]] = [
    (Opaque, bytes),
    ((bool, type(None)), lambda value: _write_atom(_NAMES[value])),
    (Atom, _write_atom),
    (int, _write_number),
    ((str, bytes), _write_text),
    (tuple, _write_tuple),
    (list, _write_list),
]


def decode(data: bytes, at: int) -> tuple[Any, int]:
    """Return the term that begins at a place of some data, and the place behind it.

    Raises:
        ValueError: It is of a kind that no answer should have.
    """
    tag = data[at : at + 1]
    reader = _READERS.get(tag)
    if reader is None:
        message = f"there is no reader for Erlang's terms that begin with {tag!r}"
        raise ValueError(message)
    return reader(data, at + 1)


def _number(width: int, *, signed: bool = False) -> Callable[[bytes, int], tuple[int, int]]:
    def read(data: bytes, at: int) -> tuple[int, int]:
        return int.from_bytes(data[at : at + width], "big", signed=signed), at + width

    return read


def _sized(width: int, make: Callable[[bytes], Any]) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        begin = at + width
        end = begin + int.from_bytes(data[at:begin], "big")
        return make(data[begin:end]), end

    return read


def _atom(name: bytes) -> Any:  # noqa: ANN401
    text = name.decode()
    return _CONSTANTS[text] if text in _CONSTANTS else Atom(text)


def _text(value: bytes) -> Union[str, bytes]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _several(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        term, at = decode(data, at)
        found.append(term)
    return found, at


def _tuple(width: int) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        count = int.from_bytes(data[at : at + width], "big")
        found, at = _several(data, at + width, count)
        return tuple(found), at

    return read


def _list(data: bytes, at: int) -> tuple[Any, int]:
    found, at = _several(data, at + 4, int.from_bytes(data[at : at + 4], "big"))
    _tail, at = decode(data, at)
    return found, at


def _map(data: bytes, at: int) -> tuple[Any, int]:
    found, at = _several(data, at + 4, 2 * int.from_bytes(data[at : at + 4], "big"))
    return dict(zip(found[::2], found[1::2])), at


def _big(width: int) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        size = int.from_bytes(data[at : at + width], "big")
        begin = at + width + 1
        value = int.from_bytes(data[begin : begin + size], "little")
        return (-value if data[begin - 1] else value), begin + size

    return read


def _float(data: bytes, at: int) -> tuple[Any, int]:
    return struct.unpack_from(">d", data, at)[0], at + 8


def _opaque(words: int) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        _node, after = decode(data, at)
        end = after + words * 4
        return Opaque(data[at - 1 : end]), end

    return read


def _reference(data: bytes, at: int) -> tuple[Any, int]:
    words = int.from_bytes(data[at : at + 2], "big")
    _node, after = decode(data, at + 2)
    end = after + 4 + words * 4
    return Opaque(data[at - 1 : end]), end


def _function(data: bytes, at: int) -> tuple[Any, int]:
    end = at + int.from_bytes(data[at : at + 4], "big")
    return Opaque(data[at - 1 : end]), end


def _export(data: bytes, at: int) -> tuple[Any, int]:
    _parts, end = _several(data, at, 3)
    return Opaque(data[at - 1 : end]), end


_READERS: dict[bytes, Callable[[bytes, int], tuple[Any, int]]] = {
    b"a": _number(1),
    b"b": _number(4, signed=True),
    b"n": _big(1),
    b"o": _big(4),
    b"F": _float,
    b"w": _sized(1, _atom),
    b"v": _sized(2, _atom),
    b"s": _sized(1, _atom),
    b"d": _sized(2, _atom),
    b"k": _sized(2, list),
    b"m": _sized(4, _text),
    b"h": _tuple(1),
    b"i": _tuple(4),
    b"j": lambda _data, at: ([], at),
    b"l": _list,
    b"t": _map,
    b"X": _opaque(3),  # a process
    b"Y": _opaque(2),  # a port
    b"x": _opaque(3),  # a port of 64 bits
    b"Z": _reference,
    b"p": _function,
    b"q": _export,
}
