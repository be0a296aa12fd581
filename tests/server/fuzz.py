"""Drive random bodies through validation, preparation and the matcher, as the server does but without its engine.

    python tests/server/fuzz.py SEED FIRST LAST

Run in a process of its own, since a crash of llguidance ends it: the case at hand is on the last line of the output.
"""

import asyncio
import sys
from collections import Counter
from math import inf
from random import Random
from typing import Any

from hostile_bodies import body
from pydantic import ValidationError
from running import loaded_model, tokenizer

from headstart.errors import HeadstartError
from headstart.sampling.bounds import on_deep_stack
from headstart.server.anthropic_request import CountTokensRequest, MessagesRequest
from headstart.server.errors import Refusal
from headstart.server.loaded_model import LoadedModel
from headstart.server.openai_request import ChatCompletionRequest, CompletionRequest
from headstart.server.prepare import Preparer
from headstart.server.prompt import Prompt
from headstart.server.settings import Limits

SHAPES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}


class Client:
    async def receive(self) -> dict[str, str]:
        await asyncio.Event().wait()
        return {}


async def case(path: str, body: dict[str, Any], served: LoadedModel, preparer: Preparer) -> str:
    try:
        asked = SHAPES[path].model_validate(body)
        asked.check()
        async with preparer.preparing(Client(), "", inf) as work:  # type: ignore[arg-type]
            prompt = await asked.make_prompt(served, work)
    except ValidationError:
        return "invalid"
    except Refusal as refused:
        if refused.status_code not in (400, 408):
            raise
        return f"refused {refused.status_code}"
    on_deep_stack(follow, prompt, served)
    return "followed" if prompt.compiled else "no grammar"


def follow(prompt: Prompt, served: LoadedModel, steps: int = 8) -> None:
    """As the engine does: masks before and after drafts, and some of what is permitted."""
    if prompt.compiled is None:
        return
    random, matcher = Random(0), prompt.compiled.matcher(tokenizer().eos_token_ids, served.model.vocabulary)
    for _ in range(steps):
        try:
            masks = matcher.masks(matcher.forced(4))
        except HeadstartError:
            return
        permitted = [i for i in range(served.model.vocabulary) if masks and masks[0][i // 8] >> i % 8 & 1]
        if not permitted or not matcher.advance([random.choice(permitted)]) or matcher.stopped:
            return


async def main(seed: str, first: int, last: int) -> None:
    served = loaded_model()
    preparer = Preparer(tokenizer(), Limits(grammar_seconds=1, prepare_seconds=120), context=10**6, max_waiting=None)
    outcomes: Counter[str] = Counter()
    for i in range(first, last):
        print(f"case {i}", flush=True)
        outcomes[await case(*body(Random(f"{seed}/{i}")), served, preparer)] += 1
    await preparer.close()
    print(dict(outcomes), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
