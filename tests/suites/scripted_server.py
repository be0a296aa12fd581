"""A server for Open Responses' suite: it sees, and calls a tool where there is one.

The suite wants a model that follows instructions. Here the device alone is missing: the answers are scripted, and
everything else is the server's own, from the image to the events. Prints its URL and waits for its input to end.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "server")]

import scripted  # noqa: E402
from seeing import running_with_tower  # noqa: E402

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'


class Obliging(scripted.ScriptedRoom):
    def _answer(self) -> bool:
        scripted.tokenizer = lambda: self.engine.tokenizer  # the one that sees has its own
        (row, *_) = self.engine.scheduler.queue.all()
        text = self.engine.tokenizer.decode(list(row.handle.request.prompt))
        self.scripts.append(CALL if "get_weather" in text else "OK, as you wish.")
        return super()._answer()


def main() -> None:
    with running_with_tower(Path(tempfile.mkdtemp()), room_type=Obliging) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
