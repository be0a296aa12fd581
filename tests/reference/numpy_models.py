"""Trunks and heads in float64 numpy, over a release's tensors: for tests, from the vendors' and vLLM's sources alone.

DeepSeek-V3 and GLM-4 MoE: transformers' `modeling_deepseek_v3.py`, `modeling_glm4_moe.py`, `MtpLayer`.
MiMo-7B: vLLM's `mimo.py` and `mimo_mtp.py`. No cache, no batch, no windows: every token is computed from the first.
"""

from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray
Tensors = dict[str, Array]


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: Array, theta: float, dims: int, *, interleaved: bool) -> Array:
    """[T, H, D] at positions 0 to T - 1; only the first `dims` of D turn."""
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = x.copy()
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(0, dims // 2), slice(dims // 2, dims))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


class Reference:
    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.config, self.tensors = config, tensors

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        c = self.config
        eps = eps or c.get("layernorm_epsilon") or c.get("layer_norm_epsilon") or c["rms_norm_eps"]
        return norm(x, self.tensors[f"{name}.weight"] + (self.config["model_type"] == "step3p5"), eps)

    def attend(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        """[T, H, D] each → [T, H·Dv]."""
        T, heads = q.shape[0], q.shape[1]
        k, v = (np.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(T, -1)

    def grouped(self, x: Array, name: str) -> Array:
        c, T = self.config, x.shape[0]
        D = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        q, k, v = (self.linear(x, f"{name}.{p}_proj").reshape(T, -1, D) for p in "qkv")
        if c.get("use_qk_norm"):
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        dims = int(D * c.get("partial_rotary_factor", 1.0))
        turned = c["model_type"] == "ernie4_5_moe"
        q, k = (rotate(a, c["rope_theta"], dims, interleaved=turned) for a in (q, k))
        return self.linear(self.attend(q, k, v, D**-0.5), f"{name}.o_proj")

    def latent(self, x: Array, name: str) -> Array:
        """Keys and values are expanded from the latents for every head, as in transformers."""
        c, T, heads = self.config, x.shape[0], self.config["num_attention_heads"]
        rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        eps = 1e-6 if c["model_type"] == "deepseek_v3" else None
        q = self.linear(
            self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", eps), f"{name}.q_b_proj"
        )
        scaled = c["model_type"] == "longcat_flash"  # transformers' `modeling_longcat_flash.py`
        q = q.reshape(T, heads, nope + rope) * ((c["hidden_size"] / c["q_lora_rank"]) ** 0.5 if scaled else 1)
        both = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latents, turned = both[:, : c["kv_lora_rank"]], both[:, None, c["kv_lora_rank"] :]
        latents = self.norm(latents, f"{name}.kv_a_layernorm", eps)
        latents = latents * ((c["hidden_size"] / c["kv_lora_rank"]) ** 0.5 if scaled else 1)
        expanded = self.linear(latents, f"{name}.kv_b_proj")
        expanded = expanded.reshape(T, heads, nope + value)
        q_turned, turned = (rotate(a, c["rope_theta"], rope, interleaved=True) for a in (q[..., nope:], turned))
        k = np.concatenate([expanded[..., :nope], np.repeat(turned, heads, axis=1)], axis=-1)
        q = np.concatenate([q[..., :nope], q_turned], axis=-1)
        return self.linear(self.attend(q, k, expanded[..., nope:], (nope + rope) ** -0.5), f"{name}.o_proj")

    def sliding(self, x: Array, name: str, *, window: int | None) -> Array:
        """MiMo-V2: keys wider than values, which are scaled; in layers with a window also a sink for each head."""
        c, T, swa = self.config, x.shape[0], "swa_" if window else ""
        D = c[f"{swa}head_dim"]
        q, k = (self.linear(x, f"{name}.{p}_proj").reshape(T, -1, D) for p in "qk")
        v = self.linear(x, f"{name}.v_proj").reshape(T, -1, c[f"{swa}v_head_dim"]) * c["attention_value_scale"]
        dims = int(D * c["partial_rotary_factor"])
        q, k = (rotate(a, c[f"{swa}rope_theta"], dims, interleaved=False) for a in (q, k))
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        distance = np.arange(T)[:, None] - np.arange(T)
        seen = (distance >= 0) & (distance < (window or T))
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * D**-0.5, -np.inf)
        if window:
            sinks = self.tensors[f"{name}.attention_sink_bias"][:, None, None]
            scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1)
        shares = softmax(scores)[..., :T]
        return self.linear(np.einsum("hqk,khd->qhd", shares, v).reshape(T, -1), f"{name}.o_proj")

    def windowed(self, x: Array, name: str, *, index: int) -> Array:
        """Step's and EXAONE's: norms of queries and keys, windows; Step's has a gate for each head."""
        c, T, step = self.config, x.shape[0], self.config["model_type"] == "step3p5"
        kinds = [*c["layer_types"][: c["num_hidden_layers"]], *c.get("mtp_layer_types", ["sliding_attention"] * 3)]
        sliding = kinds[index] == "sliding_attention"
        q, k, v = (self.linear(x, f"{name}.{p}_proj").reshape(T, -1, c["head_dim"]) for p in "qkv")
        q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if step or sliding:
            theta = c["rope_theta"][index] if step else c["rope_theta"]
            dims = int(c["head_dim"] * c["partial_rotary_factors"][index]) if step else c["head_dim"]
            q, k = (rotate(a, theta, dims, interleaved=False) for a in (q, k))
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        distance = np.arange(T)[:, None] - np.arange(T)
        seen = (distance >= 0) & (distance < (c["sliding_window"] if sliding else T))
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * c["head_dim"] ** -0.5, -np.inf)
        out = np.einsum("hqk,khd->qhd", softmax(scores), v)
        if step:
            out = out / (1 + np.exp(-self.linear(x, f"{name}.g_proj")))[..., None]
        return self.linear(out.reshape(T, -1), f"{name}.o_proj")

    def mlp(self, x: Array, name: str, limit: float = 0.0) -> Array:
        gate, up = silu(self.linear(x, f"{name}.gate_proj")), self.linear(x, f"{name}.up_proj")
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return self.linear(gate * up, f"{name}.down_proj")

    def step_mixture(self, x: Array, name: str, index: int) -> Array:
        """vLLM's `step3p5.py`: sigmoid scores, chosen with a bias; activations limited, the shared expert's too."""
        c, t = self.config, self.tensors
        out = self.mlp(x, f"{name}.share_expert", c["swiglu_limits_shared"][index])
        limit = c["swiglu_limits"][index] or np.inf
        for n, row in enumerate(x):
            scores = 1 / (1 + np.exp(-self.linear(row, f"{name}.moe.gate")))
            chosen = np.argsort(-(scores + t[f"{name}.moe.router_bias"]))[: c["moe_top_k"]]
            weights = scores[chosen] / scores[chosen].sum() * c["moe_router_scaling_factor"]
            for e, weight in zip(chosen, weights, strict=True):
                gate, up, down = (t[f"{name}.moe.{part}_proj.weight"][e] for part in ("gate", "up", "down"))
                hidden = np.minimum(silu(gate @ row), limit) * np.clip(up @ row, -limit, limit)
                out[n] += weight * (down @ hidden)
        return out

    def mixture(self, x: Array, name: str) -> Array:
        """Route each token by sigmoid scores, biased for the choice alone, and limited to the best groups."""
        c, exaone = self.config, self.config["model_type"] == "exaone_moe"
        experts, many = (c["num_experts"], 1) if exaone else (c["n_routed_experts"], c["n_shared_experts"])
        out = self.mlp(x, f"{name}.shared_experts") if many else np.zeros_like(x)
        for t, row in enumerate(x):
            scores = 1 / (1 + np.exp(-self.linear(row, f"{name}.gate")))
            choice = scores + self.tensors[f"{name}{'' if exaone else '.gate'}.e_score_correction_bias"]
            if c["n_group"] > 1:
                groups = choice.reshape(c["n_group"], -1)
                best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: c["topk_group"]]
                kept = np.repeat(np.isin(np.arange(c["n_group"]), best), experts // c["n_group"])
                choice = np.where(kept, choice, 0.0)
            chosen = np.argsort(-choice)[: c["num_experts_per_tok"]]
            weights = scores[chosen] / scores[chosen].sum() if c["norm_topk_prob"] else scores[chosen]
            for expert, weight in zip(chosen, weights * (c["routed_scaling_factor"] or 1), strict=True):
                out[t] += weight * self.mlp(row, f"{name}.experts.{expert}")
        return out

    def mamba(self, x: Array, name: str) -> Array:
        """transformers' `torch_forward` of Nemotron-H, one token after the other."""
        c, t, T = self.config, self.tensors, x.shape[0]
        heads, D, N, groups = (c[n] for n in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"))
        gate, mixed, dt = np.split(self.linear(x, f"{name}.in_proj"), [heads * D, 2 * heads * D + 2 * groups * N], 1)
        padded = np.concatenate([np.zeros((c["conv_kernel"] - 1, mixed.shape[1])), mixed])
        kernel = t[f"{name}.conv1d.weight"][:, 0]  # [C, K]
        mixed = np.stack([(padded[n : n + c["conv_kernel"]] * kernel.T).sum(axis=0) for n in range(T)])
        mixed = silu(mixed + t[f"{name}.conv1d.bias"])
        values, B, C = np.split(mixed, [heads * D, heads * D + groups * N], axis=1)
        values = values.reshape(T, heads, D)
        B, C = (np.repeat(a.reshape(T, groups, N), heads // groups, axis=1) for a in (B, C))
        dt = np.clip(np.log1p(np.exp(dt + t[f"{name}.dt_bias"])), *c["time_step_limit"])  # [T, heads]
        decay, state, out = np.exp(-np.exp(t[f"{name}.A_log"]) * dt), np.zeros((heads, D, N)), np.zeros_like(values)
        for n in range(T):
            state = decay[n][:, None, None] * state + (dt[n][:, None] * values[n])[..., None] * B[n][:, None]
            out[n] = (state * C[n][:, None]).sum(axis=-1) + t[f"{name}.D"][:, None] * values[n]
        gated = (out.reshape(T, -1) * silu(gate)).reshape(T, groups, -1)
        gated = gated / np.sqrt((gated**2).mean(axis=-1, keepdims=True) + c["layer_norm_epsilon"])
        return self.linear(gated.reshape(T, -1) * t[f"{name}.norm.weight"], f"{name}.out_proj")

    def relu2(self, x: Array, name: str) -> Array:
        return self.linear(np.maximum(self.linear(x, f"{name}.up_proj"), 0) ** 2, f"{name}.down_proj")

    def latent_mixture(self, x: Array, name: str) -> Array:
        """Nemotron 3's: experts work in a smaller space."""
        c, small, out = self.config, self.linear(x, f"{name}.fc1_latent_proj"), np.zeros((len(x), 32))
        for n, row in enumerate(x):
            scores = 1 / (1 + np.exp(-self.linear(row, f"{name}.gate")))
            choice = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
            chosen = np.argsort(-choice)[: c["num_experts_per_tok"]]
            for e, weight in zip(chosen, scores[chosen] / scores[chosen].sum(), strict=True):
                out[n] += weight * c["routed_scaling_factor"] * self.relu2(small[n], f"{name}.experts.{e}")
        return self.linear(out, f"{name}.fc2_latent_proj") + self.relu2(x, f"{name}.shared_experts")

    def block(self, x: Array, name: str, kind: str) -> Array:
        """A layer of Nemotron-H: attention has no positions."""
        normed, part = self.norm(x, f"{name}.norm"), f"{name}.mixer"
        if kind == "*":
            D = self.config["head_dim"]
            q, k, v = (self.linear(normed, f"{part}.{p}_proj").reshape(len(x), -1, D) for p in "qkv")
            return x + self.linear(self.attend(q, k, v, D**-0.5), f"{part}.o_proj")
        return x + {"M": self.mamba, "-": self.relu2, "E": self.latent_mixture}[kind](normed, part)

    def ernie_mixture(self, x: Array, name: str) -> Array:
        """transformers' `modeling_ernie4_5_moe.py`: softmax scores, a bias for the choice alone."""
        out = self.mlp(x, f"{name}.shared_experts")
        for t, row in enumerate(x):
            scores = softmax(self.linear(row, f"{name}.gate"))
            choice = scores + self.tensors[f"{name}.moe_statics.e_score_correction_bias"][0]
            chosen = np.argsort(-choice)[: self.config["moe_k"]]
            for e, weight in zip(chosen, scores[chosen] / scores[chosen].sum(), strict=True):
                out[t] += weight * self.mlp(row, f"{name}.experts.{e}")
        return out

    def longcat(self, x: Array, name: str) -> Array:
        """Two attentions and two MLPs; experts beside them, of which those past the last return their input."""
        c = self.config
        for i in range(2):
            x = x + self.latent(self.norm(x, f"{name}.input_layernorm.{i}"), f"{name}.self_attn.{i}")
            normed = self.norm(x, f"{name}.post_attention_layernorm.{i}")
            if i == 0:
                late = np.zeros_like(x)
                for t, row in enumerate(normed):
                    scores = softmax(self.linear(row, f"{name}.mlp.router.classifier"))
                    choice = scores + self.tensors[f"{name}.mlp.router.e_score_correction_bias"]
                    for e in np.argsort(-choice)[: c["moe_topk"]]:
                        made = self.mlp(row, f"{name}.mlp.experts.{e}") if e < c["n_routed_experts"] else row
                        late[t] += scores[e] * c["routed_scaling_factor"] * made
            x = x + self.mlp(normed, f"{name}.mlps.{i}")
        return x + late

    def layer(self, x: Array, name: str) -> Array:
        if f"{name}.mlps.0.up_proj.weight" in self.tensors:
            return self.longcat(x, name)
        normed = self.norm(x, f"{name}.input_layernorm")
        attention = self.latent if "kv_lora_rank" in self.config else self.grouped
        second = "post_attention_layernorm"
        if self.config["model_type"] == "mimo_v2_flash":
            head = ".mtp." in name
            windowed = head or self.config["hybrid_layer_pattern"][int(name.rpartition(".")[2])]
            attention = partial(self.sliding, window=self.config["sliding_window_size"] if windowed else None)
            second = "pre_mlp_layernorm" if head else second
        windowed, index = self.config["model_type"] in ("step3p5", "exaone_moe"), int(name.rpartition(".")[2])
        if windowed:
            index += self.config["num_hidden_layers"] if name.startswith("mtp.") else 0
            attention = partial(self.windowed, index=index)
        x = x + attention(normed, f"{name}.self_attn")
        normed = self.norm(x, f"{name}.{second}")
        if f"{name}.mlp.moe_statics.e_score_correction_bias" in self.tensors:
            return x + self.ernie_mixture(normed, f"{name}.mlp")
        if f"{name}.moe.gate.weight" in self.tensors:
            return x + self.step_mixture(normed, name, index)
        if self.config["model_type"] == "step3p5":
            return x + self.mlp(normed, f"{name}.mlp", self.config["swiglu_limits_shared"][index])
        experts = f"{name}.mlp.gate.weight" in self.tensors
        return x + (self.mixture if experts else self.mlp)(normed, f"{name}.mlp")

    def trunk(self, tokens: list[int]) -> Array:
        """[T, H] before the final norm."""
        if self.config["model_type"] == "nemotron_h":
            x = self.tensors["backbone.embeddings.weight"][tokens]
            for n, kind in enumerate(self.config["hybrid_override_pattern"]):
                x = self.block(x, f"backbone.layers.{n}", kind)
            return x
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for n in range(self.config["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{n}")
        return x

    def logits(self, tokens: list[int]) -> Array:
        return self.linear(self.norm(self.trunk(tokens), self.final_norm), "lm_head")

    @property
    def final_norm(self) -> str:
        return "backbone.norm_f" if self.config["model_type"] == "nemotron_h" else "model.norm"

    def fed(self, tokens: list[int]) -> Array:
        """What the head is given of the trunk: MiMo's before the final norm, the others' after it."""
        hidden = self.trunk(tokens)
        before = self.config["model_type"].startswith(("mimo", "step"))
        return hidden if before else self.norm(hidden, self.final_norm)

    def head(self, hidden: Array, tokens: list[int], module: int = 0) -> tuple[Array, Array]:
        """Hidden states [T, H] and a token for each → a module's hidden states [T, H] and logits [T, V]."""
        if self.config["model_type"] == "mimo":
            name = "model.mtp_layers.0"
            embedding = self.tensors["model.embed_tokens.weight"][tokens].copy()
            embedding[0] = 0
            parts = [self.norm(hidden, f"{name}.hidden_layernorm"), self.norm(embedding, f"{name}.token_layernorm")]
            x = self.layer(self.linear(np.concatenate(parts, axis=-1), f"{name}.input_proj"), name)
            x = self.norm(x, f"{name}.final_layernorm")
            return x, self.linear(x, "lm_head")
        if self.config["model_type"] == "mimo_v2_flash":  # SGLang's `mimo_v2_nextn.py`: chained before the norm
            name = f"model.mtp.layers.{module}"
            embedding = self.tensors["model.embed_tokens.weight"][tokens]
            parts = [self.norm(embedding, f"{name}.enorm"), self.norm(hidden, f"{name}.hnorm")]
            x = self.layer(self.linear(np.concatenate(parts, axis=-1), f"{name}.eh_proj"), name)
            return x, self.linear(self.norm(x, f"{name}.final_layernorm"), "lm_head")
        if self.config["model_type"] == "exaone_moe":  # vLLM's `exaone_moe_mtp.py`
            embedding = self.norm(self.tensors["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding")
            both = np.concatenate([embedding, self.norm(hidden, "mtp.pre_fc_norm_hidden")], axis=-1)
            x = self.norm(self.layer(self.linear(both, "mtp.fc"), "mtp.layers.0"), "mtp.norm")
            return x, self.linear(x, "lm_head")
        if self.config["model_type"] == "longcat_flash":  # vLLM's `longcat_flash_mtp.py`
            name = "model.mtp.layers.0"
            embedding = self.norm(self.tensors["model.mtp.embed_tokens.weight"][tokens], f"{name}.enorm.m")
            both = np.concatenate([embedding, self.norm(hidden, f"{name}.hnorm.m")], axis=-1)
            x = self.linear(both, f"{name}.eh_proj")
            x = x + self.latent(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.transformer_layer.mlp")
            x = self.norm(x, "model.mtp.norm")
            return x, self.linear(x, "lm_head")
        if self.config["model_type"] == "ernie4_5_moe":  # FastDeploy's `ernie4_5_mtp.py`: the trunk's norm at the end
            embedding = self.norm(self.tensors["model.embed_tokens.weight"][tokens], "model.mtp_emb_norm.0")
            both = np.concatenate([embedding, self.norm(hidden, "model.mtp_hidden_norm.0")], axis=-1)
            x = self.layer(self.linear(both, "model.mtp_linear_proj.0"), "model.mtp_block.0")
            x = self.norm(x, "model.norm")
            return x, self.linear(x, "lm_head")
        if self.config["model_type"] == "nemotron_h":  # vLLM's `nemotron_h_mtp.py`
            embedding = self.norm(self.tensors["backbone.embeddings.weight"][tokens], "mtp.layers.0.enorm")
            both = np.concatenate([embedding, self.norm(hidden, "mtp.layers.0.hnorm")], axis=-1)
            x = self.block(self.linear(both, "mtp.layers.0.eh_proj"), "mtp.layers.0", "*")
            x = self.norm(self.block(x, "mtp.layers.1", "E"), "mtp.layers.1.final_layernorm")
            return x, self.linear(x, "lm_head")
        name = f"model.layers.{self.config['num_hidden_layers'] + module}"
        if self.config["model_type"] == "step3p5":  # vLLM's `step3p5_mtp.py`: chained before the norm
            embedding = self.tensors["model.embed_tokens.weight"][tokens]
            parts = [self.norm(embedding, f"{name}.enorm"), self.norm(hidden, f"{name}.hnorm")]
            x = self.layer(self.linear(np.concatenate(parts, axis=-1), f"{name}.eh_proj"), name)
            head = f"{name}.transformer.shared_head"
            head = head if f"{head}.norm.weight" in self.tensors else f"{name}.shared_head"
            return x, self.linear(self.norm(x, f"{head}.norm"), f"{head}.output")
        embedding = self.tensors[f"{name}.embed_tokens.weight"][tokens]
        parts = [self.norm(embedding, f"{name}.enorm"), self.norm(hidden, f"{name}.hnorm")]
        x = self.layer(self.linear(np.concatenate(parts, axis=-1), f"{name}.eh_proj"), name)
        x = self.norm(x, f"{name}.shared_head.norm")
        return x, self.linear(x, f"{name}.shared_head.head")

    def chain(self, tokens: list[int], k: int) -> list[int]:
        """k drafts after `tokens`. Module j runs over all positions with the token that is j further on, as in
        SGLang's `multi_layer_eagle_worker_v2.py`; then the last pairs its last hidden state with the draft before."""
        modules = {"mimo_v2_flash": 3, "step3p5": 3}.get(self.config["model_type"], 1)
        hidden, following, drafts = self.fed(tokens[:-1]), tokens[1:], list[int]()
        for module in range(min(k, modules)):
            outputs, logits = self.head(hidden, following, module)
            drafts.append(int(logits[-1].argmax()))
            if module < modules - 1:
                following = [*following[1:], drafts[-1]]
                hidden = outputs if self.config["model_type"] == "step3p5" else hidden
        for _ in range(k - modules):
            hidden, following = np.concatenate([hidden, outputs[-1:]]), [*following, drafts[-1]]
            outputs, logits = self.head(hidden, following, modules - 1)
            drafts.append(int(logits[-1].argmax()))
        return drafts
