"""ApiVersions: which APIs and versions the listener serves."""

from __future__ import annotations

import re
from typing import Any

from logstore.kafka.apis import APIS
from logstore.kafka.calls import Call
from logstore.kafka.errors import ErrorCode

__all__ = ["api_versions", "unsupported"]

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def api_versions(call: Call) -> dict[str, Any]:
    """Answer with the table of APIs."""
    if call.version >= 3:
        name = call.body["client_software_name"]
        version = call.body["client_software_version"]
        if not _SOFTWARE.fullmatch(name) or not _SOFTWARE.fullmatch(version):
            return {"error_code": ErrorCode.INVALID_REQUEST}
        call.connection.software = f"{name[:50]} {version[:50]}"
    return {"api_keys": [_row(key) for key in sorted(APIS)]}


def unsupported() -> dict[str, Any]:
    """Answer a version of ApiVersions that is not served; the answer has the form of version 0."""
    return {"error_code": ErrorCode.UNSUPPORTED_VERSION, "api_keys": [_row(18)]}


def _row(key: int) -> dict[str, int]:
    first, last = APIS[key].versions
    return {"api_key": key, "min_version": first, "max_version": last}
