"""`headstart generate`: the answer on standard output, what ran on standard error, and errors in one line."""

import dataclasses
import json
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import headstart
from headstart import library
from headstart.checkpoint.template import chat_tokens
from headstart.cli.main import app
from headstart.cli.options import SAMPLING
from headstart.cli.show import LOOKS
from headstart.engine import Engine, Stats
from headstart.errors import RequestError

QUESTION = "Write a Python function that reads a JSON file and returns its contents."
ENDLESS = "Write a function that checks whether a number is prime."  # the built-in model never comes to an end


def run(*arguments: str, **how: Any) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], **how)


def run_json(*arguments: str, **how: Any) -> dict[str, Any]:
    result = run(*arguments, "--json", **how)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def expected() -> str:
    """The first ten tokens, by the library."""
    model, tokenizer = headstart.load()
    prompt = chat_tokens(tokenizer, [{"role": "user", "content": QUESTION}])
    return headstart.generate(model, tokenizer, prompt, max_tokens=10)


def test_the_text_goes_to_stdout_and_what_ran_to_stderr(expected: str) -> None:
    result = run("--prompt", QUESTION, "--max-tokens", "10", "--k", "2")
    assert result.exit_code == 0
    assert result.stdout == expected + "\n"
    (line,) = result.stderr.splitlines()
    for part in ("10 tokens", "tokens/s", "tokens per round", "depth ", "cut at the limit"):
        assert part in line


def test_kv_caches_in_eight_bits_are_marked() -> None:
    assert run_json("-p", QUESTION, "-n", "2", "--kv-bits", "8")["stats"]["exact"] is False
    refused = run("-p", QUESTION, "--kv-bits", "4")
    assert refused.exit_code == 1
    assert "kv_bits is 4" in str(refused.stderr)


@pytest.mark.parametrize(
    "arguments",
    [(QUESTION,), ("tiny-qwen3.5", QUESTION), ("-m", "tiny-qwen3.5", QUESTION), ("-p", QUESTION)],
)
def test_the_prompt_may_be_an_argument(expected: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "-n", "10")
    assert result.stdout == expected + "\n"
    assert ("No model has this name: it is the prompt" in result.stderr) == (arguments == (QUESTION,))


def test_a_model_alone_is_not_taken_for_a_prompt() -> None:
    for named in ("tiny-qwen3.5", "org/model"):
        result = run(named)
        assert (result.exit_code, result.stdout) == (1, "")
        assert (
            "give the prompt with either --prompt or --prompt-file (- is standard input), or after MODEL"
            in result.stderr
        )
    assert "given twice" in run("tiny-qwen3.5", "Hello", "-p", "Hello").stderr


def test_json_is_one_object_with_the_stats_of_the_api(expected: str) -> None:
    answer = run_json("--prompt", QUESTION, "--max-tokens", "10", "--k", "2")
    assert list(answer) == ["text", "tokens", "finish_reason", "stats"]
    assert answer["text"] == expected
    assert len(answer["tokens"]) == 10
    assert answer["finish_reason"] == "length"
    stats = answer["stats"]
    assert set(stats) >= set(Stats(None, None).as_dict())
    assert stats["drafter_kind"] == "native_mtp"
    assert 0 < stats["accepted_draft_tokens"] <= stats["proposed_draft_tokens"]
    assert len(stats["acceptance_by_position"]) == 2
    assert stats["tokens_per_round"] == pytest.approx(10 / stats["rounds"])


@pytest.mark.slow  # tests/engine/test_greedy_output.py has it without the command
def test_the_tokens_do_not_depend_on_the_depth() -> None:
    answers = [run_json("-p", QUESTION, "-n", "10", "--k", k)["tokens"] for k in ("0", "8", "auto")]
    assert answers == [answers[0]] * 3


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        (["--no-mtp"], None, "loaded without the head"),
        ([], {"HEADSTART_MTP": "0"}, "switched off by HEADSTART_MTP"),
    ],
)
def test_the_head_can_be_left_out(arguments: list[str], env: dict[str, str] | None, why: str) -> None:
    stats = run_json("-p", QUESTION, "-n", "2", *arguments, env=env)["stats"]
    assert (stats["drafter_kind"], stats["bypass_reason"]) == (None, why)


def test_a_flag_goes_before_the_environment() -> None:
    stats = run_json("-p", QUESTION, "-n", "2", "--mtp", env={"HEADSTART_MTP": "0"})["stats"]
    assert stats["drafter_kind"] == "native_mtp+copy"


def test_raw_goes_on_from_the_prompt_itself() -> None:
    model, tokenizer = headstart.load()
    text = headstart.generate(model, tokenizer, "def add(a, b):", max_tokens=6)
    assert run("-p", "def add(a, b):", "-n", "6", "--raw").stdout == text + "\n"


def test_the_prompt_may_come_from_a_file_or_stdin(tmp_path: Path, expected: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(QUESTION)
    assert run("--prompt-file", str(file), "-n", "10").stdout == expected + "\n"
    assert run("--prompt-file", "-", "-n", "10", input=QUESTION).stdout == expected + "\n"


def test_show_drafts_marks_tokens_where_there_is_no_colour() -> None:
    legend, _, *lines = run("-p", QUESTION, "-n", "10", "--show-drafts", "--k", "2").stdout.splitlines()
    assert legend == "+accepted draft  =accepted copy  !correction of a draft  *bonus token  plain"
    model, tokenizer = headstart.load()
    prompt = chat_tokens(tokenizer, [{"role": "user", "content": QUESTION}])
    responses = list(headstart.stream_generate(model, tokenizer, prompt, max_tokens=10, k=2))
    assert len({response.origin for response in responses}) > 1
    assert "\n".join(lines) == "".join(LOOKS[r.origin].mark + r.text for r in responses)


def test_show_drafts_colours_tokens_by_origin(expected: str) -> None:
    how = ("-p", QUESTION, "-n", "10", "--show-drafts", "--k", "2")
    coloured = run(*how, env={"FORCE_COLOR": "1", "TERM": "xterm"}, color=True)
    assert "\x1b[32maccepted draft\x1b[0m" in coloured.stdout
    assert coloured.stdout.count("\x1b[32m") > 1  # and drafts themselves


@pytest.mark.slow  # tests/sampling/test_seeded.py has it without the command
def test_a_seeded_sample_is_the_same_for_every_depth_and_not_the_greedy_text(expected: str) -> None:
    hot = [run_json("-p", QUESTION, "-n", "6", "-t", "2", "--seed", "7", "--k", k)["text"] for k in ("0", "3")]
    assert hot[0] == hot[1]
    assert not expected.startswith(hot[0])


def test_sampling_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {}

    def stop_there(model: Any, tokenizer: Any, prompt: Any, **params: Any) -> Any:
        reached.update(params)
        raise RequestError("far enough")

    monkeypatch.setattr(library, "stream_generate", stop_there)
    flags = dict.fromkeys(SAMPLING, "1") | {"accept": "coupled"}
    run("-p", QUESTION, *(part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)))
    assert reached.pop("prompt_progress_callback")
    assert reached.pop("engine") is None  # one machine
    assert reached == dict.fromkeys(SAMPLING, 1) | {"accept": "coupled"}


def test_every_sampling_flag_is_a_parameter_and_help_shows_its_true_default() -> None:
    defaults = dataclasses.asdict(headstart.SamplingParams())
    for name, flag in SAMPLING.items():
        _, option = flag
        default = defaults[name]
        shown = default if isinstance(default, str) else "none" if default is None else f"{default:g}"
        assert option.show_default == shown, name


@pytest.mark.parametrize(("command", "most"), [("generate", "256"), ("chat", "1024")])
def test_help_shows_the_default_limit_of_the_command(command: str, most: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert [limit for limit in ("256", "1024") if limit in shown] == [most]


def test_an_acceptance_rule_that_there_is_not_is_no_command_line() -> None:
    result = run("-p", QUESTION, "--accept", "all")
    assert result.exit_code == 2
    assert "optimistic" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --prompt or --prompt-file"),
        (["-p", "a", "--prompt-file", "b"], "either --prompt or --prompt-file"),
        (["-p", ""], "--prompt is empty"),
        (["--prompt-file", "/nowhere/at/all"], "--prompt-file /nowhere/at/all: cannot be read"),
        (["-p", "a", "--k", "16"], "k is 16"),
        (["-p", "a", "--k", "many"], "k is 'many'; it must be 'auto' or a whole number from 0 to 15"),
        (["-p", "a", "--k", "3", "--no-mtp"], "k is 3, but this model cannot draft: loaded without the head"),
        (["-p", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["-p", "a", "--temperature", "-1"], "temperature is -1"),
        (["-p", "a", "--model", "nowhere"], "nowhere: no such folder"),
        (["-p", "a", "--model", "nowhere", "--k", "16"], "k is 16"),  # known before a model is looked for
        (["-p", "a " * 5000, "--raw"], "the model's context of 4096 leaves no room"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfe")
    result = run("--prompt-file", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"error: --prompt-file {file}: cannot be read as text" in result.stderr


@pytest.mark.parametrize("arguments", ["generate --prompt-file", "config --check", "bench --prompts"])
def test_a_text_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setattr("headstart.open_files.MAX_TEXT", 9_999)
    result = CliRunner().invoke(app, [*arguments.split(), "/dev/zero"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "longer than 9,999 characters" in result.stderr


def test_so_is_an_input_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.open_files.MAX_TEXT", 9_999)
    result = run("--prompt-file", "-", input="a" * 10_000)
    assert (result.exit_code, "longer than 9,999 characters" in result.stderr) == (1, True)


def test_ctrl_c_ends_it_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once, turns = Engine.run_once, iter(range(4))

    def interrupted(engine: Engine) -> bool:
        if next(turns, None) is None:
            signal.raise_signal(signal.SIGINT)
        return run_once(engine)

    monkeypatch.setattr(Engine, "run_once", interrupted)
    result = run("-p", ENDLESS, "-n", "4000")
    assert (result.exit_code, next(turns, None)) == (130, None)
    assert isinstance(result.exception, SystemExit)


@pytest.mark.slow
def test_ctrl_c_ends_a_process_with_130() -> None:
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "generate", "-p", ENDLESS, "-n", "4000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)  # it has begun to answer
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
