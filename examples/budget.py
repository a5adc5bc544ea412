"""One question under several thinking budgets. Start the server first: `thinkfold serve`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
for budget in (0, 50, 200, -1):  # -1: no limit
    reply = client.chat.completions.create(
        model="pebble",
        messages=[{"role": "user", "content": "What is 17 * 24 + 36 * 11?"}],
        temperature=0,
        max_tokens=2000,
        extra_body={"thinking_token_budget": budget},
    )
    choice = reply.choices[0]
    spent = reply.usage.completion_tokens_details.reasoning_tokens
    effective = reply.thinkfold["policy"]["thinking"]["budget"]
    print(f"budget {effective}: {spent} thinking tokens, ended: {choice.thinking_end_reason}")
    print(f"    {choice.message.content.strip()}")
