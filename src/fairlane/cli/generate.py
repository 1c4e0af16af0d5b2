"""`fairlane generate`: one prompt in, its answer streamed to standard output, figures to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from fairlane.cli import client
from fairlane.cli.exits import FAILED, INTERRUPTED, USAGE, stop, utf8

Tier = Annotated[str, typer.Option(metavar="NAME", help="One of the tenant's tiers. Default: its first.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="Model or alias. Default: the server's.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The most tokens to generate. Default: what fits.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Same seed, same request, same tokens.")]


def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; - reads standard input.")],
    target: client.Target = client.DEFAULT_TARGET,
    key_file: client.KeyFile = None,
    tenant: client.Tenant = None,
    tier: Tier = "",
    model: Model = "",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue TEXT as it is, without the model's chat template.")] = False,
    state_dir: client.StateDir = None,
) -> None:
    """Generate an answer to TEXT and stream it.

    Examples:

    fairlane generate "Why is the sky blue?"

    fairlane generate --tenant chatly/free --tier batch --max-tokens 50 --raw "Once upon a time"

    cat mail.txt | fairlane generate --target llm.internal:50051 --key-file key.txt -
    """
    prompt = _prompt(text)
    request = new_request(model, tier, temperature, max_tokens, seed)
    if raw:
        request.prompt = prompt
    else:
        request.messages.messages.add(role="user", content=prompt)
    key = client.api_key(target, key_file, tenant, state_dir)
    with client.connect(target) as channel:
        stream(channel, request, key).print_figures()


def _prompt(text: str) -> str:
    if text != "-":
        return utf8(text, "TEXT")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        stop(USAGE, "standard input is not UTF-8 text")


def new_request(model: str, tier: str, temperature: float, max_tokens: int | None, seed: int | None) -> Any:
    """A GenerateRequest without its input."""
    from fairlane.protos.fairlane.v1 import inference_pb2 as pb

    request = pb.GenerateRequest(model=utf8(model, "--model"), tier=utf8(tier, "--tier"))
    request.sampling.temperature = temperature
    if seed is not None:
        request.sampling.seed = seed
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return request


@dataclass
class Answer:
    """What came back, and when (seconds since the request was sent)."""

    parts: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    total_s: float = 0.0
    finished: Any = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def print_figures(self) -> None:
        """One line for a person at a terminal; nothing in a pipe."""
        if not sys.stderr.isatty() or self.finished is None:
            return
        usage, tokens = self.finished.usage, self.finished.usage.completion_tokens
        decode_s = self.total_s - (self.first_token_s or 0.0)
        speed = f" · {(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else ""
        first = f" · first after {self.first_token_s * 1000:.0f} ms" if self.first_token_s is not None else ""
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        lost = f" · preempted {usage.preemptions}x" if usage.preemptions else ""
        text = f"{usage.prompt_tokens} prompt tokens{cached} · {tokens} generated{first}{speed} · tier {self.finished.tier}{lost}"
        typer.secho(text, err=True, dim=True)


def stream(channel: Any, request: Any, key: str, write: Callable[[str], None] | None = None) -> Answer:
    """Sends the request and writes its text as it comes. Raises grpc.RpcError for a refusal.

    Ends the command if nobody reads the output any more, or on Ctrl-C; the server stops the request then.
    """
    from fairlane.protos.fairlane.v1 import inference_pb2_grpc

    answer, write = Answer(), write or _write
    started = time.monotonic()
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Generate(request, metadata=client.metadata(key))
    try:
        for event in call:
            kind = event.WhichOneof("event")
            if kind == "tokens":
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - started
                answer.parts.append(event.tokens.text)
                write(event.tokens.text)
            elif kind == "finished":
                answer.finished = event.finished
    except BrokenPipeError:
        sys.stdout = None  # or the interpreter complains when it flushes it at exit
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        call.cancel()
    write("\n")
    answer.total_s = time.monotonic() - started
    return answer


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
