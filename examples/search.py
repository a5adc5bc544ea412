"""Beam search over steps of thinking, on a Countdown question. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
stream = client.chat.completions.create(
    model="pebble",
    messages=[{"role": "user", "content": "Make 58 from the numbers 3, 5, 11. Use every number exactly once."}],
    temperature=0.8,
    stream=True,
    extra_body={
        "search": {"width": 2, "branch": 3, "min_step_tokens": 32, "max_step_tokens": 64, "max_tokens": 3000},
        "thinkfold": {"events": True},
    },
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="")
    found = (getattr(chunk, "thinkfold", None) or {}).get("search")
    if found and found["rule"] is None:
        print(f"depth {found['deepest']}: {found['open']} states of thinking open, {found['ended']} ended")
    elif found:
        nodes = {node["id"]: node for node in found["nodes"]}
        print(f"\n{len(nodes)} nodes, {found['kept_tokens']} tokens kept, {found['discarded_tokens']} discarded; path:")
        at = found["node"]
        while at is not None:
            print(f"  node {at}: {nodes[at]['tokens']} tokens of thinking, score {nodes[at]['score']:.3f}")
            at = nodes[at]["parent"]
        break
