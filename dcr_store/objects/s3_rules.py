"""What a bucket's configuration does to a store: lifecycle rules, versioning.

Refuses a bucket that expires objects of the store: a log that loses a record frees its number. Servers that do not know
these calls have no such rules.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import StorageError
from dcr_store.objects.s3_errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcr_store.objects.s3 import S3Objects

_ARCHIVES: Final = {"GLACIER", "DEEP_ARCHIVE"}  # whose objects cannot be read without being restored
_DENIED: Final = {"AccessDenied", "403"}


def check_rules(objects: S3Objects) -> None:
    """Raise ``StorageError`` if the bucket expires objects of the store; warn of what else a user should know."""
    rules = _configuration(objects, "get_bucket_lifecycle_configuration", "s3:GetLifecycleConfiguration")
    for name, harm in harmful(rules.get("Rules", ()), objects.prefix):
        if harm == "expires":
            raise StorageError(
                f"lifecycle rule {name!r} of bucket {objects.bucket} expires objects under {objects.prefix!r}, and a "
                "store that loses objects is lost: limit the rule to other prefixes, or put the store elsewhere",
                key=objects.url,
            )
        warnings.warn(
            f"lifecycle rule {name!r} of bucket {objects.bucket} archives objects of {objects.url}, which then cannot "
            "be read until they are restored: limit it to other prefixes",
            stacklevel=3,
        )
    if _configuration(objects, "get_bucket_versioning", "s3:GetBucketVersioning").get("Status") == "Enabled":
        warnings.warn(
            f"bucket {objects.bucket} keeps versions: harmless, but what {objects.url} deletes takes up space until "
            "a lifecycle rule expires noncurrent versions",
            stacklevel=3,
        )


def harmful(rules: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the id of each rule that touches current objects under `prefix`, with "expires" or "archives".

    Parameters
    ----------
    rules : sequence of mapping
        As ``GetBucketLifecycleConfiguration`` returns them.
    prefix : str
        Of the store; empty, or ending in ``/``.
    """
    for rule in rules:
        scope = rule.get("Filter") or {}
        scope = {**scope, **scope.get("And", {})}
        ruled = scope.get("Prefix") or rule.get("Prefix") or ""
        tagged = "Tag" in scope or scope.get("Tags")  # objects of a store carry no tags
        if rule.get("Status") != "Enabled" or tagged or not (ruled.startswith(prefix) or prefix.startswith(ruled)):
            continue
        expiration = rule.get("Expiration") or {}
        if "Days" in expiration or "Date" in expiration:
            yield rule.get("ID", ""), "expires"
        elif any(step.get("StorageClass") in _ARCHIVES for step in rule.get("Transitions", ())):
            yield rule.get("ID", ""), "archives"


def _configuration(objects: S3Objects, operation: str, permission: str) -> Mapping[str, Any]:
    """Return the answer of a bucket configuration call, or nothing where there is none to be had."""
    try:
        return objects.call(operation, "", operation)
    except RefusedError as error:
        if error.code in _DENIED:
            warnings.warn(
                f"could not look for rules that expire objects of {objects.url} ({permission} denied): make sure that "
                "there are none",
                stacklevel=4,
            )
        return {}
