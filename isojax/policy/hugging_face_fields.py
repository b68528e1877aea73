"""Fields of a Hugging Face config.json: which are read, which are harmless, which must have one value."""

from typing import Any

# Read by `hugging_face.from_hugging_face`.
READ = frozenset(
    (
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "tie_word_embeddings"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "isojax"),
    )
)
# Names, caches, training-time and bookkeeping fields: no bit of a forward depends on them.
HARMLESS = frozenset(
    (
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict"),
        *("id2label", "label2id", "is_llama_config", "transformers.js_config", "max_window_layers"),
        *("unsloth_fixed", "unsloth_version", "_attn_implementation", "_attn_implementation_autoset"),
    )
)
# Fields that change the forward, with the values under which they don't.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "The SwiGLU region is the only activation that isojax implements exactly."),
    "mlp_bias": ((False,), "The policy's feed-forward layers have no bias."),
    "pretraining_tp": ((1, None), "Slicing the linear layers changes the order of their sums."),
    "quantization_config": ((None,), "Quantised weights have no exact counterpart in the trainer."),
    "compression_config": ((None,), "Quantised weights have no exact counterpart in the trainer."),
    "use_sliding_window": ((False, None), "Sliding-window attention is not implemented."),
    "attention_dropout": ((0, 0.0), "Dropout in training would make the two sides differ."),
    "hidden_dropout": ((0, 0.0), "Dropout in training would make the two sides differ."),
    "resid_pdrop": ((0, 0.0), "Dropout in training would make the two sides differ."),
    "rope_interleaved": ((False, None), "Only the half-split rotation of the Hugging Face reference is implemented."),
    "partial_rotary_factor": ((1, 1.0, None), "The rotation covers the whole head."),
    "is_encoder_decoder": ((False, None), "The policies are decoders."),
    "is_decoder": ((True, False, None), "The policies are decoders."),
    "add_cross_attention": ((False, None), "The policies have no cross-attention."),
    "chunk_size_feed_forward": ((0, None), "Chunking is not implemented."),
    "pruned_heads": (({}, None), "Pruned heads are not implemented."),
    "tie_encoder_decoder": ((False, None), "The policies are decoders."),
    "output_attentions": ((False, None), "The attention region does not return its weights."),
    "output_hidden_states": ((False, None), "The policy returns the last hidden states only."),
    "problem_type": ((None,), "The policies are causal language models."),
    "auto_map": ((None,), "The checkpoint brings its own model code, which isojax does not run."),
    "torchscript": ((False, None), "TorchScript is not supported."),
    "use_bfloat16": ((False, None), "It is an old name of the dtype; set the dtype explicitly."),
    "tf_legacy_loss": ((False, None), "The policies are causal language models."),
}
# The settings of a rope section, transformers 4 and 5.
ROPE = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    )
)
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
