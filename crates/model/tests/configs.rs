//! Configurations of published models, by the values of their public files.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use inflight_backend::{Activation, KvDtype};
use inflight_model::{Architecture, GgufFile, LayerGroups, ModelConfig, ModelError, RopeScaling};
use serde_json::{Value, json};
use support::{GgufBytes, TempFolder, array, assert_holds, code, message};

fn read(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json("x/config.json", &config.to_string())
}

fn llama_3_1_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3"
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "vocab_size": 128_256
    })
}

/// `base` with `changes`; `null` removes a field.
fn with(mut base: Value, changes: Value) -> Value {
    let object = base.as_object_mut().unwrap();
    for (field, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => object.remove(field),
            value => object.insert(field.clone(), value.clone()),
        };
    }
    base
}

fn sizes(config: &ModelConfig) -> [usize; 7] {
    [
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.ffn_size,
    ]
}

#[test]
fn llama() {
    let config = read(&llama_3_1_8b()).unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!(sizes(&config), [128_256, 4096, 32, 32, 8, 128, 14_336]);
    assert_eq!((config.rms_norm_eps, config.max_position), (1e-5, 131_072));
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    };
    assert_eq!((config.rope.theta, &config.rope.scaling), (500_000.0, &scaling));
    assert_eq!((config.rope.rotary_dim, config.rope.interleaved), (128, false));
    assert!(!config.tie_word_embeddings && !config.qkv_bias && !config.qk_norm);
    assert_eq!(config.layer_windows, [None; 32]);
    assert_eq!(config.eos_token_ids, [128_001, 128_008, 128_009]);
    // Two caches of eight heads of 128 halves in 32 layers.
    let bytes = |dtype| inflight_model::kv_bytes_per_block(&config, dtype, 16) / 16;
    assert_eq!(bytes(KvDtype::F16), 131_072);
    // Half of that, and a scale of four bytes for each head.
    assert_eq!(bytes(KvDtype::Int8), 65_536 + 2 * 8 * 32 * 4);

    let biased = with(llama_3_1_8b(), json!({ "attention_bias": true, "mlp_bias": true }));
    let biased = read(&biased).unwrap();
    assert!(biased.qkv_bias && biased.attention_output_bias && biased.ffn_bias);
}

#[test]
fn smollm2_135m() {
    let config = read(&json!({
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": true,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": false,
        "rope_scaling": null,
        "rope_theta": 100_000,
        "tie_word_embeddings": true,
        "vocab_size": 49_152
    }));
    let config = config.unwrap();
    assert_eq!(sizes(&config), [49_152, 576, 30, 9, 3, 64, 1536]);
    assert_eq!((config.rope.theta, &config.rope.scaling), (1e5, &RopeScaling::Default));
    assert!(config.tie_word_embeddings);
    assert_eq!(config.eos_token_ids, [0]);
}

#[test]
fn mistral() {
    let v0_1 = json!({
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 32_768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": false,
        "vocab_size": 32_000
    });
    let config = read(&v0_1).unwrap();
    assert_eq!(config.architecture, Architecture::Mistral);
    assert_eq!(sizes(&config), [32_000, 4096, 32, 32, 8, 128, 14_336]);
    assert_eq!(config.layer_windows, [Some(4096); 32]);

    let mut v0_3 = v0_1.clone();
    v0_3["sliding_window"] = Value::Null;
    v0_3["rope_theta"] = json!(1_000_000.0);
    v0_3["vocab_size"] = json!(32_768);
    let config = read(&v0_3).unwrap();
    assert_eq!((config.vocab_size, config.rope.theta), (32_768, 1e6));
    assert_eq!(config.layer_windows, [None; 32]);
    // A file that does not mention the window means the default of transformers.
    let silent = with(v0_1, json!({ "sliding_window": null }));
    assert_eq!(read(&silent).unwrap().layer_windows, [Some(4096); 32]);
}

#[test]
fn qwen2_5_0_5b() {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32_768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": 32_768,
        "tie_word_embeddings": true,
        "use_sliding_window": false,
        "vocab_size": 151_936
    });
    let plain = read(&config).unwrap();
    assert_eq!(plain.architecture, Architecture::Qwen2);
    assert_eq!(sizes(&plain), [151_936, 896, 24, 14, 2, 64, 4864]);
    assert!(plain.qkv_bias && !plain.attention_output_bias && plain.tie_word_embeddings);
    assert_eq!(plain.layer_windows, [None; 24]);

    let windowed = with(config.clone(), json!({ "use_sliding_window": true }));
    let windows = read(&windowed).unwrap().layer_windows;
    assert_eq!((windows[20], windows[21], windows[23]), (None, Some(32_768), Some(32_768)));
    let mut kinds = vec!["full_attention"; 24];
    kinds[5] = "sliding_attention";
    let listed = with(windowed, json!({ "layer_types": kinds }));
    let windows = read(&listed).unwrap().layer_windows;
    assert_eq!((windows[5], windows.iter().flatten().count()), (Some(32_768), 1));

    let yarn = json!({ "factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn" });
    let yarn = read(&with(config, json!({ "rope_scaling": yarn }))).unwrap();
    assert_eq!(yarn.max_position, 131_072);
    let RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, .. } = yarn.rope.scaling else {
        panic!("yarn was asked for");
    };
    assert_eq!((beta_fast, beta_slow), (32.0, 1.0));
    assert!((attention_factor - 1.138_629_436).abs() < 1e-9); // 0.1 ln 4 + 1
}

#[test]
fn qwen3_0_6b() {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40_960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 1_000_000,
        "sliding_window": null,
        "tie_word_embeddings": true,
        "use_sliding_window": false,
        "vocab_size": 151_936
    });
    let read_config = read(&config).unwrap();
    assert_eq!(read_config.architecture, Architecture::Qwen3);
    assert_eq!(sizes(&read_config), [151_936, 1024, 28, 16, 8, 128, 3072]);
    assert!(read_config.qk_norm && !read_config.qkv_bias && read_config.tie_word_embeddings);
    assert_eq!((read_config.q_len(), read_config.qkv_len()), (2048, 4096));
    // Half of hidden / heads would be 64: the class has a default of its own.
    assert_eq!(read(&with(config, json!({ "head_dim": null }))).unwrap().head_dim, 128);
}

/// google/gemma-3-27b-it, of which the file leaves out what is as usual, and the vision tower.
fn gemma_3_27b() -> Value {
    json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152}
    })
}

#[test]
fn gemma_3() {
    let config = read(&gemma_3_27b()).unwrap();
    assert_eq!(config.architecture, Architecture::Gemma3);
    assert_eq!(sizes(&config), [262_208, 5376, 62, 32, 16, 128, 21_504]);
    assert_eq!((config.max_position, &config.eos_token_ids[..]), (131_072, &[1, 106][..]));
    assert!(config.tie_word_embeddings && config.qk_norm && config.style.post_norms);
    assert_eq!(
        (config.rope.theta, &config.rope.scaling),
        (1e6, &RopeScaling::Linear { factor: 8.0 })
    );
    let local = config.style.local_rope.as_ref().unwrap();
    assert_eq!((local.theta, &local.scaling), (1e4, &RopeScaling::Default));
    let num_full = config.layer_windows.iter().filter(|window| window.is_none()).count();
    assert_eq!(
        (num_full, config.layer_windows[4], config.layer_windows[5]),
        (10, Some(1024), None)
    );
    assert_eq!(config.style.activation, Activation::GeluTanh);
    assert!((config.attention_scale() - 168f32.powf(-0.5)).abs() < 1e-7);
    // The root of 5376 is 73.32; numbers of eight bits there are 73.0 and 73.5.
    assert_eq!(config.style.embedding_scale, 73.5);
    let groups = LayerGroups::new(&config);
    assert_eq!((groups.num_groups(), groups.width()), (7, 10));

    let refused = |changes: Value, expected: &str| {
        let text = with(gemma_3_27b()["text_config"].clone(), changes);
        let config = with(gemma_3_27b(), json!({"text_config": text}));
        assert_holds(&message(read(&config)), &[expected]);
    };
    refused(json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping");
    refused(json!({"hidden_activation": "relu"}), "hidden_activation");
    refused(json!({"use_bidirectional_attention": true}), "use_bidirectional_attention");
}

#[test]
fn bad_fields_are_named() {
    let check = |changes: Value, expected: &[&str]| {
        let text = message(read(&with(llama_3_1_8b(), changes)));
        assert_holds(&text, &["x/config.json"]);
        assert_holds(&text, expected);
    };
    check(json!({ "num_attention_heads": 0 }), &["num_attention_heads", "is 0"]);
    check(json!({ "num_attention_heads": -1 }), &["num_attention_heads", "-1"]);
    check(json!({ "num_attention_heads": "32" }), &["num_attention_heads", "whole number"]);
    check(json!({ "num_key_value_heads": 5 }), &["num_key_value_heads", "5", "32"]);
    check(json!({ "num_hidden_layers": u64::MAX }), &["num_hidden_layers", "must be 1 to"]);
    check(json!({ "vocab_size": null }), &["vocab_size", "is missing"]);
    check(json!({ "hidden_size": 4096.5 }), &["hidden_size", "whole number"]);
    check(json!({ "hidden_size": 16 }), &["head_dim"]);
    check(json!({ "head_dim": 127 }), &["127", "pairs"]);
    check(json!({ "rms_norm_eps": -1.0 }), &["rms_norm_eps"]);
    check(json!({ "rope_theta": 0.0 }), &["rope_theta", "positive"]);
    check(json!({ "rope_theta": 1.0 }), &["rope_theta", "above 1"]);
    check(json!({ "partial_rotary_factor": 0.001 }), &["partial_rotary_factor"]);
    check(json!({ "tie_word_embeddings": 1 }), &["tie_word_embeddings", "true or false"]);
    check(json!({ "hidden_act": "gelu" }), &["hidden_act", "gelu is not supported"]);
    check(json!({ "eos_token_id": -1 }), &["eos_token_id"]);
    let rope = |changes: Value| {
        let rope = with(llama_3_1_8b()["rope_scaling"].clone(), changes);
        json!({ "rope_scaling": rope })
    };
    check(rope(json!({ "factor": null })), &["rope_scaling.factor", "is missing"]);
    check(rope(json!({ "factor": 0 })), &["rope_scaling.factor", "positive"]);
    check(
        rope(json!({ "rope_type": "longrope" })),
        &["rope_scaling.rope_type", "longrope", "yarn"],
    );
    check(rope(json!({ "rope_type": null })), &["rope_scaling.rope_type", "is missing"]);
    check(rope(json!({ "high_freq_factor": 1.0 })), &["high_freq_factor", "low_freq_factor"]);
    check(json!({ "rope_scaling": [1] }), &["rope_scaling", "an object"]);
}

#[test]
fn unknown_architectures_list_the_known() {
    let check = |changes: Value, name: &str| {
        let error = read(&with(llama_3_1_8b(), changes)).unwrap_err();
        assert!(matches!(error, ModelError::UnknownArchitecture { .. }), "{error}");
        assert_holds(&error.to_string(), &[name, "LlamaForCausalLM", "Qwen3ForCausalLM"]);
    };
    check(json!({ "architectures": ["GPT2LMHeadModel"] }), "GPT2LMHeadModel");
    check(json!({ "architectures": null, "model_type": "gpt2" }), "gpt2");
    // Of the same type, but no language model.
    check(json!({ "architectures": ["LlamaForTokenClassification"] }), "TokenClassification");
    let by_type = with(llama_3_1_8b(), json!({ "architectures": null }));
    assert_eq!(read(&by_type).unwrap().architecture, Architecture::Llama);
    assert_holds(&message(ModelConfig::from_json("c.json", "[]")), &["c.json", "JSON object"]);
    assert_holds(&message(ModelConfig::from_json("c.json", "{")), &["c.json", "EOF"]);
}

// --- GGUF ---

fn gguf(architecture: &str, head_dim_key: bool) -> GgufBytes {
    let key = |name: &str| format!("{architecture}.{name}");
    let file = GgufBytes::new()
        .text("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("context_length"), 4096)
        .u32(&key("embedding_length"), 64)
        .u32(&key("feed_forward_length"), 96)
        .u32(&key("attention.head_count"), 4)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-6)
        .zeros("token_embd.weight", &[64, 10]);
    if head_dim_key { file.u32(&key("attention.key_length"), 32) } else { file }
}

fn read_gguf(bytes: &GgufBytes) -> Result<ModelConfig, ModelError> {
    let folder = TempFolder::new();
    ModelConfig::from_gguf(&GgufFile::open(&folder.write("m.gguf", bytes.build()))?)
}

#[test]
fn gguf_families() {
    let llama = read_gguf(&gguf("llama", false)).unwrap();
    assert_eq!(llama.architecture, Architecture::Llama);
    assert_eq!(sizes(&llama), [10, 64, 2, 4, 4, 16, 96]);
    assert_eq!((llama.rope.theta, llama.max_position), (10_000.0, 4096));
    assert!(llama.rope.interleaved && llama.tie_word_embeddings && !llama.qkv_bias);

    let qwen2 = gguf("qwen2", false)
        .u32("qwen2.attention.head_count_kv", 2)
        .f32("qwen2.rope.freq_base", 1e6)
        .zeros("blk.0.attn_q.bias", &[64])
        .zeros("output.weight", &[64, 10]);
    let qwen2 = read_gguf(&qwen2).unwrap();
    assert_eq!(sizes(&qwen2), [10, 64, 2, 4, 2, 16, 96]);
    assert!(qwen2.qkv_bias && !qwen2.rope.interleaved && !qwen2.tie_word_embeddings);

    let qwen3 = read_gguf(&gguf("qwen3", true)).unwrap();
    assert_eq!((qwen3.head_dim, qwen3.rope.rotary_dim), (32, 32));
    assert!(qwen3.qk_norm && !qwen3.rope.interleaved);

    let gemma3 = gguf("gemma3", true)
        .u32("gemma3.attention.sliding_window", 512)
        .u32("gemma3.attention.sliding_window_pattern", 2)
        .f32("gemma3.rope.freq_base", 1e6);
    let gemma3 = read_gguf(&gemma3).unwrap();
    assert_eq!(gemma3.architecture, Architecture::Gemma3);
    assert_eq!(gemma3.layer_windows, [Some(512), None]);
    let local = gemma3.style.local_rope.as_ref().unwrap();
    assert_eq!((gemma3.rope.theta, local.theta, local.rotary_dim), (1e6, 1e4, 32));
    assert_eq!((gemma3.style.embedding_scale, gemma3.attention_scale()), (8.0, 32f32.powf(-0.5)));
}

/// llama.cpp (`load_swa_pattern`) takes a number, or a flag for each layer.
#[test]
fn windows_of_gemma3_in_gguf() {
    const KEY: &str = "gemma3.attention.sliding_window_pattern";
    let file = || gguf("gemma3", true).u32("gemma3.attention.sliding_window", 512);
    let flags = |flags: &[u8]| {
        let flags: Vec<Vec<u8>> = flags.iter().map(|flag| vec![*flag]).collect();
        file().meta(KEY, code::ARRAY, array(code::BOOL, &flags))
    };
    let windows = |file: &GgufBytes| read_gguf(file).unwrap().layer_windows;
    assert_eq!(windows(&file()), [Some(512); 2]);
    assert_eq!(windows(&file().u32(KEY, 1)), [None; 2]);
    assert_eq!(windows(&flags(&[0, 1])), [None, Some(512)]);
    assert_holds(&message(read_gguf(&flags(&[0, 1, 1]))), &[KEY, "3 layers, there are 2"]);
    let numbers = [1u32, 0].map(|number| number.to_le_bytes().to_vec());
    let numbers = file().meta(KEY, code::ARRAY, array(code::U32, &numbers));
    assert_holds(&message(read_gguf(&numbers)), &[KEY, "true or false"]);
    let capped = |cap| file().f32("gemma3.final_logit_softcapping", cap);
    assert_holds(&message(read_gguf(&capped(30.0))), &["final_logit_softcapping", "supported"]);
    assert_eq!(windows(&capped(0.0)), [Some(512); 2]);
}

#[test]
fn gguf_ropes() {
    let rope = |file: GgufBytes| read_gguf(&file).unwrap().rope;
    let llama = || gguf("llama", false);
    let linear = llama().text("llama.rope.scaling.type", "linear");
    let linear = rope(linear.f32("llama.rope.scaling.factor", 4.0));
    assert_eq!(linear.scaling, RopeScaling::Linear { factor: 4.0 });
    let old = rope(llama().f32("llama.rope.scale_linear", 2.0));
    assert_eq!(old.scaling, RopeScaling::Linear { factor: 2.0 });
    // llama.cpp: linear without a type, whatever the factor with type `none`.
    let untyped = rope(llama().f32("llama.rope.scaling.factor", 4.0));
    assert_eq!(untyped.scaling, RopeScaling::Linear { factor: 4.0 });
    let none = llama().text("llama.rope.scaling.type", "none");
    assert_eq!(rope(none.f32("llama.rope.scaling.factor", 4.0)).scaling, RopeScaling::Default);
    let partial = rope(llama().u32("llama.rope.dimension_count", 8));
    assert_eq!(partial.rotary_dim, 8);

    let yarn = llama()
        .text("llama.rope.scaling.type", "yarn")
        .f32("llama.rope.scaling.factor", 4.0)
        .u32("llama.rope.scaling.original_context_length", 1024);
    let RopeScaling::Yarn { attention_factor, original_max_position, .. } = rope(yarn).scaling
    else {
        panic!("yarn was asked for");
    };
    assert!((attention_factor - 1.138_629_436).abs() < 1e-9);
    assert_eq!(original_max_position, 1024);

    let mut divided = llama().zeros("rope_freqs.weight", &[8]);
    let start = divided.data.len() - 32;
    for divisor in divided.data[start..].chunks_exact_mut(4) {
        divisor.copy_from_slice(&8f32.to_le_bytes());
    }
    assert_eq!(rope(divided).scaling, RopeScaling::Divisors(vec![8.0; 8]));
}

#[test]
fn bad_gguf_keys_are_named() {
    let check = |file: GgufBytes, expected: &[&str]| {
        let text = message(read_gguf(&file));
        assert_holds(&text, &["m.gguf"]);
        assert_holds(&text, expected);
    };
    let llama = || gguf("llama", false);
    check(GgufBytes::new(), &["general.architecture", "is missing"]);
    check(gguf("mamba", false), &["architecture mamba", "llama, qwen2, qwen3"]);
    check(llama().u32("llama.expert_count", 8), &["llama.expert_count", "experts"]);
    check(llama().u32("llama.attention.head_count_kv", 3), &["head_count_kv", "3", "4"]);
    check(llama().u32("llama.attention.head_count_kv", 0), &["head_count_kv", "is 0"]);
    check(llama().text("llama.attention.key_length", "x"), &["key_length", "whole number"]);
    check(llama().u32("llama.attention.value_length", 8), &["value_length", "key_length"]);
    check(llama().u32("llama.rope.dimension_count", 17), &["dimension_count", "17"]);
    check(llama().f32("llama.rope.freq_base", f32::NAN), &["freq_base", "NaN"]);
    check(llama().text("llama.rope.scaling.type", "longrope"), &["scaling.type", "longrope"]);
    check(llama().text("llama.rope.scaling.type", "linear"), &["scaling.factor", "missing"]);
    check(llama().zeros("rope_freqs.weight", &[8]), &["rope_freqs.weight", "positive"]);
    check(llama().zeros("rope_freqs.weight", &[4]), &["rope_freqs.weight", "[4]", "[8]"]);
    let counts = support::array(support::code::U32, &[4u32, 8].map(|n| n.to_le_bytes().to_vec()));
    let counts = llama().meta("llama.attention.head_count_kv", support::code::ARRAY, counts);
    check(counts, &["head_count_kv", "same for all layers"]);
    let empty = GgufBytes { tensors: Vec::new(), ..llama() };
    check(empty, &["tensor token_embd.weight is missing"]);
}

#[test]
fn quantisation_schemes_are_known_or_named() {
    use inflight_model::Fp8Weights::Stored;
    let read = |quantization: Value| {
        read(&with(llama_3_1_8b(), json!({ "quantization_config": quantization })))
    };
    let compressed = |weights: Value| {
        json!({ "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } })
    };
    let float = |strategy: &str| json!({ "num_bits": 8, "type": "float", "strategy": strategy });
    for known in [
        json!({ "quant_method": "fp8", "activation_scheme": "static" }),
        json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] }),
        compressed(float("channel")),
        compressed(float("tensor")),
        compressed(with(float("block"), json!({ "block_structure": [128, 128] }))),
    ] {
        assert_eq!(read(known).unwrap().fp8_weights, Some(Stored));
    }
    assert_eq!(read(Value::Null).unwrap().fp8_weights, None);
    for (unknown, expected) in [
        (json!({ "bits": 4 }), &["quant_method", "is missing", "fp8"][..]),
        (json!({ "quant_method": "awq" }), &["quantization_config.quant_method", "awq"]),
        (json!({ "quant_method": "fp8", "fmt": "e5m2" }), &["fmt", "e5m2"]),
        (
            json!({ "quant_method": "fp8", "weight_block_size": [1, 64] }),
            &["weight_block_size", "[1,64]"],
        ),
        (
            json!({ "quant_method": "compressed-tensors", "format": "pack-quantized" }),
            &["format", "compressed-tensors pack-quantized"],
        ),
        (compressed(with(float("channel"), json!({ "num_bits": 4 }))), &["group_0", "bits 4"]),
        (compressed(float("group")), &["group_0", "strategy \"group\""]),
        (compressed(json!(1)), &["group_0 lacks weights"]),
        (json!("fp8"), &["quantization_config", "an object"]),
    ] {
        assert_holds(&message(read(unknown)), expected);
    }
}
