"""How versions are named: ``main@42``, ``main@tag``, ``main``, the prefix of a root, the stamp ``main@42#root``.

Refuses a reference that is ambiguous or names nothing, saying what there is.
"""

from __future__ import annotations

import contextlib

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.format.marks import Named
from dcr_store.format.names import VersionRef, tag_key, version_name, version_number
from dcr_store.versions.lines import Lines, Located


class References(Lines):
    """The lines of one store, and what names their versions."""

    def resolve(self, reference: str) -> Located:
        """Return the version that ``main@42``, ``main@tag``, ``main``, a root's prefix or ``main@42#root`` names.

        Raises
        ------
        InvalidInputError
            If `reference` is none of these, or a prefix of several roots.
        NotFoundError
            If there is no such version.
        """
        ref = VersionRef.parse(reference)
        if ref.root_prefix is not None and ref.number is None:
            found = self.find_root(ref.root_prefix)
            if len({located.row.root for located in found}) > 1:
                names = ", ".join(f"{located.name} {located.row.root[:16]}" for located in found[:5])
                raise InvalidInputError(f"the root prefix {reference} is ambiguous: {names}; give more digits")
            if found:
                return found[0]
            if reference not in self.lines():
                raise NotFoundError(f"no version has a root that begins with {reference}", key=reference)
        assert ref.line is not None
        log = self.fresh(ref.line)
        head = log.state.head
        assert head is not None
        tag = None if ref.tag is None else self.tag(ref.line, ref.tag)
        number = ref.number if tag is None else version_number(tag.version)
        row = head if number is None else self.row(ref.line, number)
        if row is None:
            raise NotFoundError(
                f"no such version; the head of {ref.line} is {version_name(ref.line, head.version)}", key=reference
            )
        if ref.number is not None and not row.root.startswith(ref.root_prefix or ""):
            raise NotFoundError(
                "the version has another root than the stamp says: it is of another store, or of one that was set back",
                key=f"{ref.line}@{number}",
                expected=ref.root_prefix,
                found=row.root,
            )
        if tag is not None and row.root != tag.root:
            raise IntegrityError(
                "the version has another root than its tag says: the store was set back, or the tag is damaged",
                key=tag_key(ref.line, tag.name),
                expected=tag.root,
                found=row.root,
            )
        return Located(ref.line, row)

    def tag(self, line: str, name: str) -> Named:
        """Return a tag of a line; ``NotFoundError`` if there is none of the name."""
        try:
            data = self.objects.get(tag_key(line, name))
        except NotFoundError as error:
            raise NotFoundError(f"the line {line} has no tag {name}", key=f"{line}@{name}") from error
        tag = Named.from_bytes("tag", data, tag_key(line, name))
        tag.check_key(tag_key(line, name))
        return tag

    def known(self, name: str) -> Located | None:
        """Return the version that ``line@number`` names if its log has been read that far; asks nobody for more of it.

        Raises
        ------
        InvalidInputError
            If `name` names no version.
        """
        ref = VersionRef.parse(name)
        if ref.line is None or ref.number is None:
            return None
        row = self.row(ref.line, ref.number)
        return None if row is None else Located(ref.line, row)

    def find(self, name: str, root: str | None) -> Located | None:
        """Return the version of that name if it is the one with that root, else another one with the root, or None.

        In a store that was restored from a copy, another version has taken the number.
        """
        with contextlib.suppress(NotFoundError, InvalidInputError):
            found = self.known(name) or self.resolve(name)
            if root in (None, found.row.root):
                return found
        return None if root is None else next(iter(self.find_root(root)), None)

    def find_root(self, prefix: str) -> list[Located]:
        """Return all versions, newest first per line, whose state root begins with `prefix`."""
        found = []
        for line in self.lines():
            log = self.log(line)
            log.refresh()
            found += [Located(line, row) for row in reversed(log.rows()) if row.root.startswith(prefix)]
        return found
