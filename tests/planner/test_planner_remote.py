"""Probing image URLs: a real server on the loopback address, which the policy of these tests alone allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from glm_fixtures import png
from PIL import Image as Pillow

from planner import remote
from planner.errors import ImageError, Reason
from planner.identity import hash_url
from planner.images import Image, ImagePolicy, read_image
from planner.remote import RemotePolicy

PICTURE = png(640, 480)


def _late_header() -> bytes:
    exif = Pillow.Exif()
    exif[0x010E] = "x" * 9000
    return png(320, 200, format="JPEG", exif=exif)


class Handler(BaseHTTPRequestHandler):
    """Answers by path; ``asked`` keeps the Range header of every request."""

    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        path, _, query = self.path.partition("?")
        getattr(self, "get_" + path.strip("/"), self._missing)(query)

    def _answer(self, data: bytes, status: int = 206, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def _part(self, data: bytes) -> None:
        last = int(self.headers["Range"].partition("-")[2])
        part = data[: last + 1]
        self._answer(part, Content_Range=f"bytes 0-{len(part) - 1}/{len(data)}")

    def _missing(self, _: str) -> None:
        self._answer(b"", 404)

    def get_picture(self, _: str) -> None:
        self._part(PICTURE)

    def get_late(self, _: str) -> None:
        self._part(_late_header())

    def get_text(self, _: str) -> None:
        self._part(b"<html>" * 20_000)

    def get_whole(self, _: str) -> None:
        self._answer(PICTURE, 200)

    def get_elsewhere(self, _: str) -> None:
        self._answer(PICTURE[10:], Content_Range=f"bytes 10-{len(PICTURE) - 1}/{len(PICTURE)}")

    def get_nowhere(self, _: str) -> None:
        self._answer(PICTURE)

    def get_empty(self, _: str) -> None:
        self._answer(b"", Content_Range="bytes 0-0/0")

    def get_to(self, query: str) -> None:
        self._answer(b"", 302, Location=query)

    def get_slow(self, _: str) -> None:
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-999/1000")
        self.end_headers()
        for _i in range(100):
            time.sleep(0.05)
            self.wfile.write(b"x")
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    asked: list[tuple[str, str | None]]

    def handle_error(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _policy(server: Server, **changes: Any) -> ImagePolicy:
    values: dict[str, Any] = {
        "hosts": frozenset({"localhost", "127.0.0.1"}), "ports": frozenset({server.server_port}),
        "addresses": frozenset({"127.0.0.1", "::1"}), "timeout_seconds": 5.0,
    }  # fmt: skip
    return ImagePolicy(remote=RemotePolicy(**values | changes))


def _url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{path}"


def _reason(url: str, policy: ImagePolicy) -> Reason:
    with pytest.raises(ImageError) as caught:
        read_image(url, policy)
    return caught.value.reason


def test_a_picture_is_sized_from_its_first_bytes(server: Server) -> None:
    url = _url(server, "picture?size=1&x=2")
    image = read_image(url, _policy(server))
    assert image == Image(640, 480, image.turn, hash_url(url))
    assert server.asked == [("/picture?size=1&x=2", "bytes=0-4095")]


def test_a_late_header_is_asked_for_once_more(server: Server) -> None:
    assert read_image(_url(server, "late"), _policy(server)).stored == (320, 200)
    assert [asked for _, asked in server.asked] == ["bytes=0-4095", "bytes=0-65535"]


def test_what_never_is_an_image_costs_two_requests(server: Server) -> None:
    assert _reason(_url(server, "text"), _policy(server)) is Reason.IMAGE_FORMAT
    assert len(server.asked) == 2


@pytest.mark.parametrize("path", ["whole", "elsewhere", "nowhere", "empty", "missing"])
def test_only_a_partial_answer_from_byte_0_is_read(server: Server, path: str) -> None:
    assert _reason(_url(server, path), _policy(server)) is Reason.REMOTE_FAILED


def test_redirects_are_followed_and_bounded(server: Server) -> None:
    assert read_image(_url(server, "to?/picture"), _policy(server)).stored == (640, 480)
    assert _reason(_url(server, "to?/to?/to?/to?/picture"), _policy(server)) is Reason.REMOTE_FAILED
    assert _reason(_url(server, "to?/picture"), _policy(server, max_redirects=0)) is Reason.REMOTE_FAILED


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/", "http://10.0.0.1/x", "ftp://localhost/x", "file:///etc/passwd", "//evil/x"]
)
def test_redirects_are_checked_like_the_first_url(server: Server, target: str) -> None:
    policy = _policy(server, hosts=frozenset({"127.0.0.1", "169.254.169.254", "10.0.0.1", "localhost"}))
    assert _reason(_url(server, "to?" + target), policy) is Reason.REMOTE_REFUSED


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "0.0.0.0",
     "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "[fe80::1]", "[fd00::1]", "100.64.0.1", "224.0.0.1",
     "2130706433", "0x7f000001", "127.1"],
)  # fmt: skip
def test_addresses_of_the_own_network_are_refused(host: str) -> None:
    policy = ImagePolicy(remote=RemotePolicy(hosts=frozenset({host.strip("[]")})))
    assert _reason(f"http://{host}/a.png", policy) is Reason.REMOTE_REFUSED


def test_one_private_address_among_several_refuses_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("93.184.216.34", 80)), (2, 1, 6, "", ("10.0.0.1", 80))]
    monkeypatch.setattr(remote.socket, "getaddrinfo", lambda *_, **__: found)
    policy = ImagePolicy(remote=RemotePolicy(hosts=frozenset({"example.com"})))
    assert _reason("http://example.com/a.png", policy) is Reason.REMOTE_REFUSED


def test_the_connection_goes_to_the_address_that_was_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = remote.socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        calls.append(host)
        return real("127.0.0.1" if host == "example.com" else host, *rest, **more)

    monkeypatch.setattr(remote.socket, "getaddrinfo", resolve)
    policy = _policy(server, hosts=frozenset({"example.com"}))
    assert read_image(f"http://example.com:{server.server_port}/picture", policy).stored == (640, 480)
    assert calls.count("example.com") == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png", "http://notexample.com/a.png", "http://example.com.evil.org/a.png",
        "http://user@example.com/a.png", "http://user:secret@example.com/a.png", "http://example.com:8080/a.png",
        "https://example.com:22/a.png", "http:///a.png", "http://",
    ],
)  # fmt: skip
def test_urls_outside_the_policy(url: str) -> None:
    policy = ImagePolicy(remote=RemotePolicy(hosts=frozenset({"example.com", ".example.net"})))
    assert _reason(url, policy) is Reason.REMOTE_REFUSED


@pytest.mark.parametrize("url", ["http://example.com:port/a", "http://[::1/a", "http://example.com:99999/a"])
def test_urls_that_are_none(url: str) -> None:
    policy = ImagePolicy(remote=RemotePolicy(hosts=frozenset({"example.com"})))
    assert _reason(url, policy) in (Reason.REMOTE_FAILED, Reason.REMOTE_REFUSED)


def test_a_server_that_drips_is_left_in_time(server: Server) -> None:
    begun = time.monotonic()
    assert _reason(_url(server, "slow"), _policy(server, timeout_seconds=0.3)) in (
        Reason.REMOTE_FAILED, Reason.IMAGE_FORMAT
    )  # fmt: skip
    assert time.monotonic() - begun < 3


def test_a_server_that_is_not_there(server: Server) -> None:
    policy = _policy(server, ports=frozenset({1}))
    assert _reason("http://127.0.0.1:1/a.png", policy) is Reason.REMOTE_FAILED
