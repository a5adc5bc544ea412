"""Watch thinking being folded while it goes on. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
stream = client.chat.completions.create(
    model="pebble",
    messages=[{"role": "user", "content": "What is 27 * 34 + 118 * 9?"}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"thinkfold": {"events": True, "fold": {"policy": "eager", "entries": 32}}},
)
for chunk in stream:
    ours = getattr(chunk, "thinkfold", None) or {}
    if fold := ours.get("fold"):
        what = "stay raw" if fold["refused"] else f"become {fold['entries']:.0f} entries"
        print(f"tokens {fold['start']}-{fold['end']} {what}, {fold['pages_freed']} pages freed")
    for segment in ours.get("segments", ()):
        print(f"segment {segment['id']}: {segment['end'] - segment['start']} tokens, {segment['state']}")
    for choice in chunk.choices:
        print(choice.delta.content or "", end="")
    if chunk.usage:
        costs = chunk.usage.thinkfold
        print(f"\n{costs['tokens']['thinking']} thinking tokens, {costs['kv']['peak_entries']} KV entries at most")
