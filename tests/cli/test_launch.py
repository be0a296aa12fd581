"""`headstart launch` with scripted agents on the PATH: what they get, what stays as it was, and how it all ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

HANG = 300
# Asks the server as the real agent would, by what it was given, and records what it saw.
AGENT = """#!{python}
import json, os, signal, sys, time, tomllib, urllib.request
from pathlib import Path

name, env = Path(sys.argv[0]).name, os.environ
report = {{"arguments": sys.argv[1:], "git": (Path(env.get("XDG_CONFIG_HOME", "/nowhere")) / "git/config").is_file()}}
if name == "claude":
    Path(env["CLAUDE_CONFIG_DIR"], "settings.json").write_text("changed")
    url, key, model = env["ANTHROPIC_BASE_URL"] + "/v1/messages", env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_MODEL"]
    body = {{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 4}}
    report["folder"], report["both"] = env["CLAUDE_CONFIG_DIR"], "ANTHROPIC_API_KEY" in env
elif name == "codex":
    settings = tomllib.loads(Path(env["CODEX_HOME"], "config.toml").read_text())
    Path(env["CODEX_HOME"], "config.toml").write_text("changed")
    provider = settings["model_providers"][settings["model_provider"]]
    url, key, model = provider["base_url"] + "/responses", env[provider["env_key"]], settings["model"]
    body, report["folder"] = {{"input": "Hello", "max_output_tokens": 4}}, env["CODEX_HOME"]
    report["context"] = settings["model_context_window"]
else:
    settings = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    Path(env["XDG_CONFIG_HOME"], "opencode").mkdir()
    Path(env["XDG_CONFIG_HOME"], "opencode/opencode.json").write_text("changed")
    provider, model = settings["model"].split("/", 1)
    options = settings["provider"][provider]["options"]
    url, key = options["baseURL"] + "/chat/completions", options["apiKey"]
    body = {{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 4}}
    report["folder"] = env["XDG_CONFIG_HOME"]
report["url"], report["key"] = url, key
headers = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
request = urllib.request.Request(url, json.dumps(body | {{"model": model}}).encode(), headers)
if "--no-request" not in sys.argv:
    report["answer"] = json.load(urllib.request.urlopen(request))
Path(env["REPORT"]).write_text(json.dumps(report))
if "--wait" in sys.argv:
    def interrupted(*_):
        Path(env["REPORT"]).write_text("interrupted")
        sys.exit(7)
    signal.signal(signal.SIGINT, interrupted)
    Path(env["REPORT"] + ".ready").touch()
    time.sleep({hang})
sys.exit(7)
"""
USERS_FILES = (
    ".claude.json", ".claude/settings.json", ".codex/config.toml", ".codex/auth.json", ".config/git/config",
    ".config/opencode/opencode.json", ".local/share/opencode/auth.json",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in USERS_FILES:
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(f"the user's own {name}")
    return tmp_path / "home"


def start(home: Path, *arguments: str, agents: tuple[str, ...] = ("claude", "codex", "opencode")) -> Any:
    programs = home.parent / "bin"
    programs.mkdir()
    for name in agents:
        (programs / name).write_text(AGENT.format(python=sys.executable, hang=HANG))
        (programs / name).chmod(0o755)
    compiled = Path(os.environ["TMPDIR"]) / "mlx"  # by mx.compile: another $TMPDIR would have all of it again
    compiled.mkdir(exist_ok=True)
    (home.parent / "mlx").symlink_to(compiled)
    changed = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "REPORT": str(home.parent / "report")}
    changed |= {"ANTHROPIC_API_KEY": "the user's", "TMPDIR": str(home.parent)}
    changed["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # has compiled kernels
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HEADSTART_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "headstart", "launch", *arguments],
        env=kept | changed,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def wait_for(true: Callable[[], Any], interval: float = 0.05) -> Any:
    until = time.monotonic() + HANG
    while not (found := true()):
        assert time.monotonic() < until, "it never came"
        time.sleep(interval)
    return found


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def children(of: int) -> list[int]:
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, parent in map(str.split, rows.splitlines()) if int(parent) == of]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow  # `test_ctrl_c_…` has the first
@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_an_agent_gets_a_server_and_the_user_keeps_their_settings(home: Path, agent: str) -> None:
    before = files(home)
    process = start(home, agent, "tiny-qwen3.5", "--", "-p", "hi", "--port")
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 7, errors
    report = json.loads((home.parent / "report").read_text())
    assert report["arguments"] == ["-p", "hi", "--port"]
    assert "id" in report["answer"]
    assert report.get("context", 4096) == 4096
    assert report["git"] == (agent == "opencode"), "the programs that it runs find their own settings"
    assert not report.get("both")
    assert files(home) == before
    assert not Path(report["folder"]).exists()
    assert not listens(int(report["url"].split(":")[2].split("/")[0]))
    assert len(report["key"]) >= 32


def test_a_missing_agent_is_named_with_its_installation(home: Path) -> None:
    process = start(home, "codex", "tiny-qwen3.5", agents=())
    _, errors = process.communicate(timeout=HANG)
    assert (process.returncode, errors.count("\n")) == (1, 1)
    assert "codex is not installed: `npm install -g @openai/codex`" in errors


def test_a_model_is_needed_where_no_server_runs(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(home, "codex", "--port", str(port))
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "headstart recommend" in errors


def test_a_port_that_something_else_uses_is_refused(home: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        process = start(home, "codex", "tiny-qwen3.5", "--port", str(other.server_port))
        _, errors = process.communicate(timeout=HANG)
        other.shutdown()
    assert process.returncode == 1
    assert "the server did not start: " in errors
    assert str(other.server_port) in errors
    assert not (home.parent / "report").exists()


@pytest.mark.parametrize(("named", "context"), [(["some16000/model"], 16000), ([], 5000)], ids=["named", "first"])
def test_a_server_that_runs_is_used_and_left_running(home: Path, named: list[str], context: int) -> None:
    class Running(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = [{"id": f"some{n}/model", "owned_by": "headstart", "context_length": n} for n in (5000, 16000)]
            known = {f"/v1/models/{each['id'].replace('/', '%2F')}": each for each in listed}  # type: ignore[attr-defined]
            body = {"data": listed} if self.path == "/v1/models" else known.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Running) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        process = start(home, "codex", *named, "--port", str(running.server_port), "--", "--no-request")
        _, errors = process.communicate(timeout=HANG)
        assert listens(running.server_port)
        running.shutdown()
    assert process.returncode == 7, errors
    report = json.loads((home.parent / "report").read_text())
    assert report["url"] == f"http://127.0.0.1:{running.server_port}/v1/responses"
    assert (report["key"], report["context"]) == ("none", context)
    short = "some5000/model has a context of 5,000 tokens, and codex sends about 11,000 before the first question"
    assert (short in errors) == (context == 5000)


def test_ctrl_c_is_the_agents_and_the_server_ends_with_it(home: Path) -> None:
    before = files(home)
    process = start(home, "claude", "tiny-qwen3.5", "--", "-p", "hi", "--port", "--wait")
    wait_for((home.parent / "report.ready").exists)
    report = json.loads((home.parent / "report").read_text())
    assert report["arguments"] == ["-p", "hi", "--port", "--wait"]
    assert "id" in report["answer"]
    assert not report["both"]
    assert len(report["key"]) >= 32
    port = int(report["url"].split(":")[2].split("/")[0])
    assert listens(port)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=HANG)
    assert process.returncode == 7
    assert (home.parent / "report").read_text() == "interrupted"
    assert not listens(port)
    assert files(home) == before
    assert not Path(report["folder"]).exists()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow), pytest.param(signal.SIGTERM, id="SIGTERM")],
)
def test_nothing_is_left_of_a_launch_that_ends_while_it_loads(home: Path, number: signal.Signals) -> None:
    process = start(home, "claude", "tiny-qwen3.5", "--", "--wait")
    started = wait_for(lambda: children(process.pid), 0.25)  # each a process of its own
    os.killpg(process.pid, number)
    process.communicate(timeout=HANG)
    assert process.returncode not in (0, 7)
    assert not any(map(is_alive, started))
    assert not list(home.parent.glob("headstart-*"))
