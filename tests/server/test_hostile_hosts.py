"""DNS rebinding: a web page that gives its own name this machine's address is known by its Host header."""

import pytest
from hostile import SMALL, Target, error_code

from headstart.server.errors import Refusal
from headstart.server.middleware import check_host, hosts_for

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/settings"),
    ("PATCH", "/v1/settings"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/"),
    ("GET", "/assets/main.js"),
    ("GET", "/openapi.json"),
    ("OPTIONS", "/v1/models"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_another_host_is_refused_on_every_route(attacked: Target, method: str, path: str) -> None:
    with attacked.http() as http:
        refusal = http.request(method, path, headers={"Host": "page.example:8000"}, content=b"{}")
        assert (refusal.status_code, error_code(refusal)) == (421, "host_not_allowed")
        assert refusal.json()["error"]["type"] == "invalid_request_error"
        assert "'page.example'" in refusal.json()["error"]["message"]
        assert "--allowed-host" in refusal.json()["error"]["message"]


def test_it_is_refused_in_anthropics_shape_too(attacked: Target) -> None:
    with attacked.http() as http:
        refusal = http.post("/v1/messages", headers={"Host": "page.example"}, json={})
    assert refusal.status_code == 421
    assert refusal.json()["type"] == "error"
    assert refusal.json()["error"]["type"] == "invalid_request_error"


def test_known_hosts_are_served_while_others_are_refused(attacked: Target) -> None:
    with attacked.http() as http:
        for host in (
            "localhost",
            "LOCALHOST:1234",
            "127.0.0.1",
            "my-mac.local",
            "my-mac.local:8000",
            "proxy.example",
        ):
            assert http.post("/v1/completions", json=SMALL, headers={"Host": host}).status_code == 200, host
            assert http.post("/v1/completions", json=SMALL, headers={"Host": f"x.{host}"}).status_code == 421
        for path in ("/health", "/metrics"):  # probes call by any name
            assert http.get(path, headers={"Host": "page.example"}).status_code == 200
    attacked.assert_serving()


def test_a_request_without_a_host_is_no_browsers(attacked: Target) -> None:
    assert attacked.raw(b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert attacked.raw(b"GET /v1/models HTTP/1.0\r\nHost: page.example\r\n\r\n").startswith(b"HTTP/1.1 421")
    assert attacked.raw(b"GET /v1/models HTTP/1.0\r\nHost:\r\n\r\n").startswith(b"HTTP/1.1 421")


def status(host: str, arrived_at: str, names: tuple[str, ...]) -> int:
    """Return the status of a request with that Host header, to a server at that address."""
    scope = {"type": "http", "path": "/", "headers": [(b"host", host.encode())], "server": (arrived_at, 8000)}
    try:
        check_host(scope, names)
    except Refusal as refusal:
        return refusal.status_code
    return 200


@pytest.mark.parametrize(
    ("host", "arrived_at", "names", "expected"),
    [
        ("127.8.8.8:80", "127.0.0.1", (), 200),
        ("[::1]:8000", "::1", (), 200),
        ("[::1]", "127.0.0.1", (), 200),
        ("[0:0:0:0:0:0:0:1]:1", "::1", (), 200),
        ("localhost.", "127.0.0.1", (), 200),
        ("localhost.page.example", "127.0.0.1", (), 421),
        ("127.0.0.1.page.example", "127.0.0.1", (), 421),
        ("page.example#localhost", "127.0.0.1", (), 421),
        ("localhost:80:80", "127.0.0.1", (), 421),
        ("localhost:x", "127.0.0.1", (), 421),
        ("", "127.0.0.1", (), 421),
        ("192.168.1.5:8000", "127.0.0.1", (), 421),
        ("192.168.1.5:8000", "192.168.1.5", (), 200),
        ("192.168.1.5:8000", "::ffff:192.168.1.5", (), 200),
        ("[fe80::1]", "fe80::1%en0", (), 200),
        ("192.168.1.6", "192.168.1.5", (), 421),
        ("page.example", "127.0.0.1", ("*",), 200),
        ("named.example:9", "127.0.0.1", ("named.example",), 200),
        ("[2001:db8::1]", "127.0.0.1", ("2001:db8::1",), 200),
    ],
)
def test_hosts(host: str, arrived_at: str, names: tuple[str, ...], expected: int) -> None:
    assert status(host, arrived_at, names) == expected


def test_what_is_accepted_by_default_depends_on_reach_and_keys() -> None:
    assert hosts_for("127.0.0.1", (), key=False) == ("127.0.0.1",)
    assert hosts_for("127.0.0.1", (), key=True) == ("127.0.0.1",)
    assert hosts_for("0.0.0.0", (), key=False) == ("0.0.0.0",)
    assert hosts_for("0.0.0.0", (), key=True) == ("*",)  # the key protects
    assert hosts_for("0.0.0.0", ("a",), key=True) == ("0.0.0.0", "a")
    assert hosts_for("127.0.0.1", ("*",), key=False) == ("127.0.0.1", "*")
