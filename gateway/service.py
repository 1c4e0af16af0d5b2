"""The public Inference service: one path for Generate and Complete from an authenticated request to its last event. It
composes validation, admission, tokenizing, the worker and the stream, and gives everything back whatever happens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

import grpc.aio

from fairlane.clock import Clock
from fairlane.errors import FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway.admission import Admission, Limits, Ticket
from fairlane.gateway.auth import Identity, owner
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.explainer import Explainer, for_tenant
from fairlane.gateway.generation import Generation, StreamFacts, Write
from fairlane.gateway.interceptors import current_identity, name_request
from fairlane.gateway.metrics import GatewayMetrics, RequestObservation
from fairlane.gateway.output_text import OutputText
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy.model import Effective, Policy
from fairlane.gateway.request_end import finish_name
from fairlane.gateway.streams import DeltaInbox, slow_consumer
from fairlane.gateway.tokenizer_pool import TokenizerPool
from fairlane.gateway.trace.record import Tape
from fairlane.gateway.trace.recorder import TraceRecorder
from fairlane.gateway.validation import Ask, check_model, may_use, validate, validate_prompt
from fairlane.gateway.verdicts import refuse_paused, refuse_suspended
from fairlane.gateway.worker_client import WorkerClient, no_ready_worker
from fairlane.gateway.worker_facts import WorkerFacts, resolve_max_tokens
from fairlane.protos.fairlane.v1 import explain_pb2, inference_pb2_grpc, worker_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.scheduler.cache_domain import framed

REQUEST_ID_METADATA = "fairlane-request-id"

Context: TypeAlias = grpc.aio.ServicerContext


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Handlers run behind EdgeInterceptor, which authenticates and turns FairlaneError into a status. Each call is judged by the
    policy that its caller was authenticated by, from beginning to end."""

    def __init__(
        self,
        config: GatewayConfig,
        overrides: Overrides,
        admission: Admission,
        worker: WorkerClient,
        tokenizers: TokenizerPool,
        metrics: GatewayMetrics,
        clock: Clock,
        explainer: Explainer,
        trace: TraceRecorder | None = None,
    ) -> None:
        """trace: records every request; None: nothing is recorded."""
        self._config = config
        self._trace = trace
        self._explainer = explainer
        self._overrides = overrides
        self._admission = admission
        self._worker = worker
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        await self._run(request, context, _StreamWriter(context, self._config.slow_consumer))

    async def Complete(self, request: pb.GenerateRequest, context: Context) -> pb.CompleteResponse:
        writer = _Collector(context)
        await self._run(request, context, writer)
        return await writer.response()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        ticket = self._admission.find(current_identity().node, request.request_id)
        ticket.cancel(FairlaneError("CANCELLED", "cancelled by its tenant"))
        return pb.CancelResponse()

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> explain_pb2.Explanation:
        node = current_identity().node
        return for_tenant(await self._explainer.explain(self._admission.find(node, request.request_id)), node)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        facts, identity = self._facts(), current_identity()
        refuse_suspended(self._overrides, identity.node)
        check_model(request.model, facts, judging_policy(identity), identity.node)
        prompt = validate_prompt(request, self._config.max_prompt)
        return pb.CountTokensResponse(tokens=len(await self._tokenizers.encode(identity.node, prompt)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        facts, policy = self._worker.facts, judging_policy(current_identity())
        if facts is None or not may_use(facts.model, policy, current_identity().node):
            return pb.ListModelsResponse()
        aliases = sorted(alias for alias, model in policy.aliases.items() if model == facts.model)
        model = pb.Model(
            name=facts.model,
            aliases=aliases,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            ready=self._worker.ready,
        )
        return pb.ListModelsResponse(models=[model])

    def _facts(self) -> WorkerFacts:
        facts = self._worker.facts
        if facts is None:
            raise no_ready_worker()
        return facts

    async def _run(self, request: pb.GenerateRequest, context: Context, writer: _Writer) -> None:
        taping = nullcontext() if self._trace is None else self._trace.follow()
        with self._metrics.observe(current_identity().node) as observation, taping as tape:
            await self._serve(request, context, writer, observation, tape)

    async def _serve(
        self,
        request: pb.GenerateRequest,
        context: Context,
        writer: _Writer,
        observation: RequestObservation,
        tape: Tape | None,
    ) -> None:
        """Everything from the decoded request to `finished`; raises FairlaneError for every other end but cancellation."""
        arrival_s = self._clock.now()
        identity = current_identity()
        refuse_suspended(self._overrides, identity.node)
        policy, facts = judging_policy(identity), self._facts()
        check_model(request.model, facts, policy, identity.node)
        ask = validate(request, identity, policy, self._config.max_prompt, facts)
        observation.asked(ask.tier)
        refuse_paused(self._overrides, ask.tier)
        bounds = policy.effective(identity.node, ask.tier)
        deadline_s = context.time_remaining()
        allowed_s = allowed_seconds(deadline_s, bounds.max_duration_s, self._config.default_max_duration)
        if tape is not None:
            tape.bounded(bounds.max_wait_s, deadline_s)
        if not self._worker.ready:
            raise no_ready_worker()
        request_id = ask.request_id or secrets.token_hex(16)
        ticket = self._admission.admit(identity, request_id, ask.tier, limits(policy, bounds))
        try:
            writer.request_id = ticket.request_id
            name_request(ticket.request_id)
            async with asyncio.timeout(allowed_s) as deadline:
                add = await self._prepare(ask, identity, bounds, facts)
                spent_s = self._clock.now() - arrival_s
                add.timeout_s = max(0.0, allowed_s - spent_s)
                if bounds.max_wait_s is not None:
                    add.max_wait_s = max(0.0, bounds.max_wait_s - spent_s)
                await self._stream(ask, add, facts, ticket, arrival_s, writer, observation, tape)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise deadline_exceeded() from None
        finally:
            ticket.release()

    async def _prepare(self, ask: Ask, identity: Identity, bounds: Effective, facts: WorkerFacts) -> worker_pb2.Add:
        """The request in the worker's terms; raises for one that can never be served here."""
        if ask.stop and self._tokenizers.tokenizer is None:
            raise FairlaneError("NO_TOKENIZER", "stop strings need a tokenizer, which this deployment has not")
        if ask.token_ids is not None:
            ids: Sequence[int] = ask.token_ids
        else:
            ids = await self._tokenizers.encode(identity.node, ask.prompt or "", facts.max_model_len)
        if not ids:
            raise InvalidRequest([FieldViolation("input", "has no tokens")])
        max_tokens = resolve_max_tokens(len(ids), ask.max_tokens, bounds.max_output_tokens, facts, bounds.kv_limits)
        return make_add(ask, identity, ids, max_tokens, facts, bounds.cache_domain)

    async def _stream(
        self,
        ask: Ask,
        add: worker_pb2.Add,
        facts: WorkerFacts,
        ticket: Ticket,
        arrival_s: float,
        writer: _Writer,
        observation: RequestObservation,
        tape: Tape | None,
    ) -> None:
        """Has the worker run it and writes its events; the worker forgets it whatever happens."""
        config = self._config
        inbox = DeltaInbox(
            max_tokens=add.max_tokens,
            vocab_size=facts.vocab_size,
            max_deltas=config.stream_buffer,
            slow_consumer_s=config.slow_consumer,
            clock=self._clock,
            on_started=ticket.start,
            on_queued=ticket.waits,
        )
        stream = StreamFacts(
            request_id=ticket.request_id,
            model=facts.model,
            tier=ask.tier,
            prompt_tokens=len(add.prompt_token_ids),
            arrival_s=arrival_s,
            coalesce_s=config.coalesce,
            return_token_ids=ask.return_token_ids,
            lifecycle_events=ask.lifecycle_events,
        )
        text = OutputText(self._tokenizers.tokenizer, ask.stop, frozenset(add.stop_token_ids))
        ticket.on_cancel(inbox.fail)
        try:
            sink = observation.watch(inbox, len(add.prompt_token_ids))
            self._worker.submit(add, sink if tape is None else tape.watch(sink, add, facts.model))
            ticket.worker_id = add.request_id
            generation = Generation(stream, inbox, text, writer.write, self._clock)
            await generation.run()
            observation.finished(generation.finish_reason)
            if tape is not None:
                tape.end(finish_name(generation.finish_reason))
        finally:
            # Reached by an answer, an error, and every face of cancellation: while waiting, while writing, on close.
            self._worker.release(add.request_id, abort=not inbox.ended)


def make_add(
    ask: Ask, identity: Identity, ids: Sequence[int], max_tokens: int, facts: WorkerFacts, domain: str
) -> worker_pb2.Add:
    """What the worker is told; the times it has are set when it is sent. domain: the policy's cache domain."""
    sampling = ask.sampling
    stop_token_ids = ask.stop_token_ids if ask.ignore_eos else ask.stop_token_ids | facts.eos_token_ids
    return worker_pb2.Add(
        # Random, not the client's: a client must not be able to name, or guess, another tenant's request.
        request_id=secrets.randbits(64),
        tenant=identity.node,
        tier=ask.tier,
        order=ask.order,
        prompt_token_ids=ids,
        max_tokens=max_tokens,
        stop_token_ids=sorted(stop_token_ids),
        sampling=worker_pb2.WorkerSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            seed=secrets.randbits(64) if ask.sampling_seed is None else ask.sampling_seed,
        ),
        cache_domain=framed(domain, ask.cache_partition),
        cache_mode=ask.cache_mode.value,
        policy_generation=identity.generation,
    )


def judging_policy(identity: Identity) -> Policy:
    """The policy that a tenant's whole call is judged by."""
    assert identity.policy is not None, "operators do not call this service"
    return identity.policy


def limits(policy: Policy, bounds: Effective) -> Limits:
    """What admission counts for a request with these bounds."""
    members = policy.nodes[owner(bounds.path)].members
    return Limits(bounds.caps, policy.tiers[bounds.tier].max_queue, None if members is None else members.max_members)


def allowed_seconds(client_s: float | None, policy_s: float | None, default_s: float) -> float:
    """Seconds a request may take, queue included: the client's deadline, else the policy's max_duration, else our own. Raises
    DEADLINE_EXCEEDED for a deadline that has passed."""
    if client_s is None:
        return default_s if policy_s is None else policy_s
    if client_s <= 0:
        raise deadline_exceeded()
    return client_s


def deadline_exceeded() -> FairlaneError:
    return FairlaneError("DEADLINE_EXCEEDED", "the deadline passed before the request was finished")


class _Writer:
    """Where events go. `request_id` is set before the first one."""

    request_id = ""
    write: Write

    def __init__(self, context: Context) -> None:
        self._context = context

    async def _echo_request_id(self) -> None:
        # Not earlier than the first answer: a refusal must be trailers-only, or stock retry policies do not fire.
        await self._context.send_initial_metadata(((REQUEST_ID_METADATA, self.request_id),))


class _StreamWriter(_Writer):
    """Writes to the client, who must take each event within `slow_consumer_s`."""

    def __init__(self, context: Context, slow_consumer_s: float) -> None:
        super().__init__(context)
        self._slow_consumer_s = slow_consumer_s

    async def write(self, event: pb.GenerateEvent) -> None:
        if event.seq == 0:
            await self._echo_request_id()
        try:
            async with asyncio.timeout(self._slow_consumer_s) as patience:
                await self._context.write(event)
        except TimeoutError:
            if not patience.expired():
                raise
            raise slow_consumer(self._slow_consumer_s) from None


class _Collector(_Writer):
    """Gathers a stream into one answer."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pieces: list[str] = []
        self._response = pb.CompleteResponse()

    async def write(self, event: pb.GenerateEvent) -> None:
        which = event.WhichOneof("event")
        if which == "tokens":
            self._pieces.append(event.tokens.text)
            self._response.token_ids.extend(event.tokens.token_ids)
        elif which == "output_finished":
            self._response.output.CopyFrom(event.output_finished)
        elif which == "finished":
            self._response.finished.CopyFrom(event.finished)

    async def response(self) -> pb.CompleteResponse:
        await self._echo_request_id()
        self._response.text = "".join(self._pieces)
        return self._response
