"""Measures a model folder on the suites: `python -m training.evaluate FOLDER --suites medium long hard`.

Prints greedy pass@1, and for suites named in --vote the majority of samples, by suite and by task.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from thinkfold.pebble.problem import Problem, extract_boxed, is_evaluation
from thinkfold.pebble.suites import problems
from thinkfold.pebble.tasks import generate, own_score, score
from training.generate import Decoder, Job, load
from training.samples import Template

Row = dict[str, object]


@dataclass(slots=True)
class Asked:
    """A problem with its greedy job and its samples."""

    group: str
    problem: Problem
    greedy: Job
    samples: list[Job] = field(default_factory=list)


def canonical(text: str) -> str | None:
    """What is voted on: the boxed answer without spaces."""
    boxed = extract_boxed(text.rpartition("</think>")[2])
    return None if boxed is None else boxed.replace(" ", "")


class Measure:
    """Builds the jobs of all groups, runs them in one pool, and reports."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = Path(arguments.folder)
        self.arguments = arguments
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = Template(folder)
        device = torch.device(arguments.device)
        ends = [self.tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
        self.decoder = Decoder(load(folder, device), arguments.slots, ends, arguments.attention == "flash")
        self.judge = own_score if arguments.own_scorer else score
        self.asked: list[Asked] = []

    def add(self, group: str, items: list[Problem], samples: int) -> None:
        """Ask every problem greedily, and `samples` times at the temperature."""
        for problem in items:
            prompt = self.template.prompt([{"role": "user", "content": problem.question}])
            ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
            drawn = [Job(ids, self.arguments.temperature) for _ in range(samples)]
            self.asked.append(Asked(group, problem, Job(ids), drawn))

    def run(self) -> None:
        """Decode everything."""
        self.decoder.run([job for asked in self.asked for job in (asked.greedy, *asked.samples)])

    def _text(self, job: Job) -> str:
        return self.tokenizer.decode(job.output, skip_special_tokens=False)

    def _thinking(self, job: Job) -> int:
        close = self.tokenizer.token_to_id("</think>")
        return job.output.index(close) if close in job.output else len(job.output)

    def outcome(self, asked: Asked) -> Row:
        """Scores and answers of one problem."""
        text = self._text(asked.greedy)
        row: Row = {
            "group": asked.group,
            "task": asked.problem.task,
            "question": asked.problem.question,
            "expected": asked.problem.answer,
            "answer": canonical(text),
            "correct": self.judge(asked.problem, text),
            "thinking": self._thinking(asked.greedy),
            "finished": asked.greedy.finished,
        }
        if asked.samples:
            texts = [self._text(job) for job in asked.samples]
            votes = Counter(vote for vote in map(canonical, texts) if vote is not None)
            best = votes.most_common(1)[0][0] if votes else ""
            row["majority"] = self.judge(asked.problem, f"</think>\\boxed{{{best}}}")
            row["sampled"] = sum(self.judge(asked.problem, each) for each in texts) / len(texts)
            row["sample_thinking"] = sum(map(self._thinking, asked.samples)) / len(texts)
        return row


def summary(rows: list[Row]) -> Row:
    """Means of a list of outcomes."""

    def mean(key: str) -> float:
        return round(sum(float(str(row[key])) for row in rows) / len(rows), 4)

    out: Row = {"n": len(rows), "pass@1": mean("correct"), "thinking": round(mean("thinking"))}
    out["longest"] = max(int(str(row["thinking"])) for row in rows)
    out["unfinished"] = sum(not row["finished"] for row in rows)
    if "majority" in rows[0]:
        out |= {"maj@k": mean("majority"), "sampled": mean("sampled")}
    return out


def report(rows: list[Row]) -> None:
    """Print one line a group and one a task in it."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row["group"])].append(row)
        groups[f"{row['group']}/{row['task']}"].append(row)
    for name in sorted(groups):
        print(name, json.dumps(summary(groups[name])), flush=True)


def sweep(path: Path, n: int) -> list[tuple[str, list[Problem]]]:
    """Groups from a JSON list of [task, size keywords], to look for a suite's sizes."""
    groups = []
    for task, size in json.loads(path.read_text()):
        rng, found = Random(f"{task}:{size}"), []
        while len(found) < n:
            problem = generate(task, rng, **size)
            if is_evaluation(problem.question):
                found.append(problem)
        groups.append((f"{task} {json.dumps(size)}", found))
    return groups


def main() -> None:
    """Parse arguments, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--suites", nargs="*", default=["long", "hard", "medium"])
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--vote", nargs="*", default=[], help="suites to sample as well")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", default="flash", choices=("flash", "sdpa"))
    parser.add_argument("--own-scorer", action="store_true", help="judge without reasoning-gym")
    parser.add_argument("--sweep", type=Path, help="JSON list of [task, size] to measure as well")
    parser.add_argument("--sweep-n", type=int, default=64)
    parser.add_argument("--sweep-samples", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write one JSON row a problem")
    arguments = parser.parse_args()
    begin = time.monotonic()
    measure = Measure(arguments)
    for suite in arguments.suites:
        samples = arguments.samples if suite in arguments.vote else 0
        measure.add(suite, list(problems(suite, arguments.n, arguments.offset)), samples)
    for name, items in sweep(arguments.sweep, arguments.sweep_n) if arguments.sweep else []:
        measure.add(name, items, arguments.sweep_samples)
    ready = time.monotonic()
    measure.run()
    done = time.monotonic()
    rows = [measure.outcome(asked) for asked in measure.asked]
    if arguments.output:
        arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(rows)
    tokens = sum(len(job.output) for asked in measure.asked for job in (asked.greedy, *asked.samples))
    print(json.dumps({"tokens": tokens, "setup_s": round(ready - begin, 1), "decode_s": round(done - ready, 1)}))


if __name__ == "__main__":
    main()
