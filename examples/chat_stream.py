"""Stream a reply with its thinking. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
stream = client.chat.completions.create(
    model="pebble",
    messages=[{"role": "user", "content": "What is 17 * 24 + 36 * 11?"}],
    stream=True,
    stream_options={"include_usage": True},
    max_tokens=2000,
)
phase = ""
for chunk in stream:
    for choice in chunk.choices:
        for name in ("reasoning_content", "content"):
            piece = getattr(choice.delta, name, None)
            if piece:
                if name != phase:
                    phase = name
                    print(f"\n[{name}]")
                print(piece, end="", flush=True)
    if chunk.usage:
        print(f"\n[usage] {chunk.usage.completion_tokens} tokens,", end=" ")
        print(f"{chunk.usage.completion_tokens_details.reasoning_tokens} of them thinking")
