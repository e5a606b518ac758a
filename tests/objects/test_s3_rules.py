"""Which lifecycle rules harm a store."""

from __future__ import annotations

from typing import Any

import pytest

from dcr_store.objects.s3_rules import harmful

DAYS = {"Expiration": {"Days": 30}}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "whole bucket": ({"Filter": {}, **DAYS}, "expires"),
    "no filter": ({**DAYS}, "expires"),
    "old form": ({"Prefix": "runs/", **DAYS}, "expires"),
    "old form elsewhere": ({"Prefix": "tmp/", **DAYS}, None),
    "the store": ({"Filter": {"Prefix": "runs/a/"}, **DAYS}, "expires"),
    "within the store": ({"Filter": {"Prefix": "runs/a/log/"}, **DAYS}, "expires"),
    "around the store": ({"Filter": {"Prefix": "ru"}, **DAYS}, "expires"),
    "a neighbour": ({"Filter": {"Prefix": "runs/ab"}, **DAYS}, None),
    "by date": ({"Filter": {"Prefix": ""}, "Expiration": {"Date": "2030-01-01"}}, "expires"),
    "by size": ({"Filter": {"And": {"Prefix": "runs/", "ObjectSizeGreaterThan": 9}}, **DAYS}, "expires"),
    "by tag": ({"Filter": {"Tag": {"Key": "a", "Value": "b"}}, **DAYS}, None),
    "by tags": ({"Filter": {"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "b"}]}}, **DAYS}, None),
    "disabled": ({"Status": "Disabled", "Filter": {}, **DAYS}, None),
    "delete markers": ({"Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}}, None),
    "noncurrent": ({"Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}, None),
    "multipart": ({"Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}, None),
    "archive": ({"Filter": {}, "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}, "archives"),
    "cheaper class": ({"Filter": {}, "Transitions": [{"Days": 1, "StorageClass": "STANDARD_IA"}]}, None),
}


@pytest.mark.parametrize(("rule", "harm"), CASES.values(), ids=CASES.keys())
def test_harmful_rules(rule: dict[str, Any], harm: str | None) -> None:
    rules = [{"ID": "r", "Status": "Enabled", **rule}]
    assert list(harmful(rules, "runs/a/")) == ([("r", harm)] if harm else [])
