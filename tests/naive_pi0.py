"""A slow reference π₀ in NumPy float64: one joint pass, a full attention matrix, Python loops.

It shares no code with `pirl.models`: an independent implementation of the architecture.
"""

import numpy as np

from pirl.models.config import GemmaConfig, Pi0Config

F64 = np.float64


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, p):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def siglip(p, image, config: Pi0Config):
    """One image [h, w, 3] in [-1, 1] to tokens."""
    patch = config.vision.patch_size
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    x = np.stack(
        [
            np.einsum(
                "hwc,hwcd->d", image[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch], p["embedding"]["kernel"]
            )
            for r in range(rows)
            for c in range(columns)
        ]
    )
    x = x + p["embedding"]["bias"] + p["pos_embedding"][0]
    blocks = p["Transformer"]["encoderblock"]
    for layer in range(config.vision.depth):
        w = take(blocks, layer)
        attention = w["MultiHeadDotProductAttention_0"]
        h = layer_norm(x, w["LayerNorm_0"])
        out = 0
        for head in range(config.vision.num_heads):
            q, k, v = (
                h @ attention[n]["kernel"][:, head] + attention[n]["bias"][head] for n in ("query", "key", "value")
            )
            out = out + softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v @ attention["out"]["kernel"][head]
        x = x + out + attention["out"]["bias"]
        h = layer_norm(x, w["LayerNorm_1"])
        x = x + dense(gelu(dense(h, w["MlpBlock_0"]["Dense_0"])), w["MlpBlock_0"]["Dense_1"])
    return dense(layer_norm(x, p["Transformer"]["encoder_norm"]), p["head"])


def take(tree, layer):
    return {k: take(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}


def to_float64(tree):
    return {k: to_float64(v) if isinstance(v, dict) else np.asarray(v, F64) for k, v in tree.items()}


def rms(x, p, cond):
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    if cond is None:
        return normed * (1 + p["scale"]), 1.0
    scale, shift, gate = np.split(dense(cond, p["Dense_0"]), 3, -1)
    return normed * (1 + scale) + shift, gate


def rope(x, position):
    """x [heads, head_dim] at one position."""
    half = x.shape[-1] // 2
    angle = position / 10_000 ** (np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def lora_weight(p, config: GemmaConfig):
    """The dense matrix of an attention projection with its adapter; the output projection sums over heads of b."""
    if config.attn_lora is None:
        return p["w"]
    return p["w"] + config.attn_lora.scaling * np.einsum("...ir,...ro->...io", p["lora_a"], p["lora_b"])


def feed_forward(p, h, config: GemmaConfig):
    def dot(x, name, i=None):
        part = (lambda w: w) if i is None else (lambda w: w[i])
        out = x @ part(p[name])
        if config.ffn_lora:
            out = out + x @ part(p[f"{name}_lora_a"]) @ part(p[f"{name}_lora_b"])
        return out

    return dot(gelu(dot(h, "gating_einsum", 0)) * dot(h, "gating_einsum", 1), "linear")


def velocity(params, config: Pi0Config, images, image_masks, state, tokens, token_mask, x_t, t):
    """dx/dt for ONE sample: images {slot: [h, w, 3]}, x_t [H, A], t scalar or [H]. Every camera is in the sequence."""
    p = to_float64(params)
    llm = p["PaliGemma"]["llm"]
    prefix, valid = [], []
    for name in config.cameras:
        x = siglip(p["PaliGemma"]["img"], np.asarray(images[name], F64), config)
        prefix.append(x)
        valid += [bool(image_masks[name])] * len(x)
    prefix.append(llm["embedder"]["input_embedding"][tokens] * np.sqrt(config.vlm.width))
    valid += [bool(m) for m in token_mask]
    prefix = np.concatenate(prefix)

    width = config.expert.width
    period = 4e-3 * (4.0 / 4e-3) ** np.linspace(0, 1, width // 2)
    angle = 2 * np.pi * np.broadcast_to(np.asarray(t, F64), len(x_t))[:, None] / period
    time = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    actions = dense(np.asarray(x_t, F64), p["action_in_proj"])
    if config.pi05:
        cond = silu(dense(silu(dense(time, p["time_mlp_in"])), p["time_mlp_out"]))
        suffix, blocks = actions, [1] * len(actions)
    else:
        cond = None
        actions = np.concatenate([actions, time], -1)
        actions = dense(silu(dense(actions, p["action_time_mlp_in"])), p["action_time_mlp_out"])
        suffix = np.concatenate([dense(np.asarray(state, F64), p["state_proj"])[None], actions])
        blocks = [1] + [2] * len(actions)

    # Tokens attend to their own and earlier blocks; both tokens must be valid.
    block = np.array([0] * len(prefix) + blocks)
    valid = np.array(valid + [True] * len(suffix))
    sees = (block[None, :] <= block[:, None]) & valid[None, :] & valid[:, None]
    position = np.cumsum(valid) - 1

    streams = [(prefix, config.vlm, "", None), (suffix, config.expert, "_1", cond)]
    for layer in range(config.vlm.depth):
        w = take(llm["layers"], layer)
        queries, keys, values, gates = [], [], [], []
        for x, gemma, sfx, c in streams:
            h, gate = rms(x, w[f"pre_attention_norm{sfx}"], c)
            gates.append(gate)
            queries.append(np.einsum("td,ndh->tnh", h, lora_weight(w["attn"][f"q_einsum{sfx}"], gemma)))
            k, v = np.einsum("td,ckdh->ctkh", h, lora_weight(w["attn"][f"kv_einsum{sfx}"], gemma))
            keys.append(k)
            values.append(v)
        q = np.stack([rope(x, at) for x, at in zip(np.concatenate(queries), position, strict=True)])
        k = np.stack([rope(x, at) for x, at in zip(np.concatenate(keys), position, strict=True)])
        v = np.concatenate(values)
        group = q.shape[1] // k.shape[1]
        attended = np.zeros_like(q)
        for head in range(q.shape[1]):
            logits = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1])
            attended[:, head] = softmax(np.where(sees, logits, -2.3819763e38)) @ v[:, head // group]
        start, new = 0, []
        for (x, gemma, sfx, c), gate in zip(streams, gates, strict=True):
            mine, start = attended[start : start + len(x)], start + len(x)
            out = w["attn"][f"attn_vec_einsum{sfx}"]
            x = x + gate * np.einsum("tnh,nhd->td", mine, out["w"])
            if gemma.attn_lora:
                low = np.einsum("tnh,nhr->tr", mine, out["lora_a"])
                x = x + gate * gemma.attn_lora.scaling * low @ out["lora_b"].sum(0)
            h, gate = rms(x, w[f"pre_ffw_norm{sfx}"], c)
            new.append((x + gate * feed_forward(w[f"mlp{sfx}"], h, gemma), gemma, sfx, c))
        streams = new
    out, _ = rms(streams[1][0], llm["final_norm_1"], cond)
    return dense(out[-len(x_t) :], p["action_out_proj"])
