"""Streams an answer with nothing but the generated gRPC stub.

FAIRLANE_API_KEY=... python examples/generate.py
"""

import os

import grpc

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1.inference_pb2_grpc import InferenceStub

QUESTION = "What is the capital of France? Answer in one sentence."

with grpc.insecure_channel(os.environ.get("FAIRLANE_TARGET", "127.0.0.1:50051")) as channel:
    request = pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(role="user", content=QUESTION)]),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=64),
    )
    key = ("authorization", f"Bearer {os.environ['FAIRLANE_API_KEY']}")
    for event in InferenceStub(channel).Generate(request, metadata=[key], timeout=60):
        print(event.tokens.text, end="", flush=True)
        if event.HasField("finished"):
            usage = event.finished.usage
            print(f"\n{usage.prompt_tokens} prompt + {usage.completion_tokens} output tokens, tier {event.finished.tier}")
