"""The gateway's requests to vLLM, and its reading of the answers; real servers answer in tests/vllm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm_backend import request

from epd_serve.backends import vllm_request
from epd_serve.backends.vllm_answer import error_of
from epd_serve.backends.vllm_metrics import read_figures
from epd_serve.backends.vllm_request import can_be_replayed
from epd_serve.errors import InstanceFailed, InvalidRequest, Unavailable
from epd_serve.media.video import pack_frames
from epd_serve.protocol.openai.generation import (
    VllmChatRequest,
    VllmCompletionRequest,
)
from epd_serve.protocol.wire import MediaRef, PrefillRequest
from epd_serve.types import AS_THE_MODEL, VideoFacts, VideoSampling

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "listen")
]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def test_pictures_are_named_by_their_hash() -> None:
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    asked = request({"messages": [{"role": "user", "content": parts}]}, num_items=2)
    body = vllm_request.prompt_body(asked, [b"\x89PNG one", b"two"])
    content = body["messages"][0]["content"]
    assert content[0] == {"type": "text", "text": "Look:"}
    assert [part["uuid"] for part in content[1:]] == ["h0", "h1"]
    assert content[1]["image_url"]["url"].startswith("data:image/png;base64,iVBORyBvbmU")


def video_request(sampling: VideoSampling = AS_THE_MODEL, is_list: bool = False) -> PrefillRequest:
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}
    asked = request({"messages": [{"role": "user", "content": [part]}]})
    ref = MediaRef.of_video(VideoFacts(64, 48, 9, 4.0, is_list), sampling)
    return msgspec.structs.replace(asked, items=[msgspec.structs.replace(ref, mm_hash="v0")])


def test_videos_and_frame_lists_are_passed_on_with_the_frames_that_are_asked_for() -> None:
    asked = video_request(VideoSampling(num_frames=4))
    whole = vllm_request.answer_body(asked, [b"file"])
    (part,) = whole["messages"][0]["content"]
    assert (part["video_url"], part["uuid"]) == ({"url": "data:video/mp4;base64,ZmlsZQ=="}, "v0")
    alone = vllm_request.encode_body("m", asked.items[0], b"file")
    assert alone["messages"][0]["content"] == [part], "E and D see the same"
    assert whole["media_io_kwargs"] == alone["media_io_kwargs"] == {"video": {"num_frames": 4}}
    frames = vllm_request.prompt_body(video_request(is_list=True), [pack_frames([b"one", b"two"])])
    assert frames["messages"][0]["content"][0]["video_url"]["url"] == "data:video/jpeg;base64,b25l,dHdv"
    assert "media_io_kwargs" not in frames


def test_processors_get_the_same_options_at_e_p_and_d() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    given = {"max_pixels": 9, "min_pixels": 4, "num_crops": 2, "size": {"longest_edge": 9}}
    body = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": given}
    parsed = VllmChatRequest.parse(msgspec.json.encode(body))
    (source,) = parsed.media()
    again = VllmChatRequest.parse(
        msgspec.json.encode({**body, "mm_processor_kwargs": dict(reversed(given.items()))})
    )
    assert again.media()[0].processing == source.processing, "the same name for the same options"
    ref = MediaRef(mm_hash="h0", width=2, height=2, processing=source.processing)
    asked = msgspec.structs.replace(request(body, kinds=(VllmChatRequest, VllmCompletionRequest)), items=[ref])
    bodies = [vllm_request.encode_body("m", ref, b""), vllm_request.prefill_body(asked, [b""])]
    for sent in (*bodies, vllm_request.answer_body(asked, [b""])):
        assert sent["mm_processor_kwargs"] == given


def test_p_and_d_are_given_the_same_prompt() -> None:
    fields = {
        "tools": TOOLS,
        "tool_choice": "required",
        "chat_template_kwargs": {"x": 1},
        "cache_salt": "mine",
        "stream": True,
        "stop": "a",
    }
    asked = request(chat(**fields))
    prompt = vllm_request.prompt_body(asked, ())
    for body in (vllm_request.prefill_body(asked, ()), vllm_request.answer_body(asked, ())):
        assert {key: body[key] for key in prompt} == prompt
    body = vllm_request.prefill_body(asked, ())
    assert (body["max_completion_tokens"], body["stream"], body["tool_choice"]) == (1, False, "none")
    assert "stop" not in body


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"max_tokens": 5}, {"max_completion_tokens": 5}),
        *(
            (fields, fields)
            for fields in (
                {"temperature": 0.0, "top_k": 3, "min_p": 0.1},
                {"logprobs": True, "top_logprobs": 2},
                {"stop": ["x"], "ignore_eos": True},
                {"logit_bias": {"5": 1.5}},
                {"structured_outputs": {"regex": "a+"}},
                {"structured_outputs": {"choice": ["a", "b"]}},
            )
        ),
        ({"n": 2, "temperature": 1}, {"n": 2, "temperature": 1.0}),
        ({"n": 3, "temperature": 0}, {"n": None, "temperature": 0.0}),  # equal choices are asked for once
        # what is left open is vLLM's to fill in, by the model's generation_config.json
        ({}, {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None}),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"repetition_penalty": 1}, {"repetition_penalty": 1.0, "temperature": None}),
        ({"seed": 3, "min_tokens": 2}, {"min_tokens": 2}),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        ),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"tools": TOOLS}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "listen"}}},
            {"tool_choice": {"type": "function", "function": {"name": "listen"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_what_a_client_asks_for_reaches_vllm(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    body = msgspec.json.decode(msgspec.json.encode(vllm_request.answer_body(request(chat(**fields)), ())))
    assert {key: body.get(key) for key in sent} == sent


def test_completions() -> None:
    body = vllm_request.answer_body(request({"prompt": "hi", "logprobs": 2, "echo": False, "max_tokens": 4}), ())
    assert (body["prompt"], body["logprobs"], body["max_tokens"]) == ("hi", 2, 4)
    assert vllm_request.prefill_body(request({"prompt": [1, 2]}), ())["max_tokens"] == 1


def test_figures() -> None:
    text = """# HELP x
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_total{engine="0"} 10.0
vllm:generation_tokens_total{engine="0"} 5.0
vllm:request_success_total{engine="0",finished_reason="stop"} 4.0
vllm:cache_config_info{block_size="128",num_gpu_blocks="40",odd="a\\"b"} 1.0
process_start_time_seconds 1.7e+09
no line at all
vllm:num_requests_running{engine="1"} NaN
"""
    found = read_figures(text)
    assert (found.num_running, found.num_waiting, found.progress) == (2, 3, 19)
    assert (found.block_size, found.num_blocks, found.started_at) == (128, 40, 1.7e9)
    assert found.kv_usage == 0.25
    assert read_figures("").num_blocks == 0


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"error":{"message":"too long","type":"B","code":400}}', InvalidRequest, "too long"),
        (500, b'{"error":{"message":"dead","code":500}}', InstanceFailed, "instance d0 answered 500: dead"),
        (
            500,
            b'{"error":{"message":"Failed to apply prompt replacement for mm_items[\'video\'][0]"}}',
            InvalidRequest,
            "does not support video items",
        ),
        (503, b"busy", Unavailable, "busy"),
        (404, b"", InvalidRequest, "nothing"),
    ],
)
def test_errors_are_told_as_ours(status: int, body: bytes, kind: type[Exception], words: str) -> None:
    error = error_of(status, body, "d0")
    assert type(error) is kind
    assert words in str(error)


GIVEN: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 1}


def for_vllm(body: dict[str, Any]) -> PrefillRequest:
    return request(body, kinds=(VllmChatRequest, VllmCompletionRequest))


def test_fields_that_only_vllm_has_reach_it() -> None:
    asked = for_vllm(chat(**GIVEN, reasoning_effort="low"))
    body = vllm_request.answer_body(asked, ())
    assert {name: body[name] for name in GIVEN} == GIVEN
    assert body["reasoning_effort"] == vllm_request.prefill_body(asked, ())["reasoning_effort"] == "low"
    assert GIVEN.keys().isdisjoint(vllm_request.prefill_body(asked, ())), "P makes no answer"
    completion = vllm_request.answer_body(for_vllm({"prompt": "hi", **GIVEN, "echo": True, "logprobs": 1}), ())
    assert {name: completion[name] for name in GIVEN} == GIVEN
    structured = vllm_request.answer_body(for_vllm(chat(tools=TOOLS, ignore_eos=True, min_tokens=3)), ())
    assert (structured["ignore_eos"], structured["min_tokens"]) == (True, 3), "the native engine refuses that"


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}, {"echo": True, "logprobs": 2}]
)
def test_who_scores_a_prompt_computes_it(fields: dict[str, Any]) -> None:
    assert vllm_request.needs_whole_prompt(for_vllm({"prompt": "hi", **fields}))
    assert not vllm_request.needs_whole_prompt(for_vllm({"prompt": "hi", "echo": True, "return_token_ids": True}))


def test_tokens_that_a_client_wants_are_left_in_its_stream() -> None:
    assert can_be_replayed(for_vllm(chat(stream=True)))
    assert not can_be_replayed(for_vllm(chat(stream=True, return_token_ids=True)))
