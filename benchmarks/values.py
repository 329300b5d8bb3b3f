"""The values that are written: the same ones for us and for every peer, from a fixed seed."""

from __future__ import annotations

import json
import random
from functools import lru_cache

VALUE_BYTES = 100
SEED = 20_240_117


@lru_cache(maxsize=1)
def random_values(count: int) -> list[bytes]:
    """`count` distinct values of 100 incompressible bytes."""
    blob = random.Random(SEED).randbytes(count * VALUE_BYTES)
    return [blob[at : at + VALUE_BYTES] for at in range(0, len(blob), VALUE_BYTES)]


def documents(total_bytes: int) -> list[bytes]:
    """JSON events of some 250 bytes: repeated names, fresh identifiers, numbers and times."""
    rng = random.Random(SEED)
    cities = ["Berlin", "Lisboa", "Kraków", "Oslo", "Lyon", "Gent", "Turku", "Porto", "Graz"]
    states = ["created", "paid", "packed", "shipped", "delivered", "returned"]
    made: list[bytes] = []
    size = 0
    moment = 1_700_000_000_000
    while size < total_bytes:
        moment += rng.randrange(1, 50)
        event = {
            "event_id": f"{rng.getrandbits(128):032x}",
            "type": f"order.{rng.choice(states)}",
            "timestamp": moment,
            "customer": {"id": rng.randrange(1_000_000), "city": rng.choice(cities)},
            "order_id": rng.randrange(10_000_000),
            "amount": {"value": rng.randrange(100, 100_000) / 100, "currency": "EUR"},
            "items": [
                {"sku": f"SKU-{rng.randrange(5_000):05d}", "count": rng.randrange(1, 4)}
                for _ in range(rng.randrange(1, 4))
            ],
        }
        made.append(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
        size += len(made[-1])
    return made


def chunked(values: list[bytes], size: int) -> list[list[bytes]]:
    return [values[at : at + size] for at in range(0, len(values), size)]
