"""`headstart launch` with the agents themselves, where they are installed: a tool round with a scripted model.

npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex opencode-ai
PATH=FOLDER/node_modules/.bin:$PATH pytest -m slow tests/cli/test_real_agents.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from running import running, tokenizer
from scripted import ScriptedRoom
from test_launch import HANG, USERS_FILES, files

COMMAND = "echo tool-$((40+2))-ran"  # so that its output is in no prompt unless it was run
RESULT, ANSWER = "tool-42-ran", "The tool said forty-two."
CALLS = {  # the agent's own tool that runs a command
    "claude": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "opencode": ("bash", "command"),
}
ARGUMENTS = {
    "claude": ["-p", "Run the command.", "--allowedTools", "Bash"],
    "codex": ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Run the command."],
    "opencode": ["run", "Run the command."],
}


class AgentRoom(ScriptedRoom):
    """Calls a tool once it is offered, and says what came of it. Anything else, such as a title, is a word."""

    call = ""

    def _answer(self) -> bool:
        prompt = tokenizer().decode(list(self.engine.scheduler.queue.all()[0].handle.request.prompt))
        name = re.search(r'"name": "(\w+)"', self.call)
        assert name is not None
        offered = f'"name": "{name[1]}"' in prompt
        self.scripts.append(ANSWER if RESULT in prompt else self.call if offered else "Command")
        return super()._answer()


@pytest.mark.slow
@pytest.mark.parametrize("agent", CALLS)
def test_an_agent_calls_a_tool_and_the_users_files_stay_as_they_were(agent: str, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    home, folder = tmp_path / "home", tmp_path / "project"
    folder.mkdir()
    for name in USERS_FILES:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"the user's own {name}")
    before = files(home)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HEADSTART_"))}
    with running(room_type=AgentRoom, context=100_000) as server:
        assert isinstance(server.room, AgentRoom)
        tool, field = CALLS[agent]
        server.room.call = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{field}": "{COMMAND}"}}}}\n</tool_call>'
        done = subprocess.run(
            [sys.executable, "-m", "headstart", "launch", agent, "--port", server.url.rpartition(":")[2], "--",
             *ARGUMENTS[agent]],
            env=kept | {"HOME": str(home), "ANTHROPIC_API_KEY": "the user's"},
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert ANSWER in done.stdout
    after = {name: data for name, data in files(home).items() if not name.startswith((".npm/", ".cache/"))}
    assert after == before  # caches of downloads aside
