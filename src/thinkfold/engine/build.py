"""Builds a core from a configuration: loads the model, sizes the pool, wires the parts."""

from __future__ import annotations

from functools import cache, partial

from thinkfold.config import EngineConfig
from thinkfold.control.parts import PartControl
from thinkfold.engine.abilities import own_abilities
from thinkfold.engine.answer_grammars import AnswerGrammars
from thinkfold.engine.branch_controls import make_control
from thinkfold.engine.capacity import reserve_pages
from thinkfold.engine.core import EngineCore
from thinkfold.engine.device import Runner
from thinkfold.engine.language import Language, load_language
from thinkfold.engine.messages import ModelInfo
from thinkfold.kv.manager import KVManager
from thinkfold.kv.shards import Shards
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.ranks import Start, start_ranks
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import EngineRequest


def build_core(config: EngineConfig, start: Start | None = None) -> tuple[EngineCore, ModelInfo]:
    """Load the model of `config` and return a core ready to step.

    A model split over several ranks has processes for the others, or what `start` starts, which the core's `ranks`
    end. Raises ParameterError or UnsupportedError for a model that cannot be loaded or served.
    """
    language = load_language(config)
    family = language.family
    ends = {"end_marker_id": family.end_token_id if family else None, "eos_token_ids": language.vocabulary.eos_ids}
    if config.tensor_parallel_size == 1:
        return wire_core(config, language, ModelRunner(config, **ends))
    runner, ranked = start_ranks(config, start, **ends)
    try:
        core, model = wire_core(config, language, runner, ranked)
    except BaseException:
        ranked.close()
        raise
    core.ranks = ranked
    return core, model


def wire_core(
    config: EngineConfig, language: Language, runner: ModelRunner, device: Runner | None = None
) -> tuple[EngineCore, ModelInfo]:
    """The core of a runner; it steps what is behind it as `device`, the runner itself if that is None."""
    family, shards = language.family, Shards(runner.shards, runner.num_kv_heads)
    reserve = reserve_pages(runner.budgets, config, runner.num_pages, shards) if family else 0
    kv = _memory(runner, config, reserve, shards)
    capacity = (runner.num_pages - reserve) * config.page_size
    admission = Admission(capacity, config.page_size, config.admission_risk)
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        fold_counts=cache(lambda entries, tokens: runner.budgets.counts(entries, tokens, config.page_size)),
        admission=admission if config.admission == "predicted" else None,
    )

    depth = config.pipeline_depth
    if depth is None:
        depth = 1 if runner.device.type == "cuda" else 0
    make_control = partial(_make_control, language, AnswerGrammars(language, runner.vocab_size))
    core = EngineCore(
        device or runner,
        scheduler,
        make_control,
        page_bytes=runner.page_bytes,
        pipeline_depth=depth,
        max_handles=config.max_handles,
        handle_ttl_s=config.handle_ttl_s,
        pin_share=config.pin_share,
        window=runner.window,
        kv_quantisation_error=runner.fp8_error or 0.0,
    )
    return core, _info(config, language, runner, capacity)


def _info(config: EngineConfig, language: Language, runner: ModelRunner, capacity: int) -> ModelInfo:
    family = language.family
    enforced = family is not None and bool(family.force_ids)
    return ModelInfo(
        name=config.served_model_name or config.model,
        model_type=runner.model_type,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        num_pages=runner.num_pages,
        page_size=config.page_size,
        page_bytes=runner.page_bytes,
        kv_capacity=capacity,
        family=family.name if family else None,
        thinks=family is not None,
        budget_enforced=enforced,
        window=runner.window,
        kv_dtype=str(runner.kv_dtype).removeprefix("torch."),
        fp8_error=runner.fp8_error,
        abilities=own_abilities(thinks=family is not None, enforced=enforced),
    )


def _memory(runner: ModelRunner, config: EngineConfig, reserve: int, shards: Shards) -> KVManager:
    return KVManager(
        runner.num_pages,
        config.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_heads=runner.num_layers * runner.num_kv_heads,
        page_blocks=runner.budgets.page_blocks,
        reserve_pages=reserve,
        host_pages=runner.host_pages,
        shards=shards,
    )


def _make_control(language: Language, grammars: AnswerGrammars, request: EngineRequest, branch: int) -> PartControl:
    return make_control(language, request, branch, grammars.open(request))
