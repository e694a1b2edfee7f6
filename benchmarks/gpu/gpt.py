"""GPT-2 as nanoGPT has it, and how many operations training it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["GPT", "GPT2_124M", "Shape"]


@dataclass(frozen=True)
class Shape:
    """The size of a GPT."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int


GPT2_124M = Shape(layers=12, heads=12, width=768, context=1024, vocabulary=50304)
"""GPT-2's smallest, with the vocabulary rounded up to a multiple of 64."""


class Block(nn.Module):
    """Causal self-attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A transformer decoder without dropout; given tokens and the next tokens, the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def operations(self) -> int:
        """Floating-point operations of the model a token, forward and backward: 6 N + 12 L H Q T.

        The formula of PaLM's appendix B (Chowdhery et al., 2022) for model FLOPs utilisation: L layers of H heads of
        width Q, a context of T; N parameters without those of the positions, as nanoGPT counts them. Recomputation
        would not count, and attention counts whole although it is causal.
        """
        count = sum(parameter.numel() for parameter in self.parameters()) - self.position.weight.numel()
        return 6 * count + 12 * self.shape.layers * self.shape.width * self.shape.context
