"""Deployments of tiny models, and questions whose answers transformers gives too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from identity import MAX_TOKENS, Question
from reference import Reference

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

CHATS = "/v1/chat/completions"


@asynccontextmanager
async def serving(
    path: Path, topology: str, *, media: Mapping[str, Any] | None = None, **instances: Any
) -> AsyncIterator[LocalDeployment]:
    """A deployment of the model in ``path``; ``media`` are the gateway's limits."""
    config = DeploymentConfig(
        topology=topology,
        model=str(path),
        served_model_name="tested",
        dtype="float32",
        restart="never",
        gateway={"port": 0, "media": media or {}},
        instances={"base_port": 0, "threads": 1, "feature_timeout_s": 20, **instances},
    )
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        yield deployment


def token_texts(answer: httpx.Response) -> list[str]:
    """The tokens of an answer with log-probabilities."""
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["logprobs"]["content"]
    return [bytes(token["bytes"]).decode(errors="replace") for token in content]


async def ask(client: httpx.AsyncClient, question: Question) -> list[str]:
    return token_texts(await client.post(CHATS, json=question.body(stream=False, ignore_eos=True)))


def expected(reference: Reference, question: Question) -> list[str]:
    """transformers' tokens."""
    media = question.images, question.videos, question.sounds
    ids = reference.generate(question.text, *media, max_tokens=MAX_TOKENS)
    assert len(set(ids)) >= 5, "tokens that say little of the model"
    return [reference.tokenizer.decode([token]) for token in ids]
