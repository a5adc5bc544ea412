"""Fast batched decoding for measuring: fixed slots, static KV, one CUDA graph a step.

It knows nothing of suites; thinkfold's engine is the way to serve the model.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from training.model import Pebble, Shape, after, attend, before, norm

STEPS_A_LOOK = 32  # decode steps between two looks at what has finished
PREFILL_TOKENS = 65536


@dataclass(slots=True)
class Job:
    """One prompt to continue; `output` is filled with ids up to and without the end marker."""

    prompt: list[int]
    temperature: float = 0.0
    output: list[int] = field(default_factory=list)
    finished: bool = False


def load(folder: Path, device: torch.device) -> Pebble:
    """The model of a Hugging Face folder."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = load_file(folder / "model.safetensors")
    shape = Shape.read(folder)
    shape = _true_shape(shape, weights)
    model = Pebble(shape, dtype).to(device)
    model.load_state_dict(weights)
    return model.to(dtype).eval().requires_grad_(False)


def _true_shape(shape: Shape, weights: dict[str, Tensor]) -> Shape:
    """A toy run's export carries the full config; its sizes are read off the weights."""
    hidden = weights["model.embed_tokens.weight"].shape[1]
    if hidden == shape.hidden:
        return shape
    first = "model.layers.0."
    dim = weights[first + "self_attn.q_norm.weight"].shape[0]
    return replace(
        shape,
        hidden=hidden,
        head_dim=dim,
        inner=weights[first + "mlp.up_proj.weight"].shape[0],
        heads=weights[first + "self_attn.q_proj.weight"].shape[0] // dim,
        kv_heads=weights[first + "self_attn.k_proj.weight"].shape[0] // dim,
        layers=sum(name.endswith("up_proj.weight") for name in weights),
    )


class Decoder:
    """`slots` sequences decoded side by side; finished ones make room for waiting jobs."""

    def __init__(self, model: Pebble, slots: int, ends: list[int], flash: bool = True) -> None:
        shape, device = model.shape, model.model.embed_tokens.weight.device
        self.model, self.slots, self.shape, self.device = model, slots, shape, device
        self.flash = flash and device.type == "cuda"
        self.longest = shape.longest
        size = (shape.layers, slots, self.longest, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros(slots, self.longest, dtype=torch.long, device=device)
        self.lengths = torch.ones(slots, dtype=torch.long, device=device)  # tokens known; the last is not yet stored
        self.idle = torch.ones(slots, dtype=torch.bool, device=device)
        self.heat = torch.zeros(slots, device=device)
        self.ends = torch.tensor(ends, device=device)
        self.rows = torch.arange(slots, device=device)
        self.bounds_q = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self.bounds_k = self.bounds_q * self.longest
        self.graph: torch.cuda.CUDAGraph | None = None

    def _attend(self, q: Tensor, layer: int, used: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        if self.flash:
            out = torch.ops.aten._flash_attention_forward(
                q, keys.flatten(0, 1), values.flatten(0, 1), self.bounds_q, self.bounds_k, 1, self.longest,
                0.0, False, False, seqused_k=used.int(),
            )  # fmt: skip
            return out[0]
        if self.device.type != "cuda":
            return self._attend_each(q, keys, values, used)
        mask = (torch.arange(self.longest, device=self.device) < used[:, None])[:, None, None]
        k, v = (x.transpose(1, 2) for x in (keys, values))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]

    def _attend_each(self, q: Tensor, keys: Tensor, values: Tensor, used: Tensor) -> Tensor:
        """Slot by slot over what is stored: no copies, which is what counts on a CPU."""
        out = torch.zeros_like(q)
        grouped = q.view(self.slots, self.shape.kv_heads, -1, self.shape.head_dim) * self.shape.head_dim**-0.5
        for slot, length in enumerate(used.tolist()):
            if self.idle[slot]:
                continue
            k, v = (x[slot, :length].transpose(0, 1) for x in (keys, values))  # [kv_heads, length, head_dim]
            out[slot] = ((grouped[slot] @ k.mT).softmax(-1) @ v).flatten(0, 1)
        return out

    def _step(self) -> None:
        """One token for every slot that is not idle."""
        model, at = self.model, self.lengths - 1
        x = F.embedding(self.tokens[self.rows, at], model.model.embed_tokens.weight)
        cos, sin = model.cos[at].to(x.dtype), model.sin[at].to(x.dtype)
        for number, layer in enumerate(model.model.layers):
            q, k, v = before(x, cos, sin, layer.before_weights(), self.shape)
            self.keys[number].index_put_((self.rows, at), k)
            self.values[number].index_put_((self.rows, at), v)
            x = after(x, self._attend(q, number, self.lengths), layer.after_weights(), self.shape)
        x = norm(x, model.model.norm.weight, self.shape.eps)
        logits = F.linear(x, model.model.embed_tokens.weight).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-10, 1 - 1e-7)))
        token = (logits + self.heat[:, None] * noise).argmax(-1)
        place = torch.where(self.idle, at, self.lengths).clamp(max=self.longest - 1)
        self.tokens.index_put_((self.rows, place), torch.where(self.idle, self.tokens[self.rows, at], token))
        self.lengths.copy_(torch.where(self.idle, self.lengths, self.lengths + 1))
        full = self.lengths >= self.longest
        self.idle.copy_(self.idle | torch.isin(token, self.ends) | full)

    def _run_steps(self) -> None:
        if self.device.type != "cuda":
            for _ in range(STEPS_A_LOOK):
                self._step()
            return
        if self.graph is None:
            keep = self.lengths.clone(), self.idle.clone(), self.tokens.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            for target, source in zip((self.lengths, self.idle, self.tokens), keep, strict=True):
                target.copy_(source)
        for _ in range(STEPS_A_LOOK):
            self.graph.replay()

    def _admit(self, jobs: list[Job], slots: list[int]) -> None:
        """Prefill all but the last token of each prompt into its slot."""
        heads = [job.prompt[:-1] for job in jobs]
        lengths = torch.tensor([len(head) for head in heads])
        bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int().to(self.device)
        ids = torch.tensor([token for head in heads for token in head], device=self.device)
        positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(self.device)
        owners = torch.repeat_interleave(torch.tensor(slots), lengths).to(self.device)
        model = self.model
        x = F.embedding(ids, model.model.embed_tokens.weight)
        cos, sin = model.cos[positions].to(x.dtype), model.sin[positions].to(x.dtype)
        for number, layer in enumerate(model.model.layers):
            q, k, v = before(x, cos, sin, layer.before_weights(), self.shape)
            self.keys[number][owners, positions] = k
            self.values[number][owners, positions] = v
            x = after(x, attend(q, k, v, bounds, int(lengths.max())), layer.after_weights(), self.shape)
        for job, slot in zip(jobs, slots, strict=True):
            self.tokens[slot, : len(job.prompt)] = torch.tensor(job.prompt, device=self.device)
            self.lengths[slot] = len(job.prompt)
            self.heat[slot] = job.temperature
            self.idle[slot] = False

    def _fill(self, waiting: list[Job], owner: list[Job | None]) -> None:
        free = [slot for slot, job in enumerate(owner) if job is None]
        while free and waiting:
            jobs, slots, tokens = [], [], 0
            while free and waiting and tokens < PREFILL_TOKENS:
                jobs.append(waiting.pop(0))
                slots.append(free.pop(0))
                owner[slots[-1]] = jobs[-1]
                tokens += len(jobs[-1].prompt)
            self._admit(jobs, slots)

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> None:
        """Continue all jobs to their end or to the model's length."""
        waiting, owner = list(jobs), [None] * self.slots
        ends = set(self.ends.tolist())
        while True:
            self._fill(waiting, owner)
            if not any(owner):
                return
            self._run_steps()
            idle, lengths = self.idle.tolist(), self.lengths.tolist()
            for slot, job in enumerate(owner):
                if job is None or not idle[slot]:
                    continue
                output = self.tokens[slot, len(job.prompt) : lengths[slot]].tolist()
                job.finished = bool(output) and output[-1] in ends
                job.output = output[:-1] if job.finished else output
                owner[slot] = None
