"""Cases of group E at the level of the core: prefix reuse, pool limits, sharing."""

import pytest
from scripted import BARE_PROMPT, CLOSE, EOS, OPEN_PROMPT, PAGE, ids, language, loop, make_engine, script

from thinkfold.types import FinishReason


def render(turns):
    """The prompt of a chat as the template writes it; thinking of earlier turns is dropped."""
    tokenizer = language()[0]
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return ids(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_case_35_stripped_thinking_keeps_the_prefix_of_twenty_turns():
    engine = make_engine(num_pages=3000)
    turns, before, cached_before = [], [], 0
    for turn in range(20):
        turns.append((f"question {turn}", None))
        prompt = render(turns)
        name = f"turn{turn}"
        engine.add(prompt, request_id=name, token_of=script(f"<think>\n{'w ' * 32}{CLOSE}\n\n{'A ' * 8}{EOS}"))
        engine.runner.scripts = {name: engine.runner.scripts[name]}
        engine.run()
        out = engine.outputs[name]
        shared = min(common_prefix(before, prompt), len(prompt) - 1)
        assert out.costs.cached_tokens == shared // PAGE * PAGE
        cached = engine.core.stats().pages_by_class["cached"]
        visible = len(prompt) - len(before)
        assert (cached - cached_before) * PAGE <= visible + PAGE
        turns[-1] = (f"question {turn}", out.outputs[0].text)
        before, cached_before = prompt, cached
    assert out.costs.cached_tokens > 500


def test_no_request_hits_kv_behind_anothers_think():
    """Prefilled thinking equal to another request's, open or closed, is computed again."""
    thought = "the same long secret thought " * 4
    engine = make_engine()
    stem = len(ids(BARE_PROMPT))
    for number, tail in enumerate((f"<think>\n{thought}", f"<think>\n{thought}\n</think>\n\nanswer so far")):
        for visit in range(2):
            name = f"{number}-{visit}"
            engine.add(BARE_PROMPT + tail, request_id=name, token_of=script(f"{CLOSE}A{EOS}"))
            engine.run()
            assert engine.outputs[name].costs.cached_tokens <= stem
    assert engine.core.stats().pages_by_class["cached"] * PAGE <= stem


def test_thinking_and_answers_are_never_published():
    engine = make_engine()
    engine.add(BARE_PROMPT, token_of=script(f"<think>\n{'w ' * 40}{CLOSE}\n\n{'A ' * 40}{EOS}"))
    engine.run()
    assert engine.core.stats().pages_by_class == {
        "prompt": 0,
        "thinking": 0,
        "summary": 0,
        "answer": 0,
        "cached": len(ids(BARE_PROMPT)) // PAGE,
        "pinned": 0,
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_case_39_growing_prompts_and_a_small_neighbour_all_finish(depth):
    engine = make_engine(depth=depth, num_pages=16)  # 64 entries
    engine.add(list(range(27)), request_id="one", token_of=loop("a"), max_tokens=37)
    engine.add(list(range(100, 127)), request_id="two", token_of=loop("a"), max_tokens=37)
    engine.add(BARE_PROMPT[:5], request_id="small", token_of=loop("a"), max_tokens=5)
    engine.run()
    assert engine.core.stats().preemptions >= 1
    for name, length in (("one", 37), ("two", 37), ("small", 5)):
        assert len(engine.one(name).token_ids) == length
        assert engine.one(name).finish_reason is FinishReason.LENGTH


def test_case_39_a_request_that_grows_to_the_whole_pool_ends_with_length():
    engine = make_engine(num_pages=16)
    engine.add(list(range(40)), token_of=loop("a"), max_tokens=24)  # what AsyncEngine makes of 200
    engine.run()
    assert engine.one().finish_reason is FinishReason.LENGTH
    assert engine.core.stats().preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_case_40_a_preempted_stream_equals_the_unpreempted_one(depth):
    results = []
    for num_pages in (2000, 150):
        engine = make_engine(depth=depth, num_pages=num_pages)
        for i in range(6):
            engine.add(request_id=f"r{i}", token_of=loop(), n=1 + i % 2, budget=100 + i, max_tokens=200)
        engine.run(limit=20_000)
        results.append(
            {
                (name, o.index): (o.reasoning, o.text, o.token_ids, o.num_thinking_tokens)
                for name, total in engine.outputs.items()
                for o in total.outputs
            }
        )
        preemptions = engine.core.stats().preemptions
        assert engine.finals == {f"r{i}": 1 for i in range(6)}
    assert preemptions >= 3
    assert results[0] == results[1]


def test_n_samples_hold_the_trunk_once():
    engine = make_engine(num_pages=2000)
    prompt = ids(OPEN_PROMPT) * 8
    engine.add(prompt, token_of=loop(), n=8, budget=-1, max_tokens=40)
    for _ in range(20):
        engine.step()
    usage = engine.core.stats().pages_by_class
    held = usage["prompt"] + usage["thinking"] + usage["answer"]
    trunk = -(-len(prompt) // PAGE)
    assert held <= trunk + 8 * (20 // PAGE + 1) + 8
    engine.core.abort("r")
    engine.run()
