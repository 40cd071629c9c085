"""Which tensors a model of a given configuration has."""

from __future__ import annotations

from engine.models.config import DecoderConfig


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The Hugging Face names and shapes of all tensors that a model of this configuration has."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in products.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
