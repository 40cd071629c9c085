"""All layers of a decoder with packed weights as one program of kernels, which a step runs in one go.

per layer       reads                 writes
qkv             residual              qkv
heads           qkv, positions        qkv
attention       qkv, pool             attended, pool
out             attended              residual
gate_up         residual              gate_up
down            gate_up               residual
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import CpuAttention
from engine.kernels import Norm, Products, new_program
from engine.models.config import DecoderConfig
from engine.models.elementwise import CpuHeads
from engine.models.layer import DecoderLayer
from engine.models.watch import Watch
from engine.quant import Linear, PackedLinear


class WholeStep:
    """For steps of up to `most_rows` tokens over one attention backend. x: the residual, float32 [most_rows, hidden].

    layers: those of which `fits` is true.
    """

    def __init__(
        self, config: DecoderConfig, layers: Sequence[DecoderLayer], attention: CpuAttention, most_rows: int
    ) -> None:
        c, self.attention, self.most_rows = config, attention, most_rows
        heads = c.num_heads + 2 * c.num_kv_heads
        self.x = torch.empty(most_rows, c.hidden_size)
        qkv = torch.empty(most_rows, heads, c.head_dim)
        attended = torch.empty(most_rows, c.num_heads, c.head_dim)
        gate_up = torch.empty(most_rows, 2 * c.intermediate_size)
        self._keep = (layers, qkv, attended, gate_up)
        self._context_length = c.context_length
        self._products = products = Products()
        products.reserve(most_rows, max(c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim))
        self._program = program = new_program()
        q, k, v = torch.split(qkv, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        self._windows = dict.fromkeys(attention.window(index) for index in range(len(layers)))

        def product(
            part: str,
            linear: Linear,
            x: torch.Tensor,
            y: torch.Tensor,
            *,
            norm: Norm | None = None,
            gated: bool = False,
            add: bool = False,
        ) -> None:
            if not isinstance(linear, PackedLinear):
                raise TypeError(f"{part} is not packed")
            call = products.call(x, linear.packed, linear.bias, y, norm=norm, gated=gated, add=add)
            program.add(part, "product", *call)

        for index, layer in enumerate(layers):
            product("qkv", layer.qkv, self.x, qkv.flatten(1), norm=layer.attention_norm.norm)
            assert isinstance(layer.heads, CpuHeads)
            program.add("heads", "heads", *layer.heads.heads.call(qkv))
            program.add("attention", attention.window(index), *attention.call(index, q, k, v, attended))
            product("out", layer.out, attended.flatten(1), self.x, add=True)
            product("gate_up", layer.gate_up, self.x, gate_up, norm=layer.mlp_norm.norm)
            product("down", layer.down, gate_up, self.x, gated=True, add=True)
        program.finish()

    @staticmethod
    def fits(layers: Sequence[DecoderLayer]) -> bool:
        """Whether all linear layers of these are packed, and none is wrapped into anything."""
        linears = (linear for each in layers for linear in (each.qkv, each.out, each.gate_up, each.down))
        return all(isinstance(linear, PackedLinear) and linear.whole for linear in linears)

    def run(self, positions: torch.Tensor, watch: Watch | None) -> torch.Tensor:
        """The residual, [T, hidden], behind the last layer of a step that attention was planned for; x holds its
        embeddings. positions: int64 [T]."""
        program, rows = self._program, len(positions)
        if positions.dtype != torch.int64 or not positions.is_contiguous() or rows > self.most_rows:
            raise ValueError(f"{positions.dtype} positions of {rows} tokens, and room for {self.most_rows}")
        if not 0 <= int(positions.min()) <= int(positions.max()) < self._context_length:
            raise ValueError(f"a position beyond the context of {self._context_length} tokens")
        program.set("product", rows=rows, counter=0)
        program.set("heads", rows=rows, positions=positions.data_ptr())
        for window in self._windows:
            planned = self.attention.planned(window)
            if planned["tokens"] != rows:
                raise ValueError(f"{rows} tokens, and {planned['tokens']} were planned")
            program.set(window, **planned)
        if watch is None:
            program.run()
        else:
            program.run_watched(watch.measure)
        return self.x[:rows]
