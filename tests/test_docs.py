"""Pages name only what exists, and generated pages are current. `make docs-check` also runs the commands."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from docs import api
from docs.pages import ROOT, blocks, pages, problems

from headstart import errors
from headstart.errors import HeadstartError
from headstart.server.anthropic_request import MessagesRequest
from headstart.server.openai_request import ChatCompletionRequest, CompletionRequest
from headstart.server.request_fields import GenerationRequest
from headstart.server.responses_request import ResponsesRequest


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path) -> None:
    assert problems(page) == []


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    links = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)", index.read_text())}
    assert [page for page in pages() if page.is_relative_to(ROOT / "docs") and page not in links | {index}] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_install_names_the_demo_and_the_tests_that_ci_runs() -> None:
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    assert {"make demo", "make test"} <= set(re.findall(r"^(make \w+)", install, re.MULTILINE))
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


def test_the_architecture_names_every_package_and_every_operation() -> None:
    page, source = (ROOT / "docs/architecture.md").read_text(), ROOT / "src/headstart"
    parts = [path for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    names = {path.name if path.suffix else f"{path.name}/" for path in parts} - {"__init__.py", "__main__.py"}
    assert {name for name in names if f"`{name}`" not in page} == set()
    table = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `kernels/")]
    named = {
        (column, name) for row in table for column, cell in enumerate(row) for name in re.findall(r"`(.+?)`", cell)
    }
    folders = {0: source, 2: source / "kernels/cpu", 3: source / "kernels/cuda", 4: source / "kernels/metal"}
    assert len(table) > 5
    assert [name for column, name in named if column in folders and not (folders[column] / name).exists()] == []


@pytest.mark.parametrize("name", ["cli.md", "python-api.md"])
def test_generated_pages_are_current(name: str) -> None:
    path = ROOT / "docs/reference" / name
    assert path.read_text() == api.pages()[path], "run `python docs/api.py`"


@pytest.mark.parametrize(
    "request_model", [ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
def test_every_request_field_is_on_the_page_of_the_http_api(request_model: type[GenerationRequest]) -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()
    assert [name for name in request_model.model_fields if not re.search(rf"`{name}\b", page)] == []


def test_every_error_is_on_the_page_of_errors() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    classes = [name for name, each in vars(errors).items() if isinstance(each, type) and each is not HeadstartError]
    assert [name for name in classes if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```sh\nheadstart sing\n```", "headstart has no command sing"),
        ("```sh\nheadstart generate --prompt x --loudly\n```", "No such option"),
        ("```sh\nheadstart serve --port nowhere\n```", "nowhere"),
        ("```sh\nheadstart --loudly\n```", "headstart has no --loudly"),
        ("```console\n$ echo x | headstart generate --loudly\nx\n```", "No such option"),
        ("```sh\nmlx.launch -n 2 -- headstart generate --loudly\n```", "No such option"),
        ("```sh\nheadstart inspect \\\n  --loudly\n```", "No such option"),
        ("```sh\npython bench/nothing.py\n```", "no file bench/nothing.py"),
        ("```sh\npython bench/step.py --loudly\n```", "bench/step.py has no --loudly"),
        ("```sh\nmake music\n```", "no target music"),
        ("```\nheadstart inspect\n```", "commands belong into"),
        ("```python\nif\n```", "invalid syntax"),
        ("```json\n{\n```", "```json"),
        ("```toml\n[\n```", "```toml"),
        ("`headstart sing` it", "headstart has no command sing"),
        ("`headstart serve --loudly`", "headstart serve has no --loudly"),
        ("`--loudly`", "nothing has --loudly"),
        ("`engine/nothing.py`", "no file engine/nothing.py"),
        ("[here](nothing.md)", "no file nothing.md"),
        ("![here](nothing.png)", "no file nothing.png"),
        ('<img src="nothing.png"> here', "no file nothing.png"),
        ("# A heading\n[here](#another-heading)", "no heading #another-heading"),
        ("HEADSTART_LOUDLY=1", "nothing reads HEADSTART_LOUDLY"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    (found,) = problems(page)
    assert problem in found


def test_what_exists_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *heading*: `k = 0`\n[here](#a-heading-k--0) and `headstart serve --port`, `--mtp-bits`, `test_docs.py`, "
        "`engine/step.py`, HEADSTART_MTP\n"
        "```sh\n# a comment\nHEADSTART_MTP=0 headstart generate -p 'a | b' --k 3 | cat  # the model's own\n"
        "python bench/step.py --rows 1\nmake demo PYTHON=python3\nheadstart --version\n```\n"
        "```\n46 tokens\n```\n"
    )
    assert problems(page) == []


def test_a_block_gives_the_reason_why_it_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: takes an hour -->\n```sh\nheadstart bench\n```\n\n```sh\nheadstart demo\n```\n")
    assert [block.not_run for block in blocks(page)] == ["takes an hour", None]


def test_output_beneath_a_command_belongs_to_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one \\\n    two\none two\n\n$ true\n```\n")
    (block,) = blocks(page)
    assert [(command.text.split(), command.output) for command in block.commands] == [
        (["echo", "one", "two"], "one two\n\n"),
        (["true"], ""),
    ]


def test_output_is_held_to_the_page_but_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    check = import_module("check")
    said = "reading\n46 tokens · 28.4 tokens/s · acceptance 93% 79% 64% · depth 3.0\n"
    assert check.shows("46 tokens · 9 tokens/s · acceptance 90% · depth   2.7\n", said)
    assert check.shows("…\n46 tokens · … · depth 3.0\n", said)
    assert check.shows("", said)
    assert not check.shows("46 tokens · no drafts: …\n", said)
    assert not check.shows("depth 3.0 · … · 46 tokens\n", said)
    assert check.fails(check.Command("headstart inspect", "error: no such folder\n"))
    assert not check.fails(check.Command("headstart inspect", "no error: all is well\n"))
