//! Requests that keep sinks and a window: what they see, and that neighbours, overlap and
//! preemption change nothing.

mod support;

use inflight_backend::{CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_engine::{Engine, EngineConfig, KvKeep, KvWindow, MemoryConfig, RequestSpec};
use inflight_model::{Decoder, ModelFiles, eval::all_logits};
use support::{Running, config, start};

const WINDOW: KvKeep = KvKeep::Latest(KvWindow { num_sinks: 2, window: 16 });

/// One layer, whose keys and values depend on their own tokens alone.
const ONE_LAYER: &str = r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral",
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": CONTEXT, "sliding_window": WINDOW, "rms_norm_eps": 1e-5,
    "hidden_act": "silu"}"#;

fn one_layer(context: usize, window: &str) -> ModelFiles {
    let folder = std::env::temp_dir();
    let folder = folder.join(format!("inflight-stream-{}-{window}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder of our own");
    let config = ONE_LAYER.replace("CONTEXT", &context.to_string()).replace("WINDOW", window);
    std::fs::write(folder.join("config.json"), config).expect("it is ours");
    let files = ModelFiles::dummy(&folder, 5).expect("the text is sound");
    std::fs::remove_dir_all(&folder).expect("it is ours");
    files
}

/// Half a thousand tokens of which no sixteen are like others.
fn stream() -> Vec<u32> {
    (0..500u32).map(|i| i.wrapping_mul(2_654_435_761) % 300).collect()
}

fn exact_cpu() -> CpuBackend {
    let (kv_dtype, weights) = (KvDtype::F32, WeightPrecision::F32);
    let config = CpuConfig { kv_dtype, weights, num_threads: 1, ..CpuConfig::detect() };
    CpuBackend::new(config).expect("a thread")
}

/// The logprob of `next` after these tokens, by a forward pass over just them.
fn logprob(backend: &CpuBackend, decoder: &Decoder<CpuBackend>, tokens: &[u32], next: u32) -> f64 {
    let logits = all_logits(backend, decoder, tokens, 64).expect("there is memory");
    let last = &logits[logits.len() - decoder.config().vocab_size..];
    let sum: f64 = last.iter().map(|logit| f64::from(*logit).exp()).sum();
    f64::from(last[next as usize]) - sum.ln()
}

/// As in the paper: each token is computed as if its sinks and its window were all there is, side
/// by side, far beyond the positions that the model has.
#[test]
fn a_long_stream_sees_sinks_and_window_side_by_side() {
    let files = one_layer(64, "null");
    let backend = exact_cpu();
    let load = |max_len| {
        Decoder::load(&backend, &files.config, &files.weights, max_len, &mut |_| {}).unwrap()
    };
    let tokens = stream();
    for num_sinks in [0, 2, 8] {
        let kv_keep = KvKeep::Latest(KvWindow { num_sinks, window: 32 });
        // Sinks of 2 take a block, of 8 two; a stride is a block of 4.
        let whole_sinks = num_sinks.next_multiple_of(4);
        let config = EngineConfig {
            max_num_batched_tokens: 16,
            max_model_len: 512,
            num_blocks: (2 * whole_sinks + 32) / 4,
            kv_keep,
            ..config(false)
        };
        let (mut engine, handle) = Engine::new(backend.clone(), load(512), config).unwrap();
        let (next, prompt) = tokens.split_last().unwrap();
        let spec =
            RequestSpec { prompt: prompt.to_vec(), max_tokens: Some(1), ..RequestSpec::default() };
        let request = handle.limits().validate(spec).unwrap();
        let scores = engine.score(request, &[*next], &mut |_| {}).unwrap();
        assert_eq!(scores.logprobs.len(), 499);
        assert!(scores.num_blocks <= (2 * whole_sinks + 32) / 4);
        let decoder = load(64);
        for position in (0..499usize).step_by(23) {
            // The cache holds sinks and window; four tokens go at once when it is full.
            let capacity = whole_sinks + 32;
            let dropped = (position + 1).saturating_sub(capacity).next_multiple_of(4);
            let kept: Vec<u32> = (0..=position)
                .filter(|i| *i < whole_sinks || *i >= whole_sinks + dropped)
                .map(|i| tokens[i])
                .collect();
            let expected = logprob(&backend, &decoder, &kept, tokens[position + 1]);
            let found = f64::from(scores.logprobs[position]);
            assert!((found - expected).abs() < 2e-3, "{position}: {found}, not {expected}");
        }
    }
}

/// What greedy sampling would have taken is told from what it would not.
#[test]
fn told_tokens_are_known_to_be_likeliest() {
    let backend = exact_cpu();
    let files = one_layer(64, "null");
    let load = || Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {}).unwrap();
    let prompt = &stream()[..20];
    let mut tokens = prompt.to_vec();
    let decoder = load();
    for _ in 0..8 {
        let logits = all_logits(&backend, &decoder, &tokens, 64).unwrap();
        let last = logits[logits.len() - 300..].iter().enumerate();
        let greatest = last.max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        tokens.push(u32::try_from(greatest.0).unwrap());
    }
    let config = EngineConfig { max_num_batched_tokens: 16, ..config(false) };
    let mut engine = Engine::new(backend.clone(), load(), config).unwrap();
    let mut check = |answer: &[u32], expected: [bool; 8]| {
        let max_tokens = Some(answer.len());
        let spec = RequestSpec { prompt: prompt.to_vec(), max_tokens, ..RequestSpec::default() };
        let request = engine.1.limits().validate(spec).unwrap();
        let scores = engine.0.score(request, answer, &mut |_| {}).unwrap();
        // Of what the second prompt has in common with the first, nothing is computed.
        assert_eq!(scores.likeliest[scores.likeliest.len() - 8..], expected);
    };
    check(&tokens[20..], [true; 8]);
    tokens[27] = (tokens[27] + 1) % 300;
    check(&tokens[20..], [true, true, true, true, true, true, true, false]);
}

/// A model that looks back on 20 tokens needs room for these and a batch: ten blocks of four
/// for 500 tokens. What it sees is what a model without a window sees of just them.
#[test]
fn blocks_behind_a_models_own_window_are_free() {
    let backend = exact_cpu();
    let load = |files: &ModelFiles| {
        Decoder::load(&backend, &files.config, &files.weights, 512, &mut |_| {}).unwrap()
    };
    let config = EngineConfig {
        max_num_batched_tokens: 16,
        max_model_len: 512,
        num_blocks: 10,
        ..config(false)
    };
    let windowed = load(&one_layer(512, "20"));
    let (mut engine, handle) = Engine::new(backend.clone(), windowed, config).unwrap();
    let tokens = stream();
    let (next, prompt) = tokens.split_last().unwrap();
    let spec =
        RequestSpec { prompt: prompt.to_vec(), max_tokens: Some(1), ..RequestSpec::default() };
    let request = handle.limits().validate(spec).unwrap();
    let scores = engine.score(request, &[*next], &mut |_| {}).unwrap();
    assert!(scores.num_blocks <= 10, "{} blocks of four", scores.num_blocks);
    let decoder = load(&one_layer(512, "null"));
    for position in (0..499usize).step_by(23) {
        let seen = &tokens[(position + 1).saturating_sub(20)..=position];
        let expected = logprob(&backend, &decoder, seen, tokens[position + 1]);
        let found = f64::from(scores.logprobs[position]);
        assert!((found - expected).abs() < 2e-3, "{position}: {found}, not {expected}");
    }
}

/// Requests of which some keep all, some a window, far beyond which they go on, and some a part of
/// the prompt.
fn requests() -> Vec<RequestSpec> {
    let request = |i: u32| RequestSpec {
        prompt: (0..3 + 17 * i).map(|j| (i * 31 + j * 7) % 200).collect(),
        max_tokens: Some(50),
        kv_keep: match i {
            0 | 3 => Some(WINDOW),
            2 => None,
            _ => Some(KvKeep::Attended(36)),
        },
        ..RequestSpec::default()
    };
    (0..5).map(request).collect()
}

fn tokens(engine: &Running, specs: &[RequestSpec]) -> Vec<Vec<u32>> {
    let clients: Vec<_> = specs.iter().map(|spec| engine.submit(spec.clone())).collect();
    clients.into_iter().map(|client| client.wait().ids()).collect()
}

#[test]
fn streams_are_the_same_alone_among_others_and_with_overlap() {
    let config = |overlap| EngineConfig { max_num_batched_tokens: 64, ..config(overlap) };
    let small = |overlap| EngineConfig { num_blocks: 40, ..config(overlap) };
    let no_cache = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let specs = requests();
    let engine = start(EngineConfig { memory: no_cache.clone(), ..config(false) });
    let alone: Vec<_> =
        specs.iter().flat_map(|spec| tokens(&engine, std::slice::from_ref(spec))).collect();
    engine.stop();
    for config in [config(true), config(false), small(true), small(false)] {
        for memory in [no_cache.clone(), MemoryConfig::default()] {
            let engine = start(EngineConfig { memory, ..config.clone() });
            assert_eq!(tokens(&engine, &specs), alone);
            // Again: what was found by its prefix changes nothing.
            assert_eq!(tokens(&engine, &specs), alone);
            engine.stop();
        }
    }
}
