"""ApiVersions: which APIs and versions the listener serves."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from logstore.kafka.apis import APIS
from logstore.kafka.calls import Call
from logstore.kafka.protocol.errors import ErrorCode

__all__ = ["api_versions", "unsupported"]


class Feature(NamedTuple):
    """A feature that clients look for before they use a new flow (KIP-584)."""

    name: str
    first: int  # level that the listener could be set to
    last: int
    level: int  # that is in force


TRANSACTIONS = "transaction.version"
FEATURES = (
    Feature("group.version", 0, 1, 1),  # KIP-848: groups of the consumer protocol
    # KIP-890: Produce adds partitions to a transaction, and each transaction has its own epoch.
    Feature(TRANSACTIONS, 0, 2, 2),
)
FEATURES_EPOCH = 0  # counts changes of the levels; a client ignores the levels of a negative one

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def api_versions(call: Call) -> dict[str, Any]:
    """Answer with the table of APIs."""
    if call.version >= 3:
        name = call.body["client_software_name"]
        version = call.body["client_software_version"]
        if not _SOFTWARE.fullmatch(name) or not _SOFTWARE.fullmatch(version):
            return {"error_code": ErrorCode.INVALID_REQUEST}
        call.connection.software = f"{name[:50]} {version[:50]}"
    return {
        "api_keys": [_row(key) for key in sorted(APIS)],
        # Clients of version 3 refuse a feature that can be at level 0, as of a broker.
        "supported_features": [
            {"name": each.name, "min_version": each.first, "max_version": each.last}
            for each in FEATURES
            if each.first > 0 or call.version >= 4
        ],
        "finalized_features_epoch": FEATURES_EPOCH,
        "finalized_features": [
            {"name": each.name, "min_version_level": each.level, "max_version_level": each.level}
            for each in FEATURES
            # In a cluster the coordinator of a transaction may be another node: clients add
            # partitions there themselves.
            if call.broker.node is None or each.name != TRANSACTIONS
        ],
    }


def unsupported() -> dict[str, Any]:
    """Answer a version of ApiVersions that is not served; the answer has the form of version 0."""
    return {"error_code": ErrorCode.UNSUPPORTED_VERSION, "api_keys": [_row(18)]}


def _row(key: int) -> dict[str, int]:
    first, last = APIS[key].versions
    return {"api_key": key, "min_version": first, "max_version": last}
