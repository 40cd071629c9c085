"""Models that run through transformers' attention interface: the logits of plain transformers, or a refusal by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.loading import load_engine
from engine.models.hf import HfModel, load_hf
from engine.models.registry import load_model
from engine.text.api import ChatMessage
from engine.weights import pull
from tests.engine.test_decoder import add_tensor, assert_equals, attention_for, drop_tensor, reshape_tensor
from tests.support.generation import assert_same_tokens, generate, reference_greedy
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.1] * 8,
        "long_factor": [4.0] * 8,
    },
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """windows: of its layers, from the first one on. context: in tokens."""

    model_type: str
    options: dict[str, Any]
    windows: tuple[int | None, ...] = (None,) * 3
    context: int = 512


MODELS = {
    "Gemma 2: soft caps, alternating windows": Case("gemma2", GEMMA2, (8, None, 8)),
    "GPT-2: learned positions": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "Phi-3: fused projections, a window": Case("phi3", {"sliding_window": 9}, (9,) * 3),
    "Phi-3: longrope": Case("phi3", {**LONGROPE, "sliding_window": None}, context=128),
    "Gemma 3: other positions in windows": Case("gemma3_text", {"head_dim": 16, "sliding_window": 8}, (8,) * 3),
    "Mixtral: experts": Case("mixtral", {"num_local_experts": 4}),
    "GPT-NeoX: parallel residuals, untied": Case("gpt_neox", {}),
    "Llama with another activation": Case("llama", {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", case.model_type, **case.options)
    model = load_model(str(tmp_path / "model"), tmp_path / "models", "float32").model
    assert isinstance(model, HfModel)
    assert tuple(layer.window for layer in model.spec.layers) == case.windows
    assert model.spec.context_length == case.context
    assert_equals(model, reference)
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]  # read where it is, nothing is copied


@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
@pytest.mark.parametrize("dtype", ["int4", "int8", "bfloat16"])
def test_narrow_weights_stay_close(dtype: str, model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", model_type, initializer_range=0.05)
    exact, narrow = (load_model(str(tmp_path / "model"), tmp_path, name) for name in ("float32", dtype))
    assert narrow.weights == dtype
    ids = torch.arange(3, 43)
    with torch.inference_mode():
        expected, few, none = (
            forward(loaded.model, ids, chunk, rows)
            for loaded, chunk, rows in ((exact, 40, 40), (narrow, 8, 8), (narrow, 40, 0))
        )
    assert float(torch.nn.functional.cosine_similarity(few, expected, dim=-1).min()) > 0.95
    assert not torch.equal(few, expected)
    assert none.shape == (0, expected.shape[1])


def forward(model: Any, ids: torch.Tensor, chunk: int, rows: int) -> torch.Tensor:
    from engine.attention import AttentionRow

    attention, parts = attention_for(model), []
    for start in range(0, len(ids), chunk):
        attention.plan([AttentionRow(1, np.arange(20, dtype=np.int32), start, chunk, len(ids))])
        span = torch.arange(start, start + chunk)
        parts.append(model.forward(ids[span], span, torch.arange(rows), attention))
    return torch.cat(parts)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
async def test_an_engine_gives_the_greedy_tokens_and_finds_them_again(model_type: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", model_type, **(GEMMA2 if model_type == "gemma2" else {}))
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")  # without a chat template
    engine = load_engine(EngineConfig(tmp_path / "models", str(tmp_path / "model"), dtype="float32", page_size=4))
    try:
        history = engine.codec.prompt([ChatMessage("user", "Hello there, who are YOU?")]).tokens
        earlier = 1
        for _ in range(2):
            expected, margins = reference_greedy(reference, history, 12)
            output = await generate(engine, history, max_tokens=12, min_tokens=12, ignore_eos=True)
            assert_same_tokens(output.ids, expected, margins)
            assert output.cached == (earlier - 1) // 4 * 4
            earlier = len(history) + 12
            history = np.concatenate((history, np.asarray(output.ids, np.int32), history[:9]))
    finally:
        await engine.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"model_type": "mamba"}, "'mamba' is not supported: it keeps a state"),
    "jamba": ({"model_type": "jamba"}, "'jamba' is not supported: it keeps a state"),
    "encoder and decoder": ({"model_type": "t5"}, "'t5' is not supported: it has an encoder"),
    "images": ({"model_type": "llava"}, "'llava' is not supported: it takes more than text"),
    "no language model": ({"model_type": "vit"}, "'vit' is not supported: transformers has no causal language model"),
    "ALiBi": ({"model_type": "bloom"}, "'bloom' is not supported: its attention cannot be replaced"),
    "attention in chunks": ({"model_type": "llama4_text"}, "it has layers of the type 'chunked_attention'"),
    "quantized elsewhere": (
        {"model_type": "phi3", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        "its weights are quantized",
    ),
    "unheard of": ({"model_type": "nonsense"}, "transformers cannot use"),
    "remote code": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
        "transformers cannot use",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_qualify_is_refused_before_its_weights_are_read(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "code.py").write_text("raise SystemExit('remote code was run')", encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_hf(tmp_path, torch.float32)
    assert message in str(caught.value)


SINKS = {"head_dim": 16, "num_local_experts": 4}
FOUND_OUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention sinks": ("gpt_oss", SINKS, "'gpt_oss' uses attention sinks"),
    "latent keys and values": ("minicpm3", {}, "'minicpm3' has keys of 96 and values of 16 elements"),
    "attention in both directions": ("bert", {}, "'bert' gives other results over our keys and values"),
    "arguments that get lost": ("nemotron", {}, "is not handed the arguments"),
    "attention twice a layer": ("diffllama", {}, "'diffllama' does not attend once in each layer"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "options", "message"), FOUND_OUT.values(), ids=FOUND_OUT)
def test_what_does_not_qualify_is_found_out_by_running_it(
    model_type: str, options: dict[str, Any], message: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type, **options)
    with pytest.raises(ModelError) as caught:
        load_hf(tmp_path, dtype)
    assert message in str(caught.value)


def test_rounding_is_no_reason_to_refuse_and_the_check_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    # Twelve layers of large random weights make much of every rounding in bfloat16.
    reference = save_tiny(tmp_path, "gpt2", num_hidden_layers=12, initializer_range=0.4)
    module = load_hf(tmp_path, torch.bfloat16).module
    loaded = dict(module.named_parameters())
    assert {name: p.dtype for name, p in loaded.items()} == dict.fromkeys(loaded, torch.bfloat16)
    for name, parameter in reference.named_parameters():
        assert torch.equal(loaded[name], parameter.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: drop_tensor(f, "transformer.h.1.mlp.c_fc.weight"),
            "lacks 1 tensors, among them transformer.h.1.mlp",
        ),
        (lambda f: add_tensor(f, "transformer.h.1.extra.weight"), "1 tensors, among them transformer.h.1.extra.weight"),
        (lambda f: reshape_tensor(f, "transformer.h.1.mlp.c_fc.weight"), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 50), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has no *.safetensors"),
    ],
    ids=["missing", "unused", "of another shape", "damaged", "pickled"],
)
def test_unusable_weights_are_named(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gpt2")
    change(tmp_path / "model")
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert message in str(caught.value)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gpt2", vocab_size=100)
    with pytest.raises(ModelError, match=r"the tokenizer has \d+ ids, and the model knows 100"):
        load_engine(EngineConfig(tmp_path / "models", str(tmp_path / "model"), dtype="float32"))


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
async def test_ids_without_text_are_never_sampled(model_type: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", model_type, vocab_size=600)
    engine = load_engine(EngineConfig(tmp_path / "models", str(tmp_path / "model"), dtype="float32"))
    try:
        prompt = np.arange(3, 40, dtype=np.int32)
        expected, _ = reference_greedy(reference, prompt, 20)
        assert max(expected) >= engine.codec.vocab_size
        output = await generate(engine, prompt, max_tokens=20, min_tokens=20, ignore_eos=True)
        assert len(output.ids) == 20
        assert max(output.ids) < engine.codec.vocab_size
    finally:
        await engine.close()


def test_pulling_leaves_such_a_model_where_it_is(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gpt2")
    assert pull(str(tmp_path / "model"), tmp_path / "models") == tmp_path / "model"


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "model", "gpt2")
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        load_hf(tmp_path / "model", torch.float32)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
