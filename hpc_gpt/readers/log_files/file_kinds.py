"""What a file is, by its first bytes: text, compressed text, or one of the things that lie beside logs."""

from __future__ import annotations

# First bytes -> what it is.
_MAGIC = (
    (b"PK\x03\x04", "a zip archive, as of a checkpoint"),
    (b"PK\x05\x06", "a zip archive"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"%PDF-", "a PDF document"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"SQLite format 3\0", "a database"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"MMIDIDX\0", "an index of tokens"),
    (b"BZh", "compressed with bzip2, which is not read"),
    (b"\xfd7zXZ\0", "compressed with xz, which is not read"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"\x04\x22\x4d\x18", "compressed with lz4, which is not read"),
    (b"\0asm", "a program"),
    (b"!<arch>\n", "a library"),
    (b"OggS", "sound"),
    (b"RIFF", "sound or an image"),
)
_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
# Bytes that no text holds; a bell, a backspace, an escape and the ends of lines it does.
_NEVER = bytes(number for number in range(1, 32) if number not in b"\a\b\t\n\v\f\r\x1b") + b"\x7f"
_MOST_NEVER = 0.05
_MOST_FOREIGN = 0.30


def compression(head: bytes) -> str | None:
    """ "gzip", "zstandard" or None."""
    if head.startswith(_GZIP):
        return "gzip"
    # 0x184D2A5? begins a skippable frame, which pzstd puts first.
    skippable = len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    return "zstandard" if head.startswith(_ZSTANDARD) or skippable else None


def not_a_log(head: bytes) -> str | None:
    """Why a file that begins so is no log, in words; None for text, NULs in it or not, and for an empty file."""
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head[8:10] == b'{"' and head[4:8] == b"\0\0\0\0":
        return "a safetensors file"
    if head[4:8] == b"\0\0\0\0" and b"brain.Event:" in head[:64]:
        return "a TensorBoard event file"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return _utf16(head)
    text = head.replace(b"\0", b"")
    if not text:
        return None
    never = len(text) - len(text.translate(None, _NEVER))
    if never > _MOST_NEVER * len(text):
        return "binary"
    # A cut in the middle of a character at the end of what was looked at is no fault.
    foreign = text.decode("utf-8", "replace").count("�")
    return "binary" if foreign > _MOST_FOREIGN * len(text) else None


def _utf16(head: bytes) -> str | None:
    try:
        text = head[: len(head) & ~1].decode("utf-16", "replace")
    except UnicodeError:
        return "binary"
    return None if text.count("\n") and text.count("�") <= _MOST_NEVER * len(text) else "binary"
