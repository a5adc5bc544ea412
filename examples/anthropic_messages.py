"""Anthropic's client with a thinking budget. Start the server first: `thinkfold serve`."""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = Anthropic(base_url=url, api_key="unused")
history = []
for question in ("What is 3 * 4?", "What is 5 * 6?"):
    history.append({"role": "user", "content": question})
    message = client.messages.create(
        model="pebble",
        max_tokens=1000,
        thinking={"type": "enabled", "budget_tokens": 400},
        messages=history,
        extra_body={"temperature": 0},
    )
    thinking, text = message.content
    print(f"{question}\n    thought {len(thinking.thinking)} characters, then said: {text.text}")
    # Blocks go back as they came: the signature shows that the thinking is the server's own.
    history.append({"role": "assistant", "content": message.content})
