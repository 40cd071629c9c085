"""LoRA adapters: the logits of the merged model, for each row of a mixed step; and what is refused, by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.adapters import Adapters, load_adapter
from engine.api import GenerateRequest
from engine.attention import AttentionRow, CpuAttention, KVShape
from engine.config import AdapterSource, EngineConfig
from engine.errors import InvalidRequest, ModelError
from engine.models.config import from_hf
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.engine.conftest import StartEngine
from tests.support.generation import assert_same_tokens, generate, reference_greedy
from tests.support.tiny_adapters import ALL, CONFIG, layers_of, merged, random_tensors, save_adapter, save_random
from tests.support.tiny_models import save_tiny

Q, V, UP = "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"
Ranks = dict[str, int]
Scales = dict[str, float]


def in_layers(values: dict[str, Any], *layers: int) -> dict[str, Any]:
    return {f"model.layers.{layer}.{module}": value for layer in layers for module, value in values.items()}


EVERY = {f"{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}": 4 for name in ALL}
CONFIGS: list[tuple[str, str, dict[str, Any], Ranks, float | Scales]] = [
    ("all", "llama", {}, in_layers(EVERY, 0, 1, 2), 2.0),
    ("all-linear", "llama", {"target_modules": "all-linear"}, in_layers(EVERY, 0, 1, 2), 2.0),
    ("biases and wide heads", "llama", {}, in_layers(EVERY, 0, 1, 2), 2.0),
    ("q/k norms", "qwen3", {"lora_alpha": 2}, in_layers(EVERY, 0, 1, 2), 0.5),
    ("rslora", "qwen2", {"use_rslora": True, "target_modules": ["q_proj"]}, in_layers({Q: 4}, 0, 1, 2), 4.0),
    ("parts of fused layers", "llama", {"target_modules": ["v_proj", UP]}, in_layers({V: 4, UP: 4}, 0, 1, 2), 2.0),
    (
        "expression",
        "llama",
        {"target_modules": r".*\.[02]\.self_attn\.(q|v)_proj", "exclude_modules": r".*\.2\..*"},
        in_layers({Q: 4, V: 4}, 0),
        2.0,
    ),
    (
        "some layers",
        "llama",
        {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1, 2]},
        in_layers({Q: 4}, 1, 2) | in_layers({UP: 4}, 0),
        2.0,
    ),
    (
        "one layer",
        "llama",
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        in_layers({Q: 4}, 1),
        2.0,
    ),
    (
        "patterns",
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "^model.layers.2.*v_proj": 6, "up_proj": 1},
            "alpha_pattern": {"q_proj": 6, "up_proj": 0.5},
        },
        in_layers({Q: 4, V: 4, UP: 1}, 0, 1, 2) | in_layers({Q: 2}, 0) | in_layers({V: 6}, 2),
        in_layers({Q: 1.5, V: 2.0, UP: 0.5}, 0, 1, 2) | in_layers({Q: 3.0}, 0) | in_layers({V: 8 / 6}, 2),
    ),
]
OPTIONS = {"biases and wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32}}


class Stepper:
    """A decoder with adapters, and what it gives for chosen rows."""

    def __init__(
        self, folder: Path, models_dir: Path, sources: tuple[AdapterSource, ...], dtype: str = "float32"
    ) -> None:
        converted = open_model(str(folder), models_dir, dtype)
        c = converted.config
        self.adapters = Adapters(load_adapter(source, c) for source in sources)
        self.model = Decoder(c, converted.tensors(), self.adapters)
        self.attention = CpuAttention(KVShape(c.num_layers, c.num_kv_heads, c.head_dim, 64, 4, torch.float32))

    def logits(self, ids: torch.Tensor, *rows: tuple[str | None, AttentionRow]) -> torch.Tensor:
        """Every row computes its span of `ids`."""
        self.attention.plan([row for _, row in rows])
        self.adapters.plan((adapter, row.count) for adapter, row in rows)
        spans = torch.cat([torch.arange(row.start, row.start + row.count) for _, row in rows])
        with torch.inference_mode():
            return self.model.forward(ids[spans], spans, torch.arange(len(spans)), self.attention)


def reference(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids[None]).logits[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "config", "ranks", "scale", "options"),
    [pytest.param(*case[1:], OPTIONS.get(case[0], {}), id=case[0]) for case in CONFIGS],
)
def test_logits_equal_the_merged_model(
    model_type: str,
    config: dict[str, Any],
    ranks: Ranks,
    scale: float | Scales,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    base = save_tiny(tmp_path / "model", model_type, **options)
    tensors = random_tensors(base, ranks, seed=5)
    save_adapter(tmp_path / "ann", tensors, **config)
    scales = dict.fromkeys(ranks, scale) if isinstance(scale, float) else scale
    ids = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(1))
    expected = reference(merged(base, tensors, scales), ids)
    assert float((expected - reference(base, ids)).abs().max()) > 0.1
    stepper = Stepper(tmp_path / "model", tmp_path / "models", (AdapterSource("ann", tmp_path / "ann"),))
    pages = np.arange(15, dtype=np.int32)

    close(stepper.logits(ids, ("ann", AttentionRow(1, pages, 0, 60, 60))), expected)
    stepper.attention.drop(1)
    cached = stepper.logits(ids, ("ann", AttentionRow(2, pages, 48, 12, 60)))
    close(cached, expected[48:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_adapter_files(dtype: torch.dtype, tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, base = tiny
    modules = layers_of(base, *ALL)
    tensors = random_tensors(base, dict.fromkeys(modules, 4), dtype=dtype)
    save_adapter(tmp_path / "ann", tensors)
    stepper = Stepper(folder, tmp_path / "models", (AdapterSource("ann", tmp_path / "ann"),))
    ids = torch.arange(3, 40)
    row = AttentionRow(1, np.arange(10, dtype=np.int32), 0, 37, 40)
    close(stepper.logits(ids, ("ann", row)), reference(merged(base, tensors, dict.fromkeys(modules, 2.0)), ids))


@pytest.mark.parametrize("dtype", ["int4", "bfloat16"])
@pytest.mark.parametrize("count", [8, 40])
def test_narrow_base_weights(dtype: str, count: int, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "model", "llama", initializer_range=0.05)
    expected_model = save_random(tmp_path / "ann", base, seed=1, size=0.1)
    source = AdapterSource("ann", tmp_path / "ann")
    stepper = Stepper(tmp_path / "model", tmp_path / "models", (source,), dtype)
    ids = torch.arange(3, 83)
    expected = reference(expected_model, ids)
    rows = [AttentionRow(1, np.arange(20, dtype=np.int32), start, count, 80) for start in range(0, 80, count)]
    found = torch.cat([stepper.logits(ids, ("ann", row)) for row in rows])
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=-1).min()) > 0.95
    assert float(torch.nn.functional.cosine_similarity(reference(base, ids), expected, dim=-1).max()) < 0.5


def test_rows_of_a_mixed_step_equal_each_alone(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, base = tiny
    references = {None: base} | {
        name: save_random(tmp_path / name, base, seed=seed) for name, seed in (("ann", 1), ("bob", 2))
    }
    sources = tuple(AdapterSource(name, tmp_path / name) for name in ("ann", "bob"))
    stepper = Stepper(folder, tmp_path / "models", sources)
    ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(3))
    expected = {name: reference(model, ids) for name, model in references.items()}
    order = ("ann", None, "bob", "ann", "bob", "bob", None)
    pages = [np.arange(8, dtype=np.int32) + 8 * number for number in range(len(order))]
    for start, counts in ((0, (9, 5, 1, 12, 3, 3, 20)), (20, (1, 1, 1, 1, 1, 1, 1))):
        if start:  # what the first step left out, so that the second decodes after 20 tokens
            for number, (name, count) in enumerate(zip(order, (9, 5, 1, 12, 3, 3, 20), strict=True)):
                if count < start:
                    row = AttentionRow(number, pages[number], count, start - count, 32)
                    close(stepper.logits(ids, (name, row)), expected[name][count:start])
        rows = [
            (name, AttentionRow(number, pages[number], start, count, 32))
            for number, (name, count) in enumerate(zip(order, counts, strict=True))
        ]
        parts = stepper.logits(ids, *rows).split(list(counts))
        for part, name, count in zip(parts, order, counts, strict=True):
            close(part, expected[name][start : start + count])


@pytest.mark.every_attention
async def test_the_engine_serves_adapters_side_by_side(
    start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    references: dict[str | None, PreTrainedModel] = {None: tiny[1]}
    for name, seed in (("ann", 1), ("bob", 2)):
        references[name] = save_random(tmp_path / name, tiny[1], seed=seed)
    engine = start_engine(adapters=tuple(AdapterSource(name, tmp_path / name) for name in ("ann", "bob")))
    assert engine.info.adapters == ("ann", "bob")
    prompt = np.random.default_rng(0).integers(3, 250, 50).astype(np.int32)
    expected = {name: reference_greedy(model, prompt, 12) for name, model in references.items()}
    assert len({tuple(ids) for ids, _ in expected.values()}) == 3
    common = {"max_tokens": 12, "min_tokens": 12, "ignore_eos": True}
    names = (None, "ann", "bob", "ann", None)
    cold = await asyncio.gather(*(generate(engine, prompt, adapter=name, **common) for name in names[:3]))
    warm = await asyncio.gather(*(generate(engine, prompt, adapter=name, **common) for name in names))
    for name, output in zip((*names[:3], *names), (*cold, *warm), strict=True):
        assert_same_tokens(output.ids, *expected[name])
    assert [output.cached for output in cold] == [0, 0, 0]
    assert [output.cached for output in warm] == [48] * 5


async def test_adapters_and_namespaces_separate_pages(
    start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    for name, seed in (("ann", 1), ("bob", 2)):
        save_random(tmp_path / name, tiny[1], seed=seed)
    engine = start_engine(adapters=tuple(AdapterSource(name, tmp_path / name) for name in ("ann", "bob")))
    keys = [(namespace, name) for namespace in ("", "adapter:ann", "salt") for name in (None, "ann", "bob")]
    for expected in (0, 48):
        for namespace, name in keys:
            output = await generate(engine, list(range(3, 53)), namespace=namespace, adapter=name, max_tokens=1)
            assert (namespace, name, output.cached) == (namespace, name, expected)


@pytest.mark.every_attention
async def test_preempted_sequences_keep_their_adapter(
    start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    references: dict[str | None, PreTrainedModel] = {None: tiny[1]}
    references["ann"] = save_random(tmp_path / "ann", tiny[1], seed=1)
    engine = start_engine(
        adapters=(AdapterSource("ann", tmp_path / "ann"),), pool_tokens=128, max_batched_tokens=16, max_running=8
    )
    prompt = np.random.default_rng(0).integers(3, 250, 20).astype(np.int32)
    common = {"max_tokens": 40, "min_tokens": 40, "ignore_eos": True}
    names = ("ann", None, "ann", None)
    outputs = await asyncio.gather(*(generate(engine, prompt, adapter=name, **common) for name in names))
    for name, output in zip(names, outputs, strict=True):
        assert_same_tokens(output.ids, *reference_greedy(references[name], prompt, 40))
    assert engine.snapshot().preemptions > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": "eve"}, "adapter that is not loaded"),
        ({"adapter": ""}, "adapter that is not loaded"),
        ({"namespace": "\0adapter:ann"}, "must not contain U+0000"),
    ],
)
async def test_requests_that_are_refused(
    change: dict[str, Any],
    message: str,
    start_engine: StartEngine,
    tiny: tuple[Path, PreTrainedModel],
    tmp_path: Path,
) -> None:
    save_random(tmp_path / "ann", tiny[1], seed=1)
    engine = start_engine(adapters=(AdapterSource("ann", tmp_path / "ann"),))
    request = GenerateRequest("a", np.arange(3, 9, dtype=np.int32))
    with pytest.raises(InvalidRequest, match=message.replace("+", r"\+")):
        engine.submit(replace(request, **change))
    assert engine.snapshot().waiting == 0


def config_with(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")

    return change


def tensors_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


B = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
        (lambda f: (f / "adapter_config.json").write_bytes(b"\xff"), "adapter_config.json cannot be read"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "it holds no object"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\xff" * 50), "not a usable safetensors"),
        (config_with(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (config_with(bias="all"), "bias 'all' is not supported"),
        (config_with(use_dora=True), "use_dora is not supported"),
        (config_with(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
        (config_with(lora_bias=True), "lora_bias is not supported"),
        (config_with(fan_in_fan_out=True), "fan_in_fan_out is not supported"),
        (config_with(layer_replication=[[0, 2]]), "layer_replication is not supported"),
        (config_with(trainable_token_indices=[1]), "trainable_token_indices is not supported"),
        (config_with(from_the_future={"x": 1}), "from_the_future is not supported"),
        (config_with(init_lora_weights="pissa"), "init_lora_weights 'pissa' is not supported"),
        (config_with(target_modules=["q_proj", "lm_head"]), "target_modules has lm_head"),
        (config_with(target_modules=".*embed_tokens"), "target_modules has model.embed_tokens"),
        (config_with(target_modules=None), "target_modules names no modules"),
        (config_with(target_modules=[3]), "a string or a list of strings"),
        (config_with(target_modules="("), "unterminated subpattern"),
        (config_with(rank_pattern={"*": 2}), "nothing to repeat"),
        (config_with(target_modules=["conv1"]), "tensors have no use"),
        (config_with(target_modules=".*", layers_to_transform=[1]), "needs a list of target_modules"),
        (config_with(layers_to_transform="x"), "layers_to_transform is a whole number or a list"),
        (config_with(layers_pattern="blocks"), "layers_pattern is not supported"),
        (config_with(rank_pattern=[1]), "cannot be used"),
        (config_with(r=0), "a rank is a whole number from 1 on, not 0"),
        (config_with(r="4"), "a rank is a whole number"),
        (config_with(lora_alpha="much"), "lora_alpha is a finite number"),
        (config_with(alpha_pattern={"q_proj": float("inf")}), "finite number, not inf"),
        (config_with(r=3), "q_proj.lora_A.weight has the shape [4, 64], and model and rank say [3, 64]"),
        (config_with(target_modules=list(ALL[:-1])), "6 tensors have no use"),
        (tensors_with(lambda t: t.pop(B)), f"{B} is missing"),
        (tensors_with(lambda t: t.update(extra=torch.zeros(1))), "1 tensors have no use, among them extra"),
        (tensors_with(lambda t: t.update({B: t[B][:-1].clone()})), f"{B} has the shape [95, 4]"),
        (tensors_with(lambda t: t[B].fill_(float("nan"))), f"{B} has values that are not finite"),
    ],
)
def test_unusable_adapters_are_named(
    change: Callable[[Path], None], message: str, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder = tmp_path / "ann"
    save_random(folder, tiny[1], seed=1)
    change(folder)
    model = from_hf(json.loads((tiny[0] / "config.json").read_text(encoding="utf-8")))
    with pytest.raises(ModelError) as caught:
        load_adapter(AdapterSource("ann", folder), model)
    assert str(caught.value).startswith("the adapter ann: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\0", "ä", "a" * 101])
def test_names_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        AdapterSource(name, tmp_path)


def test_names_are_unique(tmp_path: Path) -> None:
    twice = (AdapterSource("a", tmp_path), AdapterSource("a", tmp_path / "b"))
    with pytest.raises(ValueError, match="same name"):
        EngineConfig(tmp_path, adapters=twice)
