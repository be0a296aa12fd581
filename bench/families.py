"""Time steps and drafts of synthetic models of about 100 million parameters, one of each family's shape, on a CPU.

    python bench/families.py [FAMILY ...] [--repeats 5]

Weights are random, in float32: MLX's own experts take nothing else on a CPU. Times are CPU seconds of this process,
interleaved, and ratios are medians over the repeats. mlx-lm's is its own forward over the same weights and an argmax;
where it has none, it is a step of ours in MLX's own operations.
The text is longer than the windows and budgets of these shapes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache

from headstart import models
from headstart.engine.draft import head_drafts
from headstart.engine.step import prefill_prompts, step
from headstart.models import Model

PROMPT = [(7 * i) % 997 + 1 for i in range(96)]
STEPS = 8
BASE: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
SELECTING = LATENT | {
    "n_routed_experts": 24,
    "n_shared_experts": 1,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 48,
}
STEP3P7 = BASE | {
    "model_type": "step3p5",
    "num_attention_groups": 2,
    "head_dim": 64,
    "layer_types": ["full_attention", *["sliding_attention"] * 8],
    "sliding_window": 48,
    "attention_other_setting": {"num_attention_heads": 12, "num_attention_groups": 2, "head_dim": 64},
    "rope_theta": [1e4] * 9,
    "partial_rotary_factors": [0.5, *[1.0] * 8],
    "moe_num_experts": 24,
    "moe_top_k": 4,
    "moe_intermediate_size": 256,
    "share_expert_dim": 256,
    "moe_layers_enum": "1,2,3,4,5",
    "num_nextn_predict_layers": 3,
}
BAILING = LATENT | {
    "q_lora_rank": None,
    "head_dim": 64,
    "num_experts": 24,
    "num_shared_experts": 1,
    "layer_group_size": 3,
    "short_conv_kernel_size": 4,
    "kda_lower_bound": -5.0,
}
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "sliding_window": 48,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0],
    "compress_rate_hca": 16,
    "num_hash_layers": 1,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 12,
    "n_routed_experts": 24,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
GLM5_NEXT = SELECTING | {
    "num_hidden_layers": 8,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 0,
    "linear_attn_config": {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    "mlp_layer_types": ["dense", *["sparse"] * 7],
    "index_kpool": 4,
    "n_routed_experts": 16,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}
SHAPES: dict[str, dict[str, Any]] = {
    "step3p7": {"model_type": "step3p7", "text_config": STEP3P7},
    "bailing_hybrid": BASE | BAILING | {"model_type": "bailing_hybrid"},
    "deepseek_v32": BASE | SELECTING | {"model_type": "deepseek_v32"},
    "glm_moe_dsa": BASE | SELECTING | {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1},
    "deepseek_v4": BASE | DEEPSEEK_V4,
    "glm5_next": BASE | GLM5_NEXT | {"model_type": "glm5_next"},
}
WITHOUT_MLX_LM = ("deepseek_v4", "glm5_next")


def random_model(config: dict[str, Any]) -> Model:
    """Return a model with random weights, matrices scaled so that hidden states keep their size."""
    model = models.build(config)

    def drawn(name: str, array: mx.array) -> mx.array:
        if name.endswith("tid2eid"):
            return mx.random.randint(0, config["n_routed_experts"], array.shape)
        if array.ndim < 2:
            return array
        return mx.random.normal(array.shape) / array.shape[-1] ** 0.5

    model.weights.update(tree_map_with_path(drawn, model.weights.parameters()))
    mx.eval(model.weights.parameters())
    model.backend.prepare(model.weights, model.dtype, model.layers)
    return model


def steps_of(model: Model, k: int) -> Callable[[], None]:
    batch = prefill_prompts(model, [PROMPT], k)

    def run() -> None:
        for _ in range(STEPS):
            mx.eval(step(model, batch, k).verdict.tokens, *batch.arrays())

    return run


def drafts_of(model: Model, k: int) -> Callable[[], None]:
    """Chains of drafts after the same text: what a chain writes is overwritten by the next."""
    batch = prefill_prompts(model, [PROMPT], k)
    mx.eval(step(model, batch, k).verdict.tokens, *batch.arrays())

    def run() -> None:
        for _ in range(STEPS):
            mx.eval(head_drafts(model, batch, k).tokens)

    return run


def mlx_lm_of(model: Model) -> Callable[[], None]:
    cache = make_prompt_cache(model.lm)
    tokens = [mx.argmax(model.lm(mx.array([PROMPT]), cache=cache)[:, -1:], axis=-1)]

    def run() -> None:
        for _ in range(STEPS):
            tokens[0] = mx.argmax(model.lm(tokens[0], cache=cache), axis=-1)
            mx.eval(tokens[0])

    return run


def measured(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return CPU milliseconds of a step or chain, repeat by repeat; the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if repeat:
                times[name].append((time.process_time() - start) / STEPS * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print("| family | parameters | step, CPU ms | to mlx-lm's | 1 draft to a step | step with k = 1 to 0 | k = 3 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for family in arguments.families or SHAPES:
        model = random_model(SHAPES[family])
        parameters: Any = tree_flatten(model.weights.parameters())
        count = sum(array.size for _, array in parameters) / 1e6
        runs = {str(k): steps_of(model, k) for k in (0, 1, 3)}
        stock = replace(model, backend=model.backend.stock())
        theirs = steps_of(stock, 0) if family in WITHOUT_MLX_LM else mlx_lm_of(model)
        runs |= {"mlx-lm": theirs, "draft": drafts_of(model, 1)}
        times = measured(runs, arguments.repeats)

        def ratio(name: str, to: str, times: dict[str, list[float]] = times) -> str:
            return f"{statistics.median(a / b for a, b in zip(times[name], times[to], strict=True)):.2f}"

        ratios = [ratio(*pair) for pair in (("0", "mlx-lm"), ("draft", "0"), ("1", "0"), ("3", "0"))]
        plain = statistics.median(times["0"])
        print(f"| {family} | {count:.0f} M | {plain:.1f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
