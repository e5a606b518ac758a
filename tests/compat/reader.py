"""A second reader of dcr_store format 1, written from docs/spec/v1.md alone. Imports nothing of dcr_store.

``read_store(directory)`` reads every version of every line, checks all that the document lets a reader check, and
returns what it found as one JSON-like dict; as a script it prints that for a directory. Section numbers are the spec's.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from zarr.core.buffer import default_buffer_prototype

Bits = np.ndarray[Any, Any]
Document = dict[str, Any]
Arrays = dict[str, Bits]  # of one writer, dense, by name
Contributions = dict[str, dict[int, list[int]]]  # of one writer, by space and chunk
Owned = dict[str, Bits] | None  # of one writer, by space: which elements; None where it is not recorded
State = dict[str, Bits]  # by space, padded with zeros to whole chunks
WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
ABSENT = 2**64 - 1
# §5: bits of a value and its space.
DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), (8, "u8")),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), (6, "u8")),
    "F4": (4, "u8"),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), (16, "u16")),
    **dict.fromkeys(("F32", "U32", "I32"), (32, "u32")),
    **dict.fromkeys(("F64", "U64", "I64", "C64"), (64, "u64")),
    "C128": (128, "u64"),
}
# §10: what of a begin stands in an open transaction, and of a commit in a row.
OPEN_FIELDS = ("txid", "owner", "version", "base", "layout", "writers", "message", "metadata", "seq", "created_at")
ROW_FIELDS = ("version", "seq", "txid", "attempt", "base", "layout", "root", "manifest", "counts", "created_at")


def require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


# ---------------------------------------------------------------------------------------------- §3 documents


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse_json(data: bytes) -> Document:
    def unique(pairs: list[tuple[str, Any]]) -> Document:
        require(len(dict(pairs)) == len(pairs), "duplicate key in a document")
        return dict(pairs)

    document: Document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    return document


def parse(data: bytes, document_format: str) -> Document:
    document = parse_json(data)
    require(document["format"] == document_format, f"foreign document {document.get('format')}")
    # Numbers with fraction or exponent may have other forms in stores that others wrote; the golden ones have Python's.
    require(canonical(document) == data, "a document is not canonical")
    return document


def parse_derived(data: bytes, document_format: str) -> Document:
    """§10: the body of a hint or checkpoint, whose SHA-256 is of its own bytes as they stand in the document."""
    require(data.startswith(b'{"body":') and data[-77:-66] == b',"sha256":"' and data.endswith(b'"}'), "not derived")
    require(sha256(data[8:-77]).encode() == data[-66:-2], "a derived document is damaged")
    return parse(data[8:-77], document_format)


# ---------------------------------------------------------------------------------------------- §7 digests


def reflected_table(polynomial: int, bits: int) -> list[int]:
    reversed_polynomial = int(f"{polynomial:0{bits}b}"[::-1], 2)
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (reversed_polynomial if value & 1 else 0)
        table.append(value)
    return table


CRC64_TABLE = reflected_table(0xAD93D23594C93659, 64)
CRC32C_TABLE = reflected_table(0x1EDC6F41, 32)


def crc(data: bytes, table: list[int], bits: int) -> int:
    ones = (1 << bits) - 1
    value = ones
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 255]
    return value ^ ones


def digest(elements: Bits) -> int:
    return crc(elements.tobytes(), CRC64_TABLE, 64)


def linear(elements: Bits) -> int:
    return digest(elements) ^ digest(np.zeros_like(elements))


# ---------------------------------------------------------------------------------------------- §6.2 chunks


class Body:
    """What stands behind the header of an encoded chunk."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data, self.offset = data, offset
        self.codings: set[int] = set()

    def take(self, n: int) -> bytes:
        require(0 <= n <= len(self.data) - self.offset, "a chunk ends early")
        self.offset += n
        return self.data[self.offset - n : self.offset]

    def integer(self) -> int:
        value = 0
        for place in range(5):
            byte = self.take(1)[0]
            value |= (byte & 127) << (7 * place)
            if byte < 128:
                require(byte or not place, "LEB128 is not in its shortest form")
                return value
        raise ValueError("LEB128 is too long")

    def stream(self, least: int, most: int | None = None) -> Bits:
        coding = self.take(1)[0]
        length, stored = self.integer(), self.integer()
        require(least <= length <= (least if most is None else most), "a stream has another length")
        data = self.take(stored)
        if coding == 0:
            require(stored == length, "a stored stream has another length")
        elif coding == 1:
            require(length > 0, "an empty stream is stored")
            data = bytes(Zstd().decode(data))
            require(len(data) == length, "a zstd frame holds another length")
        else:
            require(coding == 2 and stored == 1 and length > 0, "unknown coding of a stream")
            data = data * length
        self.codings.add(coding)
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        require(self.offset == len(self.data), "a chunk has bytes left")


def bits_of(data: Bits, n: int) -> Bits:
    bits = np.unpackbits(data, bitorder="little")
    require(not bits[n:].any(), "unused bits are set")
    return bits[:n]


def from_planes(planes: list[Bits], w: int, rotation: int) -> Bits:
    """Join byte planes and undo the rotation to the left."""
    values: Bits = np.ascontiguousarray(np.stack(planes, axis=1)).view(f"<u{w}").reshape(-1)
    if rotation:
        values = values >> np.array(rotation, values.dtype) | values << np.array(8 * w - rotation, values.dtype)
    return values


def read_values(body: Body, n: int, w: int, mode: int, rotation: int) -> Bits:
    if mode == 0:
        values = from_planes([body.stream(n) for _ in range(w)], w, rotation)
    else:
        require(mode == 1, "unknown value mode")
        packed = body.stream(-(-n // 4))
        codes = np.stack([packed >> (2 * i) & 3 for i in range(4)], axis=1).reshape(-1)
        require(not codes[n:].any(), "unused bits are set")
        codes = codes[:n]
        n_escapes = int(np.count_nonzero(codes == 3))
        values = np.array([1, 3, 7, 0], f"<u{w}")[codes]
        values[codes == 3] = from_planes([body.stream(n_escapes) for _ in range(w)], w, rotation)
    require(values.all(), "a value is zero")
    return values


def read_gaps(body: Body, n: int, k: int, n_elements: int) -> Bits:
    highs, carried = [], 0
    for byte in body.stream(n, n_elements).tolist():
        carried += byte
        if byte < 255:
            highs.append(carried << k)
            carried = 0
    require(carried == 0 and len(highs) == n, "another number of gaps")
    gaps = np.array(highs, np.int64)
    if k:
        low = body.stream(k * -(-n // 8)).reshape(k, -1)
        for plane in range(k):
            gaps |= bits_of(low[plane], n).astype(np.int64) << plane
    positions = np.cumsum(gaps + 1) - 1
    require(positions[-1] < n_elements, "a position is past the end")
    return positions


def decode_chunk(data: bytes, w: int, n_elements: int, seen: set[tuple[str, int]] | None = None) -> Bits:
    """Return the elements of a chunk encoded as dcr.delta; `seen` collects methods, value modes and codings."""
    method, width, k, mode, n = struct.unpack_from("<BBBBI", data)
    require((width, n) == (w, n_elements) and len(data) <= 8 + w * n_elements, "a chunk of other elements")
    body, out = Body(data, 8), np.zeros(n, f"<u{w}")
    if method in (0, 1):
        require((k, mode) == (0, 0), "a header says too much")
        if method == 1:
            out = np.frombuffer(body.take(w * n), f"<u{w}").copy()
    elif method == 2:
        require(k < 8 * w and mode == 0, "a header is impossible")
        out = from_planes([body.stream(n) for _ in range(w)], w, k)
    elif method == 3:
        n_set = body.integer()
        require(1 <= n_set <= n and k <= 16, "a header is impossible")
        positions = read_gaps(body, n_set, k, n)
        out[positions] = read_values(body, n_set, w, mode, 0)
    else:
        require(method == 4 and k < 8 * w, "unknown method")
        n_set = body.integer()
        there = bits_of(body.stream(-(-n // 8)), n).astype(bool)
        require(1 <= n_set == np.count_nonzero(there), "another number of elements")
        out[there] = read_values(body, n_set, w, mode, k)
    body.end()
    if seen is not None:
        modes = {("mode", mode)} if method > 2 else set()
        seen |= {("method", method), *modes, *(("coding", coding) for coding in body.codings)}
    return out


# ---------------------------------------------------------------------------------------------- §6.1 arrays


def parse_partition(data: bytes, n_places: int) -> dict[int, bytes]:
    """Return place → encoded chunk of a partition."""
    index = data[len(data) - 16 * n_places - 4 : -4]
    require(len(index) == 16 * n_places, "a partition is too short")
    require(crc(index, CRC32C_TABLE, 32) == int.from_bytes(data[-4:], "little"), "the index of a partition is damaged")
    chunks = {}
    for place, (offset, nbytes) in enumerate(struct.iter_unpack("<QQ", index)):
        if (offset, nbytes) != (ABSENT, ABSENT):
            require(offset + nbytes <= len(data) - len(index) - 4, "a chunk lies outside of its partition")
            chunks[place] = data[offset : offset + nbytes]
    return chunks


def open_with_zarr(files: dict[str, bytes]) -> Any:
    """Return an array that zarr-python makes of objects by name."""
    buffers = {name: default_buffer_prototype().buffer.from_bytes(data) for name, data in files.items()}
    return zarr.open_array(zarr.storage.MemoryStore(buffers), mode="r")


def decode_array(
    description: Document,
    metadata: bytes,
    partitions: dict[int, bytes],
    *,
    through_zarr: bool,
    seen: set[tuple[str, int]] | None = None,
) -> Bits:
    """Return an array of a seal, dense and padded with zeros to whole chunks.

    `partitions` holds the verified objects by index.
    """
    space, kind = description["array"].split("/")
    width = 1 if kind == "present" else WIDTHS[space]
    n_elements, chunk, shard = description["shape"], description["chunk"], description["shard"]
    require(kind in ("mask", "value", "present") and shard % chunk == 0, "an array is impossible")
    dense = np.zeros(-(-n_elements // chunk) * chunk, f"<u{width}")
    if through_zarr:
        files = {f"c/{index}": data for index, data in partitions.items()}
        array = open_with_zarr({"zarr.json": metadata, **files})
        require((array.shape, array.chunks, array.shards) == ((n_elements,), (chunk,), (shard,)), "another zarr.json")
        require(array.dtype == dense.dtype and array.fill_value == 0, "another zarr.json")
        dense[:n_elements] = array[:]
        return dense
    require(description["codec"] == "dcr.delta", "unknown array codec")
    for index, data in partitions.items():
        for place, encoded in parse_partition(data, shard // chunk).items():
            start = index * shard + place * chunk
            require(start < len(dense), "a chunk is past the end")
            dense[start : start + chunk] = decode_chunk(encoded, width, chunk, seen)
    return dense


# ---------------------------------------------------------------------------------------------- §5 layout


class Layout:
    """The tensors, and where they are."""

    def __init__(self, data: bytes) -> None:
        document = parse(data, "dcr-layout")
        self.digest = sha256(data)
        self.lengths: dict[str, int] = {space: document["spaces"][space] for space in WIDTHS}
        self.tensors: dict[str, tuple[str, list[int], str, int, int]] = {}
        self.aliases: dict[str, str] = {}
        ends = dict.fromkeys(WIDTHS, 0)
        for tensor in document["tensors"]:
            bits, space = DTYPES[tensor["dtype"]]
            n_values = 1
            for dimension in tensor["shape"]:
                n_values *= dimension
            n_elements = -(-n_values * bits // (8 * WIDTHS[space]))
            require((tensor["space"], tensor["start"]) == (space, ends[space]), f"{tensor['name']} lies elsewhere")
            ends[space] = self.aligned(tensor["start"] + n_elements, space)
            place = (tensor["dtype"], tensor["shape"], space, tensor["start"], tensor["start"] + n_elements)
            for name in (tensor["name"], *tensor["aliases"]):
                require(name and "\0" not in name and name not in self.tensors, f"{name!r} is no name")
                self.tensors[name] = place
            self.aliases.update(dict.fromkeys(tensor["aliases"], tensor["name"]))
        require(ends == self.lengths, "a space has another length")

    @staticmethod
    def aligned(n_elements: int, space: str) -> int:
        step = 64 // WIDTHS[space]
        return -(-n_elements // step) * step

    def places(self, space: str) -> set[tuple[int, int]]:
        """Return where tensors of a space begin and end."""
        return {(start, stop) for _, _, where, start, stop in self.tensors.values() if where == space}

    def gaps(self, space: str, state: Bits) -> Bits:
        """Return a copy of a space's state with all tensors zeroed: what belongs to none."""
        rest = state.copy()
        for start, stop in self.places(space):
            rest[start:stop] = 0
        return rest


# ---------------------------------------------------------------------------------------------- §4, §8 to §11


class Reader:
    """A store in a directory."""

    def __init__(self, directory: str | Path, through_zarr: bool | None = None) -> None:
        self.root = Path(directory)
        data = self.get("dcr.json")
        document = parse(data, "dcr-store")
        require(document["version"].split(".")[0] == "1" and not document["features"], "another format version")
        self.store_sha256 = sha256(data)
        self.chunk, self.codec = document["chunk_elements"], document["codec"]
        require(self.codec in ("dcr.delta", "portable"), "unknown codec")
        self.through_zarr = self.codec == "portable" if through_zarr is None else through_zarr
        self.seen: set[tuple[str, int]] = set()
        self.fetched: dict[str, int] = {}
        self.owning: set[str] = set()  # keys of the ownership documents of the version read last

    def get(self, key: str) -> bytes:
        require(all(part not in ("", ".", "..") for part in key.split("/")), f"{key!r} is no key")
        return (self.root / key).read_bytes()

    def fetch(self, reference: Document) -> bytes:
        data = self.get(reference["key"])
        require(len(data) == reference["nbytes"], f"{reference['key']} has another length")
        require(sha256(data) == reference["sha256"], f"{reference['key']} is another object")
        self.fetched[reference["key"]] = len(data)
        return data

    # ------------------------------------------------------------------ §9 the log

    def read_log(self, line: str) -> tuple[list[Document], list[str], Document | None]:
        """Fold a line's records; return rows as §10 has them, the kinds of all records, and the open transaction."""
        rows: list[Document] = []
        kinds: list[str] = []
        prev = self.store_sha256
        pending: Document | None = None
        # Last hash, number of versions and open transaction, by length.
        prefixes: list[tuple[str, int, Document | None]] = [(prev, 0, None)]
        while (self.root / f"log/{line}/{len(kinds):020d}.json").exists():
            data = self.get(f"log/{line}/{len(kinds):020d}.json")
            record = parse(data, "dcr-log")
            require((record["line"], record["seq"], record["prev"]) == (line, len(kinds), prev), "a broken chain")
            head = rows[-1] if rows else None
            base = head and {"version": f"{line}@{head['version']}", "root": head["root"]}
            kind, prev = record["kind"], sha256(data)
            if kind == "begin":
                require(pending is None and record["version"] == len(rows) and record["base"] == base, "illegal begin")
                pending = {"attempt": 0, **{name: record[name] for name in OPEN_FIELDS}}
            else:
                if pending is None or record["txid"] != pending["txid"]:
                    raise ValueError(f"{kind} of no open transaction")
                if kind == "resume":
                    require(record["attempt"] == pending["attempt"] + 1, "illegal resume")
                    pending = {**pending, "attempt": record["attempt"], "owner": record["owner"]}
                elif kind == "commit":
                    expected = (pending["attempt"], pending["version"])
                    require((record["attempt"], record["version"]) == expected, "illegal commit")
                    require(record["base"] in (None, pending["base"]), "illegal commit")
                    told = {"message": pending["message"], "metadata": pending["metadata"]}
                    row = {name: record[name] for name in ROW_FIELDS}
                    rows.append({**row, **told, "record_sha256": prev, "begin_seq": pending["seq"], "began": pending})
                    pending = None
                else:
                    require(kind == "abort", f"unknown kind of record {kind}")
                    pending = None
            kinds.append(kind)
            prefixes.append((prev, len(rows), pending))
        self.check_derived(line, rows, prefixes)
        return rows, kinds, pending

    def check_derived(self, line: str, rows: list[Document], prefixes: list[tuple[str, int, Document | None]]) -> None:
        """§10: hint and checkpoints say what the records say."""
        hint = parse_derived(self.get(f"log/{line}/latest.json"), "dcr-log-hint")
        require(hint["line"] == line and prefixes[hint["length"]][0] == hint["last_sha256"], "the hint is wrong")
        found = sorted((self.root / f"log/{line}/checkpoints").glob("*.json"))
        require(hint["checkpoint"] == (int(found[-1].stem) if found else None), "the hint names another checkpoint")
        for path in found:
            body = parse_derived(self.get(f"log/{line}/checkpoints/{path.name}"), "dcr-log-checkpoint")
            last, n_rows, pending = prefixes[body["seq"]]
            require(int(path.stem) == body["seq"] and body["line"] == line, "a checkpoint lies elsewhere")
            require(body["store_sha256"] == self.store_sha256 and body["last_sha256"] == last, "a foreign checkpoint")
            require(body["segments"] == [] and body["open"] == pending, "a checkpoint is wrong")
            expected = [self.shortened(row) for row in rows[:n_rows]]
            require(body["rows"] == expected, "a checkpoint is wrong")
            require(body["head"] == (expected[-1] if expected else None), "a checkpoint is wrong")

    @staticmethod
    def shortened(row: Document) -> Document:
        nbytes = len(canonical([row["message"], row["metadata"]]))
        kept = {"message": None, "metadata": None} if nbytes > 1024 else {}
        return {name: value for name, value in {**row, **kept}.items() if name != "began"}

    # ------------------------------------------------------------------ §11 versions

    def read_version(self, line: str, row: Document, before: State | None) -> tuple[State, Document]:
        """Return the state of a version, given the one before (or None), its layout and its description."""
        manifest = parse(self.fetch(row["manifest"]), "dcr-manifest")
        self.fetched.clear()
        for name in ("version", "txid", "attempt", "layout", "base", "root", "counts"):
            require(manifest[name] == row[name], f"the manifest has another {name}")
        require(manifest["line"] == line, "the manifest is of another line")
        data = self.get(f"layouts/{row['layout']}.json")
        layout = Layout(data)
        require(layout.digest == row["layout"], "the layout is another document")
        base = self.zeros(layout)
        if row["base"] is not None:
            require(row["base"]["version"] == f"{line}@{row['version'] - 1}", "a base that is not the version before")
            if before is None:
                raise ValueError("there is no base")
            base = before
        prefix = f"versions/{line}/{row['version']:012d}-{row['txid']}/"
        require(row["manifest"]["key"] == f"{prefix}attempts/{row['attempt']}/manifest.json", "the manifest's key")
        former, self.owning = self.owning, set()
        writers = [self.read_writer(prefix, line, row, layout, reference) for reference in manifest["seals"]]
        earlier = {key for key in self.owning if not key.startswith(prefix)}
        require(earlier <= former if row["base"] else not earlier, "ownership that no seal of the base names")
        require(sorted(w["writer"] for w in manifest["seals"]) == sorted(row["began"]["writers"]), "other writers")
        state = self.apply(base, [arrays for arrays, _, _ in writers])
        self.check_contributions(base, writers)
        self.check_ownership(layout, writers)
        self.check_digests(layout, state, manifest)
        for space in WIDTHS:
            require(not layout.gaps(space, state[space]).any(), "elements of no tensor are not zero")
        n_changed = sum(int(np.count_nonzero(base[space] != state[space])) for space in WIDTHS)
        self.check_counts(row, layout, n_changed, prefix)
        tensors = {}
        for name, (dtype, shape, space, start, stop) in layout.tensors.items():
            tensors[name] = (dtype, shape, state[space][start:stop].tobytes())
        description = {
            "version": f"{line}@{row['version']}",
            "root": row["root"],
            "layout": row["layout"],
            "base": row["base"] and row["base"]["version"],
            "message": row["message"],
            "metadata": row["metadata"],
            "aliases": layout.aliases,
            "tensors": {
                name: {"dtype": dtype, "shape": shape, "sha256": sha256(data)}
                for name, (dtype, shape, data) in tensors.items()
            },
            "files": {
                file["path"]: {"nbytes": len(data), "sha256": sha256(data)}
                for file in manifest["files"]
                for data in [self.read_file(file, tensors)]
            },
        }
        require(len(description["files"]) == len(manifest["files"]), "two files of one path")
        return state, description

    def zeros(self, layout: Layout) -> State:
        return {
            space: np.zeros(-(-n // self.chunk) * self.chunk, f"<u{WIDTHS[space]}")
            for space, n in layout.lengths.items()
        }

    def read_writer(
        self, prefix: str, line: str, row: Document, layout: Layout, reference: Document
    ) -> tuple[Arrays, Contributions, Owned]:
        """§8: return a writer's dense arrays by name, its contributions by space, and what it owns."""
        entry = parse(self.fetch(reference), "dcr-journal")
        named = {"line": line, "txid": row["txid"], "attempt": row["attempt"]}
        named |= {name: reference[name] for name in ("writer", "incarnation")}
        require(all(entry[name] == value for name, value in named.items()), "a seal of something else")
        seal, writer = entry["seal"], reference["writer"]
        stem = f"{prefix}journal/{writer}.{reference['incarnation']}"
        require(reference["key"] == f"{stem}.{entry['seq']:06d}.json", "the seal's key")
        require(len(seal["journal"]) == entry["seq"], "the journal has another length")
        prev: str | None = None
        journaled: list[Document] = []
        for seq, earlier in enumerate(seal["journal"]):
            document = parse(self.fetch(earlier), "dcr-journal")
            require(earlier["key"] == f"{stem}.{seq:06d}.json" and document["seal"] is None, "a journal entry")
            require((document["prev"], document["seq"]) == (prev, seq), "a broken journal")
            journaled += document["partitions"]
            prev = earlier["sha256"]
        require(entry["prev"] == prev, "a broken journal")
        journaled += entry["partitions"]
        require(sorted(map(canonical, journaled)) == sorted(map(canonical, seal["partitions"])), "another journal")
        for file in seal["files"]:
            require(file["key"].endswith(f"/files/{file['sha256']}"), "a file's key")
            self.fetch(file)
        arrays: Arrays = {}
        for description in seal["arrays"]:
            name = description["array"]
            expected = (layout.lengths[name.split("/")[0]], self.chunk, self.codec)
            found = tuple(description[field] for field in ("shape", "chunk", "codec"))
            require(name not in arrays and found == expected, "an array of another layout")
            partitions: dict[int, bytes] = {}
            for item in seal["partitions"]:
                if item["array"] == name:
                    require(item["index"] not in partitions, "a partition is named twice")
                    key = f"{prefix}data/{writer}.{item['incarnation']}/{name}/c/{item['index']}"
                    partitions[item["index"]] = data = self.fetch({**item, "key": key})
                    chunks = parse_partition(data, description["shard"] // description["chunk"])
                    require(len(chunks) == item["chunks"], "a partition holds another number of chunks")
            arrays[name] = decode_array(
                description, self.fetch(description["zarr"]), partitions, through_zarr=self.through_zarr, seen=self.seen
            )
        require({item["array"] for item in seal["partitions"]} <= set(arrays), "a partition of no array")
        owned = None if seal["ownership"] is None else self.read_ownership(seal["ownership"], writer, layout)
        return arrays, self.read_contributions(seal["contributions"]), owned

    def read_ownership(self, reference: Document, writer: str, layout: Layout) -> Owned:
        """§8: return which elements a writer owns; its digests of them are checked."""
        document = parse(self.fetch(reference), "dcr-ownership")
        self.owning.add(reference["key"])
        require((document["writer"], document["layout"]) == (writer, layout.digest), "somebody else's ownership")
        owned = {space: bits.astype(bool) for space, bits in self.zeros(layout).items()}
        names = [tensor["name"] for tensor in document["tensors"]]
        require(names == sorted(set(names)) and not set(names) & set(layout.aliases), "tensors out of order")
        for tensor in document["tensors"]:
            _, _, space, start, stop = layout.tensors[tensor["name"]]
            for box in tensor["boxes"]:
                places = np.array([start + box["start"]])
                for n, stride in box["dims"]:
                    places = (places[:, None] + np.arange(n) * stride).ravel()
                require(places.max() < stop and len(set(places.tolist())) == len(places), "a box leaves its tensor")
                require(not owned[space][places].any(), "a writer owns an element twice")
                owned[space][places] = True
        for space, where in owned.items():
            ones = np.where(where, np.iinfo(f"<u{WIDTHS[space]}").max, 0).astype(f"<u{WIDTHS[space]}")
            chunks = [(i, part) for i, part in enumerate(ones.reshape(-1, self.chunk)) if part.any()]
            require(document["ones"][space] == [[i, f"{linear(part):016x}"] for i, part in chunks], "other ones")
        return owned

    def check_ownership(self, layout: Layout, writers: list[tuple[Arrays, Contributions, Owned]]) -> None:
        """§8: each element of a tensor is owned by one writer, who alone writes it."""
        recorded = [(arrays, owned) for arrays, _, owned in writers if owned is not None]
        require(len(recorded) in (0, len(writers)), "some writers do not say what they own")
        for space, bits in self.zeros(layout).items() if recorded else ():
            n_owners = sum(owned[space].astype(np.int64) for _, owned in recorded)
            require(not layout.gaps(space, np.asarray(n_owners)).any(), "somebody owns elements of no tensor")
            n_elements = sum(stop - start for start, stop in layout.places(space))
            require(np.max(n_owners, initial=0) <= 1 and np.sum(n_owners) == n_elements, "elements of no owner or two")
            for arrays, owned in recorded:
                written = arrays.get(f"{space}/mask", bits) != 0
                written |= arrays.get(f"{space}/present", bits) != 0
                require(not (written & ~owned[space]).any(), "a writer writes what it does not own")

    def read_contributions(self, reference: Document) -> Contributions:
        data = self.fetch(reference)
        require(data[:8] == b"dcrcont1", "no contributions")
        offset = 8
        tables: Contributions = {}
        for space in WIDTHS:
            (n_rows,) = struct.unpack_from("<Q", data, offset)
            rows = list(struct.iter_unpack("<4Q", data[offset + 8 : offset + 8 + 32 * n_rows]))
            require(len(rows) == n_rows and rows == sorted(rows), "contributions are cut off or out of order")
            tables[space] = {chunk: values for chunk, *values in rows}
            require(len(tables[space]) == n_rows, "a chunk contributes twice")
            offset += 8 + 32 * n_rows
        require(offset == len(data), "contributions have bytes left")
        return tables

    def apply(self, base: State, writers: list[Arrays]) -> State:
        """§6: ``(base ^ M)``, then V where P, each the union over writers."""
        state = {}
        for space, bits in base.items():
            none, absent = np.zeros_like(bits), np.zeros(len(bits), np.uint8)
            masks = [arrays.get(f"{space}/mask", none) for arrays in writers]
            present = [arrays.get(f"{space}/present", absent) != 0 for arrays in writers]
            values = [arrays.get(f"{space}/value", none) for arrays in writers]
            n_writers = sum((mask != 0).astype(int) + there for mask, there in zip(masks, present, strict=True))
            require(np.max(n_writers, initial=0) <= 1, "writers overlap, or a mask is set where a value is present")
            state[space] = bits.copy()
            for mask in masks:
                state[space] ^= mask
            for there, value in zip(present, values, strict=True):
                state[space] = np.where(there, value, state[space])
        return state

    def check_contributions(self, base: State, writers: list[tuple[Arrays, Contributions, Owned]]) -> None:
        """§8: each row is what its writer's arrays give; a chunk that a writer touches has one; all fit the base.

        Where a writer says what it owns, each chunk in which it owns anything has a row, touched or not.
        """
        for space, bits in base.items():
            total: dict[int, int] = {}
            for arrays, tables, owned in writers:
                mask = arrays.get(f"{space}/mask", np.zeros_like(bits))
                there = arrays.get(f"{space}/present", np.zeros(len(bits), np.uint8)) != 0
                value = arrays.get(f"{space}/value", np.zeros_like(bits))
                touched = mask | there if owned is None else owned[space]
                changes = np.where(there, bits ^ value, 0).astype(bits.dtype)
                for chunk in range(len(bits) // self.chunk):
                    part = slice(chunk * self.chunk, (chunk + 1) * self.chunk)
                    row = tables[space].get(chunk)
                    require((row is not None) == touched[part].any(), "a row of another chunk than those touched")
                    if row is not None:
                        require(row[:2] == [linear(mask[part]), linear(changes[part])], "a contribution is wrong")
                        if owned is not None:
                            mine = np.where(owned[space][part], bits[part], 0).astype(bits.dtype)
                            require(row[2] == linear(mine), "a contribution of another base")
                        total[chunk] = total.get(chunk, 0) ^ row[2]
                require(all(chunk < len(bits) // self.chunk for chunk in tables[space]), "a chunk past the end")
            for chunk, of_base in total.items():
                require(of_base == linear(bits[chunk * self.chunk : (chunk + 1) * self.chunk]), "another base")

    def check_digests(self, layout: Layout, state: State, manifest: Document) -> None:
        """§7: tables and root."""
        require(set(manifest["digests"]) == {s for s, n in layout.lengths.items() if n}, "tables of other spaces")
        root = hashlib.sha256(b"dcr-root-1" + bytes.fromhex(layout.digest))
        for space, length in layout.lengths.items():
            root.update(struct.pack("<QQ", length, self.chunk))
            if length:
                references = manifest["digests"][space]
                prefix = f"versions/{manifest['line']}/{manifest['version']:012d}-{manifest['txid']}/attempts/"
                prefix += f"{manifest['attempt']}/digests/{space}/"
                require(references["zarr"]["key"] == f"{prefix}zarr.json", "a table's key")
                require(references["table"]["key"] == f"{prefix}c/0", "a table's key")
                stored = self.fetch(references["table"])
                table = open_with_zarr({"zarr.json": self.fetch(references["zarr"]), "c/0": stored})[:]
                require(table.dtype == np.uint64 and table.astype("<u8").tobytes() == stored, "a table is no array")
                found = [digest(chunk) for chunk in state[space].reshape(-1, self.chunk)]
                require(found == table.tolist(), "the state has other digests")
                root.update(stored)
        require(root.hexdigest() == manifest["root"], "the state has another root")

    def check_counts(self, row: Document, layout: Layout, n_changed: int, prefix: str) -> None:
        """§8: counts; all that the manifest leads to has been fetched by now."""
        counts = row["counts"]
        names = [name for name in layout.tensors if name not in layout.aliases]
        n_elements = sum(layout.tensors[name][4] - layout.tensors[name][3] for name in names)
        require((counts["tensors"], counts["elements"]) == (len(names), n_elements), "counts of other tensors")
        require(counts["changed"] == (n_elements if row["base"] is None else n_changed), "another count of changes")
        ours = {key: nbytes for key, nbytes in self.fetched.items() if key.startswith(prefix)}
        require(counts["nbytes"] == sum(ours.values()), "another count of bytes")
        require(counts["partitions"] == sum("/c/" in key and "/data/" in key for key in ours), "count of partitions")

    def read_file(self, file: Document, tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
        """§8: a side file, or a header followed by the bytes of the tensors that it names."""
        require(all(part not in ("", ".", "..", ".dcr") for part in file["path"].split("/")), "a path leads elsewhere")
        if file["kind"] == "side":
            return self.fetch(file["object"])
        require(file["kind"] == "weights", "unknown kind of file")
        header = self.fetch(file["header"])
        require(int.from_bytes(header[:8], "little") == len(header) - 8, "a header has another length")
        pieces: list[tuple[int, int, bytes]] = []
        for name, item in parse_json(header[8:]).items():
            if name != "__metadata__":
                dtype, shape, data = tensors[name]
                require((item["dtype"], item["shape"]) == (dtype, shape), f"{name} is another tensor")
                require(item["data_offsets"][1] - item["data_offsets"][0] == len(data), f"{name} has another length")
                pieces.append((*item["data_offsets"], data))
        pieces.sort(key=lambda piece: piece[:2])
        data = header + b"".join(piece[2] for piece in pieces)
        require([p[0] for p in pieces] == [0, *(p[1] for p in pieces)][: len(pieces)], "a file with holes")
        require(len(data) == file["nbytes"], f"{file['path']} has another length")
        return data

    def read(self) -> Document:
        lines: dict[str, list[Document]] = {}
        records: dict[str, list[str]] = {}
        pending: dict[str, str | None] = {}
        for directory in sorted((self.root / "log").iterdir()):
            line, state = directory.name, None
            rows, records[line], still_open = self.read_log(line)
            pending[line] = None if still_open is None else still_open["txid"]
            lines[line] = []
            for row in rows:
                state, description = self.read_version(line, row, state)
                lines[line].append(description)
        return {"lines": lines, "records": records, "open": pending}


def read_store(directory: str | Path, through_zarr: bool | None = None) -> Document:
    """Return all that a store in a directory holds.

    `through_zarr` has zarr-python decode all arrays, not those of portable stores alone.
    """
    return Reader(directory, through_zarr).read()


if __name__ == "__main__":
    json.dump(read_store(sys.argv[1]), sys.stdout)
