"""Load: how fast a server of OpenAI's API answers, ours or any other, as its clients see it."""
