"""The same model without a server."""

import sys

from thinkfold import LLM, SamplingParams, ThinkingParams

questions = ("What is 17 * 24 + 36 * 11?", "What is 12 * 12 - 5?")
model = sys.argv[1] if len(sys.argv) > 1 else "pebble"
with LLM(model) as llm:
    chats = [[{"role": "user", "content": question}] for question in questions]
    replies = llm.chat(chats, SamplingParams(temperature=0, max_tokens=2000), ThinkingParams(reasoning_effort="low"))
for question, reply in zip(questions, replies, strict=True):
    output = reply.outputs[0]
    print(f"{question}\n    thought {output.num_thinking_tokens} tokens, then said: {output.text.strip()}")
