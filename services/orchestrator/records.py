"""Between the plan of a generation and its record in the store: another orchestrator makes the same
plan of it."""

from dataclasses import replace

import outrider
from outrider.errors import FailedPrecondition
from services.orchestrator.models import ServedModel
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.stopping import StopRules
from services.orchestrator.store_values import GenerationRecord


def record_of(plan: GenerationPlan, model: ServedModel, *, epoch: int) -> GenerationRecord:
    """What another orchestrator needs to go on with the generation; it begins in `epoch`."""
    rules = plan.rules
    return GenerationRecord(
        request_id=plan.request_id,
        start=plan.prompt_len - len(plan.prompt_ids),
        prompt_end=plan.prompt_len,
        sampling=plan.sampling,
        mode=plan.mode,
        max_tokens=rules.max_tokens,
        min_tokens=rules.min_tokens,
        stop_ids=tuple(sorted(rules.stop_token_ids)),
        stop_strings=rules.stop_strings,
        ignore_eos=rules.ignore_eos,
        eos_ids=tuple(sorted(rules.eos_token_ids)),
        context_length=rules.context_length,
        logprobs=plan.logprobs,
        keep=plan.keep,
        resumable=plan.resumable,
        durability=plan.durability,
        idempotency_key=plan.idempotency_key,
        epoch=epoch,
        num_speculative_tokens=plan.num_speculative_tokens,
        max_speculative_tokens=plan.max_speculative_tokens,
        proposer=plan.proposer,
        fan_out=plan.fan_out,
        alternatives=plan.alternatives,
        report_rounds=plan.report_rounds,
        engine_versions={
            "outrider": outrider.__version__,
            "target": model.info.version,
            "model": model.info.model_fingerprint,
        },
    )


def plan_of(record: GenerationRecord, session_id: str, model: ServedModel) -> GenerationPlan:
    """The plan that a record was made of, its prompt in the log already.

    Raises FailedPrecondition where the model is another one now.
    """
    began_with = record.engine_versions.get("model", "")
    if began_with != model.info.model_fingerprint:
        raise FailedPrecondition(
            f"the generation began with {model.name} of fingerprint {began_with} (Outrider "
            f"{record.engine_versions.get('target', 'unknown')}); {model.info.model_fingerprint} "
            f"(Outrider {model.info.version}) is served now, and might go on otherwise"
        )
    return GenerationPlan(
        request_id=record.request_id,
        session_id=session_id,
        continues=record.start > 0,
        keep=record.keep,
        prompt_ids=(),
        prompt_len=record.prompt_end,
        sampling=record.sampling,
        mode=record.mode,
        rules=StopRules(
            max_tokens=record.max_tokens,
            context_length=record.context_length,
            eos_token_ids=frozenset(record.eos_ids),
            stop_token_ids=frozenset(record.stop_ids),
            stop_strings=record.stop_strings,
            min_tokens=record.min_tokens,
            ignore_eos=record.ignore_eos,
        ),
        num_speculative_tokens=record.num_speculative_tokens,
        max_speculative_tokens=record.max_speculative_tokens,
        proposer=record.proposer,
        fan_out=record.fan_out,
        alternatives=record.alternatives,
        report_rounds=record.report_rounds,
        logprobs=record.logprobs,
        durability=record.durability,
        resumable=record.resumable,
        idempotency_key=record.idempotency_key,
    )


def asks_the_same(asked: GenerationRecord, begun: GenerationRecord, *, seed_given: bool) -> bool:
    """Whether a request that came again is the one that a generation was begun with; a seed that it
    does not give was drawn then, and may be any."""
    seed = asked.sampling.seed if seed_given else begun.sampling.seed
    again = replace(
        asked,
        sampling=replace(asked.sampling, seed=seed),
        epoch=begun.epoch,
        engine_versions=begun.engine_versions,
        outcome=begun.outcome,
    )
    return again == begun
