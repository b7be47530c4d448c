"""Between the values of `outrider.types` and the messages of `outrider.v1`: the one place.

`*_to_proto` never fails. `*_from_proto` checks every range that the field's comment states and
raises InvalidArgument with the field's name.
"""

import itertools
from collections.abc import Iterable

from outrider import trees
from outrider.errors import InvalidArgument
from outrider.types import (
    MAX_ALTERNATIVES,
    MAX_FAN_OUT,
    MAX_LOGPROBS,
    MAX_PROPOSAL_TOKENS,
    MAX_SPARSE_ENTRIES,
    MAX_SPECULATIVE_TOKENS,
    NOTHING_TO_REPORT,
    DraftPlan,
    DraftReport,
    Durability,
    FinishReason,
    GenerationSpec,
    PositionLogprobs,
    Priority,
    Proposal,
    SamplingParams,
    SessionState,
    SparseDistribution,
    SpeculationStats,
    TokenSource,
    Verdict,
    VerificationMode,
    WorkTiming,
)
from outrider.v1 import common_pb2, generation_pb2, worker_pb2

_MODES = {
    VerificationMode.COUPLED: common_pb2.VERIFICATION_MODE_COUPLED,
    VerificationMode.REJECTION: common_pb2.VERIFICATION_MODE_REJECTION,
}
_MODES_BACK = {value: key for key, value in _MODES.items()}
_SOURCES = {
    TokenSource.PLAIN: common_pb2.TOKEN_SOURCE_PLAIN,
    TokenSource.ACCEPTED: common_pb2.TOKEN_SOURCE_ACCEPTED,
    TokenSource.RECOVERED: common_pb2.TOKEN_SOURCE_RECOVERED,
    TokenSource.BONUS: common_pb2.TOKEN_SOURCE_BONUS,
}
_SOURCES_BACK = {value: key for key, value in _SOURCES.items()}
_REASONS = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: generation_pb2.FINISH_REASON_CONTEXT_FULL,
}
_REASONS_BACK = {value: key for key, value in _REASONS.items()}
_DURABILITIES = {
    Durability.REQUIRE: generation_pb2.DURABILITY_REQUIRE,
    Durability.BEST_EFFORT: generation_pb2.DURABILITY_BEST_EFFORT,
}
_DURABILITIES_BACK = {value: key for key, value in _DURABILITIES.items()}
_STATES = {
    SessionState.RUNNING: generation_pb2.SESSION_STATE_RUNNING,
    SessionState.INTERRUPTED: generation_pb2.SESSION_STATE_INTERRUPTED,
    SessionState.IDLE: generation_pb2.SESSION_STATE_IDLE,
}
_STATES_BACK = {value: key for key, value in _STATES.items()}
_PRIORITIES = {
    Priority.HIGH: generation_pb2.PRIORITY_HIGH,
    Priority.NORMAL: generation_pb2.PRIORITY_NORMAL,
    Priority.LOW: generation_pb2.PRIORITY_LOW,
}
_PRIORITIES_BACK = {value: key for key, value in _PRIORITIES.items()}
_MAX_STOP_IDS = 64
_MAX_PROPOSER_BYTES = 64
_MAX_ADDRESS_BYTES = 256
_MAX_DRAFT_TIMEOUT_MS = 60_000


def require(condition: bool, message: str, field: str) -> None:
    """Raise InvalidArgument(message, field) unless `condition` holds."""
    if not condition:
        raise InvalidArgument(message, field=field)


def mode_to_proto(mode: VerificationMode) -> "common_pb2.VerificationMode":
    return _MODES[mode]


def mode_from_proto(value: int) -> VerificationMode:
    """The mode; unspecified is coupled."""
    if value == common_pb2.VERIFICATION_MODE_UNSPECIFIED:
        return VerificationMode.COUPLED
    require(value in _MODES_BACK, f"unknown verification mode {value}", "mode")
    return _MODES_BACK[value]  # type: ignore[index]


def priority_to_proto(priority: Priority) -> "generation_pb2.Priority":
    return _PRIORITIES[priority]


def priority_from_proto(value: int) -> Priority:
    """The class; unspecified is normal."""
    if value == generation_pb2.PRIORITY_UNSPECIFIED:
        return Priority.NORMAL
    require(value in _PRIORITIES_BACK, f"unknown priority {value}", "priority")
    return _PRIORITIES_BACK[value]  # type: ignore[index]


def sources_to_proto(sources: Iterable[TokenSource]) -> list["common_pb2.TokenSource"]:
    return [_SOURCES[source] for source in sources]


def source_to_proto(source: TokenSource) -> "common_pb2.TokenSource":
    return _SOURCES[source]


def source_from_proto(value: int) -> TokenSource:
    return _SOURCES_BACK.get(value, TokenSource.PLAIN)  # type: ignore[call-overload,no-any-return]


def reason_to_proto(reason: FinishReason) -> "generation_pb2.FinishReason":
    return _REASONS[reason]


def reason_from_proto(value: int) -> FinishReason | None:
    return _REASONS_BACK.get(value)  # type: ignore[call-overload,no-any-return]


def durability_to_proto(durability: Durability) -> "generation_pb2.Durability":
    return _DURABILITIES[durability]


def durability_from_proto(value: int, default: Durability) -> Durability:
    """What a request asks for; unspecified is the default."""
    if value == generation_pb2.DURABILITY_UNSPECIFIED:
        return default
    require(value in _DURABILITIES_BACK, f"unknown durability {value}", "durability")
    return _DURABILITIES_BACK[value]  # type: ignore[index]


def state_to_proto(state: SessionState) -> "generation_pb2.SessionState":
    return _STATES[state]


def state_from_proto(value: int) -> SessionState:
    """What a session is doing; idle where a server says what is not known here."""
    return _STATES_BACK.get(value, SessionState.IDLE)  # type: ignore[call-overload,no-any-return]


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )


def sampling_from_proto(
    message: common_pb2.SamplingParams, *, default_seed: int = 0
) -> SamplingParams:
    """Sampling parameters with unset fields filled in and every range checked."""
    temperature = message.temperature if message.HasField("temperature") else 0.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    # NaN fails both comparisons of a range.
    require(0.0 <= temperature <= 10.0, f"{temperature} is not in [0, 10]", "temperature")
    require(0.0 < top_p <= 1.0, f"{top_p} is not in (0, 1]", "top_p")
    require(0.0 <= message.min_p <= 1.0, f"{message.min_p} is not in [0, 1]", "min_p")
    require(message.top_k < 1 << 31, f"{message.top_k} is not in [0, 2^31)", "top_k")
    return SamplingParams(
        temperature=temperature,
        top_k=message.top_k,
        top_p=top_p,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else default_seed,
    )


def spec_to_proto(spec: GenerationSpec) -> worker_pb2.GenerationSpec:
    return worker_pb2.GenerationSpec(
        sampling=sampling_to_proto(spec.sampling),
        mode=mode_to_proto(spec.mode),
        prompt_len=spec.prompt_len,
        min_tokens=spec.min_tokens,
        stop_ids=spec.stop_ids,
        logprobs=spec.logprobs,
    )


def spec_from_proto(message: worker_pb2.GenerationSpec, *, vocab_size: int) -> GenerationSpec:
    """A generation's sampling, as a worker with this vocabulary can carry it out."""
    logprobs = message.logprobs if message.HasField("logprobs") else None
    require(
        1 <= message.prompt_len < 1 << 31, f"{message.prompt_len} is not in [1, 2^31)", "prompt_len"
    )
    require(message.min_tokens < 1 << 31, f"{message.min_tokens} is not in [0, 2^31)", "min_tokens")
    require(
        logprobs is None or logprobs <= MAX_LOGPROBS,
        f"{logprobs} is not in [0, {MAX_LOGPROBS}]",
        "logprobs",
    )
    require(
        len(message.stop_ids) <= _MAX_STOP_IDS,
        f"{len(message.stop_ids)} ids; at most {_MAX_STOP_IDS} are allowed",
        "stop_ids",
    )
    check_token_ids(message.stop_ids, vocab_size, "stop_ids")
    return GenerationSpec(
        sampling=sampling_from_proto(message.sampling),
        mode=mode_from_proto(message.mode),
        prompt_len=message.prompt_len,
        min_tokens=message.min_tokens,
        stop_ids=tuple(message.stop_ids),
        logprobs=logprobs,
    )


def check_token_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:  # Not `require`: a message that nobody needs is made there.
        raise InvalidArgument(
            f"token id {worst} is not below the vocabulary's {vocab_size}", field=field
        )


def proposal_to_proto(proposal: Proposal) -> common_pb2.Proposal:
    return common_pb2.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        distributions=map(distribution_to_proto, proposal.distributions),
        proposer=proposal.proposer,
    )


def distribution_to_proto(distribution: SparseDistribution) -> common_pb2.SparseDistribution:
    return common_pb2.SparseDistribution(ids=distribution.ids, weights=distribution.weights)


def run_ahead_from_proto(message: worker_pb2.Outcome, *, vocab_size: int) -> Proposal:
    """The run-ahead guess of an outcome: a chain of one guess, with its distribution."""
    guess = common_pb2.Proposal(token_ids=[message.token_id], distributions=[message.distribution])
    return proposal_from_proto(guess, vocab_size=vocab_size)


def proposal_from_proto(message: common_pb2.Proposal, *, vocab_size: int) -> Proposal:
    """A proposal whose shape and ranges are right; whether it is any good is for the target.

    A tree that is a chain comes without parents.
    """
    # Slices: of a repeated field they are lists made at once, what goes through it is slow.
    token_ids, parents = tuple(message.token_ids[:]), tuple(message.parents[:])
    count, proposer = len(token_ids), message.proposer
    if count > MAX_PROPOSAL_TOKENS:
        raise InvalidArgument(
            f"{count} guesses; at most {MAX_PROPOSAL_TOKENS} are allowed",
            field="proposal.token_ids",
        )
    require(len(parents) in (0, count), "must be as many as token_ids", "proposal.parents")
    for node, parent in enumerate(parents):
        require(
            -1 <= parent < node,
            f"parent {parent} of guess {node} is not in [-1, {node})",
            "proposal.parents",
        )
    distributions = message.distributions[:]
    require(
        len(distributions) in (0, count),
        "must be as many as token_ids",
        "proposal.distributions",
    )
    check_token_ids(token_ids, vocab_size, "proposal.token_ids")
    require(
        len(proposer.encode()) <= _MAX_PROPOSER_BYTES,
        f"at most {_MAX_PROPOSER_BYTES} bytes are allowed",
        "proposal.proposer",
    )
    return Proposal(
        token_ids=token_ids,
        parents=() if trees.is_chain(parents) else parents,
        distributions=tuple(
            [
                _sparse_from_proto(distribution, token_id, vocab_size)
                for distribution, token_id in zip(distributions, token_ids, strict=False)
            ]
        ),
        proposer=proposer,
    )


def _sparse_from_proto(
    message: common_pb2.SparseDistribution, guess: int, vocab_size: int
) -> SparseDistribution:
    ids, weights = tuple(message.ids), tuple(message.weights)
    field = "proposal.distributions"
    require(1 <= len(ids) <= MAX_SPARSE_ENTRIES, f"{len(ids)} entries; 1 to 64 allowed", field)
    require(len(ids) == len(weights), "ids and weights differ in number", field)
    require(all(a < b for a, b in itertools.pairwise(ids)), "ids must increase", field)
    require(ids[-1] < vocab_size, f"token id {ids[-1]} is not below {vocab_size}", field)
    require(min(weights) >= 1 and max(weights) <= 65535, "a weight is not in [1, 65535]", field)
    require(guess in ids, f"guess {guess} is not in its own distribution", field)
    return SparseDistribution(ids, weights)


def plan_to_proto(plan: DraftPlan) -> worker_pb2.DraftPlan:
    return worker_pb2.DraftPlan(
        address=plan.address,
        num_speculative_tokens=plan.num_speculative_tokens,
        fan_out=plan.fan_out,
        timeout_ms=max(int(plan.timeout_s * 1000), 1),
        end_len=plan.end_len,
        alternatives=plan.alternatives,
    )


def plan_from_proto(message: worker_pb2.DraftPlan) -> DraftPlan:
    """A plan whose ranges are right; whether the draft is there is for the target to see."""
    size = len(message.address.encode())
    timeout_ms, end_len = message.timeout_ms, message.end_len
    require(
        1 <= size <= _MAX_ADDRESS_BYTES,
        f"1 to {_MAX_ADDRESS_BYTES} bytes are allowed, not {size}",
        "draft.address",
    )
    check_lengths(message)
    require(
        1 <= timeout_ms <= _MAX_DRAFT_TIMEOUT_MS,
        f"{timeout_ms} is not in [1, {_MAX_DRAFT_TIMEOUT_MS}]",
        "draft.timeout_ms",
    )
    require(1 <= end_len < 1 << 31, f"{end_len} is not in [1, 2^31)", "draft.end_len")
    check_alternatives(message.alternatives, "draft.alternatives")
    return DraftPlan(
        address=message.address,
        num_speculative_tokens=message.num_speculative_tokens,
        fan_out=message.fan_out,
        timeout_s=timeout_ms / 1000,
        end_len=end_len,
        alternatives=message.alternatives,
    )


def check_alternatives(count: int, field: str) -> None:
    """Alternatives of a guess that may be asked for."""
    if not 0 <= count <= MAX_ALTERNATIVES:
        raise InvalidArgument(f"{count} is not in [0, {MAX_ALTERNATIVES}]", field=field)


def check_lengths(message: "worker_pb2.DraftPlan | worker_pb2.TuneEntry") -> None:
    """Guesses and outcomes that may be asked for."""
    count, fan_out = message.num_speculative_tokens, message.fan_out
    require(
        count <= MAX_SPECULATIVE_TOKENS,
        f"{count} is not in [0, {MAX_SPECULATIVE_TOKENS}]",
        "num_speculative_tokens",
    )
    require(fan_out <= MAX_FAN_OUT, f"{fan_out} is not in [0, {MAX_FAN_OUT}]", "fan_out")


def _fill_report(message: worker_pb2.DraftReport, report: DraftReport) -> None:
    message.wait_us = report.wait_us
    message.worker_us = report.worker_us
    message.compute_us = report.compute_us
    message.failed = report.failed
    message.dropped = report.dropped
    message.asked = report.asked
    message.prepared = report.prepared
    message.rank = report.rank
    message.trip_us = report.trip_us
    message.took_us = report.took_us
    if report.hit is not None:
        message.hit = report.hit


def report_from_proto(message: worker_pb2.DraftReport) -> DraftReport:
    return DraftReport(
        wait_us=message.wait_us,
        worker_us=message.worker_us,
        compute_us=message.compute_us,
        failed=message.failed,
        dropped=message.dropped,
        hit=message.hit if message.HasField("hit") else None,
        asked=message.asked,
        prepared=message.prepared,
        rank=message.rank,
        trip_us=message.trip_us,
        took_us=message.took_us,
    )


def logprobs_to_proto(
    logprobs: Iterable[PositionLogprobs],
) -> list[common_pb2.PositionLogprobs]:
    return [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=p.token_id, logprob=p.logprob),
            top=[common_pb2.TokenLogprob(token_id=i, logprob=value) for i, value in p.top],
        )
        for p in logprobs
    ]


def logprobs_from_proto(
    messages: Iterable[common_pb2.PositionLogprobs],
) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            token_id=m.chosen.token_id,
            logprob=m.chosen.logprob,
            top=tuple((t.token_id, t.logprob) for t in m.top),
        )
        for m in messages
    )


def verified_to_proto(
    verdict: Verdict, timing: WorkTiming, report: DraftReport | None = None
) -> worker_pb2.Verified:
    message = worker_pb2.Verified(
        token_ids=verdict.token_ids,
        num_accepted=verdict.num_accepted,
        num_proposed=verdict.num_proposed,
        num_beside=verdict.num_beside,
    )
    # In place, since each round makes one: a message in a message is copied.
    fill_timing(message.timing, timing)
    if report is NOTHING_TO_REPORT:
        message.draft.SetInParent()
    elif report is not None:
        _fill_report(message.draft, report)
    if verdict.logprobs:
        message.logprobs.extend(logprobs_to_proto(verdict.logprobs))
    if verdict.run_ahead is not None:
        message.run_ahead = verdict.run_ahead
    return message


def verdict_from_proto(message: worker_pb2.Verified) -> Verdict:
    require(
        message.num_accepted == len(message.token_ids) - 1
        and message.num_accepted <= message.num_proposed <= MAX_PROPOSAL_TOKENS,
        "accepted guesses and tokens do not fit together",
        "num_accepted",
    )
    require(
        not message.run_ahead or message.num_accepted == message.num_proposed,
        "a run-ahead guess is accepted only behind all that were proposed",
        "run_ahead",
    )
    return Verdict(
        token_ids=tuple(message.token_ids),
        num_accepted=message.num_accepted,
        num_proposed=message.num_proposed,
        logprobs=logprobs_from_proto(message.logprobs),
        run_ahead=message.run_ahead if message.HasField("run_ahead") else None,
        num_beside=min(message.num_beside, MAX_PROPOSAL_TOKENS),
    )


def fill_timing(message: worker_pb2.WorkTiming, timing: WorkTiming) -> None:
    """Make a message say the same."""
    message.queue_us = timing.queue_us
    message.compute_us = timing.compute_us
    message.batch_rows = timing.batch_rows
    message.cached_tokens = timing.cached_tokens
    message.prompt_rows = timing.prompt_rows


def timing_from_proto(message: worker_pb2.WorkTiming) -> WorkTiming:
    return WorkTiming(
        message.queue_us,
        message.compute_us,
        message.batch_rows,
        message.cached_tokens,
        message.prompt_rows,
    )


def stats_to_proto(stats: SpeculationStats) -> generation_pb2.SpeculationStats:
    return generation_pb2.SpeculationStats(
        rounds=stats.rounds,
        proposed=stats.proposed,
        accepted=stats.accepted,
        recovered=stats.recovered,
        bonus=stats.bonus,
        plain=stats.plain,
        dropped_proposals=stats.dropped_proposals,
        fallback_rounds=stats.fallback_rounds,
        buffer_hits=stats.buffer_hits,
        buffer_misses=stats.buffer_misses,
        proposed_by_position=stats.proposed_by_position,
        accepted_by_position=stats.accepted_by_position,
    )


def stats_from_proto(message: generation_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        rounds=message.rounds,
        proposed=message.proposed,
        accepted=message.accepted,
        recovered=message.recovered,
        bonus=message.bonus,
        plain=message.plain,
        dropped_proposals=message.dropped_proposals,
        fallback_rounds=message.fallback_rounds,
        buffer_hits=message.buffer_hits,
        buffer_misses=message.buffer_misses,
        proposed_by_position=tuple(message.proposed_by_position),
        accepted_by_position=tuple(message.accepted_by_position),
    )
