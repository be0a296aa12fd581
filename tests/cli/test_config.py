"""Files for `headstart serve --config`: what they may hold, what is wrong in them, and the examples that we ship."""

import json
import plistlib
import re
import signal
from pathlib import Path

import httpx
import pytest
from test_serve import serving
from typer.testing import CliRunner

from headstart.cli import serve
from headstart.cli.main import app
from headstart.engine import Settings
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel
from headstart.server.server import Server
from headstart.server.states import ServerState

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"


def check(file: Path) -> str:
    result = CliRunner().invoke(app, ["config", "--check", str(file)])
    assert result.exit_code == (1 if result.stderr else 0)
    return result.stderr or result.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("port = 8001\n\nmax-que = 3\n", "line 3: unknown key 'max-que': did you mean max-queue?"),
        ("max_queue = 3\n", "line 1: unknown key 'max_queue': did you mean max-queue?"),
        ("[server]\nport = 8001\n", "line 1: unknown key 'server': `headstart config` lists all"),
        ("# all\nport = 80010\n", "line 2: port: Input should be less than or equal to 65535"),
        ("port = 8001\ntimeout = 'long'\n", "line 2: timeout: Input should be a valid number"),
        ("no-key = 1\n", "line 1: no-key: is 1; it must be true or false"),
        ("host = ['a', 'b']\n", "line 1: host: is ['a', 'b']; it must be a text or a number"),
        ("port = 8001\nmodels = ['a'\nhost = 'b'\n", "not TOML: Unclosed array (at line 3, column 1)"),
        ("log-level = 'loud'\n", "line 1: log-level: "),
        (f"models = {'[' * 5000}\n", "not TOML: "),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text(text)
    assert f"{file}" in check(file)
    assert problem in check(file)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert (result.exit_code, problem in result.stderr) == (1, True)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in check(tmp_path / "nothing.toml")
    assert check(tmp_path) == f"error: {tmp_path}: a folder. Name the file\n"


def test_the_printed_file_names_every_flag_and_is_valid_once_its_comments_are_gone(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["config"]).stdout
    helped = CliRunner().invoke(app, ["serve", "--help"]).stdout
    flags = set(re.findall(r"--([a-z0-9][a-z0-9-]+)", helped)) - {
        "help",
        "config",
        "model",
        "no-mtp",
        "no-restart",
        "no-speculation",
    }
    keys = re.findall(r"^# ([a-z0-9-]+) = ", printed, re.MULTILINE)
    assert set(keys) == flags | {"models"}
    settings = [line.removeprefix("# ") for line in printed.splitlines() if re.match(r"# [a-z0-9-]+ = ", line)]
    file = tmp_path / "headstart.toml"
    file.write_text("\n".join(line for line in settings if "…" not in line))
    assert "no problem" in check(file)


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, object] = {}

    def load(server: Server, state: ServerState, pool: ModelPool, model: PooledModel) -> None:
        found.update(settings=model.current_settings)
        found.update(queue=pool.max_queue, seconds=pool.limits.request_seconds, budget=pool.budget)

    monkeypatch.setattr(Server, "wait", lambda self, announce: announce())
    monkeypatch.setattr(serve, "_load", load)
    file = tmp_path / "headstart.toml"
    limits = "max-queue = 7\ntimeout = 50\nport = 0\nmemory-gb = 1.5\n"
    file.write_text(f"{limits}max-k = 3\nspeculation = false\nmodels = 'tiny-qwen3.5-moe'\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file), "--timeout", "60"])
    assert result.exit_code == 0, result.stderr
    assert "Model:       tiny-qwen3.5-moe\n" in result.stdout
    assert found["settings"] == Settings(speculation=False, max_k=3)
    refused = CliRunner().invoke(app, ["serve", "--config", str(file), "--no-mtp"])
    assert refused.stderr.startswith("error: max_k: this model cannot draft: ")
    assert (found["queue"], found["seconds"], found["budget"]) == (7, 60, 1_500_000_000)


def test_a_reload_takes_new_keys_and_limits_and_a_mistake_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text("api-key = ['first']\nlog-level = 'warning'\n")
    with serving("--no-mtp", "--config", str(file)) as (process, printed), httpx.Client() as http:

        def status(key: str, prompt: str = "hi") -> int:
            body, headers = {"prompt": prompt, "max_tokens": 1}, {"Authorization": f"Bearer {key}"}
            url = f"{printed['Address']}/completions"
            return http.post(url, json=body, headers=headers, timeout=300).status_code

        def reload(text: str, says: str) -> None:
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            assert says in process.stderr.readline()

        assert (status("first"), status("second")) == (200, 401)
        reload("api-key = ['second']\nmax-prompt-tokens = 4\n", "keys and limits were read again")
        assert (status("first"), status("second"), status("second", "one two " * 9)) == (401, 200, 400)
        reload("api-key = ['third']\nmax-prompt-token = 4\n", "line 2: unknown key 'max-prompt-token'")
        assert (status("third"), status("second")) == (401, 200)


def test_our_examples_are_valid() -> None:
    assert "no problem" in check(CONTRIB / "headstart.toml")
    service = (CONTRIB / "headstart.service").read_text()
    plist = plistlib.loads((CONTRIB / "headstart.plist").read_bytes())
    container = (CONTRIB / "Containerfile").read_text()
    entry = json.loads(re.findall(r"^CMD (.+)$", container, re.MULTILINE)[0])
    commands = [line.split() for line in re.findall(r"^ExecStart\w*=(.+)$", service, re.MULTILINE)]
    for command in [*(each[1:] for each in commands), plist["ProgramArguments"][1:], entry]:
        flags = [word for word in command if word.startswith("--")]
        helped = CliRunner().invoke(app, [command[0], "--help"]).stdout
        assert flags
        assert all(f"{flag} " in helped for flag in flags)
    documented = (ROOT / "docs/reference/http-api.md").read_text()
    board = json.loads((CONTRIB / "grafana.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {re.sub(r"_bucket$", "", name) for name in re.findall(r"headstart_\w+", " ".join(shown))}
    assert len(names) > 15
    assert {name for name in names if f"`{name}`" not in documented} == set()
