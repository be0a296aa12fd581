"""How many JSON Schemas a server accepts, of how many it leaves out something, and whether answers are valid.

    python bench/schemas.py FOLDER [--every N] [--answers 300] [--strict] [--check]

FOLDER holds schemas in files, such as JSONSchemaBench's `data` (https://github.com/guidance-ai/jsonschemabench). A
file may also hold its schema as `json_schema`. Answers are random walks through the grammar that end as soon as they
may, so no model is needed: what the grammar permits is what any model's answer can be.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from harness import line, options, table

from headstart.checkpoint import load_tokenizer, resolve
from headstart.errors import RequestError
from headstart.sampling import GrammarSpec, compile_grammar
from headstart.sampling.grammar import Grammar

SLOW = 3.0  # seconds of CPU time
MOST_TOKENS = 2000  # of an answer
CLOSING = 0.9  # how often a token is taken that closes something, where one is permitted
TOKENIZER: list[Any] = []


class Outcome(NamedTuple):
    refused: str = ""
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    valid: bool | None = None  # None: no answer was asked for, or it did not finish


def read(folder: Path, every: int) -> Iterator[Any]:
    for file in sorted(folder.rglob("*.json"))[::every]:
        schema = json.loads(file.read_text())
        yield schema["json_schema"] if isinstance(schema, dict) and "json_schema" in schema else schema


def attempt(schema: Any, answers: bool, strict: bool) -> Outcome:
    if not TOKENIZER:
        tokenizer = load_tokenizer(resolve("tiny-qwen3.5"))
        closing = sum(1 << id for text, id in tokenizer.get_vocab().items() if text[:1] in '"}]')
        TOKENIZER.extend([tokenizer, closing])
    tokenizer, closing = TOKENIZER
    start = time.process_time()
    try:
        grammar = compile_grammar(GrammarSpec.json_schema(schema, strict=strict), tokenizer)
    except RequestError as error:
        return Outcome(refused=str(error), seconds=time.process_time() - start)
    seconds = time.process_time() - start
    valid = is_valid(walk(grammar, closing, tokenizer), schema) if answers else None
    return Outcome("", tuple(grammar.left_out), seconds, valid)


def walk(grammar: Grammar, closing: int, tokenizer: Any) -> str | None:
    """Return a text that the grammar permits, None if it does not end."""
    matcher, stops = grammar.start.deep_copy(), sum(1 << id for id in grammar.tokenizer.eos_tokens)
    tokens: list[int] = []
    for _ in range(MOST_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask & stops or not mask:
            return str(tokenizer.decode(tokens)) if mask else None
        if mask & closing and random.random() < CLOSING:
            mask &= closing
        tokens.append(pick(mask))
        if not matcher.consume_token(tokens[-1]):
            return None
    return None


def pick(mask: int) -> int:
    position = random.randrange(mask.bit_length())
    above = mask >> position << position or mask
    return (above & -above).bit_length() - 1


def is_valid(answer: str | None, schema: Any) -> bool | None:
    if answer is None:
        return None
    try:
        jsonschema.validate(json.loads(answer), schema)
    except jsonschema.ValidationError:
        return False
    except Exception:  # a schema that jsonschema cannot read
        return None
    return True


def main() -> None:
    given = options(__doc__, "folder", every=1, answers=300, strict=False, check=False)
    schemas = list(read(Path(given.folder), given.every))
    random.seed(0)
    asked = set(random.sample(range(len(schemas)), min(given.answers, len(schemas))))
    with ProcessPoolExecutor(2) as pool:
        futures = [pool.submit(attempt, schema, i in asked, given.strict) for i, schema in enumerate(schemas)]
        outcomes = [future.result() for future in futures]
    accepted = [each for each in outcomes if not each.refused]
    whole, slow = [each for each in accepted if not each.left_out], sum(each.seconds > SLOW for each in outcomes)
    print(f"{len(outcomes)} schemas, {slow} slower than {SLOW:g} s")
    kept = not slow
    table("", "schemas", "share", "finished answers", "valid")
    for name, group, least, valid in (("accepted", accepted, 0.97, 0.95), ("nothing left out", whole, 0.82, 1.0)):
        checked = [each.valid for each in group if each.valid is not None]
        line(name, len(group), f"{len(group) / len(outcomes):.1%}", len(checked), sum(checked))
        kept &= len(group) >= least * len(outcomes) and sum(checked) >= valid * len(checked)
    table("", "how often")
    words = Counter(f"left out: {word}" for each in accepted for word in each.left_out)
    words.update(f"refused: {each.refused[:120]}" for each in outcomes if each.refused)
    for word, count in words.most_common(24):
        line(word, count)
    if given.check and not kept:
        raise SystemExit("less than asked: 97% accepted, 82% with nothing left out, none slow, 95% and 100% valid")


if __name__ == "__main__":
    main()
