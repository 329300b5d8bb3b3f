"""`logstore ui`: who may ask, what is answered, and the page in a real browser."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore.cli.verbs.ui import UiServer
from tests.cli import browser
from tests.cli.browser import Browser
from tests.cli.conftest import NOON, Command

NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
LONG = 240


@pytest.fixture
def store(command: Command) -> Iterator[logstore.Store]:
    """Readonly, on a store that has something of everything."""
    command.fill("orders", count=250, partitions=2)
    with logstore.open(command.store, durability="os") as writable:
        odd = writable.create_topic("odd", config={"retention.ms": -1})
        odd.append(NASTY.encode(), key=NASTY.encode(), headers=[(NASTY, NASTY.encode())],
                   timestamp=NOON)  # fmt: skip
        odd.append(b"\xff\x00\x1b[31m", timestamp=NOON + 1)
        odd.append(None, key=b"gone", timestamp=NOON + 2)
        odd.append(b"x" * 100_000, key=b"large", timestamp=NOON + 3)
        cut = writable.create_topic("cut", config={"segment.bytes": 1024, "retention.bytes": 2000})
        for i in range(100):
            cut.append(b"%d" % i, timestamp=NOON + i)
        cut[0].trim(20)
        writable.create_topic("empty")
    with logstore.open(command.store, readonly=True) as opened:
        yield opened


@pytest.fixture
def server(store: logstore.Store) -> Iterator[UiServer]:
    with UiServer(store) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.ending.set()
        made.shutdown()
        thread.join()


def get(
    server: UiServer, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def ask(server: UiServer, what: str, status: int = 200, **query: object) -> Any:
    text = urllib.parse.urlencode({name: str(value) for name, value in query.items()})
    found, headers, body = get(server, f"/{server.key}/api/{what}?{text}")
    assert found == status, body
    assert headers["Content-Type"] == "application/json"
    return json.loads(body)


def text_of(field: dict[str, Any]) -> bytes:
    return base64.b64decode(field["base64"])


# ---- who may ask ----


def test_the_page_is_one_file_and_allows_nothing_from_elsewhere(server: UiServer) -> None:
    status, headers, body = get(server, f"/{server.key}/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"{{nonce}}" not in body
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in body
    again = get(server, f"/{server.key}/")[1]["Content-Security-Policy"]
    assert again != policy


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "", "localhost"])
def test_a_name_that_is_made_to_point_here_gets_nothing(server: UiServer, host: str) -> None:
    for path in ("", "api/store"):
        status, _, body = get(server, f"/{server.key}/{path}", {"Host": host})
        assert status == 421
        assert b"orders" not in body


def test_localhost_is_fine(server: UiServer) -> None:
    host = {"Host": f"localhost:{server.port}"}
    assert get(server, f"/{server.key}/api/store", host)[0] == 200


@pytest.mark.parametrize("path", ["/", "/api/store", "/wrong/api/store", "//", "/%2e%2e/x"])
def test_without_the_key_there_is_nothing(server: UiServer, path: str) -> None:
    assert get(server, path)[0] == 403


def test_another_site_and_other_methods_are_refused(server: UiServer) -> None:
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert get(server, f"/{server.key}/api/store", cross)[0] == 403
    assert get(server, f"/{server.key}/api/store", method="POST")[0] == 501
    assert get(server, f"/{server.key}/api/store", method="DELETE")[0] == 501


# ---- what is answered ----


def test_topics_and_segments(server: UiServer) -> None:
    found = ask(server, "store")
    assert [topic["topic"] for topic in found["topics"]] == ["cut", "empty", "odd", "orders"]
    (cut,) = ask(server, "topic", topic="cut")["partitions"]
    assert cut["start_offset"] == 20
    assert cut["end_offset"] == cut["durable_offset"] == 100
    assert [s["sealed"] for s in cut["segments"]] == [True] * (len(cut["segments"]) - 1) + [False]
    assert sum(s["size_bytes"] for s in cut["segments"]) == cut["size_bytes"]
    assert any(s["retention"]["delete"] for s in cut["segments"])
    reasons = [s["retention"]["reason"] for s in cut["segments"]]
    assert all(reasons)
    assert any("retention.bytes 2000" in reason for reason in reasons)
    assert not any("max_bytes" in reason for reason in reasons)
    assert "did you mean 'orders'" in ask(server, "topic", 404, topic="order")["error"]


def test_pages_of_messages(server: UiServer) -> None:
    seen = []
    page = ask(server, "messages", topic="orders", limit=100)
    while True:
        seen += [(m["partition"], m["offset"]) for m in page["messages"]]
        if not page["more"]:
            break
        at = ",".join(f"{number}:{offset}" for number, offset in page["next"].items())
        page = ask(server, "messages", topic="orders", limit=100, at=at)
    assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(125)]
    only = ask(server, "messages", topic="orders", partition=1, **{"from": NOON + 241})
    assert [m["offset"] for m in only["messages"]] == [120, 121, 122, 123, 124]
    some = ask(server, "messages", topic="orders", where="$.n in [7, 8]")
    assert [text_of(m["value"]) for m in some["messages"]] == [b'{"n":7}', b'{"n":8}']
    last = ask(server, "last", topic="orders", limit=3)
    assert [m["timestamp"] - NOON for m in last["messages"]] == [247, 248, 249]


def test_what_makes_no_sense_is_refused_in_words(server: UiServer) -> None:
    assert "where:" in ask(server, "messages", 400, topic="orders", where="key ==")["error"]
    assert "not a time" in ask(server, "messages", 400, topic="orders", **{"from": "x"})["error"]
    assert "number" in ask(server, "messages", 400, topic="orders", partition="x")["error"]
    assert "no partition" in ask(server, "messages", 404, topic="orders", partition=9)["error"]
    assert "at must be" in ask(server, "messages", 400, topic="orders", at="x")["error"]
    assert "missing" in ask(server, "messages", 400)["error"]
    ask(server, "message", 404, topic="orders", offset=10**9)
    ask(server, "nothing", 404)


def test_long_values_are_cut_in_lists(server: UiServer) -> None:
    listed = ask(server, "last", topic="odd")["messages"][-1]["value"]
    assert (listed["size"], len(text_of(listed))) == (100_000, 2048)
    whole = ask(server, "message", topic="odd", partition=0, offset=3)["value"]
    assert len(text_of(whole)) == 100_000
    assert ask(server, "last", topic="odd")["messages"][2]["value"] is None


def test_messages_come_live(server: UiServer, command: Command) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG)
    query = urllib.parse.urlencode({"topic": "orders", "where": 'key == "b"'})
    try:
        connection.request("GET", f"/{server.key}/api/tail?{query}")
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        assert answer.readline() == b"event: hello\n"
        # A client that got the greeting receives every later event.
        with logstore.open(command.store, durability="os") as store:
            store["orders"].append(b"not this", key=b"a")
            store["orders"].append(b"this", key=b"b")
            line = b""
            while not line.startswith(b'data: {"partition"'):
                line = answer.readline()
                assert line, "the stream ended"
        message = json.loads(line.removeprefix(b"data: "))
        assert text_of(message["value"]) == b"this"
    finally:
        connection.close()


def test_a_port_that_is_taken_is_named(server: UiServer, command: Command) -> None:
    assert f"port {server.port} is taken" in command("ui", "--port", server.port, code=3).err


def test_ctrl_c_ends_the_server(command: Command) -> None:
    command.fill()
    process = command.start("ui", "--port", 0)
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=LONG)
    connection.request("GET", f"{parts.path}api/store")
    assert json.loads(connection.getresponse().read())["topics"][0]["topic"] == "orders"
    connection.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 130


# ---- in a browser ----


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    found = browser.find()
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(found, tmp_path / "profile") as made:
        yield made


ROWS = "document.querySelectorAll('#messages tbody tr.message').length"
CELLS = (
    "[...document.querySelectorAll('#messages tbody tr.message')].map(r => r.cells[4].textContent)"
)


def test_the_page_in_a_browser(
    server: UiServer, page: Browser, command: Command, tmp_path: Path
) -> None:
    # Topics, segments to scale, the newest messages.
    page.go(f"{server.url}#topic=cut")
    assert page.run("document.querySelectorAll('#topics button').length") == 4
    page.wait(f"{ROWS} === 80")
    (cut,) = ask(server, "topic", topic="cut")["partitions"]
    widths = page.run(
        "[...document.querySelectorAll('rect.seg')].map(r => +r.getAttribute('width'))"
    )
    scale = 1000 / cut["size_bytes"]
    for width, segment in zip(widths, cut["segments"], strict=True):
        assert abs(width - segment["size_bytes"] * scale) <= 1.01
    assert page.run("document.querySelectorAll('rect.seg.going').length") > 0
    assert "start 20, end 100" in page.run("document.querySelector('.note').textContent")
    assert "retention.bytes 2000" in page.run("document.getElementById('retention').textContent")
    # A click on a segment reads from there.
    page.run("document.querySelectorAll('rect.seg')[2].dispatchEvent(new MouseEvent('click'))")
    third = cut["segments"][2]["base_offset"]
    page.wait(f"{CELLS}[0] === '{third}'")
    # A condition, by the address; a message alone, as JSON.
    where = urllib.parse.quote("$.n > 240")
    page.go(f"{server.url}#topic=orders&where={where}&show=json")
    page.wait(f"{ROWS} === 9")
    page.run("document.querySelector('#messages tbody tr').click()")
    page.wait("document.querySelector('#detail pre:nth-of-type(2)')")
    assert json.loads(page.run("document.querySelectorAll('#detail pre')[1].textContent")) == {
        "n": 241
    }
    page.run("""document.getElementById('condition').value = 'key =='""")
    page.run("document.getElementById('go').click()")
    page.wait("document.getElementById('said').className === 'wrong'")
    assert page.errors == ["Failed to load resource: the server responded with a status of 400 "
                           "(Bad Request)"]  # fmt: skip
    page.errors.clear()
    # Nothing from data becomes markup.
    page.go(f"{server.url}#topic=odd")
    page.wait(f"{ROWS} === 4")
    for row in range(4):
        page.run(f"document.querySelectorAll('#messages tr.message')[{row}].click()")
        page.wait("document.getElementById('detail') && !document.getElementById('detail')"
                  ".classList.contains('hidden')")  # fmt: skip
    assert NASTY in page.run(CELLS)
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title").startswith("logstore")
    assert "\\xff\\x00\\x1b[31m" in page.run(CELLS)
    # Live: what is written now is seen.
    page.go(f"{server.url}#topic=orders&live=1")
    page.wait("document.getElementById('said').textContent.startsWith('live')")
    with logstore.open(command.store, durability="os") as store:
        store["orders"].append(b"fresh", partition=0)
        page.wait(f"{ROWS} > 0")
    assert page.run(CELLS) == ["fresh"]
    assert page.errors == []
    picture = tmp_path / "page.png"
    page.screenshot(picture)
    assert picture.stat().st_size > 20_000
