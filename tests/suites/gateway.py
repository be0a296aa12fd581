"""Three servers behind the real gateway: agents take turns, one server is killed and one drained.

Half of the agents are greedy, the others seeded, and half of each read streams. A stream breaks with its server: its
agent asks again. Nothing else may be lost.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError, URLError

from servers import MODEL, Broken, Process, ask, free_port, headstart, read_stream, running

AGENTS, TURNS, SERVERS = 12, 8, 3
WORDS = ("parser", "queue", "cache", "lexer", "socket", "table", "index", "stream", "graph", "timer", "tree", "lock")
RULES = "You are an agent that writes short Python functions. " + "Think about names, types and edge cases. " * 12


@dataclass
class Agent:
    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    prints: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    broken: int = 0  # streams

    @property
    def streams(self) -> bool:
        return self.number % 4 >= 2

    def request(self, turn: int) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.number % 2 else {"temperature": 0.8, "seed": 100 * self.number + turn}
        return {"model": MODEL, "messages": self.messages, "max_tokens": 24, **sampling}

    def take_turn(self, url: str, turn: int) -> None:
        if not turn:
            self.messages = [{"role": "system", "content": f"{RULES} Agent {self.number}."}]
        question = f"Turn {turn}: write the {WORDS[(self.number + turn) % len(WORDS)]}."
        self.messages.append({"role": "user", "content": question})
        try:
            text, stats = self.answer(url, turn)
        except (HTTPError, URLError, OSError, Broken) as error:
            self.lost.append(f"agent {self.number}, turn {turn}: {error}")
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": text})
        self.answers.append(text)
        self.hits.append(stats["prefix_cache_hit"] > 0)
        self.prints.add(stats["system_fingerprint"])

    def answer(self, url: str, turn: int) -> tuple[str, dict[str, Any]]:
        url, body = f"{url}/v1/chat/completions", self.request(turn)
        if not self.streams:
            answer = ask(url, body)
            return answer["choices"][0]["message"]["content"] or "", answer["generation_stats"]
        try:
            return read_stream(url, body)
        except Broken:
            self.broken += 1
            return read_stream(url, body)


class Killer:
    """Kills a server, and remembers how many requests it then had."""

    def __init__(self, server: Process):
        self._server, self.running = server, 0

    def __call__(self) -> None:
        self.running = ask(self._server.url + "/v1/loads")["loads"][0]["num_total_reqs"]
        self._server.kill()


def talk(url: str, events: dict[int, Any]) -> list[Agent]:
    """Have all agents take their turns side by side. `events`: what happens in the middle of a turn."""
    agents = [Agent(number) for number in range(AGENTS)]
    with ThreadPoolExecutor(AGENTS) as threads:
        for turn in range(TURNS):
            done = [threads.submit(agent.take_turn, url, turn) for agent in agents]
            if turn in events:
                done[0].result()  # the others are under way
                events[turn]()
            for each in done:
                each.result()
    return agents


def check(servers: list[Process], gateway: Process) -> list[str]:
    """Return what went wrong."""
    alone = talk(servers[0].url, {})
    kill = Killer(servers[1])
    together = talk(gateway.url, {3: kill, 5: servers[2].terminate})
    lost = [each for agent in together for each in agent.lost]
    different = [
        agent.number
        for agent, same in zip(together, alone, strict=True)
        if not agent.lost and agent.answers != same.answers
    ]
    calm = sum(agent.hits[turn] for agent in together for turn in (1, 2))
    broken = sum(agent.broken for agent in together)
    prints = {each for agent in (*alone, *together) for each in agent.prints}
    answers = sum(len(agent.answers) for agent in together)
    print(f"{AGENTS} agents of {TURNS} turns: {answers} answers, {len(lost)} lost")
    print(f"streams that broke with the killed server: {broken}; it had {kill.running} requests")
    print(f"prefix hits of the second and third turns: {calm} of {2 * AGENTS}")
    print(f"same text as from one server: {AGENTS - len(different)} of {AGENTS} agents; fingerprints: {prints}")
    problems = [f"lost: {each}" for each in lost]
    problems += [f"agent {number} said something else than with one server alone" for number in different]
    problems += [f"{2 * AGENTS - calm} prompts of quiet turns found no prefix"] if calm < 2 * AGENTS else []
    problems += [f"{broken} streams broke"] if broken > kill.running else []
    problems += [f"several fingerprints: {prints}"] if len(prints) > 1 else []
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smg", default="smg", help="the gateway's command")
    parser.add_argument("--policy", default="cache_aware")
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = [stack.enter_context(headstart("--drain-seconds", "8")) for _ in range(SERVERS)]
        port = free_port()
        command = [options.smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", options.policy]
        command += ["--worker-urls", *(server.url for server in servers), "--health-check-interval-secs", "1"]
        gateway = stack.enter_context(running(command, port, "/v1/models"))
        problems = check(servers, gateway)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
