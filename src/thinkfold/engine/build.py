"""Builds a core from a configuration: loads the model, sizes the pool, wires the parts."""

from __future__ import annotations

from thinkfold.config import EngineConfig
from thinkfold.control.branch import BranchControl
from thinkfold.engine.core import EngineCore
from thinkfold.engine.language import load_language
from thinkfold.engine.messages import ModelInfo
from thinkfold.kv.manager import KVManager
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import EngineRequest


def build_core(config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
    """Load the model of `config` and return a core ready to step.

    Raises ParameterError or UnsupportedError for a model that cannot be loaded or served.
    """
    language = load_language(config)
    family = language.family
    runner = ModelRunner(
        config,
        end_marker_id=family.end_token_id if family else None,
        eos_token_ids=language.vocabulary.eos_ids,
    )
    kv = KVManager(runner.num_pages, config.page_size, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(kv, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)

    def make_control(request: EngineRequest, branch: int) -> BranchControl:
        return BranchControl(
            request,
            branch,
            language.vocabulary,
            family,
            closing_ids=language.closing_ids,
            min_segment_tokens=config.min_segment_tokens,
            max_segment_tokens=config.max_segment_tokens,
        )

    depth = config.pipeline_depth
    if depth is None:
        depth = 1 if runner.device.type == "cuda" else 0
    core = EngineCore(runner, scheduler, make_control, page_bytes=runner.page_bytes, pipeline_depth=depth)
    model = ModelInfo(
        name=config.served_model_name or config.model,
        model_type=runner.model_type,
        max_model_len=min(runner.max_model_len, runner.num_pages * config.page_size),
        vocab_size=runner.vocab_size,
        num_pages=runner.num_pages,
        page_size=config.page_size,
        page_bytes=runner.page_bytes,
        family=family.name if family else None,
        thinks=family is not None,
        budget_enforced=family is not None and bool(family.force_ids),
    )
    return core, model
