"""`headstart chat`: a conversation that keeps its history, and that Ctrl-C does not end."""

import re
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import headstart
from adapters import write_adapter
from headstart import checkpoint
from headstart.checkpoint.template import chat_tokens
from headstart.cli import show
from headstart.cli.main import app
from headstart.engine import Stats
from headstart.engine.recovery import Recovery
from headstart.engine.running import Running

FIRST, SECOND = "Write a function that adds two numbers.", "Now write one that subtracts them."
ENDLESS = "Write a function that checks whether a number is prime."


@pytest.fixture(scope="module")
def loaded() -> Any:
    return headstart.load()


def answer(loaded: Any, *texts: str) -> str:
    """Return what the library answers to a conversation."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return headstart.generate(*loaded, chat_tokens(loaded[1], messages), max_tokens=8)


def chat(*lines: str) -> Result:
    return CliRunner().invoke(app, ["chat", "-n", "8"], input="".join(line + "\n" for line in lines))


def test_earlier_messages_count(loaded: Any) -> None:
    first = answer(loaded, FIRST)
    second = answer(loaded, FIRST, first, SECOND)
    assert second != answer(loaded, SECOND), "the history makes no difference: choose other questions"
    result = chat(FIRST, "", SECOND, "/exit", "not asked any more")
    assert result.exit_code == 0
    assert result.stdout == f"› {first}\n› › {second}\n› "
    assert result.stderr.count("tokens per round") == 2


def test_a_terminal_shows_how_much_of_a_long_prompt_is_read() -> None:
    how = ["chat", "-n", "1", "tiny-qwen3.5", "word " * 1500]
    reading = re.compile(r"Reading the prompt: ([\d,]+) of 1,5\d\d tokens")
    shown = reading.findall(CliRunner().invoke(app, how, env={"FORCE_COLOR": "1"}).stderr)
    assert shown[:3] == ["0", "512", "1,024"]
    assert not reading.search(CliRunner().invoke(app, how).stderr), "a file keeps no such lines"


@pytest.mark.slow
def test_earlier_messages_are_not_prefilled_again(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hits: list[int] = []
    user = {"role": "user", "content": "word " * 599 + "word"}
    message = loaded[1].apply_chat_template([user])  # without what begins the model's turn

    def summary(stats: Stats, finish_reason: str | None) -> str:
        hits.append(stats.prefix_cache_hit)
        return ""

    monkeypatch.setattr(show, "summary", summary)
    assert chat(user["content"], SECOND).exit_code == 0
    assert hits == [0, len(message)]


def test_an_answer_is_right_after_one_that_was_stopped_in_the_middle_of_a_turn(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = Running.join

    def stopped(running: Running, row: Any) -> None:
        monkeypatch.setattr(Running, "join", join)
        join(running, row)
        running.sequences.clear()  # as before its last line
        raise KeyboardInterrupt

    monkeypatch.setattr(Running, "join", stopped)
    result = chat(FIRST, "/clear", SECOND)
    assert result.exit_code == 0
    assert result.stdout == f"› \n› › {answer(loaded, SECOND)}\n› "


def test_a_system_prompt_stays_before_the_conversation(loaded: Any) -> None:
    said = [{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": FIRST}]
    expected = headstart.generate(*loaded, chat_tokens(loaded[1], said), max_tokens=8)
    assert expected != answer(loaded, FIRST), "the system prompt makes no difference: choose another"
    how = ["-n", "8", "--temp", "0", "--system-prompt", "Answer in JSON."]
    result = CliRunner().invoke(app, ["chat", *how], input=f"{FIRST}\n/clear\n{FIRST}\n")
    assert result.stdout == f"› {expected}\n› › {expected}\n› "
    assert CliRunner().invoke(app, ["generate", *how, FIRST]).stdout == expected + "\n"
    refused = CliRunner().invoke(app, ["generate", *how, "--raw", FIRST])
    assert "leave out --raw" in refused.stderr


def test_clear_forgets_the_conversation(loaded: Any) -> None:
    result = chat(FIRST, "/clear", SECOND)  # and the end of the input leaves
    assert result.exit_code == 0
    assert result.stdout == f"› {answer(loaded, FIRST)}\n› › {answer(loaded, SECOND)}\n› "


def test_a_message_that_is_too_long_is_refused_and_the_conversation_goes_on(loaded: Any) -> None:
    result = chat("word " * 5000, FIRST)
    assert result.exit_code == 0
    assert "error: prompt has" in result.stderr
    assert "/clear" in result.stderr
    assert result.stdout == f"› › {answer(loaded, FIRST)}\n› "


def test_a_message_that_is_no_text_is_refused_and_the_conversation_goes_on(loaded: Any) -> None:
    lines = b"half a \xff character\n" + FIRST.encode() + b"\n"
    result = CliRunner().invoke(app, ["chat", "-n", "8"], input=lines)
    assert result.exit_code == 0, result.output
    assert "error: the message is not text: it holds half a character, '\\udcff' at position 7" in result.stderr
    assert result.stdout == f"› › {answer(loaded, FIRST)}\n› "


def test_bad_options_are_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["chat", "tiny-qwen3.5", "--k", "16"])
    assert result.exit_code == 1
    assert result.stderr == "error: k is 16; it must be 'auto' or a whole number from 0 to 15\n"


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    process = subprocess.Popen(
        [Path(sysconfig.get_path("scripts")) / "headstart", "chat", "-n", "4000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(ENDLESS.encode() + b"\n")
    process.stdin.flush()
    process.stdout.read(20)  # it is answering
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(b"/exit\n", timeout=60)
    assert process.returncode == 0
    assert output.endswith("\n› ".encode())
    assert b"stopped" in errors
    assert b"Traceback" not in errors


def test_an_answer_that_fails_does_not_end_the_conversation(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    join = Running.join

    def full(running: Running, row: Any) -> None:
        monkeypatch.setattr(Running, "join", join)
        raise MemoryError("the device is full")

    monkeypatch.setattr(Running, "join", full)
    monkeypatch.setattr(Recovery, "_empty_prefix", lambda recovery: False)
    result = chat(FIRST, SECOND)
    assert result.exit_code == 0
    assert "error: memory ran out" in result.stderr
    assert result.stdout == f"› › {answer(loaded, SECOND)}\n› "


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_message_is_answered_and_no_other_asked_for(loaded: Any, command: str) -> None:
    result = CliRunner().invoke(app, [command, "tiny-qwen3.5", FIRST, "-n", "8"], input=f"{SECOND}\n")
    assert result.exit_code == 0
    assert result.stdout == f"{answer(loaded, FIRST)}\n"
    assert "/help" not in result.stderr
    refused = CliRunner().invoke(app, [command, "tiny-qwen3.5", "word " * 5000])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: prompt has")


def test_a_message_alone_is_for_the_builtin_model(loaded: Any) -> None:
    result = CliRunner().invoke(app, ["run", FIRST, "-n", "8"])
    assert result.stdout == f"{answer(loaded, FIRST)}\n"
    assert result.stderr.startswith("No model has this name: it is the prompt")
    refused = CliRunner().invoke(app, ["run", "qwen9", "-n", "8"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: qwen9: no such folder")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_adapter_answers(tmp_path: Path, loaded: Any, command: str) -> None:
    folder = write_adapter(tmp_path / "adapter", checkpoint.resolve(), scale=6.0)
    adapted = answer(headstart.load(adapter_path=folder), FIRST)
    assert adapted != answer(loaded, FIRST)
    model = ["-n", "8", "-m", "tiny-qwen3.5"]
    told = CliRunner().invoke(app, [command, *model, FIRST, "--adapter-path", str(folder)])
    assert told.stdout.strip() == adapted.strip()
    missing = CliRunner().invoke(app, [command, *model, FIRST, "--adapter-path", str(tmp_path / "none")])
    assert (missing.exit_code, "adapter_config.json is missing" in missing.stderr) == (1, True)


def test_an_unknown_command_is_answered_with_those_there_are(loaded: Any) -> None:
    result = chat("/set parameter seed 1", "/?", "/bye", FIRST)
    assert result.stdout == "› › › "
    assert "/set is unknown. /help shows this" in result.stderr
    assert chat("/etc/passwd is a file.").stdout != "› › ", "a path is no command"


def test_help_lists_the_commands_and_does_not_go_to_the_model(loaded: Any) -> None:
    result = chat("/help", FIRST)
    assert result.stdout == f"› › {answer(loaded, FIRST)}\n› "
    assert result.stderr.count("/clear forgets the conversation, /exit or Ctrl-D leaves") == 2  # and at the start
