"""SGLang plugin: an attention backend `hpc`, registered through SGLang's plugin and registration interfaces.

SGLang calls `register` in each of its processes, by the entry point `hpc` of the group `sglang.srt.plugins` that this
package declares; no file of SGLang is changed. Then

    sglang serve MODEL --attention-backend hpc --page-size 64

runs attention on this library for every decoder with grouped heads, beyond what SGLang's own backend `hpc_ops` admits:

    head_dim 8 to 256, v_head_dim of its own, 1 to 64 query heads a KV head     hpc_ops: 128, 4 or 8
    page sizes 1 to 256 that are powers of two                                  64
    sliding windows, with SGLang's separate pool for them or without            none
    logit soft cap (tanh), attention sinks, any softmax scale                   none, none, head_dim ** -0.5
    FP8 (e4m3) KV for every model: queries are quantised here                   HunYuan V3 only
    verification of a chain of draft tokens, up to 16 rows a request            no speculative decoding

Refused with a reason when the server starts or at the first use of a layer: MLA, encoder-decoder and bidirectional
attention, trees of draft tokens (top-k above 1, n-grams of more than one draft), the draft model itself (it gets
another backend: `--speculative-draft-attention-backend fa3`), models in float16, KV caches other than BF16 and e4m3.
The experts are another plugin, `hpc.integrations.sglang_moe`; `--moe-runner-backend hpc_ops` runs here without it.

What has run, on a CPU, where operators compute their reference: every mode of `forward` and the bookkeeping around CUDA
graphs behind stand-ins; and with the installed SGLang 0.5.17 and 0.5.23 its plugin loader and argument parser, and
several steps of two requests with its base class, layers, KV pools and request table (tests/sglang). On an H200 with
SGLang 0.5.17: these tests, its model runner, eager and in decode graphs, and servers with and without speculative
decoding; docs/sglang.md lists the models. What has not run: trained weights.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hpc.common.errors import fail

NAME = "hpc"
"""Value of `--attention-backend`."""


def register() -> None:
    """Make `--attention-backend hpc` known to SGLang in this process. May be called again.

    Raises:
        ImportError: SGLang is not installed.
    """
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    arguments = importlib.import_module("sglang.srt.server_args")
    if NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(NAME)(create)
    if NAME not in arguments.ATTENTION_BACKEND_CHOICES:
        arguments.add_attention_backend_choices([NAME])


def create(model_runner: Any) -> Any:
    """The backend of one model runner; what SGLang's registry calls.

    Args:
        model_runner: SGLang's `ModelRunner` with its model and memory pools made.

    Returns:
        An instance of SGLang's `AttentionBackend`.

    Raises:
        InvalidArgument: the model or the server's options are beyond the backend; the text says which and what to do.
    """
    if model_runner.use_mla_backend:
        fail(
            "integrations.sglang", "model", expected="grouped-query attention", got="latent attention (MLA)",
            remedy="Leave --attention-backend out for this model.",
        )  # fmt: skip
    if model_runner.model_config.is_encoder_decoder:
        fail(
            "integrations.sglang", "model", expected="a decoder", got="an encoder-decoder model",
            remedy="Leave --attention-backend out for this model.",
        )  # fmt: skip
    return backend_class()(model_runner)


@functools.cache
def backend_class() -> type:
    """The backend as a subclass of SGLang's `AttentionBackend`, made on first use so that SGLang is optional."""
    from hpc.integrations.sglang_backend import HpcAttention

    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    return type(
        "HpcAttentionBackend", (HpcAttention, base.AttentionBackend), {"__doc__": HpcAttention.__doc__}
    )
