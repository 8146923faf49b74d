"""Large reports by way of memory that the client maps, instead of through the engine's messages.

vLLM's remote calls move 200 to 400 MB/s and hold the engine meanwhile. On one host a rank puts its
report into a file that lies in memory and has no name, and answers where it is. The client maps it
through ``/proc``; its tensors keep the mapping. So nothing is left behind, whoever dies when: the
memory goes with the last of the rank's descriptor and the client's tensors.

A client that cannot open it (another host, another user) asks for the bytes instead.

Source: Linux man pages memfd_create(2), proc_pid_fd(5).
"""

from __future__ import annotations

import mmap
import os
import struct
import uuid
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.wire.value_codec import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.kept import FromHome

# Below this, the engine's message is as quick.
LEAST_BYTES = 1 << 18
# A rank keeps less than this until its next report: to tell it costs one more remote call.
MOST_LEFT_BYTES = 4 << 20
# The length of the header, and the mark of this one parcel.
_PREFIX = struct.Struct("<Q16s")
_ALIGN = 64


@final
class Parcel:
    """A rank's report that waits to be fetched. One at a time."""

    __slots__ = ("_file",)

    def __init__(self) -> None:
        self._file: int | None = None

    def pack(self, header: bytes, pieces: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Keep a value as `value_codec.encode` gave it; return where it is.

        Raises:
            OSError: There is no memory for it.
        """
        self.drop()
        size = sum(len(piece) for piece in pieces)
        mark = uuid.uuid4()
        start = _start_of(len(header))
        file = os.memfd_create("nnsight_pp")
        self._file = file
        try:
            os.posix_fallocate(file, 0, start + max(size, 1))
            os.lseek(file, 0, os.SEEK_SET)
            _write(file, memoryview(_PREFIX.pack(len(header), mark.bytes) + header))
            os.lseek(file, start, os.SEEK_SET)
            for piece in pieces:
                _write(file, piece.numpy().data)
        except OSError:
            self.drop()
            raise
        status = os.fstat(file)
        place = {"pid": os.getpid(), "file": file, "inode": status.st_ino, "size": status.st_size}
        return {**place, "mark": mark.hex}

    def read(self) -> bytes:
        """Return what was packed, for a client that cannot open it."""
        assert self._file is not None, "there is no parcel"
        return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def drop(self) -> None:
        """Forget the parcel. The memory stays while a client has it mapped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._file is None

    @property
    def is_large(self) -> bool:
        """Whether what waits should be dropped by a remote call of its own."""
        return self._file is not None and os.fstat(self._file).st_size >= MOST_LEFT_BYTES


def is_parcel(answer: Any) -> bool:
    """Tell whether a rank answered where its report is."""
    return isinstance(answer, dict) and "inode" in answer


def should_be_dropped(where: dict[str, Any]) -> bool:
    """Tell whether a rank should know that its `Parcel` is not needed any more."""
    return where["size"] >= MOST_LEFT_BYTES


def open_parcel(where: dict[str, Any], own: Callable[[FromHome], Any]) -> Any:
    """Return the value of another process's `Parcel`; its tensors lie in a private mapping.

    ``own`` is as `value_codec.decode` takes it.

    Raises:
        OSError: It is not there, or it is another file.
    """
    file = os.open(f"/proc/{where['pid']}/fd/{where['file']}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if (status.st_ino, status.st_size) != (where["inode"], where["size"]):
            raise FileNotFoundError("another process has this number here")
        data = mmap.mmap(file, where["size"], access=mmap.ACCESS_COPY)
        # On another host a process like the rank may have all these numbers, and a file like it.
        if _PREFIX.unpack_from(data)[1].hex() != where["mark"]:
            raise FileNotFoundError("another process has a file like this one")
        return value_in(data, own)
    finally:
        os.close(file)


def value_in(data: Any, own: Callable[[FromHome], Any]) -> Any:
    """Return the value that lies in the writable buffer ``data``."""
    length, _ = _PREFIX.unpack_from(data)
    header = bytes(memoryview(data)[_PREFIX.size : _PREFIX.size + length])
    payload = torch.frombuffer(data, dtype=torch.uint8, offset=_start_of(length))
    return decode(header, payload, own)


def _start_of(header_length: int) -> int:
    """Return where the elements begin: tensors of any dtype must be aligned."""
    return -(-(_PREFIX.size + header_length) // _ALIGN) * _ALIGN


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]
