"""Decoders that attend over an encoder: Whisper, BART and its kin, Llama-3.2-Vision."""

from __future__ import annotations

from functools import partial

from kvfactory.huggingface.attention import read_heads
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Kept, collect, cross, full, gqa
from kvfactory.huggingface.layertypes import num_layers

_BART = (
    """bart mbart marian pegasus m2m_100 nllb-moe blenderbot blenderbot-small plbart mvp""".split()
)


def _encoder_decoder(
    config: Fields,
    decoder_context: str = "max_position_embeddings",
    encoder_context: str = "max_position_embeddings",
) -> Geometry:
    """Every decoder layer attends over the text so far and over the encoder's output."""
    layers, heads = num_layers(config, "decoder_layers"), config.integer("decoder_attention_heads")
    width = config.integer("d_model")
    if width % heads:
        config.clash(["d_model", "decoder_attention_heads"], "heads that divide the width")
    geometry = gqa(heads, heads, max(width // heads, 1))
    kept: list[Kept] = [(layer, "full", full(geometry)) for layer in range(layers)]
    over = cross(config.integer(encoder_context), geometry)
    kept += [(layer, "cross", over) for layer in range(layers)]
    return Geometry(layers, collect(layers, kept), config.tokens(decoder_context))


def _mllama(config: Fields) -> Geometry:
    """Llama-3.2-Vision: some layers attend over the image instead of the text."""
    layers, heads = num_layers(config), read_heads(config)
    chosen = {*(config.integers("cross_attention_layers") or ())}
    if not chosen or max(chosen) >= layers:
        config.wrong("cross_attention_layers", f"a list of layers below {layers}")
    geometry = gqa(heads.q, heads.kv, heads.dim)
    over = cross(_image_tokens(config.outer.part("vision_config")), geometry)
    kept: list[Kept] = [
        (layer, "cross", over) if layer in chosen else (layer, "full", full(geometry))
        for layer in range(layers)
    ]
    return Geometry(layers, collect(layers, kept), config.tokens("max_position_embeddings"))


def _image_tokens(vision: Fields) -> int:
    """Tokens of one image: its tiles, each of square patches and a class token."""
    tiles = vision.integer("max_num_tiles", default=4)
    side = vision.integer("image_size") // vision.integer("patch_size", default=14)
    return max(tiles * (side * side + 1), 1)


PLUGINS = (
    Family(
        "whisper",
        ("whisper",),
        partial(
            _encoder_decoder,
            decoder_context="max_target_positions",
            encoder_context="max_source_positions",
        ),
    ),
    Family("bart", tuple(_BART), _encoder_decoder),
    Family("mllama", ("mllama_text_model", "mllama"), _mllama),
)
