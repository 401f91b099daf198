"""Small random models of transformers, for the tests and for gpu_models.py."""

import torch
import transformers


def config(
    kind, hidden, heads, heads_kv, layers, vocab=199, window=None, positions=4096, image=32, patch=8, softcap=None
):
    """The config of a model. All dropouts are 0. softcap is for gemma2 alone.

    The head dim is hidden / heads, but of gemma2 and gemma3 256, of phi3 96, of deepseek_v3 192 and 128, of siglip 72.
    """
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
    }
    text = {"vocab_size": vocab, "max_position_embeddings": positions}
    dropouts = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    if kind == "llama":
        return transformers.LlamaConfig(**sizes, **text, num_key_value_heads=heads_kv)
    if kind == "mistral":
        return transformers.MistralConfig(**sizes, **text, num_key_value_heads=heads_kv, sliding_window=window)
    if kind == "llama4":
        # A layer with chunks and one without; no mixture of experts.
        return transformers.Llama4TextConfig(
            **sizes,
            **text,
            num_key_value_heads=heads_kv,
            head_dim=hidden // heads,
            intermediate_size_mlp=2 * hidden,
            attention_chunk_size=window,
            no_rope_layers=[1, 0] * (layers // 2),
            moe_layers=[],
            pad_token_id=0,
        )
    if kind in ("gemma2", "gemma3"):
        more = {"num_key_value_heads": heads_kv, "sliding_window": window}
        more |= {"head_dim": 256, "query_pre_attn_scalar": 256}
        if kind == "gemma3":
            return transformers.Gemma3TextConfig(**sizes, **text, **more)
        # SDPA has no softcap, and leaves it out without a word. So models that are compared with it have none.
        more |= {"attn_logit_softcapping": softcap}
        return transformers.Gemma2Config(**sizes, **text, **more)
    if kind == "gpt_oss":
        # A layer with a window and one without. All experts take part: a choice would turn rounding into other experts.
        return transformers.GptOssConfig(
            **sizes,
            **text,
            num_key_value_heads=heads_kv,
            head_dim=hidden // heads,
            sliding_window=window,
            num_local_experts=2,
            num_experts_per_tok=2,
        )
    if kind == "phi3":
        # Its head dim is hidden_size / num_attention_heads.
        sizes["hidden_size"] = 96 * heads
        return transformers.Phi3Config(
            **sizes, **text, num_key_value_heads=heads_kv, sliding_window=window, pad_token_id=0
        )
    if kind == "deepseek_v3":
        # Head dims 192 and 128, and no mixture of experts.
        return transformers.DeepseekV3Config(
            **sizes,
            **text,
            num_key_value_heads=heads,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=layers,
        )
    if kind == "siglip":
        vision = {**sizes, "hidden_size": 72 * heads, "image_size": image, "patch_size": patch}
        return transformers.SiglipConfig(vision_config=vision, num_labels=1000)
    if kind == "bert":
        return transformers.BertConfig(**sizes, **text, **dropouts)
    return transformers.ViTConfig(**sizes, **dropouts, image_size=image, patch_size=patch, num_labels=1000)


CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "llama4": transformers.Llama4ForCausalLM,
    "bert": transformers.BertForMaskedLM,
    "vit": transformers.ViTForImageClassification,
    "gemma2": transformers.Gemma2ForCausalLM,
    "gemma3": transformers.Gemma3ForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "deepseek_v3": transformers.DeepseekV3ForCausalLM,
    "siglip": transformers.SiglipForImageClassification,
    "gpt_oss": transformers.GptOssForCausalLM,
}


def model(kind, settings, seed=0):
    """A model with random weights. Larger than usual ones, so that attention is not uniform."""
    torch.manual_seed(seed)
    made = CLASSES[kind](settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Those of SigLIP are large at the beginning: with four times as large ones attention has one key a query.
            is_projection = any(part in name for part in ("q_proj", "k_proj", "query", "key")) and parameter.ndim == 2
            if is_projection and kind != "siglip":
                parameter.mul_(4)
            if name.endswith("sinks"):
                # Logits in the range of the scores. They are zeros where a model begins.
                parameter.normal_()
    return made.eval()


def inputs(kind, settings, batch, seqlen, device="cpu", seed=1):
    """What a model is called with."""
    generator = torch.Generator().manual_seed(seed)
    if kind in ("vit", "siglip"):
        size = getattr(settings, "vision_config", settings).image_size
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator).to(device)}
    return {"input_ids": torch.randint(0, settings.vocab_size, (batch, seqlen), generator=generator).to(device)}


def four_dimensions(batch, heads, seqlen, floats, device="cpu", seed=2):
    """A 4-d mask: booleans that all heads share, or floats for each head, which are added to the scores or hide (-inf).

    Every query keeps itself, so that no row is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch, 1, seqlen, seqlen, generator=generator) > 0.5
    kept |= torch.eye(seqlen, dtype=torch.bool)
    if not floats:
        return kept.to(device)
    bias = torch.randn(batch, heads, seqlen, seqlen, generator=generator)
    return bias.masked_fill(~kept, -torch.inf).to(device)


def padding(batch, seqlen, side, device="cpu"):
    """A padding mask: the first sequence is whole, the others are shorter and shorter."""
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    for i in range(1, batch):
        cut = i * seqlen // (batch + 1)
        mask[i, slice(0, cut) if side == "left" else slice(seqlen - cut, seqlen)] = 0
    return mask.to(device)
