"""Thinking that ends when the answer is settled, by several rules. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
rules = {
    "no rule": {},
    "entropy below 0.1": {"early_stop": {"entropy": 0.1}},
    "3 of 4 probes agree": {"early_stop": {"consistency": "3/4"}},
    "preset balanced": {"thinkfold": {"control": {"preset": "balanced"}}},
    "preset aggressive": {"thinkfold": {"control": {"preset": "aggressive"}}},
}
for name, body in rules.items():
    reply = client.chat.completions.create(
        model="pebble",
        messages=[{"role": "user", "content": "What is 17 * 24 + 36 * 11?"}],
        temperature=0,
        max_tokens=2000,
        extra_body=body,
    )
    choice, tokens = reply.choices[0], reply.usage.thinkfold["tokens"]
    print(f"{name}: {tokens['thinking']} thinking tokens, {tokens['probe']} of probes, {choice.thinking_end_reason}")
    print(f"    {choice.message.content.strip()}")
