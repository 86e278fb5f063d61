"""What a stored record looks like: a short header with format version and checksum, then msgpack."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import TypeVar

from cuajax import wire
from cuajax.types import FORMAT_VERSION

T = TypeVar("T")

_HEADER = struct.Struct("<2sHBI")  # magic, format version, flags, crc32 of flags and body
_MAGIC = b"CR"
_DEFLATED = 1
_LIMIT = 256 << 20  # bytes a body may inflate to


class RecordError(ValueError):
    """A stored record that cannot be used; the subclasses say why."""


class RecordCorrupt(RecordError):
    """Truncated or damaged bytes."""


class RecordVersionError(RecordError):
    """Written by another format version."""


class RecordMissing(RecordError, KeyError):
    """No such record, or compacted away."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingImages(RecordError):
    """Images that are neither given nor stored, or cannot be decoded; `hashes` says which and why."""

    def __init__(self, hashes: Mapping[str, str], where: str) -> None:
        self.hashes = dict(hashes)
        some = ", ".join(f"{h[:12]} ({why})" for h, why in list(self.hashes.items())[:3])
        super().__init__(f"{where}: {len(self.hashes)} images cannot be used: {some}")


def seal(value: object, *, deflate: bool = False) -> bytes:
    """Any value of cuajax.wire -> record bytes; `deflate` pays for records that repeat themselves (prompts do)."""
    body = wire.encode(value)
    if deflate:
        body = zlib.compress(body, 1)
    flags = _DEFLATED if deflate else 0
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, flags, zlib.crc32(body, flags)) + body


def unseal(data: bytes, kind: type[T], name: str = "record") -> T:
    """Record bytes -> a `kind`. Raises RecordVersionError or RecordCorrupt naming `name`."""
    if len(data) < _HEADER.size:
        raise RecordCorrupt(f"{name}: {len(data)} bytes are shorter than a header")
    magic, version, flags, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RecordCorrupt(f"{name}: starts with {magic!r}, expected {_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise RecordVersionError(f"{name}: format version {version}, this program reads {FORMAT_VERSION}")
    body: bytes | memoryview = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body, flags) != crc:
        raise RecordCorrupt(f"{name}: checksum of its {len(body)} bytes does not match")
    try:
        if flags & _DEFLATED:
            inflate = zlib.decompressobj()
            body = inflate.decompress(body, _LIMIT)
            if not inflate.eof:
                raise RecordCorrupt(f"{name}: body is cut or larger than {_LIMIT} bytes")
        return wire.decode(body, kind)
    except (zlib.error, wire.WireError) as error:
        raise RecordCorrupt(f"{name}: {error}") from error
