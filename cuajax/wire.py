"""The one codec of store, client and server: msgpack through msgspec; an ndarray is (dtype, shape, bytes).

No pickle anywhere: a payload can only become the plain values and the `types` asked for.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"})


class WireError(ValueError):
    """Bytes that are not what they should be."""


@functools.cache  # `dtype.name` is computed anew at each use
def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (_dtype_name(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_array(value: Any) -> np.ndarray:
    """(dtype, shape, bytes) -> read-only ndarray. Raises WireError when they disagree."""
    try:
        name, shape, data = value
        if name not in DTYPES:
            raise WireError(f"array dtype {name!r} is not one of {sorted(DTYPES)}")
        if name == "bfloat16":
            import ml_dtypes

            dtype: Any = ml_dtypes.bfloat16
        else:
            dtype = np.dtype(name)
        return np.frombuffer(data, dtype=dtype).reshape(tuple(int(n) for n in shape))
    except WireError:
        raise
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed array on the wire: {error}") from error


def _dec(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return decode_array(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, dec_hook=_dec)


def encode(value: Any) -> bytes:
    """Any of `cuajax.types`, or plain containers of them, to msgpack bytes."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """msgpack bytes to a `kind`. Raises WireError on anything that does not fit it."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise WireError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error
