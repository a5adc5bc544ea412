"""Eight samples vote on one answer, and the vote is shown as it forms. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
stream = client.chat.completions.create(
    model="pebble",
    messages=[{"role": "user", "content": "What is 17 * 24 + 36 * 11?"}],
    temperature=0.7,
    max_tokens=2000,
    stream=True,
    extra_body={"vote": {"n": 8}, "early_stop": {"consistency": "3/4"}, "thinkfold": {"events": True}},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="")
    vote = (getattr(chunk, "thinkfold", None) or {}).get("vote")
    if vote:
        votes = ", ".join(f"{found['answer']}: {found['count']}" for found in vote["classes"]) or "none"
        print(f"\n[{vote['started']} started, {vote['running']} thinking; votes {votes}; {vote['rule'] or 'open'}]")
