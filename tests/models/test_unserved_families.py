"""All families with media that transformers has: each is held against ``generate``, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_families import TINY
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from epd_serve.config import DeploymentConfig
from epd_serve.launch.preflight import check_deployment
from epd_serve.models.checkpoint_config import read_config
from epd_serve.models.families import FAMILIES
from epd_serve.models.loader import ModelPart, load_family, load_part

ALL = sorted(
    {
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
)
#: Those that are held against ``generate``, by tiny models.
HELD = {one.model_type for one in TINY.values()} | {"qwen2_vl", "qwen3_vl_moe"}
#: Models around the part that answers in text.
WHOLE = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}


@pytest.mark.parametrize("model_type", ALL)
def test_a_family_with_media_is_run_or_refused_by_name(model_type: str, tmp_path: Path) -> None:
    """The directory has no weights: the refusal comes before they are read."""
    config = CONFIG_MAPPING[model_type]()
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    if WHOLE.get(model_type, model_type) in FAMILIES:
        assert WHOLE.get(model_type, model_type) in HELD
        try:
            read_config(tmp_path)
        except ValueError as error:  # a field of the class's defaults, which are no published model's
            assert str(tmp_path) in str(error), error
        return
    words = f"does not run the family '{model_type}'; it runs "
    deployment = DeploymentConfig(model=str(tmp_path), gateway={"port": 0}, instances={"base_port": 0})
    for refuse in (
        lambda: load_family(tmp_path),
        lambda: load_part(tmp_path, ModelPart.TOWER, None),
        lambda: load_part(tmp_path, ModelPart.LANGUAGE_MODEL, None),
        lambda: check_deployment(deployment, {}),
    ):
        with pytest.raises(ValueError, match=r"engine: vllm|vLLM that is installed") as refused:
            refuse()
        assert words in str(refused.value)


@pytest.mark.parametrize("model_type", ["kimi_vl", "internvl_chat"])
def test_a_checkpoint_with_code_of_its_own_is_refused_unread(model_type: str, tmp_path: Path) -> None:
    content = {"model_type": model_type, "auto_map": {"AutoConfig": "configuration.Odd"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    why = "its checkpoint contains custom code, which is not run"
    with pytest.raises(ValueError, match="engine: vllm") as refused:
        load_family(tmp_path)
    assert f"does not run the family '{model_type}' ({why}); it runs " in str(refused.value)
