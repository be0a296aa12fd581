"""Two replicas of Ray Serve: all APIs and models answer as one server does, and conversations keep their replica."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servers import MODEL, ask, free_port, headstart, read_stream

ROOT = Path(__file__).parents[2]
OTHER = "tiny-qwen3.5-moe"
CONVERSATIONS, TURNS = 6, 3
RULES = "You write short Python functions. " + "Think about names, types and edge cases. " * 12
os.environ |= {"MODEL": f"{MODEL},{OTHER}", "REPLICAS": "2", "RAY_USAGE_STATS_ENABLED": "0"}
sys.path.insert(0, str(ROOT))


def converse(url: str, number: int) -> list[tuple[str, int]]:
    """Return the text of each turn of a conversation, and how much of its prompt was cached."""
    messages, answers = [{"role": "system", "content": f"{RULES} Conversation {number}."}], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: write the parser."})
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 100 * number + turn}
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, **sampling}
        answer = ask(f"{url}/v1/chat/completions", body, headers={"serve_multiplexed_model_id": f"c{number}"})
        text = answer["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": text})
        answers.append((text, answer["generation_stats"]["prefix_cache_hit"]))
    return answers


def talk(url: str) -> list[list[tuple[str, int]]]:
    with ThreadPoolExecutor(CONVERSATIONS) as threads:
        return list(threads.map(lambda number: converse(url, number), range(CONVERSATIONS)))


def texts(url: str) -> dict[str, str]:
    """Return what each API says, and what a stream and the other model do."""
    said = [{"role": "user", "content": "Write a function that adds two numbers."}]
    chat: dict[str, Any] = {"messages": said, "max_tokens": 16, "temperature": 0}
    answer = ask(f"{url}/v1/responses", {"input": said, "max_output_tokens": 16, "temperature": 0})
    return {
        "chat": ask(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]["content"],
        "other model": ask(f"{url}/v1/chat/completions", chat | {"model": OTHER})["choices"][0]["message"]["content"],
        "stream": read_stream(f"{url}/v1/chat/completions", chat)[0],
        "message": "".join(block.get("text", "") for block in ask(f"{url}/v1/messages", chat)["content"]),
        "response": "".join(part["text"] for item in answer["output"] for part in item.get("content", ())),
    }


def check(url: str, alone: str) -> list[str]:
    """Return what went wrong."""
    found, expected = texts(url), texts(alone)
    problems = [
        f"{name}: {found[name]!r} instead of {expected[name]!r}" for name in found if found[name] != expected[name]
    ]
    talked, same = talk(url), talk(alone)
    different = [i for i in range(CONVERSATIONS) if [text for text, _ in talked[i]] != [text for text, _ in same[i]]]
    hits = sum(cached > 0 for answers in talked for _, cached in answers[1:])
    later = CONVERSATIONS * (TURNS - 1)
    print(f"{len(found)} kinds of answers from replicas, {len(found) - len(problems)} as from one server")
    print(f"same text as from one server: {CONVERSATIONS - len(different)} of {CONVERSATIONS} conversations")
    print(f"later turns that found their prefix: {hits} of {later}")
    problems += [f"conversation {number} differs from one server's" for number in different]
    return problems + ([f"{later - hits} later turns found no prefix"] if hits < later else [])


def main() -> None:
    import ray
    from contrib.ray_serve import app
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app)
        with headstart(MODEL, OTHER) as alone:
            problems = check(f"http://127.0.0.1:{port}", alone.url)
    finally:
        serve.shutdown()
        ray.shutdown()
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
