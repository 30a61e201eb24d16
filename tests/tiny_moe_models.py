"""A tiny random configuration of every mixture-of-experts model that the installed transformers has.

MODELS         class name -> TinyModel: model type, options, how to make it
moe_classes()  the language models with experts that transformers has, found in its sources
LEFT_OUT       those of them that MODELS does not have, with the reason
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "depth": 1,
    "num_heads": 4,
    "image_size": 64,
    "out_hidden_size": 128,
    "moe_layer_start_index": 0,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.03,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""What a configuration has of these is set to them, in the parts of a multimodal one too, before its own options."""


class TinyModel(NamedTuple):
    """model_type: transformers' name of the configuration. auto: the Auto class that makes the model.
    options: of the configuration, beside SIZES."""

    model_type: str
    auto: str
    options: dict[str, Any]

    def config(self) -> Any:
        return _tiny(self.model_type, self.options)

    def build(self, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
        """The model in eval mode, with the same weights at each call; `how` goes to from_config."""
        torch.manual_seed(0)
        return self.auto_class.from_config(self.config(), dtype=dtype, **how).eval()

    @property
    def auto_class(self) -> Any:
        import transformers

        return getattr(transformers, self.auto)


def _tiny(model_type: str, options: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    parts = {}
    for name in default.sub_configs:
        own = dict(options.get(name, {}))
        part = own.pop("model_type", getattr(getattr(default, name, None), "model_type", ""))
        if part:
            parts[name] = _tiny(part, own)
    sizes = {name: size for name, size in SIZES.items() if vars(default).get(name) is not None or "token_id" in name}
    return type(default)(**(sizes | options | parts))


_MLA = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_INDEXER = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 4}
_ONE_DENSE = {"mlp_layer_types": ["dense", "sparse"]}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_SHARED = {"shared_expert_intermediate_size": 128}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN4 = (
    _LINEAR_ATTENTION
    | _SHARED
    | {
        "hc_lowrank": 32,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    }
)
_OCR_TEXT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 1,
    "topk_group": 1,
}
_SAM = {"output_channels": 32, "mlp_dim": 128, "downsample_channels": [32, 128], "global_attn_indexes": [0]}
_INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "d_rel": 8,
    "rel_extent": 32,
    "unpadded_vocab_size": 128,
}
_INKLING_LOOP = _INKLING | {
    "num_hidden_layers": 3,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
    "loop_gate_rank": 8,
}
_INKLING_VISION = {"text_hidden_size": 128, "projection_hidden_dim": 128}
_MINIMAX_M3 = {
    "dense_intermediate_size": 256,
    "shared_intermediate_size": 128,
    "rotary_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
_DOTS3 = (
    _MLA
    | _INDEXER
    | _ONE_DENSE
    | {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {1: _MLA | {"head_dim": 32}},
        "shared_experts_intermediate_size": 128,
    }
)
# Gemma 4 does not scale its attention: tiny ones are so sensitive that near ties of experts would hide all else.
_GEMMA_MOE = {"num_experts": 8, "top_k_experts": 8, "moe_intermediate_size": 128}


def _causal(model_type: str, **options: Any) -> TinyModel:
    return TinyModel(model_type, "AutoModelForCausalLM", options)


def _multimodal(model_type: str, **options: Any) -> TinyModel:
    return TinyModel(model_type, "AutoModelForImageTextToText", options)


_ALL = {
    "AfmoeForCausalLM": _causal("afmoe", num_dense_layers=1),
    "AriaTextForCausalLM": _causal("aria_text"),
    "AXK1ForCausalLM": _causal("axk1", **_MLA, **_GROUPS, **_ONE_DENSE),
    "AXK2ForCausalLM": _causal("axk2", **_MLA, **_INDEXER, **_ONE_DENSE),
    "BailingHybridForCausalLM": _causal(
        "bailing_hybrid",
        **_MLA,
        **_ONE_DENSE,
        layer_types=["linear_attention", "full_attention"],
        num_experts_per_token=2,
        num_expert_group=2,
        topk_group=1,
        linear_num_heads=4,
        linear_head_dim=32,
    ),
    "BeamForCausalLM": _causal(
        "beam", **_GROUPS, mlp_layer_types=["sparse", "sparse"], layer_types=["sliding_attention", "full_attention"]
    ),
    "Cohere2MoeForCausalLM": _causal("cohere2_moe"),
    "DbrxForCausalLM": _causal(
        "dbrx",
        d_model=128,
        n_heads=4,
        n_layers=2,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"hidden_size": 128, "ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2},
    ),
    "DeepseekV2ForCausalLM": _causal("deepseek_v2", **_MLA, first_k_dense_replace=1, num_experts_per_tok=2),
    "DeepseekV3ForCausalLM": _causal("deepseek_v3", **_MLA, **_GROUPS, first_k_dense_replace=1),
    "DeepseekV32ForCausalLM": _causal("deepseek_v32", **_MLA, **_GROUPS, **_INDEXER, first_k_dense_replace=1),
    "DeepseekV4ForCausalLM": _causal("deepseek_v4"),
    "DogeForCausalLM": _causal("doge", is_moe=True, num_experts=16),
    "Dots1ForCausalLM": _causal(
        "dots1", n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1
    ),
    "Ernie4_5_MoeForCausalLM": _causal("ernie4_5_moe", moe_k=2),
    "ExaoneMoeForCausalLM": _causal("exaone_moe", **_ONE_DENSE),
    "FlexOlmoForCausalLM": _causal("flex_olmo"),
    "FlintForCausalLM": _causal("flint", **_SHARED, mlp_only_layers=[0]),
    "Gemma4ForCausalLM": _causal(
        "gemma4_text",
        **_GEMMA_MOE,
        enable_moe_block=True,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=32,
    ),
    "Glm4MoeForCausalLM": _causal("glm4_moe", first_k_dense_replace=1),
    "Glm4MoeLiteForCausalLM": _causal("glm4_moe_lite", **_MLA, **_ONE_DENSE),
    "GlmMoeDsaForCausalLM": _causal("glm_moe_dsa", **_MLA, **_INDEXER, **_ONE_DENSE),
    "GptOssForCausalLM": _causal("gpt_oss", sliding_window=8),
    "GraniteMoeForCausalLM": _causal("granitemoe"),
    "GraniteMoeSWAForCausalLM": _causal("granitemoe_swa"),
    "GraniteMoeHybridForCausalLM": _causal(
        "granitemoehybrid",
        layer_types=["linear_attention", "full_attention"],
        shared_intermediate_size=128,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
    ),
    "GraniteMoeSharedForCausalLM": _causal("granitemoeshared", shared_intermediate_size=128),
    "HunYuanMoEV1ForCausalLM": _causal("hunyuan_v1_moe", moe_topk=2, head_dim=32),
    "HYV3ForCausalLM": _causal("hy_v3"),
    "HYV4ForCausalLM": _causal("hy_v4", **_MLA, **_INDEXER, **_ONE_DENSE),
    "Inkling2ForCausalLM": _causal("inkling2_text", **_INKLING),
    "Inkling2LoopForCausalLM": _causal("inkling2_loop_text", **_INKLING_LOOP),
    "InklingForCausalLM": _causal("inkling_text", **_INKLING),
    "JambaForCausalLM": _causal(
        "jamba", num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16, mamba_dt_rank=8
    ),
    "JetMoeForCausalLM": _causal("jetmoe", kv_channels=32),
    "KimiLinearForCausalLM": _causal(
        "kimi_linear",
        **_MLA,
        **_ONE_DENSE,
        layer_types=["linear_attention", "full_attention"],
        num_experts_per_token=2,
        linear_num_heads=4,
        linear_head_dim=32,
    ),
    "Kolibri1ForCausalLM": _causal("kolibri1"),
    "LagunaForCausalLM": _causal("laguna"),
    "Lfm2MoeForCausalLM": _causal("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1),
    "Llama4ForCausalLM": _causal("llama4_text", intermediate_size_mlp=256),
    "LaraMiniForCausalLM": _causal("lara_mini", **_LINEAR_ATTENTION | _SHARED),
    "LongcatFlashForCausalLM": _causal(
        "longcat_flash",
        **_MLA,
        num_layers=1,
        ffn_hidden_size=256,
        expert_ffn_hidden_size=128,
        moe_topk=2,
        zero_expert_num=2,
    ),
    "MellumForCausalLM": _causal("mellum"),
    "MiMoV2FlashForCausalLM": _causal("mimo_v2_flash"),
    "MiniMaxForCausalLM": _causal("minimax"),
    "MiniMaxM2ForCausalLM": _causal("minimax_m2"),
    "MiniMaxM3VLForCausalLM": _causal("minimax_m3_vl_text", **_MINIMAX_M3),
    "Mistral4ForCausalLM": TinyModel("mistral4", "AutoModelForImageTextToText", _MLA | {"head_dim": 32}),
    "MixtralForCausalLM": _causal("mixtral"),
    "NemotronHForCausalLM": _causal(
        "nemotron_h", mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=2, chunk_size=16
    ),
    "OlmoeForCausalLM": _causal("olmoe"),
    "PhimoeForCausalLM": _causal("phimoe"),
    "Qwen2MoeForCausalLM": _causal("qwen2_moe", **_SHARED),
    "Qwen3_5MoeForCausalLM": _causal("qwen3_5_moe_text", **_LINEAR_ATTENTION, **_SHARED),
    "Qwen3MoeForCausalLM": _causal("qwen3_moe"),
    "Qwen3NextForCausalLM": _causal("qwen3_next", **_LINEAR_ATTENTION, **_SHARED),
    "Qwen4ExpForCausalLM": _causal("qwen4_exp_text", **_QWEN4),
    "SolarOpenForCausalLM": _causal("solar_open"),
    "ZayaForCausalLM": _causal("zaya", num_experts_per_tok=1),
    "Dots3NoteForCausalLM": _causal("dots3_note_text", **_DOTS3),
    "AriaForConditionalGeneration": _multimodal("aria"),
    "DeepseekOcr2ForConditionalGeneration": _multimodal(
        "deepseek_ocr2", text_config=_OCR_TEXT, vision_config={"sam_config": _SAM, "encoder_config": {}}
    ),
    "DiffusionGemmaForBlockDiffusion": _multimodal(
        "diffusion_gemma", text_config=_GEMMA_MOE, vision_config={"model_type": "gemma4_vision"}, canvas_length=8
    ),
    "Dots3NoteForConditionalGeneration": _multimodal(
        "dots3_note",
        text_config=_DOTS3,
        vision_config={"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 128, "adapter_out_dim": 128},
        audio_config={"adapter_input_size": 128, "adapter_out_dim": 128, "downsample_hidden_size": 32},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": _multimodal(
        "ernie4_5_vl_moe",
        text_config={
            "moe_intermediate_size": [128, 128],
            "moe_k": 2,
            "rope_parameters": _ROPE | {"mrope_section": [6, 6, 4]},
        }
        | _ONE_DENSE,
    ),
    "Gemma4ForConditionalGeneration": _multimodal(
        "gemma4",
        text_config=_GEMMA_MOE
        | {"enable_moe_block": True, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32},
    ),
    "Glm4vMoeForConditionalGeneration": _multimodal(
        "glm4v_moe",
        text_config={
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            "first_k_dense_replace": 1,
        },
    ),
    "Glm5NextForConditionalGeneration": _multimodal(
        "glm5_next",
        text_config=_MLA
        | _INDEXER
        | _ONE_DENSE
        | {
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "qk_nope_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "index_kpool": 4,
        },
        vision_config={"projection_intermediate_size": 128},
    ),
    "HYV4VLForConditionalGeneration": _multimodal(
        "hy_v4_vl",
        text_config=_MLA
        | _INDEXER
        | _ONE_DENSE
        | {"index_n_heads": 16, "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},  # four heads have near ties
        vision_config={},
    ),
    "Inkling2ForConditionalGeneration": _multimodal("inkling2", text_config=_INKLING, vision_config=_INKLING_VISION),
    "Inkling2LoopForConditionalGeneration": _multimodal(
        "inkling2_loop", text_config=_INKLING_LOOP, vision_config=_INKLING_VISION
    ),
    "Llama4ForConditionalGeneration": _multimodal(
        "llama4",
        text_config={"intermediate_size_mlp": 256},
        vision_config={"vision_output_dim": 128, "projector_input_dim": 128, "projector_output_dim": 128},
    ),
    "MiniMaxM3SparseForConditionalGeneration": _multimodal(
        "minimax_m3_vl", text_config=_MINIMAX_M3, projector_hidden_size=128
    ),
    "MistralLarge4ForConditionalGeneration": _multimodal(
        "mistral_large4", text_config=_MLA | _INDEXER | _ONE_DENSE | {"first_k_dense_replace": 1}
    ),
    "MuseSparkForConditionalGeneration": _multimodal(
        "muse_spark",
        text_config={"moe_hidden_size": 128},
        vision_config={},
        audio_config={"hidden_sizes": (32, 32), "depths": (1, 1), "patch_sizes": (4, 4)},
        projector_hidden_size=128,
    ),
    "Qwen3_5MoeForConditionalGeneration": _multimodal("qwen3_5_moe", text_config=_LINEAR_ATTENTION | _SHARED),
    "Qwen3OmniMoeThinkerForConditionalGeneration": _multimodal(
        "qwen3_omni_moe_thinker",
        vision_start_token_id=125,
        audio_config={
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 128,
            "output_dim": 128,
            "downsample_hidden_size": 32,
        },
        vision_config={"deepstack_visual_indexes": [0]},
    ),
    "Qwen3VLMoeForConditionalGeneration": _multimodal("qwen3_vl_moe", vision_config={"deepstack_visual_indexes": [0]}),
    "Qwen4ExpForConditionalGeneration": _multimodal("qwen4_exp", text_config=_QWEN4),
    "Step3p7ForConditionalGeneration": _multimodal(
        "step3p7",
        text_config=_ONE_DENSE | {"share_expert_dim": 128, "sliding_window": 8, "num_sliding_attention_heads": 4},
    ),
    "UnlimitedOcrForConditionalGeneration": _multimodal(
        "unlimited_ocr", text_config=_OCR_TEXT, vision_config={"sam_config": _SAM, "encoder_config": {}}
    ),
}


def _available() -> dict[str, TinyModel]:
    from transformers import CONFIG_MAPPING

    return {name: model for name, model in _ALL.items() if model.model_type in CONFIG_MAPPING}


MODELS = _available()

LEFT_OUT = {
    "InklingForConditionalGeneration": "its images need scipy; its language model is InklingForCausalLM",
    "NllbMoeForConditionalGeneration": "an encoder-decoder, no causal language model",
    "Qwen3OmniMoeForConditionalGeneration": "speech; its language model is Qwen3OmniMoeThinkerForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration": "an encoder-decoder, no causal language model",
    "openai_privacy_filter": "no language model",
    "vitpose_backbone": "no language model",
}

_LANGUAGE_MODELS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_EXPERTS_MODULE = re.compile(
    r"^@use_experts_implementation|^class \w*(?:Experts|MoE|Moe|SparseMLP)\w*\(nn\.", re.MULTILINE
)
_EXPERTS_OPTION = re.compile(r"^ +(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts): ", re.MULTILINE)


def moe_classes() -> set[str]:
    """The language models of every package of transformers with experts, and packages with experts but without one.

    A package has experts if a module of it goes through transformers' experts interface or is named as one, or if its
    configuration counts experts. Models that only hold one of another package are not listed: that one is.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    found = set()
    names = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values() for task in _LANGUAGE_MODELS]
    language_models = {name for values in names for name in values}
    for package in sorted((Path(transformers.__file__).parent / "models").iterdir()):
        modeling, configuration = (package / f"{kind}_{package.name}.py" for kind in ("modeling", "configuration"))
        if not modeling.is_file():
            continue
        text = modeling.read_text()
        options = configuration.read_text() if configuration.is_file() else ""
        if _EXPERTS_MODULE.search(text) or _EXPERTS_OPTION.search(options):
            classes = set(re.findall(r"^class (\w+)\(", text, re.MULTILINE)) & language_models
            found |= classes or {package.name}
    return found
