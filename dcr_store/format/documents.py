"""The documents beside the log (docs/spec/v1.md §3, §4, §8): store document, journal entry with seal, manifest.

Frozen values with ``to_json`` and ``from_json``; parsing refuses what the spec forbids, by key and field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from dcr_store.errors import FormatError
from dcr_store.format import canonical, copies
from dcr_store.format.fields import MAX_VERSION, Fields
from dcr_store.format.names import KEY, STORE_KEY, VERSION, TransactionKeys
from dcr_store.format.paths import path_problem

FORMAT_VERSION: Final = (1, 0)
FEATURES: Final = frozenset({copies.FEATURE})
CODECS: Final = ("dcr.delta", "portable")
SPACES: Final = ("u8", "u16", "u32", "u64")
KINDS: Final = ("mask", "value", "present")
_FORMAT_VERSION: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object by key, content and nbytes."""

    key: str
    sha256: str
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"key": self.key, "sha256": self.sha256, "nbytes": self.nbytes}

    @classmethod
    def from_json(cls, fields: Fields) -> ObjectRef:
        """Parse; ``FormatError`` names the field."""
        key = fields.matching("key", KEY, "a key below the store's prefix")
        return cls(key, fields.hex("sha256", 64), fields.count("nbytes"))

    @classmethod
    def of(cls, key: str, data: bytes | bytearray | memoryview) -> ObjectRef:
        """Return the reference of `data` stored at `key`."""
        return cls(key, canonical.sha256(data), len(data))


@dataclass(frozen=True, slots=True)
class StoreDocument:
    """``dcr.json`` (§4).

    Attributes
    ----------
    is_copy : bool
        Whether the store is a copy of another one, and follows it until it is detached.
    """

    store_id: str
    codec: str
    chunk_elements: int
    created_at: str
    version: tuple[int, int] = FORMAT_VERSION
    is_copy: bool = False

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        source = canonical.encode(
            {
                "format": "dcr-store",
                "version": f"{self.version[0]}.{self.version[1]}",
                "store_id": self.store_id,
                "codec": self.codec,
                "chunk_elements": self.chunk_elements,
                "created_at": self.created_at,
                "features": [],
            }
        )
        return copies.copy_document(source) if self.is_copy else source

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreDocument:
        """Parse and apply the compatibility rules of §3."""
        fields = Fields(canonical.decode_object(data, STORE_KEY, "dcr-store"), STORE_KEY)
        text = fields.matching("version", _FORMAT_VERSION, "MAJOR.MINOR")
        major, _, minor = text.partition(".")
        if int(major) != FORMAT_VERSION[0]:
            raise FormatError(
                "the store has another major format version; use the dcr_store release that wrote it or a newer one",
                key=STORE_KEY,
                expected=f"{FORMAT_VERSION[0]}.x",
                found=text,
            )
        if unknown := sorted(set(fields.texts("features")) - FEATURES):
            raise FormatError(
                "the store needs features that this release does not know; upgrade dcr_store",
                key=STORE_KEY,
                expected=sorted(FEATURES),
                found=unknown,
            )
        codec, chunk_elements = fields.text("codec"), fields.count("chunk_elements")
        if codec not in CODECS:
            raise FormatError("unknown codec; upgrade dcr_store", key=STORE_KEY, expected=CODECS, found=codec)
        if not 64 <= chunk_elements <= 1 << 24 or chunk_elements & (chunk_elements - 1):
            raise FormatError(
                "chunk_elements is wrong", key=STORE_KEY, expected="a power of two, 64 to 2^24", found=chunk_elements
            )
        copies.chain_sha256(data)
        return cls(
            fields.hex("store_id", 32),
            codec,
            chunk_elements,
            fields.time("created_at"),
            (int(major), int(minor)),
            copies.is_copy(fields.document),
        )

    def check_writable(self) -> None:
        """Refuse to write into a store of a newer minor version."""
        if self.version > FORMAT_VERSION:
            raise FormatError(
                "the store has a newer minor format version, which this release only reads; upgrade dcr_store",
                key=STORE_KEY,
                expected=f"at most {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}",
                found=f"{self.version[0]}.{self.version[1]}",
            )


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition entry (§8): one stored Zarr shard of one array of one incarnation of a writer."""

    array: str
    index: int
    incarnation: str
    nbytes: int
    sha256: str
    chunks: int

    def ref(self, keys: TransactionKeys, writer: str) -> ObjectRef:
        """Return the shard as an object, in the transaction of the writer."""
        return ObjectRef(keys.partition(writer, self.incarnation, self.array, self.index), self.sha256, self.nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "array": self.array,
            "index": self.index,
            "incarnation": self.incarnation,
            "nbytes": self.nbytes,
            "sha256": self.sha256,
            "chunks": self.chunks,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> Partition:
        """Parse; ``FormatError`` names the field."""
        return cls(
            check_array(fields.text("array"), fields.key),
            fields.count("index"),
            fields.hex("incarnation", 16),
            fields.count("nbytes", 1),
            fields.hex("sha256", 64),
            fields.count("chunks", 1),
        )


def check_array(name: str, key: str) -> str:
    """Return `name` if it is ``<space>/<kind>``."""
    space, _, kind = name.partition("/")
    if space not in SPACES or kind not in KINDS:
        raise FormatError("unknown array", key=key, expected="<space>/<mask|value|present>", found=name)
    return name


@dataclass(frozen=True, slots=True)
class Array:
    """One Zarr array of a seal (§6.1, §8). Lengths are in elements."""

    array: str
    shape: int
    chunk: int
    shard: int
    codec: str
    zarr: ObjectRef

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "array": self.array,
            "shape": self.shape,
            "chunk": self.chunk,
            "shard": self.shard,
            "codec": self.codec,
            "zarr": self.zarr.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> Array:
        """Parse; ``FormatError`` names the field."""
        array = cls(
            check_array(fields.text("array"), fields.key),
            fields.count("shape", 1),
            fields.count("chunk", 1),
            fields.count("shard", 1),
            fields.text("codec"),
            ObjectRef.from_json(fields.object("zarr")),
        )
        if array.codec not in CODECS:
            raise FormatError(
                "unknown array codec; upgrade dcr_store", key=fields.key, expected=CODECS, found=array.codec
            )
        if array.shard % array.chunk:
            raise FormatError(
                "the shard is no multiple of the chunk",
                key=fields.key,
                expected=f"k * {array.chunk}",
                found=array.shard,
            )
        return array


@dataclass(frozen=True, slots=True)
class Seal:
    """A writer's statement that its part of an attempt is complete and durable (§8)."""

    arrays: tuple[Array, ...]
    partitions: tuple[Partition, ...]
    contributions: ObjectRef
    journal: tuple[ObjectRef, ...]
    files: tuple[ObjectRef, ...]
    changed: int
    ownership: ObjectRef | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "arrays": [array.to_json() for array in self.arrays],
            "partitions": [partition.to_json() for partition in self.partitions],
            "contributions": self.contributions.to_json(),
            "journal": [ref.to_json() for ref in self.journal],
            "files": [ref.to_json() for ref in self.files],
            "ownership": None if self.ownership is None else self.ownership.to_json(),
            "counts": {"changed": self.changed},
        }

    @classmethod
    def from_json(cls, fields: Fields) -> Seal:
        """Parse; ``FormatError`` names the field."""
        ownership = fields.optional_object("ownership")
        arrays = tuple(Array.from_json(item) for item in fields.objects("arrays"))
        names = [array.array for array in arrays]
        if len(set(names)) != len(names):
            raise FormatError("the seal names an array twice", key=fields.key, expected="each once", found=names)
        return cls(
            arrays,
            tuple(Partition.from_json(item) for item in fields.objects("partitions")),
            ObjectRef.from_json(fields.object("contributions")),
            tuple(ObjectRef.from_json(item) for item in fields.objects("journal")),
            tuple(ObjectRef.from_json(item) for item in fields.objects("files")),
            fields.object("counts").count("changed"),
            None if ownership is None else ObjectRef.from_json(ownership),
        )


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry of a writer's journal (§8); the last one of an incarnation carries the seal."""

    line: str
    txid: str
    attempt: int
    writer: str
    incarnation: str
    seq: int
    prev: str | None
    partitions: tuple[Partition, ...]
    seal: Seal | None = None

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode(
            {
                "format": "dcr-journal",
                "line": self.line,
                "txid": self.txid,
                "attempt": self.attempt,
                "writer": self.writer,
                "incarnation": self.incarnation,
                "seq": self.seq,
                "prev": self.prev,
                "partitions": [partition.to_json() for partition in self.partitions],
                "seal": None if self.seal is None else self.seal.to_json(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> JournalEntry:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, "dcr-journal"), key)
        seal = fields.optional_object("seal")
        return cls(
            fields.line(),
            fields.hex("txid", 32),
            fields.count("attempt"),
            fields.writer(),
            fields.hex("incarnation", 16),
            fields.count("seq"),
            fields.optional_hex("prev", 64),
            tuple(Partition.from_json(item) for item in fields.objects("partitions")),
            None if seal is None else Seal.from_json(seal),
        )


@dataclass(frozen=True, slots=True)
class SealRef:
    """Which seal of which writer counts."""

    writer: str
    incarnation: str
    ref: ObjectRef

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"writer": self.writer, "incarnation": self.incarnation, **self.ref.to_json()}

    @classmethod
    def from_json(cls, fields: Fields) -> SealRef:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.writer(), fields.hex("incarnation", 16), ObjectRef.from_json(fields))


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of the published checkpoint.

    Attributes
    ----------
    path : str
        Relative, ``/``-separated, checked.
    kind : str
        ``weights`` (`ref` is the safetensors header, `nbytes` that of the whole file) or ``side`` (`ref` is the file).
    """

    path: str
    kind: str
    ref: ObjectRef
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        if self.kind == "weights":
            return {"path": self.path, "kind": self.kind, "header": self.ref.to_json(), "nbytes": self.nbytes}
        return {"path": self.path, "kind": self.kind, "object": self.ref.to_json()}

    @classmethod
    def from_json(cls, fields: Fields) -> CheckpointFile:
        """Parse; ``FormatError`` names the field."""
        path, kind = check_path(fields.text("path"), fields.key), fields.text("kind")
        if kind == "weights":
            return cls(path, kind, ObjectRef.from_json(fields.object("header")), fields.count("nbytes"))
        if kind == "side":
            ref = ObjectRef.from_json(fields.object("object"))
            return cls(path, kind, ref, ref.nbytes)
        raise FormatError("unknown kind of file", key=fields.key, expected="weights or side", found=kind)


def check_path(path: str, key: str) -> str:
    """Return `path` if a checkout may write it, else raise ``FormatError`` (§8)."""
    problem = path_problem(path)
    if problem is not None:
        raise FormatError(
            f"holds a path that leaves the checkpoint: {problem}",
            key=key,
            expected="a plain relative path",
            found=repr(path)[:200],
        )
    return path


@dataclass(frozen=True, slots=True)
class Digests:
    """Where the digest table of a space is (§7)."""

    zarr: ObjectRef
    table: ObjectRef


@dataclass(frozen=True, slots=True)
class Counts:
    """What a version holds and costs (§8). ``nbytes`` is of stored objects."""

    changed: int
    elements: int
    nbytes: int
    partitions: int
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "changed": self.changed,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "partitions": self.partitions,
            "tensors": self.tensors,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> Counts:
        """Parse; ``FormatError`` names the field."""
        return cls(*(fields.count(name) for name in ("changed", "elements", "nbytes", "partitions", "tensors")))


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a delta is against, by name and content."""

    version: str
    root: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"version": self.version, "root": self.root}

    @classmethod
    def from_json(cls, fields: Fields | None) -> Base | None:
        """Parse; None stays None."""
        if fields is None:
            return None
        return cls(fields.matching("version", VERSION, "line@number"), fields.hex("root", 64))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a committed version consists of (§8)."""

    line: str
    version: int
    txid: str
    attempt: int
    layout: str
    base: Base | None
    root: str
    created_at: str
    seals: tuple[SealRef, ...]
    digests: dict[str, Digests]
    files: tuple[CheckpointFile, ...]
    counts: Counts = field(default_factory=lambda: Counts(0, 0, 0, 0, 0))

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode(
            {
                "format": "dcr-manifest",
                "line": self.line,
                "version": self.version,
                "txid": self.txid,
                "attempt": self.attempt,
                "layout": self.layout,
                "base": None if self.base is None else self.base.to_json(),
                "root": self.root,
                "created_at": self.created_at,
                "seals": [seal.to_json() for seal in self.seals],
                "digests": {
                    space: {"zarr": item.zarr.to_json(), "table": item.table.to_json()}
                    for space, item in self.digests.items()
                },
                "files": [file.to_json() for file in self.files],
                "counts": self.counts.to_json(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Manifest:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, "dcr-manifest"), key)
        digests = fields.object("digests")
        files = tuple(CheckpointFile.from_json(item) for item in fields.objects("files"))
        if len({file.path for file in files}) != len(files):
            raise FormatError("names a file twice", key=key, expected="unique paths", found=[f.path for f in files])
        if unknown := sorted(set(digests.document) - set(SPACES)):
            raise FormatError("has digests of unknown spaces", key=key, expected=SPACES, found=unknown)
        if not fields.array("seals"):
            raise FormatError("names no seal", key=key, expected="at least one", found=0)
        return cls(
            fields.line(),
            fields.count("version", 0, MAX_VERSION),
            fields.hex("txid", 32),
            fields.count("attempt"),
            fields.hex("layout", 64),
            Base.from_json(fields.optional_object("base")),
            fields.hex("root", 64),
            fields.time("created_at"),
            tuple(SealRef.from_json(item) for item in fields.objects("seals")),
            {
                space: Digests(
                    ObjectRef.from_json(digests.object(space).object("zarr")),
                    ObjectRef.from_json(digests.object(space).object("table")),
                )
                for space in digests.document
            },
            files,
            Counts.from_json(fields.object("counts")),
        )
