"""Trains Pebble in legs: `python -m training.train --minutes N --resume DIR`.

A leg goes on from DIR's checkpoint, if there is one, and leaves a checkpoint and a Hugging Face folder there.
"""

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from thinkfold.pebble import pebble_path
from training.data import Batch, Feeder
from training.model import Pebble, Shape
from training.optimizer import Optimizer

WINDOW = 16384
WARMUP_STEPS = 200
DECAY_FROM = 0.4  # share of the whole run after which the rates fall linearly to zero
STAGES_FROM = (0.0, 0.22, 0.45)
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(slots=True)
class Progress:
    """What a resumed leg must know."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def rate_factor(share: float, steps: int) -> float:
    """Warm up, hold, then fall to zero at the end of the whole run."""
    return min(1.0, (steps + 1) / WARMUP_STEPS, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def stage_at(share: float) -> int:
    """The data stage at a share of the whole run."""
    return sum(share >= start for start in STAGES_FROM) - 1


def export(model: Pebble, folder: Path, tokenizer_folder: Path) -> None:
    """Write bf16 weights, config and tokenizer as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().cpu().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)


class Run:
    """One leg of training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder = arguments, Path(arguments.resume)
        self.device = torch.device(arguments.device)
        shape = Shape.read(pebble_path())
        if arguments.tiny:
            shape = replace(shape, hidden=64, inner=128, layers=2, heads=2, kv_heads=1, head_dim=32)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Pebble(shape, dtype).to(self.device)
        self.optimizer = Optimizer(self.model)
        self.progress = Progress()
        self._load()
        if self.device.type == "cuda":
            self.model.compile_parts()
        self.spent_before = self.progress.seconds
        seed = f"{arguments.seed}:{self.progress.steps}"
        self.feeder = Feeder(pebble_path(), arguments.workers, arguments.window, arguments.windows, seed)

    def _load(self) -> None:
        path = self.folder / "state.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=False)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write the checkpoint and the Hugging Face folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, self.folder / "state.tmp")
        (self.folder / "state.tmp").replace(self.folder / "state.pt")
        export(self.model, self.folder / "hf", pebble_path())

    def step(self, batch: Batch, share: float) -> torch.Tensor:
        """One update; returns the loss on the device."""
        ids, labels, positions, bounds = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (batch.ids, batch.labels, batch.positions, batch.bounds)
        )
        loss = self.model.loss(ids, labels, positions, bounds, batch.longest)
        loss.backward()
        self.optimizer.step(rate_factor(share, self.progress.steps))
        self.progress.steps += 1
        self.progress.tokens += len(batch.ids)
        return loss.detach()

    def run(self) -> None:
        """Train until the leg's minutes are over."""
        begin = saved = time.monotonic()
        whole = 60 * (self.arguments.total_minutes or self.arguments.minutes)
        window_begin, window_tokens = begin, self.progress.tokens
        while (elapsed := time.monotonic() - begin) < 60 * self.arguments.minutes:
            share = min(1.0, (self.spent_before + elapsed) / whole)
            self.feeder.set_stage(stage_at(share))
            loss = self.step(self.feeder.next(), share)
            if self.progress.steps % self.arguments.log_every == 0:
                value = loss.item()
                now = time.monotonic()
                speed = (self.progress.tokens - window_tokens) / (now - window_begin)
                window_begin, window_tokens = now, self.progress.tokens
                row = {"step": self.progress.steps, "tokens": self.progress.tokens, "share": round(share, 3),
                       "loss": round(value, 5), "tokens_per_s": int(speed)}  # fmt: skip
                print(json.dumps(row), flush=True)
            if time.monotonic() - saved > 60 * self.arguments.save_minutes:
                saved = time.monotonic()
                self.progress.seconds = self.spent_before + saved - begin
                self.save()
        self.progress.seconds = self.spent_before + time.monotonic() - begin
        self.save()
        self.feeder.close()


def main() -> None:
    """Parse arguments and run one leg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="length of this leg")
    parser.add_argument("--total-minutes", type=float, help="length of the whole run, for the schedule")
    parser.add_argument("--resume", required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workers", type=int, default=8, help="processes that generate data")
    parser.add_argument("--windows", type=int, default=8, help="windows in a batch")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens in a window")
    parser.add_argument("--save-minutes", type=float, default=2.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe on a CPU")
    Run(parser.parse_args()).run()


if __name__ == "__main__":
    main()
