"""A search from outside: grow branches part by part, keep the surest. Start the server first: `thinkfold serve`.

Needs `pip install 'thinkfold[client]'`. A branch is a handle on the server: nothing is sent or computed again.
"""

import sys

from thinkfold import Client
from thinkfold.types import Until

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = Client(url)
question = [{"role": "user", "content": "What is 17 * 24?"}]
paragraph = Until("paragraph", min_tokens=8, max_tokens=64)
grown = client.begin(paragraph, messages=question, n=3, temperature=0.8, seed=1, max_tokens=1000)
for depth in range(1, 13):
    best = min(grown, key=lambda branch: len(branch.part.reasoning))  # your score: here, the shortest paragraph
    for branch in grown:
        if branch is not best:
            branch.release()
    print(f"depth {depth}: {best.part.reasoning.strip()[:60]!r}")
    if best.finished or best.part.phase == "answer":
        break
    grown = best.extend(paragraph, n=3)
if not best.finished:
    (best,) = best.extend()
print(f"thinking of {len(best.reasoning)} characters, then: {best.text.strip()}")
