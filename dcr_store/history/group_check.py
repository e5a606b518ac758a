"""Check the groups of a store: each log from its first record, the versions it names, the acknowledgements it rests on.

Lists problems instead of raising. Acknowledgements that no promotion names are left alone: they decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dcr_store.errors import DcrError, IntegrityError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.groups import Ack, GroupVersion, Promote, Propose, VersionRoot
from dcr_store.format.names import VERSION, group_checkpoint_key, group_record_key
from dcr_store.history.report import Problem
from dcr_store.log.group import read_checkpoint
from dcr_store.versions.catalog import Catalog


@dataclass(slots=True)
class GroupCheck:
    """What is wrong with a group. ``sizes`` holds the nbytes of its objects, ``read`` the keys of those read."""

    problems: list[Problem] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)


def check_group_log(catalog: Catalog, group: str) -> GroupCheck:
    """Read and check what is below ``groups/<group>/``."""
    result = GroupCheck(sizes=catalog.objects.list(f"groups/{group}/"))
    log = catalog.group_log(group)
    n_records, proposal = 0, 0
    promoted: list[tuple[Promote, GroupVersion]] = []
    try:
        for record, data in log.records():
            key = group_record_key(group, n_records)
            n_records += 1
            result.sizes[key] = len(data)
            result.read.add(key)
            if isinstance(record, Propose):
                proposal = record.seq
                _check_version(catalog, record.new, key, result)
            elif isinstance(record, Promote):
                promoted.append((record, GroupVersion(record.new.version, record.new.root, proposal)))
    except StorageError:
        raise
    except DcrError as error:
        result.problems.append(Problem.of(error, group_record_key(group, n_records)))
        return result
    for record, version in promoted:
        _check_acks(catalog, record, version, result, is_active=record is promoted[-1][0])
    _check_end(catalog, group, n_records, result)
    return result


def _check_end(catalog: Catalog, group: str, n_records: int, result: GroupCheck) -> None:
    """Check that nothing that was once there comes after the last record that is there."""
    checkpoint = read_checkpoint(catalog.objects, group, catalog.store_sha256)
    key = group_checkpoint_key(group)
    if key in result.sizes:
        result.read.add(key)
        if checkpoint is None:
            message = "the group's checkpoint cannot be used; delete it, it is derived"
            result.problems.append(Problem(key, message, "a checkpoint of this group", "something else"))
    beyond = [key for key in result.sizes if key > group_record_key(group, n_records) and "/log/0" in key]
    length = max(0 if checkpoint is None else checkpoint.length, n_records + len(beyond))
    if length > n_records:
        message = "the group record is missing; restore it from a copy of the store"
        result.problems.append(Problem(group_record_key(group, n_records), message, f"{length} records", "nothing"))


def _check_version(catalog: Catalog, new: VersionRoot, key: str, result: GroupCheck) -> None:
    match = VERSION.fullmatch(new.version)
    assert match is not None
    log = catalog.log(match[1])
    log.refresh()
    row = log.row(int(match[2]))
    if row is None or row.root != new.root:
        message = f"the group was proposed {new.version}, which its line does not have; withdraw it if it stands"
        found = "no such version" if row is None else f"root {row.root}"
        result.problems.append(Problem(key, message, f"root {new.root}", found))


def _check_acks(
    catalog: Catalog, record: Promote, promoted: GroupVersion, result: GroupCheck, *, is_active: bool
) -> None:
    """Check what a promotion rests on; of a version that is not active any more it may have been collected."""
    for ref in record.acks:
        ack = Ack("prepared", record.group, ref.name, ref.incarnation, promoted)
        try:
            data = catalog.objects.get(ack.key)
            canonical.check_sha256(data, ref.sha256, ack.key)
            found = Ack.from_bytes(data, ack.key)
            if not found.says_same(ack):
                raise IntegrityError(
                    "the acknowledgement says something else than its promotion needs",
                    key=ack.key,
                    expected=ack,
                    found=found,
                )
            result.read.add(ack.key)
        except StorageError:
            raise
        except NotFoundError as error:
            if is_active:
                result.problems.append(Problem.of(error, ack.key))
        except DcrError as error:
            result.problems.append(Problem.of(error, ack.key))
