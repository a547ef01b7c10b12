"""Models as people train them: narrow, with the depth, the number of tensors and the layouts of the wide ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

VOCABULARY = 64
LARGE_GRADIENT = 33_000.0
"""Gradient that float16 holds, though not the sum of two."""


@dataclass(frozen=True)
class Architecture:
    """A model and the loss of a batch that is drawn for it.

    Args:
      build: makes the model, with random weights.
      loss: draws a batch and returns its loss.
      least_tensors: parameters and buffers that the model has at least.
      needs_transformers: whether the model is one of that library.
      has_unused: whether the loss leaves out parameters, which DistributedDataParallel has to be told.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Generator], Tensor]
    least_tensors: int
    needs_transformers: bool = False
    has_unused: bool = False


# --- by hand --------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        changes_shape = stride != 1 or inputs != 4 * width
        projection = (nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Sequential(*(projection if changes_shape else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(width: int = 4) -> nn.Module:
    """Makes the 161 parameters and 159 buffers of ResNet-50, in the memory format that convolutions prefer."""
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Attention(nn.Module):
    """Attention with tables of rotations, a mask of the smallest number, and state that is no tensor."""

    def __init__(self, width: int, length: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        frequencies = 10_000.0 ** -torch.arange(0, 1, 2 * heads / width)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        for name, table in {"cosines": angles.cos(), "sines": angles.sin(), "mask": mask}.items():
            self.register_buffer(name, table, persistent=False)

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        assert state == self.get_extra_state()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).float()
        q, k = (y * self.cosines + y.roll(y.shape[-1] // 2, -1) * self.sines for y in (q, k))
        attended = ((q @ k.mT + self.mask).softmax(-1) @ v).transpose(1, 2).flatten(2)
        output: Tensor = self.output(attended.to(x.dtype))
        return output


class Decoder(nn.Module):
    """Blocks in bfloat16 whose norms and embedding stay in float32."""

    def __init__(self, blocks: int = 12, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.attentions = nn.ModuleList(Attention(width, length) for _ in range(blocks))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        for part in self.modules():
            if isinstance(part, nn.Linear):
                part.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        layers = [layer for pair in zip(self.attentions, self.inner, strict=True) for layer in pair]
        for norm, layer in zip(self.norms, layers, strict=True):
            x = x + layer(norm(x).to(torch.bfloat16))
        logits: Tensor = self.head(x.to(torch.bfloat16)).float()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Experts(nn.Module):
    """Routers to experts that are modules of their own, few of which see a token."""

    def __init__(self, blocks: int = 5, experts: int = 16, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(blocks))
        self.experts: Any = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
                for _ in range(experts)
            )
            for _ in range(blocks)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.flatten())
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, chosen = router(x).softmax(-1).topk(2, -1)
            for number in chosen.unique().tolist():
                rows, places = (chosen == number).nonzero(as_tuple=True)
                x = x.index_add(0, rows, experts[number](x[rows]) * weights[rows, places, None])
        return F.cross_entropy(self.head(x), ids.flatten())


class Adapter(nn.Module):
    """LoRA on a layer of GPT-2, whose weight is frozen, as bytes with a scale for each column if wished."""

    def __init__(self, layer: Any, rank: int = 2, *, is_quantised: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.scales: Tensor
        self.register_buffer("scales", weight.abs().amax(0) / 127 if is_quantised else torch.ones(()))
        values = (weight / self.scales + 128).round().to(torch.uint8) if is_quantised else weight
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.randn(len(weight), rank) / rank)
        self.b = nn.Parameter(torch.zeros(rank, len(self.bias)))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if weight.dtype is torch.uint8:
            weight = (weight.float() - 128) * self.scales
        return x @ weight + self.bias + x @ self.a @ self.b


def adapted(*, is_quantised: bool) -> Any:
    model = gpt2(12).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapter(block.attn.c_attn, is_quantised=is_quantised)
        block.mlp.c_fc = Adapter(block.mlp.c_fc, is_quantised=is_quantised)
    return model


class Half(nn.Module):
    """A model in float16, and a parameter of no dimension whose gradient is large."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.offset = model.half(), nn.Parameter(torch.zeros((), dtype=torch.float16))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(images.half()).logits
        return F.cross_entropy(logits.float(), labels) + LARGE_GRADIENT * self.offset.float()


# --- of transformers ------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 16}
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make(model: str, config: str, **options: Any) -> Any:
    """Makes a model of transformers by the names of its class and of its configuration."""
    transformers = import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def gpt2(layers: int) -> Any:
    """Makes a GPT-2 whose embedding is its head."""
    sizes = {"n_embd": 16, "n_positions": 16, "n_layer": layers, "n_head": 2}
    return make("GPT2LMHeadModel", "GPT2Config", **_TEXT, **sizes, use_cache=False)


def llama() -> Any:
    """Makes a Llama of 12 layers, whose queries share keys."""
    layers = {"num_hidden_layers": 12, "num_key_value_heads": 1}
    return make("LlamaForCausalLM", "LlamaConfig", **_TEXT, **_SIZES, **layers, use_cache=False)


def t5() -> Any:
    """Makes a T5 in bfloat16, the last layers of whose blocks stay in float32, with one embedding for three uses."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 6, "num_heads": 2}
    model = make("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0).bfloat16()
    for name, part in model.named_modules():
        if name.endswith(".wo"):
            part.float()
    return model


def vit() -> Any:
    options = {**_SIZES, **_IMAGE, "num_hidden_layers": 12, "num_labels": 10}
    return make("ViTForImageClassification", "ViTConfig", **options)


def clip() -> Any:
    """Makes a CLIP, whose temperature has no dimension."""
    text = {**_SIZES, **_TEXT, "num_hidden_layers": 6, "max_position_embeddings": 12}
    vision = {**_SIZES, **_IMAGE, "num_hidden_layers": 6}
    return make("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=8)


def swin() -> Any:
    """Makes a Swin, which has tables of positions in buffers of integers."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 6], "num_heads": [2, 2]}
    return make("SwinForImageClassification", "SwinConfig", **sizes, window_size=4, num_labels=10)


def wav2vec2() -> Any:
    """Makes a wav2vec 2.0, whose convolution of positions is parametrized, with the feature extractor frozen."""
    convolutions = {
        "num_feat_extract_layers": 2,
        "conv_dim": (16, 16),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
    }
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    options = {**_TEXT, **_SIZES, **convolutions, **positions, "num_hidden_layers": 6}
    model = make("Wav2Vec2ForCTC", "Wav2Vec2Config", **options, mask_time_prob=0.0, layerdrop=0.0)
    model.freeze_feature_encoder()
    return model


# --- batches --------------------------------------------------------------------------------------------------


def draw_ids(random: Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 12), generator=random)


def draw_images(random: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=random), torch.randint(10, (4,), generator=random)


def text_loss(model: nn.Module, random: Generator) -> Tensor:
    ids = draw_ids(random)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def own_text_loss(model: nn.Module, random: Generator) -> Tensor:
    loss: Tensor = model(draw_ids(random))
    return loss


def image_loss(model: nn.Module, random: Generator) -> Tensor:
    images, labels = draw_images(random)
    return F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)


def labelled_image_loss(model: nn.Module, random: Generator) -> Tensor:
    images, labels = draw_images(random)
    output = model(images, labels=labels)
    return cast("Tensor", getattr(output, "loss", output))


def caption_loss(model: nn.Module, random: Generator) -> Tensor:
    images, _ = draw_images(random)
    ids = torch.randint(3, VOCABULARY, (4, 12), generator=random)
    ids[:, -1] = 2
    loss: Tensor = model(input_ids=ids, pixel_values=images, return_loss=True).loss
    return loss


def speech_loss(model: nn.Module, random: Generator) -> Tensor:
    waves, labels = (
        torch.randn(2, 1000, generator=random),
        torch.randint(1, VOCABULARY, (2, 5), generator=random),
    )
    loss: Tensor = model(waves, labels=labels).loss
    return loss


_hugging_face = partial(Architecture, needs_transformers=True)
ARCHITECTURES: dict[str, Architecture] = {
    "resnet50": Architecture(resnet50, image_loss, 320),
    "decoder": Architecture(Decoder, own_text_loss, 170),
    "experts": Architecture(Experts, own_text_loss, 330, has_unused=True),
    "gpt2": _hugging_face(partial(gpt2, 12), text_loss, 148),
    "llama": _hugging_face(llama, text_loss, 110),
    "t5": _hugging_face(t5, text_loss, 130),
    "vit-float16": _hugging_face(lambda: Half(vit()), labelled_image_loss, 200),
    "clip": _hugging_face(clip, caption_loss, 200),
    "swin": _hugging_face(swin, labelled_image_loss, 140),
    "wav2vec2": _hugging_face(wav2vec2, speech_loss, 100),
    "lora": _hugging_face(partial(adapted, is_quantised=False), text_loss, 220),
    "qlora": _hugging_face(partial(adapted, is_quantised=True), text_loss, 220),
}
