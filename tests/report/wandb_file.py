"""Reads a .wandb file: LevelDB's log format behind a header of 7 bytes, each record a protobuf of wandb's."""

import struct
from pathlib import Path

_BLOCK = 32768
_HEADER = 7
_FULL, _LAST = 1, 4


def read_records(path: Path) -> list:
    """Every record of the file, as wandb's own protobuf."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    found, part, place = [], b"", 7
    while place < len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + _HEADER])
        part += content[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found
