# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files (the format of ggml's docs/gguf.md, versions 2 and 3, little-endian).

A vocabulary is two arrays of some 50,000 strings, which the ``gguf`` package's reader takes one numpy view at a time:
seconds, where this takes a tenth. Dequantisation is that package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.models.spec import UnsupportedModel

FloatArray = NDArray[np.float32]

_REQUIRED = object()
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types of the metadata: number -> struct's code."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Where tensors begin, in bytes, unless general.alignment says otherwise."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``shape`` has the fastest dimension first; ``offset`` counts bytes from the first tensor."""

    shape: tuple[int, ...]
    tensor_type: gguf.GGMLQuantizationType
    offset: int


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        begin = self.at + 8
        self.at = begin + length
        if self.at > len(self.data):
            raise EOFError
        return self.data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.at)
            self.at += count * struct.calcsize(_SCALARS[item])
            return list(values)
        read: Callable[[], Any] = self.string if item == _STRING else lambda: self.value(item)
        return [read() for _ in range(count)]


class GGUFFile:
    """Metadata and tensors of one file; tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            UnsupportedModel: the file is no GGUF file, of another version, or damaged.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read(_Cursor(self._data))
        except (struct.error, EOFError, KeyError, OverflowError, ValueError) as error:
            if isinstance(error, UnsupportedModel):
                raise
            raise UnsupportedModel(f"{path}: damaged, or no GGUF file ({type(error).__name__}: {error})") from error

    def _read(self, cursor: _Cursor) -> None:
        if self._data[:4] != b"GGUF":
            raise UnsupportedModel(f"{self.path}: does not begin as a GGUF file does")
        cursor.at = 4
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(f"{self.path}: GGUF version {version} (or byte order) is not supported, 2 and 3 are")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        self._metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.string()
            self._metadata[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, StoredTensor] = {}
        for _ in range(tensors):
            name = cursor.string()
            shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
            kind = gguf.GGMLQuantizationType(cursor.number("I"))
            self.tensors[name] = StoredTensor(shape, kind, cursor.number("Q"))
        alignment = self.get("general.alignment", _ALIGNMENT)
        self._first = -(-cursor.at // alignment) * alignment

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value of the metadata.

        Raises:
            UnsupportedModel: it is not there, and no default was given.
        """
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise UnsupportedModel(f"{self.path}: the metadata has no {key}")
        return value

    def tensor(self, name: str) -> FloatArray:
        """A tensor as float32, dequantised where needed.

        Raises:
            UnsupportedModel: it is not there, cut off, or of a type that cannot be dequantised.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise UnsupportedModel(f"{self.path}: there is no tensor {name}")
        block, size = gguf.GGML_QUANT_SIZES[stored.tensor_type]
        count = math.prod(stored.shape) // block * size
        if self._first + stored.offset + count > len(self._data):
            raise UnsupportedModel(f"{self.path}: the file ends within tensor {name}")
        data = np.frombuffer(self._data, np.uint8, count, self._first + stored.offset)
        rows = tuple(reversed(stored.shape[1:]))
        try:
            values = gguf.quants.dequantize(data.reshape(*rows, -1), stored.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self.path}: {name}: {stored.tensor_type.name} is not supported") from error
        return np.array(values, dtype=np.float32)
