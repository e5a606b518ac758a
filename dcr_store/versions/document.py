"""The document with which a store begins, and the hash with which its logs do. Refuses a place without one."""

from __future__ import annotations

from dcr_store.errors import NotFoundError
from dcr_store.format.copies import chain_sha256
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.ports import ObjectStore


def read_document(objects: ObjectStore) -> tuple[StoreDocument, str]:
    """Return ``dcr.json``, and the SHA-256 with which the hash chains of the logs start.

    Raises
    ------
    NotFoundError
        If there is none.
    FormatError
        If it is of another format version, or no store's.
    """
    try:
        data = objects.get(STORE_KEY)
    except NotFoundError as error:
        raise NotFoundError("there is no store here; create one with: dcr init STORE", key=objects.url) from error
    return StoreDocument.from_bytes(data), chain_sha256(data)
